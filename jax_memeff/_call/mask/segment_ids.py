"""Conversion of segment ids of any integer dtype to the int32 ids that kernels compare.

A cast would wrap: hashed ids that differ by 2**32 would match, and large unsigned ones would turn
negative, which means "attends to nothing".
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_memeff._call.values import is_host

_PART_BITS = 31
"""Bits of a non-negative int32."""


def as_int32(query_ids: Any, key_ids: Any) -> tuple[tuple[Any, Any], ...]:
    """Pairs of int32 ids, all of which match if and only if the given ids are equal.

    Negative ids stay negative. Ids that fit are cast. Larger ids on the host are replaced by their
    ranks among all ids of the call, so they cost no more than small ones. Ranks of device arrays
    would need a sort, and in ``ring_attention`` the ids of all devices. Larger ids on a device are
    therefore split into parts of 31 bits, the highest first: two pairs for uint32, three for 64-bit
    ids.

    Args:
        query_ids: integers of any shape.
        key_ids: likewise.

    >>> ((query, key),) = as_int32(np.array([7, 2**32 + 7, -(2**40)]), np.array([2**32 + 7]))
    >>> query.tolist(), key.tolist()
    ([1, 2, -1], [2])
    >>> [key.tolist() for _, key in as_int32(jnp.array([5]), jnp.array([2**31 + 3], "uint32"))]
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
