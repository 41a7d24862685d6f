"""Attention and its gradients by their definition, in NumPy, and the errors that kernels may have.

It shares no code with the kernels, nor with the blockwise path: masks and dropout bits follow their
definitions, and every score is materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Rounding = Callable[[np.ndarray], np.ndarray]
Pullback = Callable[[np.ndarray, bool], tuple[np.ndarray, np.ndarray | None]]
Function = Callable[[np.ndarray], tuple[np.ndarray, Pullback]]
"""Maps scores [B, N, T, S] to new ones, and their gradients to those of the old ones and of the
array that the function reads. If the flag is set, the gradients are magnitudes, and so are those of
the array.
"""

_MASKED = -1e37
"""A bias below this masks its element."""


class Problem(NamedTuple):
    """A call in float64, with finite numbers everywhere."""

    query: np.ndarray
    """[B, T, N, H]"""
    key: np.ndarray
    """[B, S, K, H]"""
    value: np.ndarray
    """[B, S, K, Hv]"""
    dout: np.ndarray
    """[B, T, N, Hv]"""
    dlse: np.ndarray
    """[B, T, N]"""
    valid: np.ndarray
    """bool[B, N, T, S]"""
    kept: np.ndarray
    """Broadcasts to [B, N, T, S]: the factors of the probabilities by dropout."""
    scale: float
    soft_cap: float | None = None
    bias: np.ndarray | None = None
    """Of rank 4, broadcasts to [B, N, T, S]; may be -inf."""
    is_latent: bool = False
    """Whether the values are the first columns of the keys, which then get their gradient."""
    sinks: np.ndarray | None = None
    """[B, N, T]; -inf for rows without one."""
    function: Function | None = None


class Answer(NamedTuple):
    """Results by name: ``out``, ``lse``, ``maxima``, and the gradients ``dquery``, ``dkey``, …

    ``scales`` has the sums of absolute terms of gradients that cancel.
    """

    results: Mapping[str, np.ndarray]
    scales: Mapping[str, np.ndarray]


class _Rows(NamedTuple):
    """The forward of all rows, [B, N, T, ...]; keys and values of each query head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    tanh: np.ndarray | None
    pullback: Pullback | None
    maxima: np.ndarray
    terms: np.ndarray
    """exp(scores - largest); their sums include that of the sink."""
    of_sink: np.ndarray
    sums: np.ndarray
    has_scores: np.ndarray
    lse: np.ndarray
    probabilities: np.ndarray
    dropped: np.ndarray
    out: np.ndarray


def answer(problem: Problem, rounded: Rounding = lambda x: x) -> Answer:
    """The results, with ``rounded`` applied to the result of each operation.

    Sums are taken in float64 and rounded once. Rows without keys and sink have output 0, logsumexp
    -inf, and gradients of 0.
    """
    with np.errstate(all="ignore"):  # -inf minus -inf, in rows that are replaced
        return _gradients(problem, _forward(problem, rounded), rounded)


def tangents(
    problem: Problem, directions: Sequence[np.ndarray], rounded: Rounding = lambda x: x
) -> dict[str, np.ndarray]:
    """``out_tangent`` and ``lse_tangent`` for tangents of query, key and value, without a function.

    Rows without keys have tangents of 0.
    """
    with np.errstate(all="ignore"):
        rows = _forward(problem, rounded)
        groups = problem.query.shape[2] // problem.key.shape[2]
        dq = np.swapaxes(directions[0], 1, 2)
        dk, dv = (np.repeat(np.swapaxes(x, 1, 2), groups, 1) for x in directions[1:])
        products = rounded(
            rounded(dq @ rows.k.swapaxes(2, 3)) + rounded(rows.q @ dk.swapaxes(2, 3))
        )
        dscores = rounded(rounded(np.asarray(problem.scale)) * products)
        if rows.tanh is not None:
            dscores = rounded(dscores * rounded(1 - rounded(rows.tanh * rows.tanh)))
        dlse = rounded(rounded(rows.probabilities * dscores).sum(3, keepdims=True))
        ddropped = rounded(rows.dropped * rounded(dscores - dlse))
        dout = rounded(rounded(ddropped @ rows.v) + rounded(rows.dropped @ dv))
    return {"out_tangent": dout.swapaxes(1, 2), "lse_tangent": dlse[..., 0].swapaxes(1, 2)}


