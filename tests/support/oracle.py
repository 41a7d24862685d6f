"""Attention by its definition: materialized scores, written without the code under test.

Masks and dropout bits follow their definitions in NumPy; gradients are JAX's of the materialized
formula. Every test of numbers compares with this file by :func:`check`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call.mask import Mask, Window
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import DropoutState, Operands
from jax_memeff._call.options import Options


class Answer(NamedTuple):
    """The results of attention and their gradients, as NumPy arrays."""

    out: np.ndarray
    """[B, T, N, Hv]"""
    lse: np.ndarray
    """[B, T, N]"""
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    bias_scale: np.ndarray | None
    """The sum of the absolute score gradients that the bias gradient adds up."""
    sinks: np.ndarray | None = None
    sinks_scale: np.ndarray | None = None
    """As ``bias_scale``, for the gradient of the sinks."""
    maxima: np.ndarray | None = None
    """[B, T, N], the largest valid score of each row; -inf without one."""


NO_SINKS: Any = np.float32(-np.inf)


def valid_elements(
    mask: Mask, B: int, N: int, T: int, S: int, position: Position | None = None
) -> np.ndarray:
    """The mask by its definition, bool[B, N, T, S]."""
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    first_rows, first_cols = _first_indices(position, B)

    def lengths(given: Any, size: int) -> np.ndarray:
        full = np.full(B, size)
        return full if given is None else np.clip(np.asarray(given).astype(np.int64), 0, size)

    query_lengths, key_lengths = lengths(mask.query_lengths, T), lengths(mask.key_lengths, S)
    valid = np.ones((B, N, T, S), bool)
    for b in range(B):
        valid[b] &= (t < query_lengths[b]) & (s < key_lengths[b])
        for window, distance in (
            (mask.top_left, 0),
            (mask.bottom_right, key_lengths[b] - query_lengths[b]),
        ):
            window = window or Window(None, None)
            diagonal = t + first_rows[b] + distance - first_cols[b]
            if window.left is not None:
                valid[b] &= s >= diagonal - window.left
            if window.right is not None:
                valid[b] &= s <= diagonal + window.right
        for query_ids, key_ids in mask.segment_ids:
            query_id = np.broadcast_to(np.asarray(query_ids), (B, T))[b][:, None]
            key_id = np.broadcast_to(np.asarray(key_ids), (B, S))[b][None, :]
            valid[b] &= (query_id == key_id) & (query_id >= 0) & (key_id >= 0)
    for array in mask.booleans:
        valid &= np.asarray(array)
    for lists in mask.key_lists:
        valid &= listed_elements(np.asarray(lists.indices), B, N, T, S)
    return valid


def listed_elements(indices: np.ndarray, B: int, N: int, T: int, S: int) -> np.ndarray:
    """The elements that lists [B | 1, K | 1, T, n] name, one by one, bool[B, N, T, S]."""
    indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
    batch, heads, _, count = indices.shape
    valid = np.zeros((B, N, T, S), bool)
    for b, h, t, place in np.ndindex(B, N, T, count):
        index = indices[b % batch, h * heads // N, t, place]
        if 0 <= index < S:
            valid[b, h, t, index] = True
    return valid


def _first_indices(position: Position | None, B: int) -> tuple[np.ndarray, np.ndarray]:
    """The global indices of row 0 and of column 0, [B] each."""
    rows, columns = (0, 0) if position is None else position
    first, second = (np.broadcast_to(np.asarray(x, np.int64), (B,)) for x in (rows, columns))
    return first, second


def philox4x32_7(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32 with 7 rounds, computed in 64-bit integers."""
    low_word = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x).astype(np.uint64) for x in counter]
    k = [np.asarray(x).astype(np.uint64) for x in key]
    for _ in range(7):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ k[0],
            second & low_word,
            (first >> np.uint64(32)) ^ c[3] ^ k[1],
            first & low_word,
        ]
        k = [
            (k[0] + np.uint64(0x9E3779B9)) & low_word,
            (k[1] + np.uint64(0xBB67AE85)) & low_word,
        ]
    return c


