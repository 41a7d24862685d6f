"""The buffers of a custom call, by the names that the host library knows (ffi/src)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from jax_memeff._call import divisors
from jax_memeff._call.mask import Mask
from jax_memeff._call.options import Divisors, DropoutState, Operands, Options, QkvPackedOperands
from jax_memeff._cuda import block_mask as block_masks
from jax_memeff.codegen.spec import KernelSpec


class Buffer(NamedTuple):
    """An operand, or without a value a result; its layout is row-major by default."""

    name: str
    aval: Any
    value: Any = None
    layout: Sequence[int] | None = None


def of_operands(
    ctx: mlir.LoweringRuleContext, avals: Any, operands: Any, options: Options
) -> list[Buffer]:
    """Those of the operands. One that holds several arrays has their names, joined by "+"."""

    def buffers_of(avals: Any, values: Any, *names: str) -> list[Buffer]:
        return [Buffer(name, getattr(avals, name), getattr(values, name)) for name in names]

    lengths = avals.mask, operands.mask
    if isinstance(avals, QkvPackedOperands):
        buffers = [Buffer("query+key+value", avals.query_key_value, operands.query_key_value)]
    else:
        buffers = buffers_of(avals, operands, "query", "key", "value")
        if avals.sequences is not None:
            lengths = avals.sequences, operands.sequences
            buffers += buffers_of(*lengths, "query_starts", "key_starts")
    buffers += buffers_of(avals, operands, "bias")
    buffers += buffers_of(*lengths, "query_lengths", "key_lengths")
    if avals.dropout is not None and operands.dropout is not None:
        buffers += map(Buffer, DropoutState._fields, avals.dropout, operands.dropout)
    if avals.position is not None and operands.position is not None:
        buffers += [
            Buffer("query_position", avals.position.query, operands.position.query),
            Buffer("key_position", avals.position.key, operands.position.key),
        ]
    buffers += _segment_ids(ctx, avals.mask, operands.mask)
    buffers += _boolean(ctx, avals, operands.mask, options)
    return [buffer for buffer in buffers if buffer.aval is not None]


def _segment_ids(ctx: mlir.LoweringRuleContext, avals: Mask, mask: Mask) -> list[Buffer]:
    """Stacked to [B, pairs, T] and [B, pairs, S]."""
    buffers = []
    if avals.segment_ids:
        for name, ids, values in zip(
            ("query_segments", "key_segments"),
            zip(*avals.segment_ids, strict=True),
            zip(*mask.segment_ids, strict=True),
            strict=True,
        ):
            buffers.append(_computed(ctx, name, lambda *ids: jnp.stack(ids, 1), ids, values))
    return buffers


def of_block_masks(
    ctx: mlir.LoweringRuleContext,
    avals: Operands,
    mask: Mask,
    shared: Divisors,
    specs: dict[str, KernelSpec],
) -> list[Buffer]:
    """Which tiles the kernels visit where masks are arrays."""
    maps = {block_mask for spec in specs.values() for block_mask in spec.block_masks}
    arrays, structure = jax.tree.flatten(avals.mask)
    return [
        _computed(
            ctx,
            block_mask.name,
            lambda *x, block_mask=block_mask: block_masks.lines(
                jax.tree.unflatten(structure, x), block_mask, avals.scores, shared
            ),
            arrays,
            jax.tree.leaves(mask),
        )
        for block_mask in sorted(maps)
    ]


def _boolean(
    ctx: mlir.LoweringRuleContext, avals: Any, mask: Mask, options: Options
) -> list[Buffer]:
    """One boolean mask as it is, of several the "and" in the broadcast of their shapes."""
    if not mask.booleans:
        return []

    def conjunction(*booleans: Any) -> Any:
        mask = dataclasses.replace(avals.mask, booleans=booleans)
        return divisors.conjunction(mask, options.divisors, divisors.batch_of(avals))[0]

    return [_computed(ctx, "boolean", conjunction, avals.mask.booleans, mask.booleans)]


def _computed(
    ctx: mlir.LoweringRuleContext, name: str, function: Any, avals: Sequence, values: Sequence
) -> Buffer:
    """A buffer that XLA computes from operands before the call.

    ``avals`` have shapes and dtypes; those of packed projections are no abstract values of JAX.
    """
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in avals]
    result = jax.eval_shape(function, *avals)
    aval = ShapedArray(result.shape, result.dtype)
    context = ctx.replace(avals_in=avals, avals_out=[aval])
    lowered = mlir.lower_fun(function, multiple_results=False)(context, *values)
    return Buffer(name, aval, *lowered)


def layouts(buffers: Iterable[Buffer]) -> list[Sequence[int]]:
    """Dims of each buffer, minor to major."""
    return [
        tuple(reversed(range(len(buffer.aval.shape)))) if buffer.layout is None else buffer.layout
        for buffer in buffers
    ]
