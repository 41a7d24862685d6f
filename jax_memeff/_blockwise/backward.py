"""The backward of the blockwise path.

The probabilities are recomputed from the logsumexp, tile by tile, as in Dao, Fu, Ermon, Rudra and
Re, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), appendix
B.4. The outer loop runs over Q blocks: the gradient of a Q block is accumulated in place and
rounded once, the gradients of key and value are summed in buffers of the size of key and value.

``rowsum(dout * out)`` is also ``sum(p * dp)``, which a single tile has at hand, and takes if the
output has 16 bits. Several tiles take the output, unless that has too few digits for a gradient
(``_call/functions.py``). Then a first loop over the KV blocks of each Q block adds up
``sum(p * dp)``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise.lists import problem_of
from jax_memeff._blockwise.tiles import (
    Index,
    Problem,
    Tile,
    added,
    has_probabilities,
    scaled,
    select,
    ungrouped,
)
from jax_memeff._call.divisors import gradient_shape, summed
from jax_memeff._call.functions import needs_delta_from_scores
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import Gradients, NeedsGrad, Operands
from jax_memeff._call.options import Options


class _Sums(NamedTuple):
    """Running sums of the gradients; None if a gradient is not needed."""

    query: jax.Array | None
    """The gradient itself between Q blocks, the sums of one of them, [B, K, G, rows, H], inside."""
    key: jax.Array | None
    value: jax.Array | None
    bias: jax.Array | None
    captured: tuple[jax.Array | None, ...]


def backward(
    operands: Operands,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    needs_grad: NeedsGrad,
) -> Gradients:
    """Gradients of :func:`forward`.

    Args:
        operands: those of the forward.
        options: those of the forward.
        out: [B, T, N, Hv], the forward's result.
        lse: [B, T, N], the forward's result.
        dout: [B, T, N, Hv], the cotangent of ``out``.
        dlse: [B, T, N], the cotangent of ``lse``; None is zero.
        needs_grad: which gradients to compute.

    Returns:
        Gradients in the operands' own dtypes and in the shapes of ``attention_bwd``'s results. The
        gradients of a broadcast bias and of captured arrays are summed tile by tile.
    """
    problem = problem_of(operands, options)
    bias = operands.bias
    needs_bias_grad = needs_grad.bias and bias is not None
    # A bias of one column adds a constant to each row of scores. That changes no probability and
    # shifts the logsumexp, so the gradient follows from dlse alone. With a single key column this
    # shortcut is not taken: in ring attention that column is not the whole row.
    constant_rows = bias is not None and bias.shape[3] == 1 != operands.key.shape[1]
    sums = _Sums(
        query=problem.zeros(*operands.query.shape).astype(operands.query.dtype)
        if needs_grad.query
        else None,
        key=_zeros_by_head(problem, operands.key) if needs_grad.key else None,
        value=_zeros_by_head(problem, operands.value) if needs_grad.value else None,
        bias=_bias_sums(problem) if needs_bias_grad and not constant_rows else None,
        captured=_captured_sums(problem, needs_grad),
    )
    row_is_live = live_rows(operands.mask, lse)
    if dlse is not None:
        dlse = jnp.where(row_is_live, dlse, 0)
    is_empty = 0 in (*operands.query.shape[:3], problem.cols.length)
    if not is_empty and jax.tree.leaves(sums):
        sums = _backward_loops(problem, sums, row_is_live, out, lse, dout, dlse)

    def finish(x: jax.Array | None, like: jax.Array) -> jax.Array | None:
        return None if x is None else ungrouped(x[:, :, None]).astype(like.dtype)

    dbias = None
    if needs_bias_grad and bias is not None:
        dbias = sums.bias
        if dbias is None:
            shape = gradient_shape("bias", bias.shape, operands, options.divisors)
            dbias = problem.zeros(*shape)
            if dlse is not None and not is_empty:
                dbias = summed(dlse.transpose(0, 2, 1)[..., None], shape)
        dbias = dbias.astype(bias.dtype)
    return Gradients(
        query=sums.query,
        key=finish(sums.key, operands.key),
        value=finish(sums.value, operands.value),
        bias=dbias,
        captured=tuple(
            None if x is None else x.astype(like.dtype)
            for x, like in zip(sums.captured, operands.captured, strict=True)
        ),
    )


def _zeros_by_head(problem: Problem, x: jax.Array) -> jax.Array:
    """Zeros for the gradient of keys or values, [B, K, S, .]."""
    _, columns, kv_heads, dim = x.shape
    return problem.zeros(problem.group_shape[0], kv_heads, columns, dim)


def _backward_loops(
    problem: Problem,
    sums: _Sums,
    row_is_live: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> _Sums:
    rows, cols, kept_scale = problem.rows, problem.cols, problem.options.kept_scale
    needed = tuple(x is not None for x in sums.captured)
    # An output of 16 bits has fewer digits than the products of a tile with whole rows.
    is_rounded = problem.operands.query.dtype != problem.accumulator
    is_in_tile = problem.has_rows_in_tile and problem.options.has_whole_rows and is_rounded
    is_first_loop = not is_in_tile and needs_delta_from_scores(
        problem.operands, problem.options, needed
    )
    given = None if is_in_tile or is_first_loop else out
    dout, lse, row_term = _row_arrays(problem, row_is_live, given, lse, dout, dlse)
    needs_scores_grad = bool(jax.tree.leaves(sums._replace(value=None)))
    captured = {i: problem.captured[i] for i, x in enumerate(sums.captured) if x is not None}

    def query_block(index: Index, sums: _Sums) -> _Sums:
        row, first_row = rows.start(index)
        query = problem.query_tile(row)
        dout_tile = problem.row_tile(dout, row)
        lse_tile = problem.row_tile(lse[..., None], row)
        row_term_tile = problem.row_tile(row_term[..., None], row)

        def probabilities_of(key: jax.Array, col: Index, first_col: Index):
            bias = problem.bias_tile(row, col)
            tile = problem.tile(query, key, bias, row, col, first_row, first_col)
            return tile, jnp.exp(tile.scores - lse_tile)

        def kept_gradient(tile: Tile, col: Index) -> jax.Array:
            dprobabilities = problem.products(dout_tile, problem.value_tile(row, col))
            return scaled(select(tile.keep, dprobabilities), kept_scale)

        def add_to_row_term(index: Index, row_term: jax.Array) -> jax.Array:
            col, first_col = cols.start(index)
            tile, probabilities = probabilities_of(problem.key_tile(row, col), col, first_col)
            terms = probabilities * kept_gradient(tile, col)
            return row_term + jnp.sum(terms, -1, keepdims=True)

        if is_first_loop:
            row_term_tile = problem.each_key_block(row, add_to_row_term, row_term_tile)

        def key_block(index: Index, sums: _Sums) -> _Sums:
            col, first_col = cols.start(index)
            key = problem.key_tile(row, col)
            tile, probabilities = probabilities_of(key, col, first_col)
            dvalue = sums.value
            if dvalue is not None:
                kept = scaled(select(tile.keep, probabilities), kept_scale)
                dvalue = problem.added_by_key(dvalue, kept, dout_tile, row, col)
            if not needs_scores_grad:
                return sums._replace(value=dvalue)
            dprobabilities, delta = kept_gradient(tile, col), row_term_tile
            if is_in_tile:
                delta = delta + jnp.sum(probabilities * dprobabilities, -1, keepdims=True)
            dscores = probabilities * (dprobabilities - delta)
            dbias = sums.bias
            if dbias is not None:
                dbias = problem.added_to_bias(dbias, dscores, row, col)
            dscores, dcaptured = tile.pull(dscores, captured)
            dscores = scaled(dscores, problem.options.scaling.scale)
            dquery, dkey = sums.query, sums.key
            if dquery is not None:
                dquery = dquery + problem.weighted(dscores, key)
            if dkey is not None:
                dkey = problem.added_by_key(dkey, dscores, query, row, col)
            summed_captured = (
                None if x is None else x + dcaptured[index] for index, x in enumerate(sums.captured)
            )
            return _Sums(dquery, dkey, dvalue, dbias, tuple(summed_captured))

        dquery = None if sums.query is None else problem.zeros(*query.shape)
        block = problem.each_key_block(row, key_block, sums._replace(query=dquery))
        if sums.query is not None and block.query is not None:
            # Exact in the gradient's own dtype: rows that blocks share are zero in the later one.
            dquery = ungrouped(block.query).astype(sums.query.dtype)
            block = block._replace(query=added(sums.query, dquery, (1, row)))
        return block

    return rows.each(query_block, sums)


def _row_arrays(
    problem: Problem,
    row_is_live: jax.Array,
    out: jax.Array | None,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The per-row arrays of the tiles: ``dout``, the logsumexp, and ``rowsum(dout * out) - dlse``.

    The last one is D in the paper, which is subtracted from dP in every element of the row; without
    ``out`` it is ``-dlse``. In rows that are not live, the logsumexp is inf, D is 0, and ``dout``
    is multiplied by probabilities of 0.
    """
    dtype = problem.accumulator
    within = rows_within_lengths(problem.operands.mask, lse)
    if within is not None:
        dout = jnp.where(within[..., None], dout, 0)
    row_term = problem.zeros(*lse.shape)
    if out is not None:
        row_term = jnp.sum(dout.astype(dtype) * out.astype(dtype), -1)
        row_term = jnp.where(row_is_live, row_term, 0)
    if dlse is not None:
        row_term = row_term - dlse.astype(dtype)
    return dout, jnp.where(row_is_live, lse, jnp.inf), row_term


