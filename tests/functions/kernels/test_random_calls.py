"""Random calls with functions against the dense definition in float64, with NaN all around."""

from __future__ import annotations

import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_calls
from random_calls import TOLERANCES, Call

CALLS = random_calls.drawn()

SANITIZED = random_calls.covering(CALLS)
"""The calls for compute-sanitizer; every value of every axis occurs in them."""

COTANGENTS = 4

ROW_SUMS = ("alibi", "pairs", "buckets", "outer", "gates", "holes")
"""Functions with an array to whose elements several columns of a row add, and without tanh."""

ROW_SUM_TOLERANCE = 1e-4

fast = {"xla_backend_optimization_level": 0}


def value_and_gradients(function: Any, arrays: Any, cotangents: Any) -> Any:
    """Results, and the gradients of all arrays for fixed cotangents of both results."""

    def loss(arrays: Any) -> Any:
        results = function(arrays)
        found = jnp.zeros((), jnp.promote_types(results[0].dtype, jnp.float32))
        for result, cotangent in zip(results, cotangents, strict=True):
            finite = jnp.where(jnp.isfinite(result), result, 0)
            found += jnp.sum((finite * cotangent.astype(result.dtype)).astype(found.dtype))
        return found, results

    (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return results, gradients


def surrounded(array: np.ndarray) -> np.ndarray:
    nan = np.full_like(array, np.nan)
    return np.stack([nan, array, nan])


def fill_free_memory_with_nan() -> None:
    """Fills free memory with NaN, so results and workspaces of the next program begin as NaN."""
    arrays = [jnp.full(2**24, jnp.nan, jnp.float32) for _ in range(2)]
    jax.block_until_ready(arrays)
    for array in arrays:
        array.delete()


def program(call: Call) -> Any:
    """A jitted function of larger arrays and a layer index: each operand is one layer of an
    array.
    """
    cotangents = call.cotangents()

    def run(stacked: Any, layer: Any) -> Any:
        index = jax.lax.dynamic_index_in_dim
        arrays = {name: index(x, layer, 0, False) for name, x in stacked.items()}
        return value_and_gradients(call.ours, arrays, cotangents)

    return jax.jit(run)


def results(call: Call, arch: str | None = None, seed: int = 0) -> Any:
    """Results and gradients. With an architecture it runs in the process of ``machine``."""
    if arch is not None:
        emulator.configure(arch, seed=seed)
    stacked = {name: jnp.asarray(surrounded(x)) for name, x in call.arrays().items()}
    if arch is None:
        fill_free_memory_with_nan()
    return jax.tree.map(np.asarray, program(call)(stacked, jnp.int32(1)))


def exact(call: Call) -> tuple[Any, dict[str, np.ndarray]]:
    """Results and gradients by the definition, in float64 on the CPU, and a typical size of each
    gradient.

    Rounding errors of a gradient are relative to the terms of its sum. A backward subtracts
    ``rowsum(dO * O)`` from ``dO @ value.T``. In a row in which one key has nearly all the weight
    the two are nearly equal, and the difference is little more than their errors. Without the
    subtraction the terms give the gradient for a constant normalizer. Both gradients may also be
    small by chance, so the typical size is the larger root mean square over several cotangents.
    """
    finite = {name: np.nan_to_num(x.astype(np.float64)) for name, x in call.arrays().items()}
    cotangents = jax.tree.map(lambda *x: np.stack(x), *map(call.cotangents, range(COTANGENTS)))

    def gradients(arrays: Any, cotangents: Any, constant_normalizer: bool) -> Any:
        """Results, and the gradients for all cotangents."""
        defined = functools.partial(call.defined, constant_normalizer=constant_normalizer)
        results, pullback = jax.vjp(defined, arrays)
        return results, jax.vmap(pullback)(cotangents)[0]

    def typical(*gradients: jax.Array) -> jax.Array:
        return functools.reduce(
            jnp.maximum, (jnp.sqrt(jnp.mean(jnp.sum(x**2, range(1, x.ndim)))) for x in gradients)
        )

    def run(arrays: Any, cotangents: Any) -> Any:
        results, found = gradients(arrays, cotangents, False)
        _, terms = gradients(arrays, cotangents, True)
        own = jax.tree.map(lambda x: x[0], found)
        return (results, own), jax.tree.map(typical, found, terms)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(run, compiler_options=fast)(finite, cotangents)
        return jax.tree.map(np.asarray, want)


def errors(found: Any, want: Any) -> dict[str, float]:
    """Relative errors in the Frobenius norm, those of gradients relative to the typical size.

    If the exact result is zero, as the gradient of a value that dropout drops everywhere, the error
    is absolute.
    """
    (results, gradients), sizes = want
    names = ["out", "lse", *gradients]
    ours = dict(zip(names, (*found[0], *(found[1][name] for name in gradients)), strict=True))
    theirs = dict(zip(names, (*results, *gradients.values()), strict=True))
    errors = {}
    for name in names:
        got, exact = (np.asarray(x[name], np.float64) for x in (ours, theirs))
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=name)
        size = max(np.linalg.norm(exact[finite]), sizes.get(name, 0.0))
        errors[name] = float(np.linalg.norm(got[finite] - exact[finite]) / (size or 1.0))
    return errors


