"""Ragged batches of prompts and decode steps in pages: two calls, each of the kernel that is quick
for its sequences.

A tile of many queries keeps the tensor cores busy; one token has none for it, but long keys, which
the split forward divides over the device. Each call takes some of the sequences, and gives the
tokens of the others the output 0 and the logsumexp -inf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_memeff._call.operands import Operands
from jax_memeff._cuda import buffers
from jax_memeff.codegen.strategy import FEW_ROWS


def few_queries(avals: Operands) -> int:
    """The most queries of a sequence of the first call; 0 if there is one call.

    Masks with a row for each query have the rows of one call, and invariant results one kernel.
    """
    if avals.pages is None or avals.pages.is_invariant:
        return 0
    if avals.mask.kinds() & {"boolean", "segments"}:
        return 0
    batch, heads, longest, _ = avals.scores
    few = max(1, FEW_ROWS // max(1, heads // max(1, avals.key.shape[2])))
    # Half of the rows would be empty, so sequences have different numbers of queries.
    is_mixed = 2 * avals.query.shape[1] <= batch * longest
    return few if is_mixed and longest > few else 0


def types_of_parts(types: Operands, few: int) -> tuple[Operands, Operands]:
    """The types of both calls: for sequences of at most ``few`` queries, and for the others."""
    assert types.sequences is not None
    short = dataclasses.replace(types.sequences, longest_query=few)
    return types._replace(sequences=short), types


def operands_of_part(
    ctx: mlir.LoweringRuleContext, types: Operands, operands: Operands, few: int, is_short: bool
) -> Operands:
    """The operands of one of the calls: sequences of the other have no queries."""
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


def joined(ctx: mlir.LoweringRuleContext, parts: list[Any]) -> list[Any]:
    """Output and logsumexp of both calls. A sum, so that NaN of a query stays visible."""

    def both(out: Any, lse: Any, other_out: Any, other_lse: Any) -> tuple[jax.Array, jax.Array]:
        return out + other_out, jnp.maximum(lse, other_lse)

    context = ctx.replace(avals_in=[*ctx.avals_out, *ctx.avals_out])
    values = [value for part in parts for value in part]
    return mlir.lower_fun(both, multiple_results=True)(context, *values)