def _bias_sums(problem: Problem) -> jax.Array | None:
    """Zeros to which the gradient of the bias is added."""
    bias = problem.operands.bias
    if bias is None:
        return None
    shape = gradient_shape("bias", bias.shape, problem.operands, problem.options.divisors)
    return problem.zeros(*shape).astype(problem.bias_accumulator)


def _captured_sums(problem: Problem, needs_grad: NeedsGrad) -> tuple[jax.Array | None, ...]:
    """Zeros to which the gradients of captured arrays are added; none need one by default."""
    needed = needs_grad.captured or (False,) * len(problem.captured)
    return tuple(
        problem.zeros(*x.shape).astype(x.dtype) if is_needed else None
        for x, is_needed in zip(problem.captured, needed, strict=True)
    )


def live_rows(mask: Mask, lse: jax.Array) -> jax.Array:
    """bool[B, T, N]: the rows that have gradients.

    The backward sets the logsumexp of other rows to inf, which makes their probabilities 0.
    """
    live, within = has_probabilities(lse), rows_within_lengths(mask, lse)
    return live if within is None else live & within


def rows_within_lengths(mask: Mask, lse: jax.Array) -> jax.Array | None:
    """bool, broadcasts to [B, T, N]: the rows whose values may reach a result; None if all may.

    Within the lengths, a fully masked row has probabilities of 0, as in kernels, and 0 * NaN is
    NaN. To test each row for keys, kernels would have to read the output gradient once more.
    """
    within = None
    if mask.query_lengths is not None:
        row = lax.broadcasted_iota(jnp.int32, lse.shape, 1)
        within = row < mask.query_lengths[:, None, None]
    if mask.key_lengths is not None:
        has_keys = mask.key_lengths[:, None, None] > 0
        within = has_keys if within is None else within & has_keys
    return within
