"""Lists of keys for each query row: top-k attention with the keys that an indexer chooses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._call import values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KeyLists(values.HoldsArrays):
    """The lists of a mask. A canonical mask has at most one, whose entries are distinct."""

    indices: jax.Array
    """Integers ``[B | 1, K | 1, T, n]`` with 1s on the left left out, or ``[tokens, K | 1, n]`` for
    packed sequences. In a canonical mask int32 ``[B | 1, K | 1, T, n]`` or ``[1, tokens, K | 1,
    n]``; entries that are no index of a key are nothing."""
    is_unique: bool = dataclasses.field(metadata={"static": True})
    """Whether the entries of a row that are indices of keys are distinct."""

    @staticmethod
    def of(indices: ArrayLike, unique_indices: Any) -> KeyLists:
        """Check the arguments, except for the sizes that only a call determines.

        Raises:
            TypeError: the indices are not integers, or ``unique_indices`` is not True or False.
            ValueError: the rank is not 2, 3 or 4.
        """
        array = values.integers("key indices", indices)
        if not 2 <= array.ndim <= 4:
            raise ValueError(
                "key indices must have shape [B, K, T, n], where B and K may be 1 or absent, or "
                f"[tokens, K, n] for packed sequences, got {tuple(array.shape)}"
            )
        return KeyLists(array, values.flag("unique_indices", unique_indices))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of padded lists, left-padded with 1s to rank 4."""
        shape = self.indices.shape
        first, second, rows, count = (1,) * (4 - len(shape)) + tuple(shape)
        return first, second, rows, count

    def distinct(self, columns: int, is_packed: bool) -> jax.Array:
        """The indices in the form of a canonical mask of so many columns.

        >>> lists = KeyLists.of([[2, 0, 2, 7, -1]], False)
        >>> lists.distinct(columns=4, is_packed=False).tolist()
        [[[[-1, 0, -1, 2, 4]]]]
        """
        indices = self.indices
        if values.is_host(indices) or indices.dtype != jnp.int32:
            indices = jnp.asarray(values.clipped(indices, -1, columns))
        indices = indices[None] if is_packed and indices.ndim == 3 else indices
        indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
        if self.is_unique:
            return indices
        ordered = jnp.sort(indices, -1)
        return jnp.where(_equals_next(ordered), -1, ordered)

    def listed(self, columns: int) -> jax.Array:
        """Whether each column is in the list of each row, bool[B | 1, K | 1, T, columns]."""
        indices = self.distinct(columns, is_packed=False)
        is_key = (indices >= 0) & (indices < columns)
        place = (x[..., None] for x in jnp.ogrid[tuple(map(slice, indices.shape[:3]))])
        table = jnp.zeros((*indices.shape[:3], columns), bool)
        return table.at[(*place, jnp.where(is_key, indices, columns))].set(True, mode="drop")


def canonical(lists: Sequence[KeyLists], columns: int, is_packed: bool) -> tuple[KeyLists, ...]:
    """One list with the entries that all lists have, or none.

    Args:
        lists: those of a mask.
        columns: S of the call.
        is_packed: whether the lists have a row for each token.
    """
    if not lists:
        return ()
    found = functools.reduce(_common, (x.distinct(columns, is_packed) for x in lists))
    return (KeyLists(found, is_unique=True),)


def _common(a: jax.Array, b: jax.Array) -> jax.Array:
    """The entries of both lists, each of which has distinct entries."""
    rows = jnp.broadcast_shapes(a.shape[:3], b.shape[:3])
    both = [jnp.broadcast_to(x, (*rows, x.shape[3])) for x in (a, b)]
    ordered = jnp.sort(jnp.concatenate(both, -1), -1)
    return jnp.where(_equals_next(ordered), ordered, -1)


def _equals_next(ordered: jax.Array) -> jax.Array:
    """Whether each entry of a sorted list equals the next one."""
    return jnp.pad(ordered[..., :-1] == ordered[..., 1:], [(0, 0)] * 3 + [(0, 1)])
