"""Comparing the results of a test call with the oracle's."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import oracle
from attention_case import Case, run_case

TF32_TOLERANCE = 1e-3
"""The relative Frobenius error of products with 11 bits."""


def assert_matches_the_oracle(case: Case) -> None:
    """Runs a case and compares each of its results with the oracle's."""
    assert_results_match(case, run_case(case, *case.arrays()))


def assert_results_match(case: Case, results: tuple) -> None:
    """Compares results of :func:`run_case`, or of a forward with gradients of None, with the
    oracle's.
    """
    operands, dout, _ = case.arrays()
    reference, low = answers(case)
    wide = low is None
    (out, lse, *maxima), gradients = results
    assert len(maxima) == case.row_maxima

    def check(name, got, field, **allowances):
        oracle.check(
            name,
            got,
            getattr(reference, field),
            None if low is None else getattr(low, field),
            wide_tolerance=TF32_TOLERANCE if case.precision == "tf32" else None,
            **allowances,
        )

    check("out", out, "out")
    rough = case.precision == "tf32" or (case.soft_cap is not None and not wide)
    if lse is not None:
        check("lse", lse, "lse", lse_tolerance=1e-3 if rough else 1e-5)
    if case.row_maxima:
        check("maxima", maxima[0], "maxima", lse_tolerance=1e-3 if rough else 1e-5)
    if gradients is None:
        return
    dq, dk, dv, dbias, dsinks = gradients
    floor = cancellation(operands, case.options, dout, reference.out)
    check("dq", dq, "query", floor=floor * abs(case.options.scaling.scale) * largest(operands.key))
    check("dk", dk, "key", floor=floor * abs(case.options.scaling.scale) * largest(operands.query))
    check("dv", dv, "value")
    if case.bias is not None:
        check("dbias", dbias, "bias", scale=reference.bias_scale, floor=floor)
    if case.sinks:
        check("dsinks", dsinks, "sinks", scale=reference.sinks_scale, floor=floor)


@functools.lru_cache(maxsize=1)
def answers(case: Case) -> tuple[oracle.Answer, oracle.Answer | None]:
    """The oracle's answer, and for 16 bits that of its formula in the dtype of the case.

    Consecutive tests of a case share the answers, because compiling the formula for the shapes of
    the case takes most of their time.
    """
    operands, dout, dlse = case.arrays()
    answer = functools.partial(oracle.answer, operands, case.options, dout, dlse)
    if case.dtype == "float32":
        return answer(np.float64), None
    return answer(np.float32), answer(jnp.dtype(case.dtype))


def cancellation(operands, options, dout, out):
    """The rounding error of dP - delta if they cancel: two dot products of a row in f32.

    delta = rowsum(dout * out) uses the rounded out, while dP is not rounded, and TF32 reads 11 bits
    of the operands of dP. The terms of both sums are rounded independently; the bound is four
    standard deviations.
    """
    dtype = operands.query.dtype
    value, dout, out = (np.asarray(x, np.float32) for x in (operands.value, dout, out))
    if 0 in (*value.shape, *dout.shape):
        return 0.0
    kept_scale = 256 / (256 - options.dropout_threshold)
    rows = kept_scale * np.linalg.norm(dout, axis=-1).max() * np.linalg.norm(value, axis=-1).max()
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    error = 2.0**-22 * rows
    error += 4 * half_ulp / np.sqrt(3) * np.linalg.norm(dout * out, axis=-1).max()
    if dtype == np.float32 and options.precision == "tf32":
        error += 4 * 2.0**-12 * np.sqrt(2 / 3) * rows / np.sqrt(value.shape[-1])
    return error


def largest(array):
    return np.abs(np.asarray(array, np.float32)).max(initial=0)