def _forward(problem: Problem, rounded: Rounding) -> _Rows:
    B, T, N, _ = problem.query.shape
    groups = N // problem.key.shape[2]
    q = np.swapaxes(problem.query, 1, 2)
    k, v = (np.repeat(np.swapaxes(x, 1, 2), groups, 1) for x in (problem.key, problem.value))
    scores = rounded(rounded(np.asarray(problem.scale)) * rounded(q @ k.swapaxes(2, 3)))
    tanh, pullback = None, None
    if problem.soft_cap is not None:
        cap = rounded(np.asarray(problem.soft_cap))
        tanh = rounded(np.tanh(rounded(scores / cap)))
        scores = rounded(cap * tanh)
    if problem.function is not None:
        scores, pullback = problem.function(scores)
        scores = rounded(scores)
    valid = problem.valid & np.isfinite(scores)
    if problem.bias is not None:
        valid = valid & (problem.bias >= _MASKED)
        scores = rounded(scores + np.where(problem.bias >= _MASKED, problem.bias, 0))
    sinks = np.full((B, N, T), -np.inf) if problem.sinks is None else rounded(problem.sinks)
    maxima = np.where(valid, scores, -np.inf).max(3, initial=-np.inf)
    largest = np.maximum(maxima, sinks)[..., None]
    has_scores = largest > -np.inf
    terms = np.where(valid, rounded(np.exp(rounded(scores - largest))), 0)
    of_sink = np.where(has_scores, rounded(np.exp(rounded(sinks[..., None] - largest))), 0)
    sums = rounded(terms.sum(3, keepdims=True) + of_sink)
    lse = np.where(has_scores, rounded(rounded(np.log(sums)) + largest), -np.inf)
    probabilities = np.where(valid, rounded(np.exp(rounded(scores - lse))), 0)
    dropped = rounded(probabilities * problem.kept)
    out = rounded(dropped @ v)
    return _Rows(
        q, k, v, tanh, pullback, maxima, terms, of_sink, sums, has_scores, lse, probabilities,
        dropped, out,
    )  # fmt: skip