def kept_elements(
    state: DropoutState, threshold: int, T: int, S: int, position: Position | None = None
) -> np.ndarray:
    """The dropout bits by their definition, element by element, bool[B, N, T, S]."""
    base, heads = np.asarray(state.batch_base), np.asarray(state.head_index)
    rows, columns = _first_indices(position, base.size)
    r = np.arange(T)[None, None, :, None] + rows[:, None, None, None]
    c = np.arange(S)[None, None, None, :] + columns[:, None, None, None]
    bh = (base[:, None] + heads[None, :])[:, :, None, None]
    keys = np.asarray(state.key_words)[:, :, None, None, None]
    counter = [(r >> 4) << 2 | (r >> 1) & 3, (c >> 4) << 2 | (c >> 1) & 3, bh, np.zeros_like(bh)]
    words = np.stack(np.broadcast_arrays(*philox4x32_7(counter, [keys[:, 0], keys[:, 1]])))
    which = np.broadcast_to(2 * (r & 1) + (c & 1), words.shape[1:])
    word = np.take_along_axis(words, which[None], 0)[0]
    shift = 8 * (2 * ((r >> 3) & 1) + ((c >> 3) & 1))
    return ((word >> shift.astype(np.uint64)) & np.uint64(255)) >= threshold


def kept_factors(operands: Operands, options: Options) -> np.ndarray:
    """The factors of the probabilities by dropout, [B, N, T, S]."""
    B, T, N, _ = operands.query.shape
    S, threshold = operands.key.shape[1], options.dropout_threshold
    if not threshold or operands.dropout is None:
        return np.ones((B, N, T, S))
    kept = kept_elements(operands.dropout, threshold, T, S, operands.position)
    return 256 / (256 - threshold) * kept


# These functions call lax, because each function of jnp is a program of its own, and tracing and
# differentiating all of these took half of the oracle's time.


def scores_of(query, key, bias, scale, soft_cap):
    """The scores by their definition, [B, N, T, S], before masks; arguments as in ``formula``."""
    key = of_query_heads(key, query.shape[2])
    scores = scale * product(query, key, (3, 3))
    if soft_cap is not None:
        scores = soft_cap * lax.tanh(scores / soft_cap)
    return scores + bias


def of_query_heads(array, heads):
    """Keys or values of each query head, [B, S, N, H]."""
    batch, columns, key_heads, dim = array.shape
    groups = heads // max(key_heads, 1)
    repeated = lax.broadcast_in_dim(array, (batch, columns, key_heads, groups, dim), (0, 1, 2, 4))
    return lax.reshape(repeated, (batch, columns, key_heads * groups, dim))


def product(left, right, contracted, heads=(2, 2)):
    """Products for each batch index and head, summed over the contracted axes of both arrays."""
    axes = ((contracted[0],), (contracted[1],)), ((0, heads[0]), (0, heads[1]))
    return lax.dot_general(left, right, axes, precision=lax.Precision.HIGHEST)


def logsumexp(scores):
    """Reduces the last axis to one element. Sums of 16-bit numbers are rounded once."""
    largest = lax.stop_gradient(lax.reduce_max(scores, (scores.ndim - 1,)))[..., None]
    terms = lax.exp(scores - largest)
    wide = jnp.promote_types(scores.dtype, np.float32)
    sums = lax.reduce_sum(lax.convert_element_type(terms, wide), (scores.ndim - 1,))[..., None]
    return lax.log(lax.convert_element_type(sums, scores.dtype)) + largest


def formula(query, key, value, bias, sinks, valid, kept, scale, soft_cap):
    """Output and logsumexp by their definition, as a function that JAX can differentiate.

    Args:
        query, key, value: arrays of any float dtype. bias: broadcasts to [B, N, T, S], finite.
        sinks: broadcasts to [B, N, T, 1], a score of each row without a value; -inf is no sink.
        valid: bool[B, N, T, S]. kept: [B, N, T, S], the factors of the probabilities. scale: of the
        products. soft_cap: static, or None.
    """
    value = of_query_heads(value, query.shape[2])
    scores = scores_of(query, key, bias, scale, soft_cap)
    sinks = jnp.broadcast_to(jnp.asarray(sinks, scores.dtype), (*scores.shape[:3], 1))
    has_sink = sinks > -np.inf
    has_scores = lax.reduce_or(valid, (3,))[..., None] | has_sink
    # Hazard: rows without keys and sink get finite scores here and their defined values below, so
    # that JAX's gradients of them are zero instead of NaN.
    scores = either(valid | ~has_scores, scores, -np.inf)
    lse = logsumexp(lax.concatenate([scores, either(has_sink, sinks, -np.inf)], 3))
    probabilities = either(valid, lax.exp(scores - lse), 0) * kept
    out = lax.transpose(product(probabilities, value, (3, 1), heads=(1, 2)), (0, 2, 1, 3))
    rows = lax.reshape(either(has_scores, lse, -np.inf), lse.shape[:3])
    return out, lax.transpose(rows, (0, 2, 1))


def either(condition, array, constant):
    """The array where the condition holds, and the constant elsewhere."""
    condition = jnp.broadcast_to(condition, array.shape)
    return lax.select(condition, array, lax.full_like(array, constant))