def check(call: Call, found: Any, want: Any) -> None:
    """Checks that errors are below the tolerance and twice the error of plain JAX in the same
    precision.

    The gradients of the arrays that a function reads get three times the tolerance: a fused
    backward takes ``rowsum(dO * O)`` from the rounded output, and all scores of a row have this
    error in common. If several columns of a row add to one element, it must not do so: then the
    gradients have the digits of float32, unless the hardware tanh computes the scores.
    """
    own = random_calls.FUNCTIONS[call.function].shapes(call.sizes)
    ours = errors(found, want)
    limit = TOLERANCES[call.dtype]
    of_own = 3 * limit
    if call.function in ROW_SUMS and not call.soft_cap:
        of_own = min(of_own, ROW_SUM_TOLERANCE)
    limits = {name: of_own if name in own else limit for name in ours}
    if all(error <= limits[name] for name, error in ours.items()):
        return
    with jax.default_device(jax.devices("cpu")[0]):
        plain = errors(results(call), want)
    for name, error in ours.items():
        assert error <= max(limits[name], 2 * plain[name]), (name, error, plain[name])


def marked() -> list[Any]:
    marks = {call: [pytest.mark.sanitizer] for call in SANITIZED}
    return [pytest.param(call, marks=marks.get(call, [])) for call in CALLS]


def test_there_are_five_hundred_and_a_few_have_every_value():
    assert len(CALLS) == 500 and len({*CALLS}) == 500
    assert len(SANITIZED) < 16
    for name, values in random_calls.AXES.items():
        assert {getattr(call, name) for call in SANITIZED} == {*values}


def test_arrays_have_nan_where_nothing_reads():
    call = next(call for call in CALLS if call.function == "table" and call.layout == "lengths")
    arrays = call.arrays()
    assert all(np.isnan(arrays[name]).any() for name in ("query", "key", "value", "table"))
    assert not any(np.isnan(x).any() for x in jax.tree.leaves(exact(call)))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("call", CALLS[::101], ids=str)
def test_plain_jax(call):
    check(call, results(call), exact(call))


@pytest.mark.rotating(2)
@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("call", [CALLS[3], CALLS[66]], ids=str)
def test_emulated_kernels(call, arch, machine):
    found = machine.submit(results, call, arch).result(timeout=600)
    check(call, found, exact(call))


@pytest.mark.gpu
@pytest.mark.parametrize("call", marked(), ids=str)
def test_kernels(call):
    check(call, results(call), exact(call))
