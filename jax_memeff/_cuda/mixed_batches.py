"""Ragged batches of prompts and decode steps in pages: two calls with different kernels.

A prompt fills large tiles of queries, which keep the tensor cores busy. A decode step has one query
and long keys, and the split forward divides the keys over the device. Each call computes some of
the sequences, and writes their results in place: it leaves the tokens of the others alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_memeff._call.operands.arrays import Operands
from jax_memeff._cuda.custom_call import buffers
from jax_memeff.codegen.strategy import FEW_ROWS


def few_queries(avals: Operands) -> int:
    """The most queries of a sequence in the first of two calls; 0 if one call is enough.

    Masks with a row for each query, and batch-invariant results, require a single call.
    """
    if avals.pages is None or avals.pages.is_invariant:
        return 0
    if avals.mask.kinds() & {"boolean", "segments"}:
        return 0
    batch, heads, longest, _ = avals.scores
    few = max(1, FEW_ROWS // max(1, heads // max(1, avals.key.shape[2])))
    # The numbers of queries differ so much that a padded batch would be at least half empty.
    is_mixed = 2 * avals.query.shape[1] <= batch * longest
    return few if is_mixed and longest > few else 0


def types_of_parts(types: Operands, few: int) -> tuple[Operands, Operands]:
    """The types of both calls: sequences with at most ``few`` queries, and the others."""
    assert types.sequences is not None
    short = dataclasses.replace(types.sequences, longest_query=few)
    return types._replace(sequences=short), types


def operands_of_part(
    ctx: mlir.LoweringRuleContext, types: Operands, operands: Operands, few: int, is_short: bool
) -> Operands:
    """The operands of one of the calls, in which the other's sequences have no queries."""
    assert types.sequences is not None and operands.sequences is not None

    def own(lengths: jax.Array) -> jax.Array:
        return jnp.where((lengths <= few) == is_short, lengths, 0)

    lengths = buffers.computed(
        ctx,
        "query_lengths",
        own,
        [types.sequences.query_lengths],
        [operands.sequences.query_lengths],
    )
    sequences = dataclasses.replace(operands.sequences, query_lengths=lengths.value)
    return operands._replace(sequences=sequences)


def filled(ctx: mlir.LoweringRuleContext) -> list[Any]:
    """Output 0 and logsumexp -inf, into which both calls write the results of their sequences."""

    def fill() -> list[jax.Array]:
        out, lse = ctx.avals_out
        return [jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)]

    return list(mlir.lower_fun(fill, multiple_results=True)(ctx.replace(avals_in=[])))
