"""Packed sequences: the tokens that belong to each of them, and the pages of their keys.

A paged call is a call with packed sequences whose keys are in a pool instead of contiguous.
``Operands.key`` and ``Operands.value`` are the pools, [1, pages * page_size, K, H] and
[1, pages * page_size, K, Hv], and ``Sequences.key_starts`` is not read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff.codegen.features.pages import INVARIANT_COLUMNS

MOST_POSITIONS = 1 << 28
"""The most rows or columns that the kernels support: ``kMaxLength`` of memeff/params.h."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """The starts and lengths of packed sequences in the tokens of query, and of key and value.

    Sequences are in order and do not overlap. Tokens between the end of one and the next start
    belong to none. The last of the B + 1 starts is the first one plus the number of tokens, so the
    gap after the last sequence wraps around to token 0.
    """

    query_starts: jax.Array
    """int32[B + 1]"""
    key_starts: jax.Array
    """int32[B + 1]"""
    query_lengths: jax.Array
    """int32[B]; clamped to [0, T] by whoever reads them, because XLA would launch a kernel"""
    key_lengths: jax.Array
    """int32[B], clamped to [0, S] likewise"""
    longest_query: int = dataclasses.field(metadata={"static": True})
    """T: the largest number of queries in a sequence."""
    longest_key: int = dataclasses.field(metadata={"static": True})
    """S: the largest number of keys in a sequence."""

    @property
    def clamped(self) -> Sequences:
        """The same sequences with clamped lengths, as kernels clamp them.

        >>> starts, lengths = jnp.arange(3), jnp.array([-2, 9])
        >>> own = Sequences(starts, starts, lengths, lengths, longest_query=1, longest_key=4)
        >>> own.clamped.query_lengths.tolist(), own.clamped.key_lengths.tolist()
        ([0, 1], [0, 4])
        """
        return dataclasses.replace(
            self,
            query_lengths=self.query_lengths.clip(0, self.longest_query),
            key_lengths=self.key_lengths.clip(0, self.longest_key),
        )


def starts_and_lengths(
    cu_seqlens: jax.Array, longest: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Starts as in :class:`Sequences`, int32[B + 1], and lengths, int32[B], of packed sequences.

    Values are clamped to [0, tokens] and raised to the largest earlier value, so no token is in two
    sequences. A sequence ends after at most ``longest`` tokens.

    >>> starts, lengths = starts_and_lengths(jnp.array([0, 3, 2, 9]), longest=4, tokens=8)
    >>> starts, lengths
    (Array([0, 3, 3, 8], dtype=int32), Array([3, 0, 4], dtype=int32))
    """
    bounds = lax.cummax(clamped(cu_seqlens, tokens))
    lengths = jnp.minimum(bounds[1:] - bounds[:-1], longest)
    return jnp.append(bounds[:-1], bounds[0] + tokens), lengths


def clamped(cu_seqlens: jax.Array, tokens: int) -> jax.Array:
    """Integers clamped to [0, tokens], as int32."""
    # Small integer types cannot hold `tokens`: widen, clamp, then narrow.
    if cu_seqlens.dtype.itemsize < 4:
        cu_seqlens = cu_seqlens.astype(jnp.int32)
    return cu_seqlens.clip(0, tokens).astype(jnp.int32)


def token_indices(starts: jax.Array, lengths: jax.Array, longest: int, tokens: int) -> jax.Array:
    """The token at each position of a sequence; beyond its length ``tokens``, an invalid index.

    Args:
        starts: int32[...], the first token of each sequence.
        lengths: int32[...], their lengths.
        longest: T, the number of positions.
        tokens: the number of tokens.

    Returns:
        int32[..., T]

    >>> token_indices(jnp.array([0, 3]), jnp.array([3, 1]), longest=4, tokens=5).tolist()
    [[0, 1, 2, 5], [3, 5, 5, 5]]
    """
    shape = (*lengths.shape, longest)
    position = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return jnp.where(position < lengths[..., None], starts[..., None] + position, tokens)


def sequence_of_tokens(starts: jax.Array, tokens: int) -> jax.Array:
    """The sequence that each token is in, int32[tokens]; arbitrary for a token in none.

    All pairs are compared: a binary search is a loop of XLA, which launches kernels in each step.

    Args:
        starts: int[B + 1], the first token of each sequence and the end of the last.
        tokens: the number of tokens.

    >>> sequence_of_tokens(jnp.array([0, 2, 2, 5]), 6).tolist()
    [0, 0, 2, 2, 2, 2]
    """
    positions = jnp.arange(tokens, dtype=starts.dtype)
    return jnp.sum(starts[None, 1:-1] <= positions[:, None], 1, dtype=jnp.int32)


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
            columns: int32[...], from 0 to less than ``longest_key``.
            pool_rows: pages * page_size.

        Returns:
            int32[B, ...]

        >>> pages = Pages(jnp.array([[3, 0, 9]]), None, None, page_size=2)
        >>> pages.rows(jnp.arange(6), pool_rows=8).tolist()
        [[6, 7, 0, 1, 8, 8]]
        """
        page = jnp.take(self.table, columns // self.page_size, 1)
        is_valid = (page >= 0) & (page < pool_rows // self.page_size)
        # The page is selected before the multiplication, which could overflow.
        first = jnp.where(is_valid, page, 0) * self.page_size
        place = lax.rem(columns, jnp.int32(self.page_size))
        return jnp.where(is_valid, first + place[None], pool_rows)
