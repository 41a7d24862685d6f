"""The buffers of a custom call, by the names that the host library uses (ffi/src)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import mlir

from jax_memeff._call import divisors
from jax_memeff._call.operands import (
    NO_BUFFER,
    Item,
    Operands,
    QkvPackedOperands,
    batch_of,
    in_table_order,
)
from jax_memeff._call.options import Divisors, Options
from jax_memeff._cuda import bits, functions
from jax_memeff._cuda import block_mask as block_masks
from jax_memeff._cuda.problem import sizes_of
from jax_memeff.codegen import gpu
from jax_memeff.codegen.launch import BlockMask, Workspace
from jax_memeff.codegen.spec import KernelSpec

ROW_STATISTICS = (1, 2, 0)
"""The layout of logsumexps, minor to major: [B, T, N] for users and [B, N, T] in memory."""


_LARGEST_CONSTANT = 1 << 12
"""The most numbers of a range that a program holds: 16 KiB."""


class Buffer(NamedTuple):
    """An operand, or a result if it has no value; its layout is row-major by default."""

    name: str
    aval: Any
    value: Any = None
    layout: Sequence[int] | None = None


def separate(avals: Operands | QkvPackedOperands) -> Operands:
    """The types of query, key and value as three arrays, even if one array holds them."""
    if isinstance(avals, QkvPackedOperands):
        return jax.eval_shape(QkvPackedOperands.separate, avals)
    return avals


def operand_buffers(
    ctx: mlir.LoweringRuleContext,
    avals: Any,
    values: Any,
    options: Options,
    replaced: Mapping[str, Buffer] = MappingProxyType({}),
) -> list[Buffer]:
    """The buffers of the operands, in the order of the table; arrays of one buffer are combined.

    ``replaced`` has buffers instead of some of them, by the names of the latter.
    """
    pairs = zip(in_table_order(avals), in_table_order(values), strict=True)
    has_functions = getattr(avals, "functions", None) is not None
    unread = functions.unread_indices(separate(avals), options) if has_functions else set()
    buffers = []
    bounds = functions.window_buffers(avals.mask)
    for name, group in itertools.groupby(pairs, key=lambda pair: buffer_name(pair[0], bounds)):
        types, arrays = zip(*((aval.array, value.array) for aval, value in group), strict=True)
        if name == NO_BUFFER:
            continue
        if name in replaced:
            buffers.append(replaced[name])
        elif name == "bits":
            of_tokens = getattr(avals, "sequences", None) is not None
            name = "boolean_of_tokens" if of_tokens else "boolean"
            buffers.append(Buffer(name, *types, *arrays))
        elif name == "boolean":
            buffers.append(computed(ctx, name, _boolean_words(avals, options), types, arrays))
        elif name in ("query_segments", "key_segments"):
            buffers.append(computed(ctx, name, lambda *ids: jnp.stack(ids, 1), types, arrays))
        elif name in ("query_position", "key_position", *bounds.values()):
            # XLA merges the broadcast of a scalar with its computation, so it costs no launch.
            repeated = functools.partial(jnp.broadcast_to, shape=(batch_of(avals),))
            buffers.append(computed(ctx, name, repeated, types, arrays))
        elif name in unread:
            buffers.append(constant_range(ctx, name, *types[0].shape))
        elif functions.is_converted(types[0]):
            buffers.append(computed(ctx, name, functions.in_kernel_type, types, arrays))
        else:
            buffers.append(Buffer(name, *types, *arrays))
    if has_functions:
        literals = functions.literals(separate(avals), options)
        buffers.append(constant(ctx, "function_literals", np.asarray(literals)))
    return buffers


def buffer_name(item: Item, bounds: Mapping[str, str]) -> str:
    """The name of an array's buffer; captured arrays and ``bounds`` have buffers of their own."""
    name, last = item.operand.buffer, item.name.rpartition(".")[2]
    return f"{name}{last}" if name.endswith("captured") else bounds.get(item.name, name)


