"""Derivatives of the blockwise path that JAX can differentiate again, with linear memory.

Everything but the forward is a derivative of one function. For a fixed logsumexp ``l`` it computes
two sums per row, ``z = sum_s p`` and ``w = sum_s keep * p * v`` with ``p = exp(s - l)``:

- forward mode: ``dlse = dz`` and ``dout = dw - dz * out``;
- reverse mode: its transpose, applied to ``dlse - rowsum(dout * out)`` for z and ``dout`` for w,
  which is the backward of Dao, Fu, Ermon, Rudra and Re, "FlashAttention: Fast and Memory-Efficient
  Exact Attention with IO-Awareness" (2022), appendix B.4.

The function sums independent tiles and recomputes a tile whenever a derivative needs it
(``jax.checkpoint``), so derivatives of any order hold one tile of scores at a time. Blocks are
scanned inputs, not slices of a captured array, so that each cotangent block is written once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise import packed as blockwise_packed
from jax_memeff._blockwise.backward import live_rows, rows_within_lengths
from jax_memeff._blockwise.lists import problem_of
from jax_memeff._blockwise.tiles import Blocks, Problem, grouped, select, ungrouped, when
from jax_memeff._call import sinks
from jax_memeff._call.divisors import (
    as_gradient,
    broadcastable,
    may_sum_gradient,
    whole,
    with_values,
    without_divisors,
)
from jax_memeff._call.operands import (
    Gradients,
    NeedsGrad,
    Operands,
    QkvPackedGradients,
    QkvPackedOperands,
    array_of,
    batch_of,
    gradients_needed,
    named_arrays,
    replaced,
)
from jax_memeff._call.options import Options

Sums = tuple[jax.Array, jax.Array]


def tangent(
    operands: Operands | QkvPackedOperands,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    tangents: Gradients | QkvPackedGradients,
) -> tuple[jax.Array, jax.Array]:
    """Tangents of output and logsumexp.

    Args:
        operands: those of the forward.
        options: those of the forward.
        out: [B, T, N, Hv], the forward's result.
        lse: [B, T, N], the forward's result.
        tangents: of the differentiable operands, in the shapes of gradients; None is zero.
    """
    given = named_arrays(tangents)
    sums, primals = _sums_of(operands, options, lse, list(given))
    _, (dlse, dweighted) = jax.jvp(sums, tuple(primals), tuple(given.values()))
    dout = dweighted - dlse[..., None] * out.astype(dlse.dtype)
    return dout.astype(out.dtype), dlse


def backward(
    operands: Operands | QkvPackedOperands,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    needs_grad: NeedsGrad,
) -> list[jax.Array]:
    """The needed gradients, in the form of ``attention_bwd``'s results."""
    is_live = live_rows(operands.mask, lse)
    is_given = rows_within_lengths(operands.mask, lse)
    dout = select(None if is_given is None else is_given[..., None], dout).astype(lse.dtype)
    row_term = jnp.where(is_live, -jnp.sum(dout * out.astype(lse.dtype), -1), 0)
    if dlse is not None:
        row_term = row_term + jnp.where(is_live, dlse, 0)
    needed = gradients_needed(operands, needs_grad)
    sums, primals = _sums_of(operands, options, lse, needed)
    _, transpose = jax.vjp(sums, *primals)
    return list(transpose((row_term, dout)))


def _sums_of(
    operands: Any, options: Options, lse: jax.Array, names: list[str]
) -> tuple[Callable[..., Sums], list[jax.Array]]:
    """The sums as a function of the named operands, and these operands in gradient shapes."""
    divisors, batch = options.divisors, batch_of(operands)
    primals = [as_gradient(name, array_of(operands, name), operands, divisors) for name in names]
    operands = whole(operands, options)
    options = without_divisors(options)
    # Batch indices that sum into one gradient also read one index of the operand.
    together = {
        name: divisors.of_gradient(name) or 1 for name in names if may_sum_gradient(name, operands)
    }

    def sums(*arrays: jax.Array) -> Sums:
        given = dict(zip(names, arrays, strict=True))
        for name, divisor in together.items():
            given[name] = broadcastable(given[name], divisor, batch)
        call = replaced(operands, given)
        call, _ = with_values(call, options)
        fixed = jnp.where(live_rows(operands.mask, lse), lse, jnp.inf)
        sizes = *call.scores_shape, call.query.shape[1], call.key.shape[1]
        if 0 in (*sizes, *(lists.indices.shape[3] for lists in call.mask.key_lists)):
            total, weighted = _zeros(call, lse)
        elif call.sequences is None:
            total, weighted = _row_sums(call, options, fixed)
        else:
            total, weighted = _row_sums_packed(call, options, fixed)
        if call.sinks is not None:
            # A sink of 1e9 or inf has a derivative, although the keys beside it have none.
            total = total + sinks.probabilities(call, options, lse)
        return total, weighted

    return sums, primals