# Operations must round as written; XLA would keep more bits between fused 16-bit operations. Each
# compiled oracle runs once, so it is not optimized.
@functools.partial(
    jax.jit,
    static_argnames="soft_cap",
    compiler_options={"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0},
)
def _answer(query, key, value, bias, sinks, valid, kept, scale, dout, dlse, soft_cap):
    def differentiable(query, key, value, bias, sinks):
        return formula(query, key, value, bias, sinks, valid, kept, scale, soft_cap)

    results, transpose = jax.vjp(differentiable, query, key, value, bias, sinks)
    scores = either(valid, scores_of(query, key, bias, scale, soft_cap), -np.inf)
    maxima = lax.transpose(lax.reduce_max(scores, (3,)), (0, 2, 1))
    return results, transpose((dout, dlse)), maxima


def answer(
    operands: Operands,
    options: Options,
    dout: Any,
    dlse: Any | None = None,
    dtype: Any = np.float64,
) -> Answer:
    """Output, logsumexp and gradients, with every step in ``dtype``.

    All operands must be finite, masked elements included.
    """
    B, T, N, _ = operands.query.shape
    S = operands.key.shape[1]
    arrays, valid, kept = _arrays_of(operands, options)
    bias_shape = (1, 1, 1, 1) if operands.bias is None else np.shape(operands.bias)
    dlse = np.zeros((B, T, N)) if dlse is None else dlse
    others = (kept, options.scaling.scale, dout, dlse)
    # Runs on the CPU: its compiler is independent of the GPU's and much faster for single
    # operations.
    cpu = jax.default_device(jax.local_devices(backend="cpu")[0])
    with cpu, jax.enable_x64(np.dtype(dtype) == np.float64):
        q, k, v, bias, sinks, kept, scale, dout, dlse = (
            np.asarray(x).astype(np.float64).astype(dtype) for x in (*arrays, *others)
        )
        if S == 0:
            # JAX has no maximum of an empty array, so one invalid column is added.
            k, v, bias, kept = (
                jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), dtype)
                for x, axis in ((k, 1), (v, 1), (bias, 3), (kept, 3))
            )
            valid = np.zeros(bias.shape, bool)
        cap = options.scaling.soft_cap
        results = _answer(q, k, v, bias, sinks, valid, kept, scale, dout, dlse, cap)
    (out, lse), (dq, dk, dv, dscores, dsinks), maxima = jax.tree.map(np.asarray, results)
    dsinks = dsinks.astype(np.float64)
    dscores = dscores[..., :S].astype(np.float64)
    reduced = tuple(axis for axis, size in enumerate(bias_shape) if size == 1)
    has_bias = operands.bias is not None

    def bias_gradient(dscores: np.ndarray) -> np.ndarray:
        together = options.divisors.of_gradient("bias") or 1
        elements = dscores.reshape(-1, together, *dscores.shape[1:]).sum(1)
        return elements.sum(reduced, keepdims=True)

    return Answer(
        out,
        lse,
        dq,
        dk[:, :S],
        dv[:, :S],
        bias_gradient(dscores).astype(dtype) if has_bias else None,
        bias_gradient(np.abs(dscores)) if has_bias else None,
        None if operands.sinks is None else dsinks.sum((0, 2, 3))[None].astype(dtype),
        None if operands.sinks is None else np.abs(dsinks).sum((0, 2, 3))[None],
        maxima,
    )


