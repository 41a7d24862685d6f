"""Writing the keys and values of new tokens into a pool of pages."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from jax_memeff import _compat as compat
from jax_memeff._api.arrays import NEW_TOKENS
from jax_memeff._api.paged import arguments
from jax_memeff._call import values
from jax_memeff.errors import UnsupportedError

LARGEST_FLOAT8 = 448.0
"""The largest finite number of float8_e4m3fn; a cast turns larger numbers into NaN."""

_MOST_STEPS = 512
"""The most tokens that a CPU writes one by one. With JAX 0.10 and a pool of 262,144 rows of 256
bytes, a step takes up to 0.4 ms; copying the pool, as a scatter of integers does, takes 180 ms."""


@overload
def append_to_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    query_starts: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def append_to_pages(
    key_pages: ArrayLike,
    value_pages: None,
    key: ArrayLike,
    value: None,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    query_starts: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: None = None,
) -> tuple[jax.Array, None]: ...


@values.takes_objects
def append_to_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike | None,
    key: ArrayLike,
    value: ArrayLike | None,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    query_starts: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Write the keys and values of new tokens into the pages of their sequences.

    The new tokens are the last of their sequence: the last token of sequence b goes to position
    ``kv_lengths[b] - 1``. XLA writes in place if the pools are donated
    (``jax.jit(..., donate_argnums=...)``); otherwise it copies them once. No other row of the pools
    changes.

    Args:
        key_pages: ``[pages, page_size, K, H]``, as in :func:`jax_memeff.paged_attention`.
        value_pages: ``[pages, page_size, K, Hv]`` in the dtype of ``key_pages``; None for latent
            attention.
        key: ``[B, T, K, H]``, T new tokens of each sequence; or with ``query_starts``
            ``[tokens, K, H]``. It has the dtype of the pool; for a float8 pool any float dtype.
        value: ``[B, T, K, Hv]`` or ``[tokens, K, Hv]``, likewise; None if ``value_pages`` is.
        page_table: ``[B, max_pages]`` integers.
        kv_lengths: ``[B]`` integers, the number of tokens of each sequence, including the new ones.
        query_starts: ``[B + 1]`` integers: sequence b owns new tokens ``query_starts[b]`` up to
            ``query_starts[b + 1]`` (exclusive).
        key_scale: ``[K]`` or ``[pages, K]`` float32, only for float8: the pool stores ``key``
            divided by this, clipped to +-448 and rounded.
        value_scale: Likewise for values.

    Returns:
        The new ``key_pages`` and ``value_pages``.

    Raises:
        ValueError: A shape, or a length or start in a NumPy array, is wrong; or ``jax.vmap`` maps
            the tokens but not the pool.
        TypeError: A dtype is wrong.
        jax_memeff.UnsupportedError: ``jax.export`` has made a size symbolic, or the call is
            differentiated.

    Entries of ``page_table`` and values of device arrays never raise. Lengths are clamped to the
    keys of a row of the table, as in ``paged_attention``: the last token of a longer sequence
    replaces the last key of its table, and its other tokens replace those before.
    :func:`jax_memeff.check` reports such lengths. A token is not written if it lies before the
    start of its sequence, if it belongs to no sequence, or if its page is not in the pool. If two
    tokens map to the same place, it is undefined which of them is written.

    >>> import jax.numpy as jnp, jax_memeff
    >>> key_pages, value_pages = jnp.zeros((2, 3, 16, 1, 4))
    >>> key, value = jnp.ones((2, 1, 2, 1, 4))  # two new tokens of one sequence
    >>> key_pages, value_pages = jax_memeff.append_to_pages(
    ...     key_pages, value_pages, key, value, jnp.array([[2, 0]]), jnp.array([17])
    ... )
    >>> jnp.argwhere(key_pages[..., 0, 0]).tolist()  # positions 15 and 16
    [[0, 0], [2, 15]]
    """
    if (value is None) != (value_pages is None):
        given, missing = ("value_pages", "value") if value is None else ("value", "value_pages")
        raise ValueError(f"{missing} must be given, because {given} is; got None")
    arrays, sizes = arguments.checked_pages(
        {
            "key_pages": key_pages,
            "value_pages": value_pages,
            "page_table": page_table,
            "key": key,
            "value": value,
            "query_starts": query_starts,
            "key_scale": key_scale,
            "value_scale": value_scale,
        },
        NEW_TOKENS,
    )
    pools = {name: arrays[f"{name}_pages"] for name in ("key", "value")}
    for name, pool in pools.items():
        if pool is not None:
            arguments.require_whole_pages(f"{name}_pages", pool)
    # Every device has all pages of its heads, so it needs every new token.
    table = arguments.gathered(arrays["page_table"])
    new = {name: arguments.gathered(arrays[name]) for name, x in pools.items() if x is not None}
    pages, page_size, count = sizes["pages"], sizes["page_size"], len(new["key"])
    lengths = arguments.lengths(kv_lengths, sizes["B"], sizes["max_pages"] * page_size)
    rows = arguments.rows(arrays["query_starts"], lengths, count, sizes.get("T"), count)
    scales = {name: arguments.scale_of_pages(arrays[f"{name}_scale"]) for name in pools}
    if not pages:
        return pools["key"], pools["value"]  # JAX cannot index scales of no pages
    page, slot = _places(rows, table, pages, page_size, count)
    for name, x in new.items():
        stored = _as_stored(x, scales[name], page, pools[name].dtype)
        pools[name] = _written(pools[name], stored, page, slot)
    return pools["key"], pools["value"]