def _zeros(operands: Operands, lse: jax.Array) -> Sums:
    # Derived from an operand, so that the zeros vary over the same mesh axes inside `shard_map`.
    zero = jnp.sum(operands.query[:0], dtype=lse.dtype)
    weighted = (*lse.shape, operands.value.shape[3])
    return jnp.broadcast_to(zero, lse.shape), jnp.broadcast_to(zero, weighted)


def _row_sums(operands: Operands, options: Options, lse: jax.Array) -> Sums:
    """z, [B, T, N], and w, [B, T, N, Hv]."""
    problem = problem_of(operands, options)
    if operands.mask.key_lists:
        return _row_sums_of_lists(problem, lse)
    rows, cols = problem.rows, problem.cols

    def widened(x: jax.Array) -> jax.Array:
        # Cast before the loops, because JAX sums cotangents in the dtype of the scanned blocks.
        return x.astype(problem.accumulator)

    bias = None if operands.bias is None else widened(operands.bias)
    keys = tuple(_blocks(widened(x), cols, 2) for x in problem.whole_key_and_value())
    queries = (
        _blocks(widened(problem.whole_query()), rows, 3),
        _blocks(grouped(lse[..., None], operands.key.shape[2]), rows, 3),
    )

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tile_sums(query, row_lse, key, value, tile_bias, row, col, first_col, possible) -> Sums:
        def add(_: Sums) -> Sums:
            own_bias = None if tile_bias is None else problem.per_head(tile_bias)
            tile = problem.tile(query, key, own_bias, row, col, None, first_col)
            probabilities = jnp.exp(tile.scores - row_lse)
            kept = select(tile.keep, probabilities) * problem.options.kept_scale
            return jnp.sum(probabilities, -1), problem.weighted(kept, value)

        return when(possible, add, _no_sums(problem))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def row_block(_: Any, block: Any) -> tuple[None, Sums]:
        index, (query, row_lse), row_bias = block
        row, _ = rows.start(index)
        row_bias = bias if row_bias is None else row_bias

        def column_block(sums: Sums, block: Any) -> tuple[Sums, None]:
            index, (key, value), tile_bias, possible = block
            tile_bias = row_bias if tile_bias is None else tile_bias
            col, first_col = cols.start(index)
            tile = query, row_lse, key, value, tile_bias, row, col, first_col
            part = tile_sums(*tile, possible)
            return jax.tree.map(jnp.add, sums, part), None

        blocks = cols.indices, keys, _full_blocks(row_bias, cols, 3), problem.may_attend(row)
        return None, lax.scan(column_block, _no_sums(problem), blocks)[0]

    blocks = rows.indices, queries, _full_blocks(bias, rows, 2)
    _, (total, weighted) = lax.scan(row_block, None, blocks)
    total, weighted = (_joined(x, rows, 3) for x in (total[..., None], weighted))
    return ungrouped(total)[..., 0], ungrouped(weighted)


