"""A paged cache for the attention modules of both APIs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax.typing import ArrayLike, DTypeLike

from jax_memeff._api.arrays import FLOAT8, FLOATS, POOL_DTYPES, ArrayArgument, checked, paged
from jax_memeff._api.paged import arguments
from jax_memeff._api.paged.append import append_to_pages
from jax_memeff._api.paged.attention import paged_attention
from jax_memeff._call import values
from jax_memeff._call.mask import Mask
from jax_memeff.codegen.features.pages import SIZES, is_size
from jax_memeff.flax.attention import is_nonzero, promoted_sinks, separated
from jax_memeff.flax.heads import rotated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages(values.HoldsArrays):
    """The sequences whose new tokens are the inputs of a layer with a paged cache.

    The arrays are arguments of :func:`jax_memeff.paged_attention`, the same for all layers.
    """

    page_table: ArrayLike
    """[B, max_pages]"""
    kv_lengths: ArrayLike
    """[B], the number of tokens of each sequence, including the new ones."""
    query_starts: ArrayLike | None = None
    """[B + 1], if the inputs are [tokens, features] of concatenated sequences."""
    key_scale: ArrayLike | None = None
    """[K] or [pages, K], the scale of a float8 pool."""
    value_scale: ArrayLike | None = None
    """Likewise."""


class Pools(NamedTuple):
    """The keys and values of a layer."""

    key_pages: jax.Array
    """[pages, page_size, K, H]"""
    value_pages: jax.Array
    """[pages, page_size, K, H]"""


def require_readable(pages: Any, page_size: Any, dtype: DTypeLike | None) -> None:
    """Raise if no call could read a pool of this shape and dtype; None is the dtype of the keys.

    Raises:
        ValueError: a number is negative, or no page has this size.
        TypeError: a number is not a Python integer, or pools cannot have this dtype.
    """
    for name, value, least in (("pages", pages, 0), ("page_size", page_size, 1)):
        values.size(name, value, least, most=None)
    if not is_size(page_size):
        raise ValueError(f"page_size must be {SIZES}, got {page_size}")
    if dtype is not None and jnp.dtype(dtype).name not in POOL_DTYPES:
        raise TypeError(
            f"the dtype of pages must be one of {', '.join(POOL_DTYPES)}, got {jnp.dtype(dtype)}"
        )


def attend_pages(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pools: Pools,
    pages: Pages,
    *,
    rotary_base: float | None,
    positions: ArrayLike | None,
    mask: ArrayLike | Mask | None,
    dtype: DTypeLike | None,
    sinks: ArrayLike | None,
    score_mod: Any,
    deterministic: bool,
    **others: Any,
) -> tuple[jax.Array, Pools]:
    """Append new tokens to the pools, and attend to the pages of their sequences.

    Args:
        query: ``[B, T, N, H]``, or ``[tokens, N, H]`` with ``query_starts``.
        key: ``[B, T, K, H]`` or ``[tokens, K, H]``.
        value: likewise.
        pools: the pools of this layer.
        pages: the sequences.
        rotary_base: None for no rotary embedding.
        positions: the positions of the tokens; None counts from the start of each sequence.
        mask: as in the modules.
        dtype: the dtype of the result; None infers it.
        sinks: as in the modules.
        score_mod: as in the modules.
        deterministic: must be True.
        others: arguments that paged caches do not support; each must be None.

    Raises:
        ValueError: one of ``others`` is given, or positions are given without a rotary embedding.
        TypeError: ``pages`` is not a ``Pages``.
    """
    if not isinstance(pages, Pages):
        raise TypeError(
            f"pages must be a jax_memeff.flax.Pages, got {type(pages).__name__}; pass "
            "Pages(page_table, kv_lengths)"
        )
    if not deterministic:
        raise ValueError(
            "deterministic must be True with pages, which only serving uses, got False"
        )
    for name, value_of_it in others.items():
        if value_of_it is not None:
            raise ValueError(
                f"{name} must be None with pages, got {type(value_of_it).__name__}; "
                "see jax_memeff.paged_attention for the supported arguments"
            )
    conditions, array = separated(mask)
    query, key = rotated(
        query,
        key,
        rotary_base,
        positions,
        in_order=lambda: _positions(query, key, pages, pools.key_pages),
    )
    query, key, value = dtypes.promote_dtype((query, key, value), dtype=dtype)
    result, dtype_of_pool = query.dtype, pools.key_pages.dtype
    if dtype_of_pool != FLOAT8:
        query, key, value = (x.astype(dtype_of_pool) for x in (query, key, value))
    sequences = pages.page_table, pages.kv_lengths
    scales: dict[str, Any] = {"key_scale": pages.key_scale, "value_scale": pages.value_scale}
    pools = Pools(*append_to_pages(*pools, key, value, *sequences, pages.query_starts, **scales))
    out = paged_attention(
        query,
        *pools,
        *sequences,
        query_starts=pages.query_starts,
        mask=conditions if array is None else is_nonzero(array),
        sinks=promoted_sinks(sinks, query),
        score_mod=score_mod,
        **scales,
    )
    return out.astype(result), pools


def _positions(
    query: jax.Array, key: jax.Array, pages: Pages, key_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The positions of queries and keys in their sequences.

    Raises:
        ValueError, TypeError: ``pages`` do not fit; ``append_to_pages`` checks them later.
    """
    given = {
        "key_pages": key_pages,
        "value_pages": None,
        "page_table": pages.page_table,
        "query": query,
        "key": key,
        "query_starts": pages.query_starts,
        "key_scale": None,
        "value_scale": None,
    }
    has_starts = pages.query_starts is not None
    for new in (ArrayArgument("query", "B T N H", FLOATS), ArrayArgument("key", "B T K H", FLOATS)):
        layout = paged((new,), has_starts)
        arrays, sizes, _ = checked(layout, **{row.name: given[row.name] for row in layout.rows})
    longest = sizes["max_pages"] * sizes["page_size"]
    lengths = arguments.lengths(pages.kv_lengths, sizes["B"], longest)
    starts = arrays["query_starts"]
    return _position(query, starts, lengths), _position(key, starts, lengths)


def _position(x: jax.Array, starts: ArrayLike | None, lengths: jax.Array) -> jax.Array:
    """The position of each token of ``x`` in its sequence, [B, T] or [tokens]."""
    if starts is None:
        count = x.shape[1]
        return lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    tokens = x.shape[0]
    # Lengths and starts are clamped here, as they are where the tokens are written and attended.
    rows = arguments.rows(starts, lengths, tokens, None, tokens)
    if not lengths.size:  # JAX cannot index an empty array
        return jnp.zeros(tokens, jnp.int32)
    sequence, from_end = rows.places(tokens)
    return lengths[sequence] - from_end