def _boolean_words(avals: Any, options: Options) -> Callable[..., jax.Array]:
    """The "and" of boolean masks, broadcast to a common shape except for columns, in bits."""

    def words(*booleans: Any) -> Any:
        mask = dataclasses.replace(avals.mask, booleans=booleans)
        boolean, _ = divisors.conjunction(mask, options.divisors, batch_of(avals))
        return bits.words_of(boolean, separate(avals).scores_shape[3])

    return words


def block_mask_buffers(
    ctx: mlir.LoweringRuleContext,
    avals: Operands,
    operands: Any,
    shared: Divisors,
    specs: dict[str, KernelSpec],
) -> list[Buffer]:
    """The block masks: the tiles of scores that each kernel computes if masks are not intervals."""
    maps = {block_mask for spec in specs.values() for block_mask in spec.block_masks}

    def parts(x: Any) -> tuple[Any, ...]:
        # The operands of a QKV call have no sequences.
        return x.mask, x.functions, x.position, getattr(x, "sequences", None)

    arrays, structure = jax.tree.flatten(parts(avals))

    def lines(*values: Any, tile: BlockMask) -> jax.Array:
        mask, functions, position, sequences = jax.tree.unflatten(structure, values)
        return block_masks.lines(
            mask, functions, position, tile, avals.scores_shape, shared, sequences
        )

    def buffer(tile: BlockMask) -> Buffer:
        mask, _, *others = parts(avals)
        if not jax.tree.leaves((mask, others)):
            known = block_masks.constant_lines(mask, tile, avals.scores_shape)
            if known is not None:
                return constant(ctx, tile.name, known)
        compute = functools.partial(lines, tile=tile)
        return computed(ctx, tile.name, compute, arrays, jax.tree.leaves(parts(operands)))

    return [buffer(tile) for tile in sorted(maps)]


def workspace_buffers(
    avals: Operands, options: Options, specs: dict[str, KernelSpec]
) -> list[Buffer]:
    """The memory that kernels need besides operands and results (ffi/include/memeff/params.h).

    It is fixed before the device is known, and large enough for the kernel of every architecture.
    """
    sizes = sizes_of(avals, options.divisors)
    largest: dict[str, Workspace] = {}
    for arch, spec in specs.items():
        for workspace in spec.kernel.workspaces(spec, sizes, gpu.multiprocessors(arch)):
            other = largest.get(workspace.name, workspace)
            shape = tuple(map(max, zip(workspace.shape, other.shape, strict=True)))
            largest[workspace.name] = workspace._replace(shape=shape)
    return [
        Buffer(workspace.name, ShapedArray(workspace.shape, jnp.dtype(workspace.dtype)))
        for workspace in largest.values()
        if math.prod(workspace.shape)
    ]


def computed(
    ctx: mlir.LoweringRuleContext, name: str, function: Any, avals: Sequence, values: Sequence
) -> Buffer:
    """A buffer that XLA computes from operands before the call.

    ``avals`` have shapes and dtypes, and need not be abstract values of JAX.
    """
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in avals]
    result = jax.eval_shape(function, *avals)
    aval = ShapedArray(result.shape, result.dtype)
    context = ctx.replace(avals_in=avals, avals_out=[aval])
    lowered = mlir.lower_fun(function, multiple_results=False)(context, *values)
    return Buffer(name, aval, *lowered)


def constant_range(ctx: mlir.LoweringRuleContext, name: str, size: int) -> Buffer:
    """int32[1, size], the numbers from 0 on. XLA would replace an array of rank 1 by an iota, which
    it computes in a kernel. That is better than a large constant in the program.
    """
    if size > _LARGEST_CONSTANT:
        return computed(ctx, name, lambda: lax.broadcasted_iota(jnp.int32, (1, size), 1), (), ())
    return constant(ctx, name, np.arange(size, dtype=np.int32)[None])


def constant(ctx: mlir.LoweringRuleContext, name: str, numbers: np.ndarray) -> Buffer:
    """A buffer that the program holds."""
    return computed(ctx, name, lambda: jnp.asarray(numbers), (), ())


def layouts(buffers: Iterable[Buffer]) -> list[Sequence[int]]:
    """Dims of each buffer, minor to major."""
    return [
        tuple(reversed(range(len(buffer.aval.shape)))) if buffer.layout is None else buffer.layout
        for buffer in buffers
    ]
