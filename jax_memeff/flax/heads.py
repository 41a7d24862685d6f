"""Heads, caches and rotary embeddings: the code between the projections of both APIs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jax_memeff._api.arrays import FLOATS
from jax_memeff._call import values
from jax_memeff._call.functions import ScoreFunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.expression import with_rows_from
from jax_memeff._call.values import score_dtype
from jax_memeff.flax.attention import attend, batch_dims, separated

SegmentIds = ArrayLike | tuple[ArrayLike, ArrayLike]


class Cache(NamedTuple):
    """Keys and values of the previous tokens, with Flax's names."""

    cached_key: jax.Array
    """[batch..., S, K, H]"""
    cached_value: jax.Array
    """[batch..., S, K, H]"""
    cache_index: jax.Array
    """int32[], the number of tokens in the cache."""


def heads_of_keys(num_heads: int, num_kv_heads: int | None) -> int:
    """K of a layer; None means N.

    Raises:
        ValueError: a number is below 1, or K does not divide N.
        TypeError: a number is not a Python integer.
    """
    values.size("num_heads", num_heads, least=1)
    if num_kv_heads is None:
        return num_heads
    heads = values.static_integer(
        "num_kv_heads", num_kv_heads, "a Python integer", "make it static"
    )
    if heads < 1 or num_heads % heads:
        raise ValueError(
            f"num_kv_heads must be at least 1 and divide num_heads, {num_heads}, got {heads}"
        )
    return heads


def attend_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache | None,
    *,
    rotary_base: float | None,
    positions: ArrayLike | None = None,
    mask: ArrayLike | Mask | None,
    segment_ids: SegmentIds | None,
    is_causal: bool,
    dtype: DTypeLike | None,
    score_mod: ScoreFunction | None = None,
    **settings: Any,
) -> tuple[jax.Array, Cache | None]:
    """Attention of projected heads, and the cache with the new tokens appended.

    Args:
        query: ``[batch..., T, N, H]``.
        key: ``[batch..., S, K, H]``; with a cache, the new tokens only.
        value: ``[batch..., S, K, H]``.
        cache: None attends to ``key`` and ``value`` only.
        rotary_base: None for no rotary embedding.
        positions: ``[batch..., T]``, for queries and keys; None counts from the start of the cache.
        mask: as in the modules.
        segment_ids: as in the modules.
        is_causal: as in the modules; attention over a cache is always causal.
        dtype: the dtype of the computation; None infers it.
        score_mod: as in the modules.
        settings: the other arguments of ``attend``.

    Raises:
        ValueError: shapes do not fit one another or the cache, segment ids are given with a cache,
            or positions without a rotary embedding.
    """
    batch_shape = batch_dims(query, key, value)
    batch, rows = math.prod(batch_shape), query.shape[-3]
    in_order = functools.partial(_positions, rows, key.shape[-3], cache)
    query, key = rotated(query, key, rotary_base, positions, in_order)
    conditions, array = separated(mask)
    if segment_ids is not None:
        columns = key.shape[-3]
        conditions &= _segments(segment_ids, batch_shape, (rows, columns), cache is not None)
    if cache is not None:
        cache = _append(cache, key, value)
        key, value = cache.cached_key, cache.cached_value
        sizes = batch, rows, key.shape[-3]
        filled = jnp.minimum(cache.cache_index, key.shape[-3])  # a full cache counts on
        conditions = with_rows_from(conditions, filled - rows, *sizes)
        conditions = _in_cache(conditions, filled, batch, rows)
        score_mod = _with_rows_from(score_mod, filled - rows)
        is_causal = False
    query, key, value = dtypes.promote_dtype((query, key, value), dtype=dtype)
    settings = {**settings, "mask": array, "conditions": conditions, "is_causal": is_causal}
    return attend(query, key, value, score_mod=score_mod, **settings), cache


def _with_rows_from(score_mod: ScoreFunction | None, first: jax.Array) -> ScoreFunction | None:
    """The function for rows of a cache, the first of which is at position ``first``."""
    if score_mod is None:
        return None

    def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score_mod(score, b, h, q + first, k)

    return function


