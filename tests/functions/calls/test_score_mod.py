"""Functions of scores and masks in every kind of call, against their definition in float64."""

from __future__ import annotations

import functools
from typing import Any

import daily
import functions_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions_case import B, Case, Hv, N, T

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""The allowed relative error in the Frobenius norm."""

# These tests spend most of their time on compilation.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr("jax_memeff._blockwise.tiles.LONGEST_BLOCK", 16)


def value_and_gradients(function: Any, arrays: Any, cotangents: Any) -> Any:
    """Results, and the gradients of all arrays for fixed cotangents of both results."""

    def loss(arrays: Any) -> Any:
        out, lse = function(arrays)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        dout, dlse = (x.astype(y.dtype) for x, y in zip(cotangents, (out, lse), strict=True))
        return jnp.sum(out * dout) + jnp.sum(finite * dlse), (out, lse)

    (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return results, gradients


SAMPLE = functions_case.sample()
"""Every pair of values of two axes. Each run has a third of the cases."""


@pytest.mark.rotating(5)
@pytest.mark.parametrize(
    "case", daily.drawn("calls with functions", SAMPLE, len(SAMPLE) // 3), ids=str
)
def test_the_definition(case: Case, assert_close, request):
    if case.dtype == "float64":
        request.getfixturevalue("x64")  # in all threads, because the partitioner has its own
    arrays = case.arrays()
    twice = (2,) if case.layout == "vmap" else ()
    rng = np.random.default_rng(3)
    cotangents = tuple(
        rng.standard_normal((*twice, *shape)).astype(case.dtype).astype(np.float64)
        for shape in ((B, T, N, Hv), (B, T, N))
    )
    run = compiled(lambda arrays: value_and_gradients(case.ours, arrays, cotangents))
    got = jax.tree.map(np.asarray, run(case.placed(arrays)))
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x.astype(np.float64)) for name, x in arrays.items()}
        function = case.defined
        if twice:
            function = lambda arrays: functions_case.vmapped(case.defined, arrays)  # noqa: E731
        want = compiled(lambda arrays: value_and_gradients(function, arrays, cotangents))(exact)
        want = jax.tree.map(np.asarray, want)
    for name, x in arrays.items():
        assert got[1][name].dtype == x.dtype
    assert_close(got, want, TOLERANCES[case.dtype])


ROW_SUMS = [
    Case("dense", "alibi", "causal", 2, "bfloat16", bias=True),
    Case("dense", "gain", "not", N, "float16", dropout=True, sinks=True),
    Case("packed", "elements", "lengths", 2, "bfloat16", dropout=True),
    Case("vmap", "alibi", "ends", N, "bfloat16", soft_cap=2.0),
    Case("automatic", "alibi", "prefix", 2, "float16", sinks=True),
]
"""Calls in which whole rows add to one element of a captured array."""


@pytest.mark.rotating(2)
@pytest.mark.parametrize("case", ROW_SUMS, ids=str)
def test_sums_over_rows_keep_the_digits_of_float32(case, assert_close):
    """Arrays of 32 bits in calls of 16 bits. With delta from the output, errors are about 1e-3."""
    arrays = case.arrays()
    captured, _ = functions_case.SCORE_FUNCTIONS[case.function]
    arrays |= {name: arrays[name].astype(np.float32) for name in captured}
    twice = (2,) if case.layout == "vmap" else ()
    cotangents = tuple(
        np.random.default_rng(3).standard_normal((*twice, *shape)).astype(case.dtype)
        for shape in ((B, T, N, Hv), (B, T, N))
    )
    run = compiled(lambda arrays: value_and_gradients(case.ours, arrays, cotangents)[1])
    got = run(case.placed(arrays))
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x.astype(np.float64)) for name, x in arrays.items()}
        function = case.defined
        if twice:
            function = lambda arrays: functions_case.vmapped(case.defined, arrays)  # noqa: E731
        own = tuple(x.astype(np.float64) for x in cotangents)
        want = compiled(lambda arrays: value_and_gradients(function, arrays, own)[1])(exact)
    for name in captured:
        assert_close(np.asarray(got[name]), np.asarray(want[name]), 2e-5)
