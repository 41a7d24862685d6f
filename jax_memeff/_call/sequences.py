"""Packed sequences: where each stands among the tokens of the arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

MOST_POSITIONS = 1 << 28
"""Rows and columns of the largest problem of the kernels: ``kMaxLength`` of memeff/params.h."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Where packed sequences start in the tokens of query, and of key and value.

    They follow one another and do not overlap; tokens between the end of one and the next start
    belong to none. The last start is the first one plus the number of tokens: the gap after the
    last sequence goes on at token 0.
    """

    query_starts: jax.Array
    """int32[B + 1]"""
    key_starts: jax.Array
    """int32[B + 1]"""
    query_lengths: jax.Array
    """int32[B], at most T"""
    key_lengths: jax.Array
    """int32[B], at most S"""
    longest_query: int = dataclasses.field(metadata={"static": True})
    """T: no sequence has more queries."""
    longest_key: int = dataclasses.field(metadata={"static": True})
    """S: no sequence has more keys."""


def starts_and_lengths(
    cu_seqlens: jax.Array, longest: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Starts as in :class:`Sequences`, int32[B + 1], and lengths, int32[B], of packed sequences.

    Values are clamped to [0, tokens], and one that is below an earlier one counts as that one, so
    no token is in two sequences. A sequence ends after ``longest`` tokens.

    >>> starts, lengths = starts_and_lengths(jnp.array([0, 3, 2, 9]), longest=4, tokens=8)
    >>> starts, lengths
    (Array([0, 3, 3, 8], dtype=int32), Array([3, 0, 4], dtype=int32))
    """
    # Small integer types cannot hold `tokens`: widen, clamp, then narrow.
    if cu_seqlens.dtype.itemsize < 4:
        cu_seqlens = cu_seqlens.astype(jnp.int32)
    bounds = lax.cummax(cu_seqlens.clip(0, tokens).astype(jnp.int32))
    lengths = jnp.minimum(bounds[1:] - bounds[:-1], longest)
    return jnp.append(bounds[:-1], bounds[0] + tokens), lengths


def token_indices(starts: jax.Array, lengths: jax.Array, longest: int, tokens: int) -> jax.Array:
    """The token at each position of a sequence; ``tokens``, which is none, beyond its length.

    Args:
        starts: int32[...], where sequences start.
        lengths: int32[...], their lengths.
        longest: T, the number of positions.
        tokens: the number of tokens.

    Returns:
        int32[..., T]

    >>> token_indices(jnp.array([0, 3]), jnp.array([3, 1]), longest=4, tokens=5).tolist()
    [[0, 1, 2, 5], [3, 5, 5, 5]]
    """
    position = lax.iota(jnp.int32, longest)
    return jnp.where(position < lengths[..., None], starts[..., None] + position, tokens)


def sequence_of_tokens(starts: jax.Array, tokens: int) -> jax.Array:
    """The sequence that each token is in, int[tokens]; any for a token that is in none.

    Args:
        starts: int[B + 1], the first token of each sequence and the end of the last.
        tokens: how many there are.
    """
    positions = jnp.arange(tokens, dtype=starts.dtype)
    return jnp.clip(jnp.searchsorted(starts[:-1], positions, side="right") - 1, 0)
