"""Attention in plain JAX with linear memory, for every platform, feature and dtype.

The forward loops over Q blocks and, for each, over KV blocks, and holds one tile of scores at a
time. It is the online softmax of Rabe and Staats, "Self-attention does not need O(n^2) memory"
(2021), section 3. The backward is in ``backward.py``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise.backward import backward
from jax_memeff._blockwise.lists import problem_of
from jax_memeff._blockwise.pages import Pools
from jax_memeff._blockwise.tiles import Index, Problem, Tile, select, ungrouped, written
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options

__all__ = ["backward", "forward"]

State = tuple[jax.Array, jax.Array, jax.Array]


def forward(
    operands: Operands, options: Options, dtype: Any = None, pools: Pools | None = None
) -> tuple[jax.Array, ...]:
    """Attention and its logsumexp.

    Args:
        operands: arrays in canonical shapes; ``operands.mask`` is canonical.
        options: the static part. ``precision`` only affects the kernels: products here are float32.
        dtype: of ``out``; the query's by default.
        pools: of a call with pages.

    Returns:
        out: [B, T, N, Hv]; 0 in rows without valid keys.
        lse: [B, T, N], float32 (float64 for float64 inputs); -inf in rows without valid keys.
        maxima: only with ``options.row_maxima``: the largest score of each row, typed like ``lse``.
    """
    batch, length, heads, _ = operands.query.shape
    value_dim = operands.value_dim
    problem = problem_of(operands, options, pools)
    if 0 in (batch, length, heads, problem.cols.length):
        out = problem.zeros(batch, length, heads, value_dim).astype(dtype or operands.query.dtype)
        nothing = problem.zeros(batch, length, heads) - jnp.inf
        return (out, nothing, nothing) if options.row_maxima else (out, nothing)

    rows, cols = problem.rows, problem.cols
    group_shape = problem.group_shape

    def query_block(index: Index, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row, _ = rows.start(index)
        query = problem.query_tile(row)

        def key_block(index: Index, state: State | None) -> State:
            col, first_col = cols.start(index)
            key, bias = problem.key_tile(row, col), problem.bias_tile(row, col)
            tile = problem.tile(query, key, bias, row, col, None, first_col)
            return _online_softmax(problem, state, tile, problem.value_tile(row, col))

        # A single tile starts from nothing, so that XLA fuses its softmax with the products.
        state = (
            None
            if problem.is_one_tile
            else (
                problem.zeros(*group_shape, rows.size) - jnp.inf,
                problem.zeros(*group_shape, rows.size),
                problem.zeros(*group_shape, rows.size, value_dim),
            )
        )
        maximum, total, weighted = problem.each_key_block(row, key_block, state)
        has_keys = total != 0  # true for NaN, too, which must reach the logsumexp and the gradients
        # A row without keys is divided by 1, so that neither its value nor its derivative is NaN.
        total = jnp.where(has_keys, total, 1)
        out = weighted * (problem.options.kept_scale / total)[..., None]
        lse = jnp.where(has_keys, maximum + jnp.log(total), -jnp.inf)
        of_rows = (lse, maximum) if options.row_maxima else (lse,)
        blocks = ungrouped(out), *(ungrouped(x[..., None])[..., 0] for x in of_rows)
        return tuple(
            written(result, block.astype(result.dtype), (1, row))
            for result, block in zip(results, blocks, strict=True)
        )

    out = problem.zeros(batch, length, heads, value_dim).astype(dtype or operands.query.dtype)
    of_rows = [problem.zeros(batch, length, heads)] * (2 if options.row_maxima else 1)
    return rows.each(query_block, (out, *of_rows))


def _online_softmax(problem: Problem, state: State | None, tile: Tile, value: jax.Array) -> State:
    """Add one tile to the running maximum, sum of exponentials and weighted values of each row.

    A state of None is that of no tile.
    """
    scores = tile.scores
    # Neither results nor derivatives depend on the subtracted maximum.
    new_maximum = lax.stop_gradient(jnp.max(scores, -1))
    if state is not None:
        new_maximum = jnp.maximum(state[0], new_maximum)
    # Rows without a valid key so far subtract a finite number, because -inf - -inf would be NaN.
    subtracted = jnp.maximum(new_maximum, jnp.finfo(scores.dtype).min)
    probabilities = jnp.exp(scores - subtracted[..., None])
    new_total = jnp.sum(probabilities, -1)
    new_weighted = problem.weighted(select(tile.keep, probabilities), value)
    if state is None:
        return new_maximum, new_total, new_weighted
    maximum, total, weighted = state
    decay = jnp.exp(maximum - subtracted)
    return new_maximum, total * decay + new_total, weighted * decay[..., None] + new_weighted
