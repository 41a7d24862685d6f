"""The custom calls of a paged call: two for a ragged batch of prompts and decode steps.

A prompt fills large tiles of queries, which keep the tensor cores busy. A decode step has one query
and long keys, and the split forward divides the keys over the device. So each call computes some of
the sequences. The call of the prompts also clears the tokens that belong to no sequence, because
its grid has tiles for all tokens. The call of the steps then writes its sequences in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jax_memeff._call.operands import (
    AnyOperands,
    Operands,
    QkvPackedOperands,
    pages_of,
)
from jax_memeff._call.sequences import MOST_POSITIONS
from jax_memeff._cuda import buffers
from jax_memeff._cuda.buffers import Buffer
from jax_memeff._cuda.custom_call import UNBOUNDED
from jax_memeff.codegen.kernels.sm80.split import FEW_ROWS

# ``kNoGap`` of ffi/include/memeff/params.h
_NO_GAP = -UNBOUNDED


class Part(NamedTuple):
    """A custom call, which computes the sequences with some numbers of queries."""

    types: Any
    """The types of its operands."""
    least: int = 1
    most: int = MOST_POSITIONS
    clears_gaps: bool = True
    """Whether it clears the tokens that belong to no sequence; the first call does."""


def parts_of(types: AnyOperands) -> tuple[Part, ...]:
    """The custom calls of a forward, in their order: one, or two for a mixed batch."""
    if isinstance(types, QkvPackedOperands) or not (few := _few_queries(types)):
        return (Part(types),)
    assert types.sequences is not None
    short = dataclasses.replace(types.sequences, longest_query=few)
    steps = Part(types._replace(sequences=short), most=few, clears_gaps=False)
    return Part(types, least=few + 1), steps


def _few_queries(types: Operands) -> int:
    """The most queries of a sequence in the second of two calls; 0 if one call is enough.

    Masks with a row for each query, and batch-invariant results, require a single call.
    """
    if types.pages is None or types.pages.is_invariant:
        return 0
    if types.mask.kinds() & {"boolean", "segments"}:
        return 0
    batch, heads, longest, _ = types.scores_shape
    few = max(1, FEW_ROWS // max(1, heads // max(1, types.key.shape[2])))
    # The numbers of queries differ so much that a padded batch would be at least half empty.
    is_mixed = 2 * types.query.shape[1] <= batch * longest
    return few if is_mixed and longest > few else 0


def sequence_buffers(ctx: mlir.LoweringRuleContext, part: Part, operands: Any) -> dict[str, Buffer]:
    """The buffers of starts and of query lengths of a paged call, by the names of those that they
    replace. XLA computes them in one kernel, because they have one shape and no concatenation.
    """
    if pages_of(part.types) is None:
        return {}
    # No kernel reads the starts of keys. Filling them with zeros would cost one more launch.
    if part.types.pages.tokens_each == 1:
        # Sequence b has row b. If it has no token, the row is a gap after it.
        starts = buffers.constant_range(ctx, "query_starts", part.types.scores_shape[0] + 1)
        return {"query_starts": starts, "key_starts": starts._replace(name="key_starts")}
    types, arrays = (
        [x.sequences.query_starts, x.sequences.query_lengths] for x in (part.types, operands)
    )
    starts = buffers.computed(ctx, "query_starts", _not_concatenated, types[:1], arrays[:1])
    marked = functools.partial(_marked_lengths, part)
    return {
        "query_starts": starts,
        "key_starts": starts._replace(name="key_starts"),
        "query_lengths": buffers.computed(ctx, "marked_query_lengths", marked, types, arrays),
    }


def _not_concatenated(starts: jax.Array) -> jax.Array:
    """The same starts. Their last element is appended to the others, which would be a kernel."""
    is_last = lax.iota(jnp.int32, len(starts)) == len(starts) - 1
    return jnp.where(is_last, starts[-1], jnp.pad(starts[:-1], (0, 1)))


def _marked_lengths(part: Part, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """The lengths of a part's sequences as in codegen/memeff/layout/sequences.cuh, and one more
    element: int32[B + 1].
    """
    starts = _not_concatenated(starts)
    is_own = (lengths >= part.least) & (lengths <= part.most)
    has_gap = starts[:-1] + lengths < starts[1:]
    others = jnp.where(has_gap & part.clears_gaps, 0, _NO_GAP)
    return jnp.pad(jnp.where(is_own, lengths, others), (0, 1))
