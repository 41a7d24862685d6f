"""Attention sinks in plain JAX: a logit per head that is in the softmax and has no value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_memeff._call import divisors
from jax_memeff._call.operands import batch_of, is_packed
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import sequence_of_tokens
from jax_memeff._call.values import score_dtype


def joined(
    out: jax.Array, lse: jax.Array, sinks: jax.Array, is_valid: jax.Array | bool
) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp of rows including their sinks, given those of the keys alone.

    Args:
        out: [..., Hv].
        lse: [...]; -inf in a row without keys.
        sinks: broadcasts to ``lse``; -inf is exactly no sink.
        is_valid: broadcasts likewise; rows beyond the lengths have no sink.
    """
    is_valid &= sinks != -jnp.inf  # a sink of NaN must reach the results
    # A row with neither keys nor a sink would subtract infinities, giving NaN, in derivatives too.
    lse_of_keys, sinks = (jnp.where(is_valid, x, 0) for x in (lse, sinks))
    share_of_keys = jnp.where(is_valid, jax.nn.sigmoid(lse_of_keys - sinks), 1)
    total = jnp.where(is_valid, jnp.logaddexp(lse_of_keys, sinks), lse)
    return out * share_of_keys[..., None], total


def delta(out: jax.Array, dout: jax.Array, dlse: jax.Array | None) -> jax.Array:
    """rowsum(dO * O) - dlse, [B, T, N]."""
    accumulator = score_dtype(out.dtype)
    found = jnp.sum(dout.astype(accumulator) * out.astype(accumulator), -1)
    return found if dlse is None else found - dlse.astype(accumulator)


def of_each_row(operands: Any, options: Options) -> tuple[jax.Array, jax.Array | bool]:
    """The sink of each row, which broadcasts to [B, T, N], and whether the row is valid."""
    own = operands.sinks
    if not is_packed(operands):
        sinks = divisors.broadcastable(own, options.divisors["sinks"], batch_of(operands))
        lengths = operands.mask.query_lengths
        if lengths is None:
            return sinks[:, None], True
        rows = jnp.arange(operands.query.shape[1], dtype=lengths.dtype)
        return sinks[:, None], (rows[None] < lengths[:, None])[..., None]
    sequences, tokens = operands.sequences, jnp.arange(operands.query.shape[1], dtype=jnp.int32)
    if not sequences.query_lengths.size:  # JAX cannot index an empty array
        return own[None], jnp.zeros((1, tokens.size, 1), bool)
    index = sequence_of_tokens(sequences.query_starts, operands.query.shape[1])
    place = tokens - sequences.query_starts[index]
    is_valid = (place >= 0) & (place < sequences.query_lengths[index])
    if own.shape[0] != 1:
        own = divisors.expanded(own, options.divisors["sinks"], batch_of(operands))[index]
    return own[None], is_valid[None, :, None]


def probabilities(operands: Any, options: Options, lse: jax.Array) -> jax.Array:
    """exp(sink - lse), [B, T, N]: the probability of each row's sink; 1 if both are inf."""
    sinks, _ = of_each_row(operands, options)
    # Rows beyond the lengths have a logsumexp of -inf.
    is_empty = lse == -jnp.inf
    return jnp.where(is_empty, 0, jnp.exp(_distance(sinks, jnp.where(is_empty, 0, lse))))


@jax.custom_jvp
def _distance(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """sinks - lse, and 0 with the same derivatives if both are inf."""
    return jnp.where((sinks == jnp.inf) & (lse == jnp.inf), 0, sinks - lse)


@_distance.defjvp
def _of_distance(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _distance(*primals), tangents[0] - tangents[1]


def gradient(operands: Any, options: Options, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """-sum of exp(sink - lse) * delta over rows, and over the batch indices that share a sink."""
    sinks, batch = operands.sinks, batch_of(operands)
    shape = divisors.gradient_shape("sinks", sinks.shape, operands, options.divisors)
    own = probabilities(operands, options, lse)
    # Rows beyond the lengths are dropped, whatever delta holds there.
    terms = jnp.where(own == 0, 0, -own * delta)
    if not is_packed(operands) or shape[0] == 1:
        per_batch_index = jnp.sum(terms, 1)
    else:
        starts = operands.sequences.query_starts
        of_tokens = sequence_of_tokens(starts, operands.query.shape[1])
        per_batch_index = jax.ops.segment_sum(terms[0], of_tokens, batch)
    return divisors.summed(per_batch_index, shape).astype(sinks.dtype)
