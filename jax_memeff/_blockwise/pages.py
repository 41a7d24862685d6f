"""Tiles of keys and values from a pool of pages.

A tile is gathered when it is read, so neither the pool nor a whole sequence is copied. Keys beyond
the length of the sequence, and keys before the window of the tile's queries, may be NaN. They are
not gathered, because 0 times NaN would be NaN; the tile holds 0 in their place, whatever the scales
are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.operands import Operands


class Pools(NamedTuple):
    """The pools of a call as matrices with a row for each key.

    Hazard: form them before the first loop. XLA may choose one layout for a pool with one key head
    outside a loop and another one inside, which is the same order of elements, but it copies the
    pool. A matrix leaves it no choice.
    """

    key: jax.Array
    """[pages * page_size, K * H]"""
    value: jax.Array
    """[pages * page_size, K * Hv]; with latent values, the array of the keys"""

    @classmethod
    def of(cls, operands: Operands) -> Pools | None:
        """The pools of a call; None if its keys are not in pages."""
        if operands.pages is None:
            return None
        key, value = (
            x.reshape(x.shape[1], x.shape[2] * x.shape[3]) for x in (operands.key, operands.value)
        )
        return cls(key, value if operands.pages.latent_dim is None else key)


def key_tile(operands: Operands, pools: Pools, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The keys in the given rows of the pool, [1, K, keys, H]; or [1, K, rows, n, H] for lists.

    Args:
        operands: a call with one sequence.
        pools: its pools.
        rows: int32[keys], from :func:`needed_rows`; or int32[1|K, rows, n], for each key head.
        dtype: the dtype of the result, in which scales are applied.
    """
    pages = operands.pages
    assert pages is not None
    return _tile(operands, pools.key, operands.key.shape[3], pages.key_scale, rows, dtype)


def value_tile(operands: Operands, pools: Pools, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values in the given rows of the pool, [1, K, keys, Hv]; or [1, K, rows, n, Hv]."""
    pages = operands.pages
    assert pages is not None
    scale = pages.value_scale if pages.latent_dim is None else pages.key_scale
    tile = _tile(operands, pools.value, operands.value.shape[3], scale, rows, dtype)
    return tile[..., : operands.value_dim]


def are_in_pool(operands: Operands, first: int | jax.Array, size: int) -> jax.Array:
    """Whether the pages of these keys are in the pool, bool[size]."""
    pool_rows = operands.key.shape[1]
    return _rows(operands, first, size) < pool_rows


def needed_rows(
    operands: Operands, first: int | jax.Array, size: int, reached: jax.Array | None
) -> jax.Array:
    """The rows of the pool with the keys ``first`` to ``first + size`` of one sequence.

    For a key that no query of the tile needs, it is an invalid index.

    Args:
        operands: a call with one sequence.
        first: int32[].
        size: the number of keys.
        reached: bool[size], false before the windows of all queries; None if there are none.

    Returns:
        int32[size]
    """
    lengths = operands.mask.key_lengths
    assert lengths is not None
    is_needed = first + lax.iota(jnp.int32, size) < lengths[0]
    if reached is not None:
        is_needed &= reached
    return jnp.where(is_needed, _rows(operands, first, size), operands.key.shape[1])


def _rows(operands: Operands, first: int | jax.Array, size: int) -> jax.Array:
    assert operands.pages is not None
    columns = first + lax.iota(jnp.int32, size)
    return operands.pages.rows(columns, operands.key.shape[1])[0]


def _tile(
    operands: Operands,
    pool: jax.Array,
    dim: int,
    scale: jax.Array | None,
    rows: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    pages, pool_rows = operands.pages, pool.shape[0]
    assert pages is not None
    # Part of the loop's body: XLA for CPUs would otherwise widen the whole pool before the loop.
    pool, rows = lax.optimization_barrier((pool, rows))
    if rows.ndim == 3:
        return _listed_tile(operands, pool, dim, scale, rows, dtype)
    tile = jnp.take(pool, rows, 0, mode="fill", fill_value=0).astype(dtype)
    tile = tile.reshape(1, rows.shape[0], operands.key.shape[2], dim)
    if scale is not None:
        page = rows // pages.page_size if scale.shape[1] != 1 else jnp.zeros_like(rows)
        tile = tile * jnp.take(scale, page, 1, mode="fill", fill_value=0).astype(dtype)
        # A scale for the whole pool may be inf or NaN, and 0 times that is NaN.
        tile = jnp.where((rows < pool_rows)[:, None, None], tile, 0)
    return tile.transpose(0, 2, 1, 3)


def _listed_tile(
    operands: Operands,
    pool: jax.Array,
    dim: int,
    scale: jax.Array | None,
    rows: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    """:func:`_tile` for rows of the pool of each key head, int32[1|K, rows, n]."""
    pages, pool_rows, heads = operands.pages, pool.shape[0], operands.key.shape[2]
    assert pages is not None
    head = jnp.arange(heads, dtype=jnp.int32).reshape(-1, 1, 1)
    if rows.shape[0] == 1:
        tile = jnp.take(pool, rows[0], 0, mode="fill", fill_value=0)
        tile = jnp.moveaxis(tile.reshape(*rows.shape[1:], heads, dim), 2, 0)
    else:
        own = pool.reshape(pool_rows, heads, dim)
        tile = own.at[rows, head].get(mode="fill", fill_value=0)
    tile = tile.astype(dtype)
    if scale is not None:
        page = rows // pages.page_size if scale.shape[1] != 1 else jnp.zeros_like(rows)
        factor = scale.at[0, page, head, 0].get(mode="fill", fill_value=0).astype(dtype)
        tile = jnp.where((rows < pool_rows)[..., None], tile * factor[..., None], 0)
    return tile[None]