def _places(
    rows: arguments.Rows, table: jax.Array, pages: int, page_size: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The page of each token and its row in it, int32[tokens]; page ``pages`` drops the token."""
    if 0 in (*table.shape, tokens):
        none = jnp.full(tokens, pages, jnp.int32)
        return none, none
    sequence, from_end = rows.places(tokens)
    position = rows.lengths[sequence] - from_end
    is_own = (from_end > 0) & (from_end <= rows.given[sequence]) & (position >= 0)
    place = jnp.where(is_own, position, 0)
    page = table[sequence, place // page_size]
    return jnp.where(is_own & (page >= 0) & (page < pages), page, pages), place % page_size


def _as_stored(x: jax.Array, scale: jax.Array | None, page: jax.Array, dtype: Any) -> jax.Array:
    """New tokens in the dtype of the pool, divided by their scale. A head of zeros may have the
    scale 0, and stays zeros.
    """
    if x.dtype == dtype and scale is None:
        return x
    wide = x.astype(jnp.float32)
    if scale is not None:
        own = scale[0] if scale.shape[1] == 1 else jnp.take(scale[0], page, 0, mode="clip")
        wide = wide / jnp.where(own == 0, 1, own)
    return jnp.clip(wide, -LARGEST_FLOAT8, LARGEST_FLOAT8).astype(dtype)


@jax.custom_jvp
def _written(pool: jax.Array, x: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """The pool with one row written per token; tokens with an invalid page are dropped."""
    return _set(pool, x, page, slot)


@_written.defjvp
def _no_derivative(primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        [
            "keys and values in pages have no gradient; train with dot_product_attention or "
            "varlen_attention, or pass jax.lax.stop_gradient of keys and values"
        ],
        summary="append_to_pages has no derivative",
    )


@custom_vmap
def _set(pool: jax.Array, x: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    if not compat.widens_scatter(pool.dtype):
        return _set_together(pool, x, page, slot)
    pool, x, page, slot = compat.cast_to_common_varying_axes((pool, x, page, slot))
    on_cpu = _set_one_by_one if x.shape[0] <= _MOST_STEPS else _set_as_integers
    return lax.platform_dependent(pool, x, page, slot, cpu=on_cpu, default=_set_together)


def _set_together(pool: jax.Array, x: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    return pool.at[page, slot].set(x, mode="drop")


def _set_as_integers(pool: jax.Array, x: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """XLA does not widen integers, but copies the pool twice."""
    return _as_floats(_set_together(_as_integers(pool), _as_integers(x), page, slot), pool.dtype)


def _set_one_by_one(pool: jax.Array, x: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """One row after the other, in place.

    Hazard: each step converts the whole pool to integers and back. XLA fuses these conversions with
    the update of a row, and then writes nothing else, but only if nothing else in the step reads
    the pool. So tokens with an invalid page, whose old row would stay, have no step.
    """
    if 0 in x.shape:
        return pool
    order = jnp.argsort(page)  # the invalid page is the largest
    count = jnp.sum(page < pool.shape[0])
    x = _as_integers(x)

    def step(index: jax.Array, pool: jax.Array) -> jax.Array:
        token = order[index]
        row = lax.dynamic_slice_in_dim(x, token, 1)[None]
        origin = jnp.zeros_like(page[token])
        place = page[token], slot[token], origin, origin
        return _as_floats(lax.dynamic_update_slice(_as_integers(pool), row, place), pool.dtype)

    return lax.fori_loop(0, count, step, pool)


def _as_integers(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _as_floats(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


@_set.def_vmap
def _folded(
    size: int,
    mapped: tuple[bool, bool, bool, bool],
    pool: jax.Array,
    x: jax.Array,
    page: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, bool]:
    """One call for all mapped calls, whose pages follow one another."""
    if not mapped[0]:
        raise ValueError(
            "key_pages and value_pages must be mapped by jax.vmap if the tokens, the table or the "
            "lengths are, because every mapped call writes into a pool of its own; got a pool that "
            "is not mapped: write the tokens of all calls as one batch"
        )
    x, page, slot = (
        array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
        for array, is_mapped in zip((x, page, slot), mapped[1:], strict=True)
    )
    pages = pool.shape[1]
    first = jnp.arange(size, dtype=page.dtype)[:, None] * pages
    page = jnp.where(page < pages, page + first, size * pages)
    flat = _set(
        pool.reshape(-1, *pool.shape[2:]),
        x.reshape(-1, *x.shape[2:]),
        page.reshape(-1),
        slot.reshape(-1),
    )
    return flat.reshape(pool.shape), True
