"""The largest logit of each head, from the row maxima that a forward writes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.operands.arrays import is_varlen
from jax_memeff._call.sequences import sequence_of_tokens


def of_heads(maxima: jax.Array, operands: Any) -> jax.Array:
    """The maximum over the rows, which has no derivative; -inf if no row has a valid score.

    Args:
        maxima: [B, T, N] or [T, N]; [tokens, N] for packed sequences.
        operands: those of the call.

    Returns:
        [B, N] or [N]; [B, N] for packed sequences.
    """
    maxima = lax.stop_gradient(maxima)
    if not is_varlen(operands):
        return jnp.max(maxima, -2, initial=-jnp.inf)
    # Tokens that belong to no sequence have -inf, so they may be assigned to any sequence.
    sequence = sequence_of_tokens(operands.sequences.query_starts, maxima.shape[0])
    of_sequences = functools.partial(
        jax.ops.segment_max,
        segment_ids=sequence,
        num_segments=operands.scores[0],
        indices_are_sorted=True,
    )
    # Head by head: a scatter has no rule for explicitly sharded heads, but a vmapped one does.
    return jax.vmap(of_sequences, 1, 1)(maxima)
