"""The gallery and dense JAX in the same precision: their errors against float64.

``python tests/gallery/gallery_errors.py`` prints them as a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gallery_definitions as definitions
import jax
import jax.numpy as jnp
import numpy as np
from gallery.catalog import ENTRIES, Entry, Shape

import jax_memeff

KEY_HEADS = 2
FLOAT32_TOLERANCE = 1e-5

# These tests spend most of their time on compilation.
fast = {"xla_backend_optimization_level": 0}


class Error(NamedTuple):
    """The relative errors of one result in the Frobenius norm: ours and that of dense JAX."""

    ours: float
    dense: float
    limit: float
    """The limit of our error: a tolerance in float32, twice the error of dense JAX in 16 bits."""


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
    """A function from arrays to the output and the gradients of all float arrays.

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
    """Relative errors in the Frobenius norm."""
    assert found.keys() == exact.keys()
    return {
        name: float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name]))
        for name in exact
    }


def compare(
    name: str, shape: Shape, head_dim: int, implementation: Any, dtype: str
) -> dict[str, Error]:
    """The errors of the output and of all gradients, by name; arguments are numbered.

    Dense JAX runs on the CPU. On a GPU its products take minutes to tune if several processes share
    the device, and float32 products use TF32.

    The gradients of the arrays that a function reads may have an error of the output's dtype,
    because any fused backward takes ``rowsum(dO * O)`` from the rounded output. All scores of a row
    have this error in common, so a sum over them does not average it out, while JAX rounds each
    score independently.
    """
    entry = ENTRIES[name]
    arguments = [np.asarray(x) if isinstance(x, jax.Array) else x for x in entry.arguments(shape)]
    theirs = program(dense(entry), arguments)
    arrays = operands(entry, arguments, shape, head_dim, dtype)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    with jax.default_device(jax.devices("cpu")[0]):
        with jax.enable_x64(True):
            exact = results(theirs, wide)
        own = errors(results(theirs, arrays), exact)
    ours = errors(results(program(fused(entry, implementation), arguments), arrays), exact)
    found = {}
    for result, error in own.items():
        limit = FLOAT32_TOLERANCE
        if dtype != "float32":
            rounded = float(jnp.finfo(dtype).eps)
            limit = max(2 * error, rounded if result.startswith("argument") else 0.0)
        found[result] = Error(ours[result], error, limit)
    return found
