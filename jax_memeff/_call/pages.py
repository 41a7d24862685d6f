"""Paged keys and values: a pool of pages, and the table through which sequences reach them.

A paged call is a call of packed sequences (``sequences.py``) whose keys lie in a pool instead of
one after the other. ``Operands.key`` and ``Operands.value`` are the pool, [1, pages * page_size, K,
H] and [1, pages * page_size, K, Hv], and ``Sequences.key_starts`` is not read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

INVARIANT_COLUMNS = 256
"""The keys that are summed together if results are batch invariant: segments of the sequence begin
at multiples of it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Key j of sequence b is row ``table[b, j // page_size] * page_size + j % page_size``.

    A page that the pool does not have is never read, and its keys take part in no sequence. Entries
    beyond the length of a sequence are arbitrary.
    """

    table: jax.Array
    """int32[B, max_pages]"""
    key_scale: jax.Array | None
    """float32[1, 1|pages, K, 1]: a key is its row of the pool times this; None is 1."""
    value_scale: jax.Array | None
    """float32[1, 1|pages, K, 1], likewise."""
    page_size: int = dataclasses.field(metadata={"static": True})
    latent_dim: int | None = dataclasses.field(default=None, metadata={"static": True})
    """The number of columns of the keys that are the values, too. ``Operands.value`` is then the
    array of the keys. None: values have an array of their own."""
    tokens_each: int | None = dataclasses.field(default=None, metadata={"static": True})
    """The tokens of the query for each sequence, if there are equally many: the sequences may then
    be divided over devices."""
    is_invariant: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the bits of a row depend on its own query, keys and position alone. ``longest_key``
    is then a multiple of ``INVARIANT_COLUMNS``."""

    @property
    def longest_key(self) -> int:
        """The most keys of a sequence: those of a whole row of the table."""
        return self.table.shape[1] * self.page_size

    def rows(self, columns: jax.Array, pool_rows: int) -> jax.Array:
        """The row of the pool for keys of each sequence; ``pool_rows``, an invalid index, if the
        pool does not have the page.

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
        # Selected before the product, which may overflow.
        first = jnp.where(is_valid, page, 0) * self.page_size
        return jnp.where(is_valid, first + lax.rem(columns, jnp.int32(self.page_size)), pool_rows)
