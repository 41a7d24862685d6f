"""Every function of the gallery against dense JAX: results, all gradients, and their precision."""

from __future__ import annotations

from typing import Any

import gallery_definitions as definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gallery import scores, windows
from gallery.catalog import ENTRIES, Entry, Shape

import jax_memeff
from jax_memeff import Mask

CPU, GPU = Shape(2, 4, 64), Shape(2, 4, 256)
KEY_HEADS = 2
FLOAT32_TOLERANCE = 1e-5

# Compilation is most of the time of these tests.
fast = {"xla_backend_optimization_level": 0}

names = pytest.mark.parametrize("name", ENTRIES)


def operands(
    entry: Entry, arguments: list[Any], shape: Shape, head_dim: int, dtype: Any
) -> dict[str, Any]:
    """Query, key and value, the cotangent of the output, and the float arguments."""
    rng = np.random.default_rng(5)
    rows = entry.rows or shape.length
    sizes = {"query": (rows, shape.heads), "key": (shape.length, KEY_HEADS)}
    sizes |= {"value": sizes["key"], "cotangent": sizes["query"]}
    found = {
        name: rng.standard_normal((shape.batch, length, heads, head_dim)).astype(jnp.dtype(dtype))
        for name, (length, heads) in sizes.items()
    }
    floats = {i: x for i, x in enumerate(arguments) if getattr(x, "dtype", None) == np.float32}
    return found | {f"argument {place}": x for place, x in floats.items()}


def program(attention: Any, given: list[Any]) -> Any:
    """From arrays to the output and the gradients of all float arrays.

    ``given`` are the arguments of the gallery's function; the float ones are among the arrays.
    """

    def loss(arrays: dict[str, Any], cotangent: Any) -> Any:
        arguments = [arrays.get(f"argument {place}", x) for place, x in enumerate(given)]
        out = attention(arguments, *(arrays[name] for name in ("query", "key", "value")))
        return jnp.sum((out * cotangent).astype(jnp.promote_types(out.dtype, jnp.float32))), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=fast)


def results(run: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """The output and gradients of a program, as float64 in NumPy."""
    others = {name: x for name, x in arrays.items() if name != "cotangent"}
    (_, out), gradients = run(others, arrays["cotangent"])
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), {"out": out, **gradients})


def dense(entry: Entry) -> Any:
    def attention(arguments: Any, *operands: Any) -> Any:
        return definitions.attention(entry.name, arguments, entry.is_causal, *operands)

    return attention


def fused(entry: Entry, implementation: Any) -> Any:
    def attention(arguments: Any, *operands: Any) -> Any:
        own = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arguments]
        return jax_memeff.dot_product_attention(
            *operands, **entry.call(*own), implementation=implementation
        )

    return attention


def errors(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Relative, in the Frobenius norm."""
    assert found.keys() == exact.keys()
    return {
        name: float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name]))
        for name in exact
    }


def check(name: str, shape: Shape, head_dim: int, implementation: Any) -> None:
    """float32 to a tolerance; 16 bits to twice the error of dense JAX, both against float64.

    The gradients of what a function reads have an error of the output's dtype at least: any fused
    backward takes ``rowsum(dO * O)`` from the rounded output. A row's error is then common to all
    of its scores and does not average out in a sum over them, while JAX rounds each score's alone.
    """
    entry = ENTRIES[name]
    arguments = [np.asarray(x) if isinstance(x, jax.Array) else x for x in entry.arguments(shape)]
    ours = program(fused(entry, implementation), arguments)
    theirs = program(dense(entry), arguments)
    for dtype in ("float32", "bfloat16", "float16"):
        arrays = operands(entry, arguments, shape, head_dim, dtype)
        with jax.enable_x64(True):
            wide = {name: x.astype(np.float64) for name, x in arrays.items()}
            exact = results(theirs, wide)
        limits = dict.fromkeys(exact, FLOAT32_TOLERANCE)
        if dtype != "float32":
            rounded = float(jnp.finfo(dtype).eps)
            for result, error in errors(results(theirs, arrays), exact).items():
                is_argument = result.startswith("argument")
                limits[result] = max(2 * error, rounded if is_argument else 0.0)
        for result, error in errors(results(ours, arrays), exact).items():
            assert error <= limits[result], (dtype, result, error, limits[result])


@names
def test_results_and_gradients(name):
    check(name, CPU, 16, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@names
def test_results_and_gradients_in_kernels(name, head_dim):
    check(name, GPU, head_dim, "cuda")


def test_there_are_fourteen_and_each_has_a_definition():
    assert len(ENTRIES) >= 14
    assert set(ENTRIES) == {*definitions.SCORES, *definitions.MASKS}


@names
def test_masks_are_their_definition(name):
    entry = ENTRIES[name]
    arguments = entry.arguments(CPU)
    mask = entry.call(*arguments).get("mask")
    if mask is None:
        assert name in definitions.SCORES
        return
    sizes = (CPU.batch, CPU.heads, entry.rows or CPU.length, CPU.length)
    want = definitions.MASKS[name](definitions.Index.of(*sizes), *map(np.asarray, arguments))
    want = np.broadcast_to(want, sizes)
    assert 0 < want.mean() < 1
    np.testing.assert_array_equal(mask.as_array(*sizes), want)


def test_layers_with_other_windows_run_in_one_scan():
    """Gemma's: five local layers and a global one, each with a window of its own."""
    lefts = jnp.array([8, 8, 8, 8, 8, 2**30], jnp.int32)
    x = jax.random.normal(jax.random.key(2), (1, 64, 2, 16))

    def layer(x, left):
        mask = windows.local_or_global(left)
        return x + jax_memeff.dot_product_attention(x, x, x, mask=mask), None

    scanned = jax.jit(lambda x: jax.lax.scan(layer, x, lefts)[0])(x)
    for left in lefts.tolist():
        window = (left, 0)
        x = x + jax.nn.dot_product_attention(x, x, x, local_window_size=window, is_causal=True)
    np.testing.assert_allclose(scanned, x, rtol=1e-5, atol=1e-5)


def test_equal_arguments_and_functions():
    """An argument of the call does the same, as the docstrings say."""
    x = jax.random.normal(jax.random.key(3), (2, 64, 4, 16))
    call = jax_memeff.dot_product_attention
    np.testing.assert_allclose(
        call(x, x, x, score_mod=scores.soft_cap(2.0)), call(x, x, x, logits_soft_cap=2.0), rtol=1e-6
    )
    ids = ENTRIES["documents"].arguments(CPU)[0]
    pairs = (
        (ENTRIES["sliding_window"].make(8), Mask.window(8, 0)),
        (ENTRIES["documents"].make(ids), Mask.segments(ids, ids)),
    )
    for ours, same in pairs:
        np.testing.assert_array_equal(ours.as_array(2, 4, 64, 64), same.as_array(2, 4, 64, 64))