@functools.partial(
    jax.jit,
    static_argnames="soft_cap",
    compiler_options={"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0},
)
def _tangents(arrays, directions, bias, sinks, valid, kept, scale, soft_cap):
    def differentiable(query, key, value):
        return formula(query, key, value, bias, sinks, valid, kept, scale, soft_cap)

    return jax.jvp(differentiable, arrays, directions)[1]


def tangents(
    operands: Operands, options: Options, directions: Any, dtype: Any = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """Tangents of output and logsumexp for those of query, key and value, in ``dtype``.

    All operands must be finite, masked elements included.
    """
    arrays, valid, kept = _arrays_of(operands, options)
    cpu = jax.default_device(jax.local_devices(backend="cpu")[0])
    with cpu, jax.enable_x64(np.dtype(dtype) == np.float64):
        q, k, v, bias, sinks, dq, dk, dv, kept, scale = (
            np.asarray(x).astype(np.float64).astype(dtype)
            for x in (*arrays, *directions, kept, options.scaling.scale)
        )
        found = _tangents(
            (q, k, v), (dq, dk, dv), bias, sinks, valid, kept, scale, options.scaling.soft_cap
        )
    dout, dlse = jax.tree.map(np.asarray, found)
    return dout, dlse


def _arrays_of(operands: Operands, options: Options) -> tuple[tuple, np.ndarray, np.ndarray]:
    """Query, key, value, bias and sinks as ``formula`` takes them; valid elements, and factors."""
    B, T, N, _ = operands.query.shape
    S = operands.key.shape[1]
    valid = valid_elements(operands.mask, B, N, T, S, operands.position)
    bias = np.zeros((1, 1, 1, 1))
    if operands.bias is not None:
        bias = np.asarray(operands.bias).astype(np.float64)
        valid = valid & (bias >= -1e37)
    bias = np.broadcast_to(np.where(bias >= -1e37, bias, 0), valid.shape)
    sinks = _sinks_of_rows(operands, (B, N, T, 1))
    arrays = (operands.query, operands.key, operands.value, bias, sinks)
    return arrays, valid, kept_factors(operands, options)


def _sinks_of_rows(operands: Operands, shape: tuple[int, ...]) -> np.ndarray:
    """The sink of each row within the lengths, [B, N, T, 1], and -inf in other rows."""
    if operands.sinks is None:
        return np.full(shape, -np.inf)
    sinks = np.broadcast_to(np.asarray(operands.sinks)[:, :, None, None], shape)
    lengths = operands.mask.query_lengths
    if lengths is None:
        return sinks
    in_row = np.arange(shape[2]) < np.asarray(lengths)[:, None]
    return np.where(in_row[:, None, :, None], sinks, -np.inf)


def check(
    name: str,
    got: Any,
    reference: Any,
    low_precision: Any = None,
    *,
    scale: Any = None,
    lse_tolerance: float = 1e-5,
    floor: float = 0.0,
    wide_tolerance: float | None = None,
) -> None:
    """Fails unless a result is as near to the reference as its precision allows.

    Args:
        name: ``"lse"`` or ``"maxima"``, or the name of the result in the message. got: the result
        under test. reference: the oracle's, in float64 (float32 for 16-bit inputs). low_precision:
        the oracle's formula run in the dtype of 16-bit inputs; None for wider
            inputs, where the relative Frobenius error is at most ``wide_tolerance``.
        scale: magnitudes that replace the reference's if terms cancel in a reduction. floor: the
        rounding error of f32 if the reference cancels exactly (a row with one key has dP = delta).
        It is added to the allowed error of an element.
        wide_tolerance: 5e-6 by default (1e-12 in float64).
        lse_tolerance: of the logsumexp and the maxima, relative to ``1 + max |lse|``.

    Results of 16-bit inputs may have twice the largest error of ``low_precision``, in each row and
    in the tensor, plus two roundings of their largest element: one of an operand of the last
    product and one of its result. In a row of few elements ``low_precision`` may have neither by
    chance.
    """
    if wide_tolerance is None:
        wide_tolerance = 1e-12 if got.dtype == np.float64 else 5e-6
    got = np.asarray(got).astype(np.float64)
    reference = np.asarray(reference).astype(np.float64)
    assert got.shape == reference.shape, f"{name}: expected {reference.shape}, got {got.shape}"
    infinite = ~np.isfinite(reference)
    np.testing.assert_array_equal(got[infinite], reference[infinite], err_msg=name)
    assert np.isfinite(got[~infinite]).all(), f"{name}: expected finite values"
    if got.size == 0:
        return
    got, reference = np.where(infinite, 0, got), np.where(infinite, 0, reference)
    error = np.abs(got - reference)
    if name in ("lse", "maxima"):
        allowed = lse_tolerance * (1 + np.abs(reference).max())
        assert error.max() <= allowed, f"{name}: error {error.max():.3g}, allowed {allowed:.3g}"
        return
    magnitude = np.abs(reference) if scale is None else np.asarray(scale)
    if low_precision is None:
        total = np.linalg.norm(error)
        allowed = wide_tolerance * np.linalg.norm(magnitude) + floor * np.sqrt(error.size)
        assert total <= allowed, f"{name}: Frobenius error {total:.3g}, allowed {allowed:.3g}"
        return
    low_error = np.abs(np.asarray(low_precision).astype(np.float64) - reference)
    rounding = float(jnp.finfo(low_precision.dtype).eps) * magnitude.max() + floor
    allowed = 2 * low_error.max() + rounding
    assert error.max() <= allowed, f"{name}: error {error.max():.3g}, allowed {allowed:.3g}"
    rows = error.max(-1), 2 * low_error.max(-1) + rounding
    worst = np.unravel_index(np.argmax(rows[0] - rows[1]), rows[0].shape)
    assert rows[0][worst] <= rows[1][worst], (
        f"{name}: row {worst} has error {rows[0][worst]:.3g}, allowed {rows[1][worst]:.3g}"
    )