def _gradients(problem: Problem, rows: _Rows, rounded: Rounding) -> Answer:
    B, _, N, _ = problem.query.shape
    K = problem.key.shape[2]

    def of_key_heads(gradient: np.ndarray) -> np.ndarray:
        summed = gradient.reshape(B, K, N // K, *gradient.shape[2:]).sum(2)
        return np.swapaxes(rounded(summed), 1, 2)

    dout = np.swapaxes(problem.dout, 1, 2)
    dlse = np.swapaxes(problem.dlse, 1, 2)[..., None]
    dv = of_key_heads(rounded(rows.dropped.swapaxes(2, 3) @ dout))
    dp = rounded(rounded(dout @ rows.v.swapaxes(2, 3)) * problem.kept)
    dexp = rounded(dp * rows.probabilities)
    dlog = rounded(rounded(dlse - dexp.sum(3, keepdims=True)) / rows.sums)
    dlog = np.where(rows.has_scores, dlog, 0)
    ds = rounded(dexp + rounded(dlog * rows.terms))
    dsinks = rounded(dlog * rows.of_sink)[..., 0]
    found, scales = {}, {}
    if problem.sinks is not None:
        found["dsinks"] = rounded(dsinks.sum((0, 2)))
        scales["dsinks"] = np.abs(dsinks).sum((0, 2))
    if problem.bias is not None:
        axes = tuple(axis for axis, size in enumerate(problem.bias.shape) if size == 1)
        found["dbias"] = rounded(ds.sum(axes, keepdims=True))
        scales["dbias"] = np.abs(ds).sum(axes, keepdims=True)
    if rows.pullback is not None:
        magnitudes = rows.pullback(np.abs(ds), True)[1]
        ds, captured = rows.pullback(ds, False)
        if captured is not None and magnitudes is not None:
            found["dcaptured"], scales["dcaptured"] = rounded(captured), magnitudes
    if rows.tanh is not None:
        ds = rounded(ds * rounded(1 - rounded(rows.tanh * rows.tanh)))
    dproduct = rounded(rounded(np.asarray(problem.scale)) * ds)
    found |= {
        "out": rows.out.swapaxes(1, 2),
        "lse": rows.lse[..., 0].swapaxes(1, 2),
        "maxima": rows.maxima.max(2, initial=-np.inf),
        "dquery": rounded(dproduct @ rows.k).swapaxes(1, 2),
        "dkey": of_key_heads(rounded(dproduct.swapaxes(2, 3) @ rows.q)),
        "dvalue": dv,
    }
    if problem.is_latent:
        of_columns = found["dkey"][..., : dv.shape[-1]]
        of_columns[...] = rounded(of_columns + found.pop("dvalue"))
    return Answer(found, scales)


def added_term(array: np.ndarray, index: np.ndarray, factor: np.ndarray) -> Function:
    """The function that adds ``array[index] * factor`` to the scores.

    ``array`` has one axis; ``index`` and ``factor`` broadcast to the scores.
    """

    def function(scores: np.ndarray) -> tuple[np.ndarray, Pullback]:
        def pullback(gradient: np.ndarray, magnitudes: bool) -> tuple[np.ndarray, np.ndarray]:
            terms = gradient * (np.abs(factor) if magnitudes else factor)
            of_array = np.bincount(
                np.broadcast_to(index, terms.shape).ravel(), terms.ravel(), len(array)
            )
            return gradient, of_array

        return scores + array[index] * factor, pullback

    return function


def kept_elements(
    words: np.ndarray, threshold: int, shape: tuple[int, int, int, int]
) -> np.ndarray:
    """The dropout bits of the generator's key uint32[2], bool[B, N, T, S].

    The random byte of an element is a function of the key, ``b * N + n``, the row and the column:
    Philox4x32 with 7 rounds, whose every call serves a part of a block of 16 by 16 elements.
    """
    B, N, T, S = shape
    low = np.uint64(0xFFFFFFFF)
    head = np.arange(B * N, dtype=np.uint64).reshape(B, N, 1, 1)
    r, c = np.arange(T, dtype=np.uint64)[:, None], np.arange(S, dtype=np.uint64)
    one, two, three, four = (np.uint64(x) for x in (1, 2, 3, 4))
    counter = [(x >> four) << two | (x >> one) & three for x in (r, c)]
    x0, x1, x2, x3 = np.broadcast_arrays(*counter, head, np.uint64(0))
    k0, k1 = (np.uint64(word) for word in words)
    for _ in range(7):
        first, second = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1 = (second >> np.uint64(32)) ^ x1 ^ k0, second & low
        x2, x3 = (first >> np.uint64(32)) ^ x3 ^ k1, first & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    which = np.broadcast_to(two * (r & one) + (c & one), shape).astype(np.intp)
    word = np.choose(which, (x0, x1, x2, x3))
    byte = two * ((r >> three) & one) + ((c >> three) & one)
    return ((word >> (np.uint64(8) * byte)) & np.uint64(255)) >= np.uint64(threshold)


ABSOLUTE = ("lse", "maxima", "lse_tangent")
"""Results in float32, which are compared relative to 1 plus the largest one."""


class Comparison(NamedTuple):
    """The error of a result, and the largest one allowed where it was the nearest to its limit."""

    result: str
    error: float
    allowed: float
    text: str
    """What is wrong, or "" if nothing is."""


def compare(
    result: str,
    got: np.ndarray,
    reference: np.ndarray,
    low: np.ndarray | None,
    *,
    eps: float,
    tolerance: float,
    floor: float = 0.0,
    scale: np.ndarray | None = None,
) -> Comparison:
    """Compare a result with the oracle's.

    Args:
        result: its name.
        got, reference: arrays of one shape.
        low: of 16-bit inputs, the oracle's result with every operation rounded to their dtype; an
            element may have twice its largest error, in each row and in the tensor, plus two
            roundings of the largest element. None for float32, whose relative Frobenius error is at
            most ``tolerance``.
        eps: of the dtype.
        tolerance: of the results of ``ABSOLUTE``, or of float32.
        floor: the rounding error of float32 where the reference cancels exactly.
        scale: magnitudes that replace those of the reference if its terms cancel.
    """
    got, reference = (np.asarray(x, np.float64) for x in (got, reference))
    if got.shape != reference.shape:
        return _wrong(result, f"expected the shape {reference.shape}, got {got.shape}")
    infinite = ~np.isfinite(reference)
    if not np.array_equal(got[infinite], reference[infinite]):
        return _wrong(result, "expected -inf in rows without keys")
    if count := int((~np.isfinite(got[~infinite])).sum()):
        return _wrong(result, f"{count} of {got.size} elements are not finite")
    if got.size == 0:
        return Comparison(result, 0.0, 0.0, "")
    got, reference = np.where(infinite, 0, got), np.where(infinite, 0, reference)
    error = np.abs(got - reference)
    if result in ABSOLUTE:
        return _within(result, error.max(), tolerance * (1 + np.abs(reference).max()))
    magnitude = np.abs(reference) if scale is None else scale
    if low is None:
        allowed = tolerance * np.linalg.norm(magnitude) + floor * np.sqrt(error.size)
        return _within(result, np.linalg.norm(error), allowed)
    low_error = np.abs(np.asarray(low, np.float64) - reference)
    rounding = eps * magnitude.max() + floor
    whole = _within(result, error.max(), 2 * low_error.max() + rounding)
    if whole.text:
        return whole
    rows, allowed_rows = error.max(-1), 2 * low_error.max(-1) + rounding
    worst = np.unravel_index(np.argmax(rows - allowed_rows), np.shape(rows))
    place = f", row {tuple(map(int, worst))}" if worst else ""
    return _within(result, rows[worst], allowed_rows[worst], place)


def cancellation(problem: Problem, out: np.ndarray, *, eps: float, fast: bool) -> float:
    """The rounding error of ``dP - delta`` where they cancel: two dot products of a row in float32.

    delta is the row sum of ``dout * out`` with the rounded output, while dP is not rounded; TF32
    reads 11 bits of the operands of dP. The bound is four standard deviations.
    """
    if 0 in (*problem.value.shape, *problem.dout.shape):
        return 0.0
    dout, value = problem.dout, problem.value
    rows = problem.kept.max() * np.linalg.norm(dout, axis=-1).max()
    rows *= np.linalg.norm(value, axis=-1).max()
    error = 2.0**-22 * rows + 2 * eps / np.sqrt(3) * np.linalg.norm(dout * out, axis=-1).max()
    if fast:
        error += 4 * 2.0**-12 * np.sqrt(2 / 3) * rows / np.sqrt(value.shape[-1])
    return float(error)


def _within(result: str, error: Any, allowed: Any, place: str = "") -> Comparison:
    is_right = error <= allowed
    text = "" if is_right else f"{result}{place}: error {error:.3g}, allowed {allowed:.3g}"
    return Comparison(result, float(error), float(allowed), text)


def _wrong(result: str, text: str) -> Comparison:
    return Comparison(result, float("inf"), 0.0, f"{result}: {text}")
