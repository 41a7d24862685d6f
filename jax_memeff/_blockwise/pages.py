"""Tiles of keys and values from a pool of pages.

A tile is gathered when it is read, so neither the pool nor a whole sequence is copied. Keys beyond
the length of the sequence may be NaN. They are not gathered, because 0 times NaN would be NaN; the
tile holds 0 in their place, whatever the scales are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.operands.arrays import Operands


def key_tile(operands: Operands, first: jax.Array, size: int, dtype: jnp.dtype) -> jax.Array:
    """The keys ``first`` to ``first + size`` of one sequence, [1, K, size, H].

    Args:
        operands: a call with one sequence.
        first: int32[].
        size: the number of keys.
        dtype: the dtype of the result, in which scales are applied.
    """
    pages = operands.pages
    assert pages is not None
    return _tile(operands, operands.key, pages.key_scale, first, size, dtype)


def value_tile(operands: Operands, first: jax.Array, size: int, dtype: jnp.dtype) -> jax.Array:
    """The values ``first`` to ``first + size`` of one sequence, [1, K, size, Hv]."""
    pages = operands.pages
    assert pages is not None
    scale = pages.value_scale if pages.latent_dim is None else pages.key_scale
    tile = _tile(operands, operands.value, scale, first, size, dtype)
    return tile[..., : operands.value_dim]


def are_in_pool(operands: Operands, first: jax.Array, size: int) -> jax.Array:
    """Whether the pages of these keys are in the pool, bool[size]."""
    pool_rows = operands.key.shape[1]
    return _rows(operands, first, size) < pool_rows


def _rows(operands: Operands, first: jax.Array, size: int) -> jax.Array:
    assert operands.pages is not None
    columns = first + lax.iota(jnp.int32, size)
    return operands.pages.rows(columns, operands.key.shape[1])[0]


def _tile(
    operands: Operands,
    pool: jax.Array,
    scale: jax.Array | None,
    first: jax.Array,
    size: int,
    dtype: jnp.dtype,
) -> jax.Array:
    pages, lengths = operands.pages, operands.mask.key_lengths
    assert pages is not None and lengths is not None
    rows = _rows(operands, first, size)
    rows = jnp.where(first + lax.iota(jnp.int32, size) < lengths[0], rows, pool.shape[1])
    tile = jnp.take(pool, rows, 1, mode="fill", fill_value=0).astype(dtype)
    if scale is not None:
        page = rows // pages.page_size if scale.shape[1] != 1 else jnp.zeros_like(rows)
        tile = tile * jnp.take(scale, page, 1, mode="fill", fill_value=0).astype(dtype)
        # A scale for the whole pool may be inf or NaN, and 0 times that is NaN.
        tile = jnp.where((rows < pool.shape[1])[:, None, None], tile, 0)
    return tile.transpose(0, 2, 1, 3)
