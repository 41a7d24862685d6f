"""Packed sequences: the tokens that belong to each of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

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
