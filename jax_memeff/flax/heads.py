"""What the modules of both APIs do between their projections."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_memeff._call import values
from jax_memeff._call.mask import Mask
from jax_memeff.flax.attention import attend, batch_dims
from jax_memeff.flax.rotary import rotary_embedding

SegmentIds = ArrayLike | tuple[ArrayLike, ArrayLike]


class Cache(NamedTuple):
    """Keys and values of the tokens that came before; the names are those of Flax."""

    cached_key: jax.Array
    """[batch..., S, K, H]"""
    cached_value: jax.Array
    """[batch..., S, K, H]"""
    cache_index: jax.Array
    """int32[], the number of tokens in the cache."""


def attend_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache | None,
    *,
    rotary_base: float | None,
    mask: ArrayLike | Mask | None,
    segment_ids: SegmentIds | None,
    is_causal: bool,
    dtype: DTypeLike | None,
    **settings: Any,
) -> tuple[jax.Array, Cache | None]:
    """Attention of projected heads, and the cache with the new tokens.

    Args:
        query: ``[batch..., T, N, H]``.
        key: ``[batch..., S, K, H]``, of the new tokens only where there is a cache.
        value: ``[batch..., S, K, H]``.
        cache: None attends to ``key`` and ``value`` alone.
        rotary_base: None for no rotary embedding.
        mask: as of the modules.
        segment_ids: as of the modules.
        is_causal: as of the modules; a cache is causal in any case.
        dtype: of the computation; None infers it.
        settings: ``bias``, and dropout and precision, as of ``attend``.

    Raises:
        ValueError: shapes do not fit one another or the cache, or segment ids meet a cache.
    """
    batch_shape = batch_dims(query, key, value)
    batch, rows = math.prod(batch_shape), query.shape[-3]
    first = 0 if cache is None else cache.cache_index
    if rotary_base is not None:
        query = rotary_embedding(query, first + jnp.arange(rows), rotary_base)
        key = rotary_embedding(key, first + jnp.arange(key.shape[-3]), rotary_base)
    conditions, array = Mask(), None
    if isinstance(mask, Mask):
        conditions = mask
    elif mask is not None:
        array = jnp.asarray(mask)
    if segment_ids is not None:
        columns = key.shape[-3]
        conditions &= _segments(segment_ids, batch_shape, (rows, columns), cache is not None)
    if cache is not None:
        cache = _append(cache, key, value)
        key, value = cache.cached_key, cache.cached_value
        conditions = _in_cache(conditions, cache.cache_index, batch, rows)
        is_causal = False
    query, key, value = dtypes.promote_dtype((query, key, value), dtype=dtype)
    settings = {**settings, "mask": array, "conditions": conditions, "is_causal": is_causal}
    return attend(query, key, value, **settings), cache


def _append(cache: Cache, key: jax.Array, value: jax.Array) -> Cache:
    """The cache after the new tokens; where it is full, they take the place of its last ones."""
    *batch_shape, longest, heads, head_dim = cache.cached_key.shape
    fits = key.shape[:-3] == tuple(batch_shape) and key.shape[-2:] == (heads, head_dim)
    if not fits or key.shape[-3] > longest:
        expected = ", ".join(map(str, (*batch_shape, f"at most {longest}", heads, head_dim)))
        raise ValueError(
            f"keys must fit the cache, [{expected}], got shape {key.shape}; make a cache for this"
            " batch and for the longest sequence"
        )
    zero = jnp.zeros_like(cache.cache_index)
    start = (*[zero] * len(batch_shape), cache.cache_index, zero, zero)
    return Cache(
        lax.dynamic_update_slice(cache.cached_key, key.astype(cache.cached_key.dtype), start),
        lax.dynamic_update_slice(cache.cached_value, value.astype(cache.cached_value.dtype), start),
        cache.cache_index + key.shape[-3],
    )


def _in_cache(conditions: Mask, filled: jax.Array, batch: int, rows: int) -> Mask:
    """Causal among the ``filled`` columns of a cache, whose last ones belong to the rows.

    The rows are the last of a square of scores, where both alignments of a window are the same.
    """
    window = conditions.bottom_right
    if conditions.top_left is not None:
        window = conditions.top_left if window is None else window & conditions.top_left
    conditions = dataclasses.replace(conditions, top_left=None, bottom_right=window)
    if rows > 1:
        # One row is the last: there is nothing behind it.
        conditions &= Mask.causal("bottom_right")
    return conditions & Mask.lengths(key=jnp.broadcast_to(filled, (batch,)))


def _segments(
    segment_ids: SegmentIds, batch_shape: tuple[int, ...], lengths: tuple[int, int], cached: bool
) -> Mask:
    """The mask of segment ids ``[batch..., length]``, one array for queries and keys or two."""
    if cached:
        raise ValueError(
            "segment_ids must be None while decoding: the cache has no ids; pass a mask"
            " [batch..., 1, T, S] over the cache instead"
        )
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    flat = []
    for name, ids, length in zip(("queries", "keys"), pair, lengths, strict=True):
        ids = values.array(f"segment_ids of the {name}", ids)
        expected = (*batch_shape, length)
        if ids.shape != expected:
            raise ValueError(
                f"segment_ids of the {name} must have shape {expected}, got {ids.shape};"
                " pass a pair (of queries, of keys) where their lengths differ"
            )
        flat.append(ids.reshape(-1, length))
    return Mask.segments(*flat)
