"""Checks of the arguments from which masks are made, and the dtypes in which masks keep them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_memeff._call import values
from jax_memeff._call.values import INT32_MAX, is_host


def scores_shape(query: Any, key: Any) -> tuple[int, int, int, int]:
    """(B, N, T, S) from the shapes of a query and a key of ``Mask.blocks``."""
    shapes = [_shape(name, x) for name, x in (("query", query), ("key", key))]
    if len(shapes[0]) != len(shapes[1]) or len(shapes[0]) not in (3, 4):
        raise ValueError(
            "Mask.blocks: query and key must have shapes [B, T, N, H] and [B, S, K, H], or both "
            f"lack B, got {shapes[0]} and {shapes[1]}"
        )
    (*batch, rows, heads, _), (*key_batch, columns, _, _) = shapes
    if batch != key_batch:
        raise ValueError(
            f"Mask.blocks: key must have the batch size of query, {batch[0]}, got {key_batch[0]} "
            f"in shape {shapes[1]}"
        )
    return batch[0] if batch else 1, heads, rows, columns


def _shape(name: str, x: Any) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple):
        raise TypeError(f"Mask.blocks: {name} must be an array, got {type(x).__name__}")
    values.require_countable(f"Mask.blocks: {name}", shape)
    return shape


def not_a_mask(other: object) -> TypeError:
    """The error for a mask that is combined with something else."""
    advice = ""
    if callable(other):
        advice = ": pass jax_memeff.Mask.function(function)"
    elif hasattr(other, "dtype"):
        advice = ": pass jax_memeff.Mask.boolean(array)"
    return TypeError(f"a Mask combines with another Mask, got {type(other).__name__}{advice}")


def bound(name: str, value: Any) -> int | None:
    """A static bound of a window."""
    if value is None:
        return None
    return values.static_integer(
        f"window {name}",
        value,
        "a Python integer or None",
        "make it static, or a JAX scalar",
    )


def boolean(x: ArrayLike) -> Any:
    """A boolean array of rank at most 4."""
    array = values.array("boolean mask", x)
    if array.dtype != bool:
        raise TypeError(
            f"boolean mask must have dtype bool, got {array.dtype}; "
            "pass an additive mask as bias instead"
        )
    if array.ndim > 4:
        raise ValueError(f"boolean mask must have rank <= 4, got shape {array.shape}")
    return array


def integers(name: str, x: ArrayLike, ranks: tuple[int, ...]) -> Any:
    """An integer array with one of these ranks."""
    array = values.integers(name, x)
    if array.ndim not in ranks:
        expected = " or ".join(str(rank) for rank in ranks)
        advice = "" if array.ndim else "; pass one for each batch index or token, such as [x]"
        raise ValueError(f"{name} must have rank {expected}, got shape {array.shape}{advice}")
    return array


def lengths(name: str, x: ArrayLike) -> Any:
    """Lengths [B]; host values are clipped to int32."""
    array = integers(name, x, (1,))
    if values.is_host(array):
        # jax.jit would wrap 64-bit arguments around.
        array = values.clipped(array, -INT32_MAX, INT32_MAX)
    return array


_PART_BITS = 31
"""Bits of a non-negative int32."""


def segment_ids(query_ids: Any, key_ids: Any) -> tuple[tuple[Any, Any], ...]:
    """Pairs of int32 ids, all of which match if and only if the given ids are equal.

    A cast would wrap: hashed ids that differ by 2**32 would match, and large unsigned ones would
    turn negative, which means "attends to nothing".

    Negative ids stay negative. Ids that fit are cast. Larger ids on the host are replaced by their
    ranks among all ids of the call, so they cost no more than small ones. Ranks of device arrays
    would need a sort, and in ``ring_attention`` the ids of all devices. Larger ids on a device are
    therefore split into parts of 31 bits, the highest first: two pairs for uint32, three for 64-bit
    ids.

    Args:
        query_ids: integers of any shape.
        key_ids: likewise.

    >>> ((query, key),) = segment_ids(np.array([7, 2**32 + 7, -(2**40)]), np.array([2**32 + 7]))
    >>> query.tolist(), key.tolist()
    ([1, 2, -1], [2])
    >>> [key.tolist() for _, key in segment_ids(jnp.array([5]), jnp.array([2**31 + 3], "uint32"))]
    [[1], [3]]
    """
    count = max(_parts(query_ids), _parts(key_ids))
    if count == 1:
        return ((_cast(query_ids), _cast(key_ids)),)
    if is_host(query_ids) and is_host(key_ids):
        return (_ranks(query_ids, key_ids),)
    return tuple((_part(query_ids, i), _part(key_ids, i)) for i in reversed(range(count)))


def _parts(ids: Any) -> int:
    """The number of parts needed for every id: by value on the host, else by dtype."""
    largest = int(ids.max(initial=0)) if is_host(ids) else int(jnp.iinfo(ids.dtype).max)
    return max(1, -(-largest.bit_length() // _PART_BITS))


def _cast(ids: Any) -> Any:
    if is_host(ids) and np.issubdtype(ids.dtype, np.signedinteger):
        ids = np.maximum(ids, -1)  # a large negative id could wrap to a valid one
    return ids.astype(np.int32)


def _ranks(query_ids: np.ndarray, key_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # NumPy would promote int64 and uint64 together to float64.
    joined = np.concatenate(
        [np.maximum(ids, 0).astype(np.uint64).ravel() for ids in (query_ids, key_ids)]
    )
    ranks = np.unique(joined, return_inverse=True)[1].astype(np.int32).ravel()
    of_query, of_key = np.split(ranks, [query_ids.size])
    return (
        np.where(query_ids < 0, np.int32(-1), of_query.reshape(query_ids.shape)),
        np.where(key_ids < 0, np.int32(-1), of_key.reshape(key_ids.shape)),
    )


def _part(ids: Any, index: int) -> Any:
    """31 bits of each id, counted from the lowest part; -1 for negative ids."""
    if is_host(ids):
        part = ids.astype(np.uint64) >> np.uint64(_PART_BITS * index)
        part = (part & np.uint64(2**_PART_BITS - 1)).astype(np.int32)
        return np.where(ids < 0, np.int32(-1), part)
    bits = jnp.iinfo(ids.dtype).bits
    if bits < 32:
        ids = ids.astype(jnp.int32)
    if _PART_BITS * index >= bits:
        part = jnp.zeros_like(ids, jnp.int32)
    else:
        part = ((ids >> (_PART_BITS * index)) & (2**_PART_BITS - 1)).astype(jnp.int32)
    return jnp.where(ids < 0, -1, part)
