"""Paged keys and values: a pool of pages, and the table that lists the pages of each sequence.

A paged call is a call with packed sequences (``sequences.py``) whose keys are in a pool instead of
contiguous. ``Operands.key`` and ``Operands.value`` are the pools, [1, pages * page_size, K, H] and
[1, pages * page_size, K, Hv], and ``Sequences.key_starts`` is not read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff.codegen.features.pages import INVARIANT_COLUMNS

__all__ = ["INVARIANT_COLUMNS", "Pages"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Key j of sequence b is row ``table[b, j // page_size] * page_size + j % page_size``.

    A page outside the pool is never read, and its keys are masked. Entries beyond the length of a
    sequence are arbitrary.
    """

    table: jax.Array
    """int32[B, max_pages]"""
    key_scale: jax.Array | None
    """float32[1, 1|pages, K, 1]: a key is its row of the pool times this; None means 1."""
    value_scale: jax.Array | None
    """float32[1, 1|pages, K, 1], likewise. Latent values have the scale of the keys."""
    page_size: int = dataclasses.field(metadata={"static": True})
    latent_dim: int | None = dataclasses.field(default=None, metadata={"static": True})
    """The number of columns of the keys that are also the values. ``Operands.value`` is then the
    array of the keys. None if the values are a separate array."""
    tokens_each: int | None = dataclasses.field(default=None, metadata={"static": True})
    """The number of query rows of each sequence, if all have the same number. Sequences may then be
    sharded over devices."""
    is_invariant: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the bits of a row depend only on its own query, keys, values and position.
    ``longest_key`` is then a multiple of ``INVARIANT_COLUMNS``."""

    @property
    def longest_key(self) -> int:
        """The largest possible number of keys of a sequence: a whole row of the table."""
        return self.table.shape[1] * self.page_size

    def rows(self, columns: jax.Array, pool_rows: int) -> jax.Array:
        """The row of the pool for keys of each sequence. For a page outside the pool it is
        ``pool_rows``, an invalid index.

        Args:
            columns: int32[n], less than ``longest_key``.
            pool_rows: pages * page_size.

        Returns:
            int32[B, n]

        >>> pages = Pages(jnp.array([[3, 0, 9]]), None, None, page_size=2)
        >>> pages.rows(jnp.arange(6), pool_rows=8).tolist()
        [[6, 7, 0, 1, 8, 8]]
        """
        page = jnp.take(self.table, columns // self.page_size, 1)
        is_valid = (page >= 0) & (page < pool_rows // self.page_size)
        # The page is selected before the multiplication, which could overflow.
        first = jnp.where(is_valid, page, 0) * self.page_size
        place = lax.rem(columns, jnp.int32(self.page_size))
        return jnp.where(is_valid, first + place[None, :], pool_rows)