def _row_sums_of_lists(problem: Problem, lse: jax.Array) -> Sums:
    """Like :func:`_row_sums`, for lists of keys, whose tiles have whole rows.

    JAX transposes the gathers of a tile: a derivative in reverse mode adds an array of the size of
    the keys for each tile.
    """
    operands = problem.operands
    wide = {"key": operands.key, "value": operands.value, "bias": operands.bias}
    wide = {name: x.astype(problem.accumulator) for name, x in wide.items() if x is not None}
    problem = dataclasses.replace(problem, operands=operands._replace(**wide))
    rows = problem.rows
    queries = (
        _blocks(problem.whole_query().astype(problem.accumulator), rows, 3),
        _blocks(grouped(lse[..., None], operands.key.shape[2]), rows, 3),
    )

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def row_block(_: Any, block: Any) -> tuple[None, Sums]:
        index, (query, row_lse) = block
        row, _ = rows.start(index)

        def sums(_: Sums) -> Sums:
            key, bias = problem.key_tile(row, 0), problem.bias_tile(row, 0)
            tile = problem.tile(query, key, bias, row, 0, None, 0)
            probabilities = jnp.exp(tile.scores - row_lse)
            kept = select(tile.keep, probabilities) * problem.options.kept_scale
            return jnp.sum(probabilities, -1), problem.weighted(kept, problem.value_tile(row, 0))

        possible = problem.may_attend(row)
        possible = None if possible is None else possible[0]
        return None, when(possible, sums, _no_sums(problem))

    _, (total, weighted) = lax.scan(row_block, None, (rows.indices, queries))
    total, weighted = (_joined(x, rows, 3) for x in (total[..., None], weighted))
    return ungrouped(total)[..., 0], ungrouped(weighted)


def _no_sums(problem: Problem) -> Sums:
    shape = *problem.group_shape, problem.rows.size
    return problem.zeros(*shape), problem.zeros(*shape, problem.operands.value_dim)


def _blocks(x: jax.Array, blocks: Blocks, axis: int) -> jax.Array:
    """The blocks of one axis, stacked as dim 0; the last may overlap its neighbour."""
    full = lax.slice_in_dim(x, 0, (blocks.count - 1) * blocks.size, axis=axis)
    shape = (*x.shape[:axis], blocks.count - 1, blocks.size, *x.shape[axis + 1 :])
    last = lax.slice_in_dim(x, blocks.length - blocks.size, blocks.length, axis=axis)
    return jnp.concatenate([jnp.moveaxis(full.reshape(shape), axis, 0), last[None]])


def _full_blocks(x: jax.Array | None, blocks: Blocks, axis: int) -> jax.Array | None:
    """The blocks; None if x is absent or broadcast over the axis."""
    if x is None or x.shape[axis] == 1:
        return None
    return _blocks(x, blocks, axis)


def _joined(x: jax.Array, blocks: Blocks, axis: int) -> jax.Array:
    """The inverse of :func:`_blocks`."""
    full = jnp.moveaxis(x[:-1], 0, axis)
    before_last = (blocks.count - 1) * blocks.size
    merged = full.reshape(*full.shape[:axis], before_last, *full.shape[axis + 2 :])
    rest = blocks.length - before_last
    last = lax.slice_in_dim(x[-1], blocks.size - rest, blocks.size, axis=axis)
    return jnp.concatenate([merged, last], axis)


def _row_sums_packed(operands: Operands, options: Options, lse: jax.Array) -> Sums:
    """Like :func:`_row_sums`, for packed sequences, which are processed one after the other."""
    bias = operands.bias
    per_sequence = None if bias is None or bias.shape[0] == 1 else bias[:, None]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def sequence_sums(index: jax.Array, own_bias: jax.Array | None):
        rows, columns = blockwise_packed.tokens_of(operands, index)
        one = blockwise_packed.sequence_of(
            operands._replace(bias=None), options, index, rows, columns
        )
        whole = bias if own_bias is None else own_bias
        if whole is not None:
            one = one._replace(bias=whole[:, :, : rows.size, : columns.size])
        sums = _row_sums(one, options, jnp.take(lse, rows, 1, mode="fill", fill_value=0))
        return rows, sums

    def add(results: Sums, xs: Any) -> tuple[Sums, None]:
        rows, sums = sequence_sums(*xs)
        total, weighted = (
            result.at[:, rows].add(part, mode="drop")
            for result, part in zip(results, sums, strict=True)
        )
        return (total, weighted), None

    indices = lax.iota(jnp.int32, operands.scores_shape[0])
    return lax.scan(add, _zeros(operands, lse), (indices, per_sequence))[0]