def rotated(
    query: jax.Array,
    key: jax.Array,
    rotary_base: float | None,
    positions: ArrayLike | None,
    in_order: Callable[[], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, rotated to their positions if there is a ``rotary_base``.

    Args:
        query: ``[batch..., T, N, H]``.
        key: ``[batch..., S, K, H]``.
        rotary_base: None for no rotary embedding.
        positions: those that the user gives, ``[batch..., T]``, or None.
        in_order: returns the positions of queries and keys if the user gives none.

    Raises:
        ValueError: positions are given without a rotary embedding, or have another shape.
    """
    if rotary_base is None:
        if positions is not None:
            raise ValueError(
                "input_positions must be None in a layer without a rotary embedding, got shape"
                f" {jnp.shape(positions)}; pass rotary_base to the constructor"
            )
        return query, key
    at_query, at_key = in_order() if positions is None else _given(positions, query, key)
    return (
        rotary_embedding(query, at_query, rotary_base),
        rotary_embedding(key, at_key, rotary_base),
    )


def _given(positions: ArrayLike, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The positions of queries and of keys that the user gives."""
    array, rows = jnp.asarray(positions), query.shape[:-2]
    fits = array.shape[-1:] == rows[-1:] and array.ndim <= len(rows)
    batch = zip(reversed(array.shape[:-1]), reversed(rows[:-1]), strict=False)
    if not fits or any(size not in (1, full) for size, full in batch):
        raise ValueError(
            f"input_positions must broadcast to [batch..., T] = {list(rows)} and end with the "
            f"same T, got shape {array.shape}"
        )
    if key.shape[-3] != rows[-1]:
        raise ValueError(
            "input_positions are the positions of the queries and of the keys: expected as many"
            f" keys as queries, {rows[-1]}, got {key.shape[-3]}"
        )
    return array, array


def _positions(rows: int, columns: int, cache: Cache | None) -> tuple[jax.Array, jax.Array]:
    """The positions of the queries and of the new keys."""
    if cache is None:
        return jnp.arange(rows), jnp.arange(columns)
    # The queries are the last tokens, as in the masks. A call may need only the last query.
    first, end = cache.cache_index, cache.cache_index + columns
    return end - rows + jnp.arange(rows), first + jnp.arange(columns)


def _append(cache: Cache, key: jax.Array, value: jax.Array) -> Cache:
    """The cache with the new tokens appended. In a full cache they replace the last ones."""
    *batch_shape, longest, heads, head_dim = cache.cached_key.shape
    fits = key.shape[:-3] == tuple(batch_shape) and key.shape[-2:] == (heads, head_dim)
    if not fits or key.shape[-3] > longest:
        expected = ", ".join(map(str, (*batch_shape, f"at most {longest}", heads, head_dim)))
        raise ValueError(
            f"keys must fit the cache, [{expected}], got shape {key.shape}; create a cache for"
            " this batch and for the longest sequence"
        )
    if value.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"inputs_v must have the length of inputs_k, {key.shape[-3]}, got {value.shape[-3]}:"
            " the cache gets a key and a value for each new token"
        )
    _require_dtype(cache)
    zero = jnp.zeros_like(cache.cache_index)
    start = (*[zero] * len(batch_shape), cache.cache_index, zero, zero)
    return Cache(
        lax.dynamic_update_slice(cache.cached_key, key.astype(cache.cached_key.dtype), start),
        lax.dynamic_update_slice(cache.cached_value, value.astype(cache.cached_value.dtype), start),
        cache.cache_index + key.shape[-3],
    )


def _require_dtype(cache: Cache) -> None:
    """Raise for a cache whose dtype would change keys and values by more than rounding.

    Raises:
        TypeError: it is not a dtype of ``dot_product_attention``.
    """
    for name in ("cached_key", "cached_value"):
        dtype = getattr(cache, name).dtype.name
        if dtype not in FLOATS:
            raise TypeError(
                f"{name} must be one of {', '.join(FLOATS)}, got {dtype}; create the cache"
                " with one of these dtypes (float8 needs a paged cache)"
            )


def _in_cache(conditions: Mask, filled: jax.Array, batch: int, rows: int) -> Mask:
    """The causal mask over the ``filled`` columns of a cache, the last of which are the rows' own.

    The rows are the last rows of a square of scores, in which both alignments of a window agree.
    """
    if rows > 1:
        # A single row is the last one: no filled column lies after it.
        conditions &= Mask.causal("bottom_right")
    if any(conditions.all_lengths()):
        # A bottom-right window would end at the user's lengths, and not at the filled columns.
        conditions = _with_fixed_windows(conditions, filled - rows)
    else:
        conditions = _with_windows_at_the_end(conditions)
    return conditions & Mask.lengths(key=jnp.broadcast_to(filled, (batch,)))


def _with_windows_at_the_end(conditions: Mask) -> Mask:
    """All windows count from the last row and the last valid column."""
    window = conditions.bottom_right
    if conditions.top_left is not None:
        window = conditions.top_left if window is None else window & conditions.top_left
    traced = (
        dataclasses.replace(window, alignment="bottom_right")
        for window in conditions.traced_windows
    )
    return dataclasses.replace(
        conditions, top_left=None, bottom_right=window, traced_windows=tuple(traced)
    )


def _with_fixed_windows(conditions: Mask, first: jax.Array) -> Mask:
    """All windows count from column ``first`` in row 0, whatever the lengths are."""
    windows = (conditions.top_left, conditions.bottom_right)
    traced = (
        *(window.traced() for window in windows if window is not None),
        *conditions.traced_windows,
    )
    return dataclasses.replace(
        conditions,
        top_left=None,
        bottom_right=None,
        traced_windows=tuple(window.moved(first) for window in traced),
    )


def _segments(
    segment_ids: SegmentIds, batch_shape: tuple[int, ...], lengths: tuple[int, int], cached: bool
) -> Mask:
    """The mask of segment ids ``[batch..., length]``: one array, or a pair for queries and keys."""
    if cached:
        raise ValueError(
            "segment_ids must be None while decoding: the cache has no ids; pass a mask"
            " [batch..., 1, T, S] over the cache instead"
        )
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(
            f"segment_ids must be an array, or a pair (of queries, of keys), got {len(pair)} arrays"
        )
    flat = []
    for name, ids, length in zip(("queries", "keys"), pair, lengths, strict=True):
        ids = values.array(f"segment_ids of the {name}", ids)
        expected = (*batch_shape, length)
        if ids.shape != expected:
            raise ValueError(
                f"segment_ids of the {name} must have shape {expected}, got {ids.shape};"
                " pass a pair (of queries, of keys) if their lengths differ"
            )
        flat.append(ids.reshape(-1, length))
    return Mask.segments(*flat)


@values.takes_objects
def rotary_embedding(x: jax.Array, positions: ArrayLike, base: float = 10_000.0) -> jax.Array:
    """Rotate pairs of features by angles that grow with the position.

    Pair ``i`` consists of the features ``i`` and ``i + H / 2`` and is rotated by
    ``position * base**(-2 i / H)`` (Su et al., "RoFormer", https://arxiv.org/abs/2104.09864,
    section 3.2.2). The product of a rotated query and a rotated key depends only on the difference
    of their positions.

    Args:
        x: ``[..., T, heads, H]`` with an even H, any float dtype.
        positions: numbers that broadcast to ``[..., T]``.
        base: a number > 0; the longest wavelength is almost ``2 pi base`` positions.

    Returns:
        ``x``'s shape and dtype; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: H is odd, ``base`` is not > 0, or a shape or the dtype of ``x`` is wrong.
        TypeError: ``x`` or ``positions`` are not arrays of real numbers, or ``base`` is not a
            number.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> out = rotary_embedding(x, jnp.arange(3))
    >>> out.shape, bool(jnp.array_equal(out[:, 0], x[:, 0]))  # position 0 is not rotated
    ((1, 3, 2, 4), True)
    """
    x = jnp.asarray(values.array("x", x))
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be floats of shape [..., T, heads, H], got {x.dtype} of shape {x.shape}"
        )
    at = values.array("positions", positions)
    if not any(jnp.issubdtype(at.dtype, kind) for kind in (jnp.integer, jnp.floating, jnp.bool_)):
        raise TypeError(f"positions must be real numbers, got dtype {at.dtype}")
    if not _broadcasts(at.shape, x.shape[:-2]):
        raise ValueError(
            f"positions must broadcast to [..., T] = {list(x.shape[:-2])}, got shape {at.shape}"
        )
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"a rotary embedding needs an even head dim, got {head_dim}")
    if not isinstance(base, Tracer):
        base = values.static_number("base", base, "pass a Python number")
        if base <= 0:
            raise ValueError(f"base must be > 0, got {base}; layers take it as rotary_base")
    dtype = score_dtype(x.dtype)
    half = head_dim // 2
    frequency = base ** (-jnp.arange(half, dtype=dtype) / half)
    # All operands get the rank of x, for users who forbid rank promotion.
    at = jnp.expand_dims(jnp.asarray(at, dtype), (*range(x.ndim - 2 - at.ndim), -2, -1))
    angle = at * jnp.expand_dims(frequency, range(x.ndim - 1))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
