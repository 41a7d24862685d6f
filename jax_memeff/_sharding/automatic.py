"""Sharding over Auto mesh axes: a rule for XLA's partitioner around each primitive.

If the compiler partitions a program, a primitive is lowered to a call of
``jax.experimental.custom_partitioning``. Its rule propagates shardings along the batch, the heads
and the rows. For the final shardings the compiler asks :meth:`_ShardedCall.partition` for the
program of one device. That program is lowered like the inside of ``jax.shard_map``, so kernels are
chosen for the shapes of a device. It may want other shardings than the compiler has, which then
transfers the operands: no call fails for a sharding that nobody may have asked for. The log says
once for each call what is transferred. It is a log and no warning, because XLA asks for the program
of a device in a callback, and an exception there would be an error of the compiler.

The program text names the call by the address of a Python object. In another process that address
may belong to a different call, so the call also carries a digest of everything that its program
depends on. Otherwise a cache could return the program of another call.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_memeff import _compat as compat
from jax_memeff._call.divisors import changed, gradient_shape
from jax_memeff._call.operands import (
    Item,
    QkvPackedOperands,
    batch_of,
    gradients_needed,
    gradients_of,
    items,
    mapped,
)
from jax_memeff._call.options import Options
from jax_memeff._call.values import score_dtype
from jax_memeff._compat import Primitive
from jax_memeff._sharding.dims import (
    BatchAxes,
    dims,
    divides_groups,
    even_tokens,
    forward_dims,
    heads_of,
    named_dims,
    result_dims,
)
from jax_memeff._sharding.layout import Layout, Move, Sharded, fitted
from jax_memeff._sharding.local import (
    limits,
    put_own_key_heads,
    take_own_key_heads,
    with_own_starts,
    with_positions,
)
from jax_memeff._sharding.mesh_axes import Axes, DeviceAxes, Stride, strides_of_dims, text

Lowering = Callable[..., Sequence[Any]]


def by_shards(
    primitive: Primitive, lowering: Lowering, kernel_digest: Callable[..., bytes] | None = None
) -> Lowering:
    """A lowering that the compiler can partition.

    Args:
        primitive: a primitive of ``primitives.py``.
        lowering: its lowering for one device.
        kernel_digest: a digest of the lowering's dependencies other than this package's modules. It
            takes the types of the operands and the primitive's parameters, and raises the errors of
            the lowering.
    """

    def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Sequence[Any]:
        typed: Any = ctx.avals_in
        if any(0 in aval.shape for aval in typed):
            return lowering(ctx, *values, **params)
        if axes := _axes_left_to_compiler(typed):
            _log_axes_left_over(compat.call_site(), axes)
            return lowering(ctx, *values, **params)
        devices = compat.devices_of_compiler(ctx)
        if devices == 1:
            return lowering(ctx, *values, **params)
        if compat.is_exported(ctx):
            raise ValueError(
                f"attention over {devices} devices with automatic mesh axes cannot be exported, "
                "because the compiler calls a Python function of this process to partition it: "
                "make the axes explicit (jax.make_mesh(..., axis_types=(jax.sharding.AxisType."
                "Explicit, ...))), or call attention inside jax.shard_map"
            )
        avals = tuple(map(compat.local, typed))
        axes = _axes_of_user(typed)
        call = _ShardedCall(primitive, params, avals, devices, axes, compat.call_site())
        digest = hashlib.sha256(_python_digest() + repr((avals, params)).encode())
        if kernel_digest is not None:
            digest.update(kernel_digest(avals, **params))
        rule = call.rule(tuple(axes.values()) or (devices,))
        in_jax = mlir.lower_fun(
            lambda *leaves: call.partitioned(leaves, rule, digest.hexdigest()),
            multiple_results=True,
        )
        ctx = compat.with_device_assignment(ctx)
        return in_jax(ctx.replace(avals_in=avals), *values)

    return lower


def _axes_left_to_compiler(avals: Sequence[ShapedArray]) -> Axes:
    """The axes of more than one device over which an enclosing shard_map is not manual."""
    axes = {}
    for mesh in (aval.sharding.mesh for aval in avals):
        if AxisType.Manual in mesh.axis_types:
            axes.update(zip(mesh.axis_names, mesh.axis_types, strict=True))
            sizes = mesh.shape
    return tuple(axis for axis, kind in axes.items() if kind != AxisType.Manual and sizes[axis] > 1)


def _axes_of_user(avals: Sequence[ShapedArray]) -> dict[Any, int]:
    """The sizes of the axes of the user's mesh; none if no operand has a type over a mesh."""
    meshes = (aval.sharding.mesh for aval in avals)
    return next((dict(mesh.shape) for mesh in meshes if not mesh.empty), {})


@functools.cache
def _python_digest() -> bytes:
    """The digest of this package's modules; the kernels' digest covers the code generator."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


class _ShardedCall(NamedTuple):
    """A call of a primitive, with the global types of its operands."""

    primitive: Primitive
    params: dict[str, Any]
    avals: tuple[ShapedArray, ...]
    devices: int
    axes: dict[Any, int]
    """The axes of the user's mesh, for messages."""
    site: str
    """Where the user called attention, for messages."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The types of the operands of attention, and of the primitive's further arguments."""
        arrays: Any = jax.tree.unflatten(self.params["tree"], self.avals)
        return (arrays,) if hasattr(arrays, "_fields") else arrays

    @property
    def operands(self) -> Any:
        return self.arrays[0]

    @property
    def batch(self) -> BatchAxes:
        sizes = self.params["options"].batch_axes
        return BatchAxes(sizes or (batch_of(self.operands),))

    @property
    def dims(self) -> tuple[list[str], list[str]]:
        """The names of the dims of the primitive's operands and results."""
        arrays, operands, batch = self.arrays, self.operands, self.batch
        divisors = self.params["options"].divisors

        def one(item: Item, named: str) -> str:
            indices, *_ = (*item.array.shape, 1)  # a position may have no dims
            return batch.named(named, indices, divisors[item.name])

        operand_dims = mapped(one, operands, dims(operands))
        indices = math.prod(batch.sizes)
        forward = tuple(batch.named(named, indices) for named in result_dims(operands))
        gradients = self.gradient_dims
        names = {
            1: (operand_dims,),  # attention_fwd
            4: (operand_dims, *forward, gradients_of(operands, gradients)),  # attention_tangent
            5: (operand_dims, *forward, *forward),  # attention_bwd
        }[len(arrays)]
        present = jax.tree.map(
            lambda array, dims: None if array is None else dims,
            arrays,
            names,
            is_leaf=lambda array: array is None,
        )
        results = list(forward)
        if len(arrays) == 1:
            of_forward = forward_dims(operands, self.params["options"])
            results = [batch.named(named, indices) for named in of_forward]
        if "needs_grad" in self.params:
            needed = gradients_needed(operands, self.params["needs_grad"])
            results = [gradients[name] for name in needed]
        return jax.tree.leaves(present), results

    @property
    def gradient_dims(self) -> dict[str, str]:
        """The dims of the gradients, which may have more batch indices than their operands."""
        operands, indices = self.operands, math.prod(self.batch.sizes)
        dims_by_name = {}
        for item in items(operands):
            if not item.operand.has_gradient:
                continue
            shape = gradient_shape(
                item.name, item.array.shape, operands, self.params["options"].divisors
            )
            named = named_dims(item.operand, shape, operands)
            dims_by_name[item.name] = self.batch.named(named, shape[0], indices // shape[0])
        return dims_by_name

    def partitioned(
        self, leaves: Sequence[Any], rule: SdyShardingRule, digest: str
    ) -> list[jax.Array]:
        in_dims, out_dims = self.dims
        batch = self.batch

        def split(leaves: Sequence[Any], dims: Sequence[str]) -> list[Any]:
            return list(map(batch.split, leaves, dims))

        def bind(*leaves: Any) -> list[jax.Array]:
            whole = map(batch.joined, leaves, in_dims)
            return split(self.primitive.bind(*whole, **self.params), out_dims)

        function = custom_partitioning(bind)
        partition = compat.located_at_this_call(self.partition)
        function.def_partition(partition, sharding_rule=rule, decode_shardings=False)
        with set_xla_metadata(jax_memeff_digest=digest):
            results = function(*split(leaves, in_dims))
        return list(map(batch.joined, results, out_dims))

    def rule(self, mesh_axes: Sequence[int]) -> SdyShardingRule:
        """The propagation rule: arrays have only batch, heads and rows as common factors.

        Args:
            mesh_axes: the sizes of the mesh axes.
        """
        fresh = (f"own{index}" for index in itertools.count())
        heads, key_heads = heads_of(self.operands)
        group = heads // key_heads
        factors: dict[str, Any] = {"heads": "heads", "key_heads": "heads"}
        if not isinstance(self.operands, QkvPackedOperands):
            # In a single array of query, key and value, positions are both rows and columns.
            factors["rows"] = "rows"
        factors |= {name: name for name in self.batch.names}
        sizes: Any = {}
        each = even_tokens(self.operands)
        if each is not None:
            tokens = "sequences" if each == 1 else CompoundFactor("sequences", "tokens_each")
            factors |= {"even_sequences": "sequences", "even_tokens": tokens}
            sizes |= {} if each == 1 else {"tokens_each": each}
        if 1 < key_heads < heads:
            if divides_groups(heads, key_heads, mesh_axes):
                factors["heads"] = CompoundFactor("heads", "group")
                sizes["group"] = group
            else:
                # No product of factors gives these shards, so the compiler would gather results.
                del factors["key_heads"]

        def mapping(dims: str) -> ArrayMapping:
            return ArrayMapping(*(factors.get(dim) or next(fresh) for dim in dims.split()))

        operands, results = (tuple(map(mapping, dims)) for dims in self.dims)
        return SdyShardingRule(operands, results, **sizes)

    def partition(self, mesh: Mesh, shapes: Any, results: Any) -> tuple[Any, ...]:
        """The program of one device, and the shardings of its operands and results."""
        # The compiler does not know the user's mesh. The shardings of results follow from those of
        # the operands.
        del mesh, results
        try:
            return self.program_of_device([shape.sharding for shape in shapes])
        except Exception as error:
            # A traceback would keep the frames of this call alive; the copy has none.
            _raised[str(error)] = copy.copy(error)
            raise

    def program_of_device(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """:meth:`partition`, for operands of these shardings."""
        in_dims, out_dims = self.dims
        layout, axes = self.layout(given)
        mesh = axes.mesh
        batch = self.batch.of_device(lambda name: axes.devices(layout.axes(name)))
        params = {**self.params, "options": self.options_of(batch)}
        row_devices = axes.devices(layout.rows)
        key_heads = heads_of(self.operands)[1] // axes.devices(layout.key_heads)

        def local_heads(x: jax.Array, dims: str) -> jax.Array:
            return take_own_key_heads(batch.joined(x, dims), dims.split(), layout)

        def result(x: jax.Array, dims: str) -> jax.Array:
            whole = x
            if "key_heads" in dims.split():
                whole = put_own_key_heads(x, layout, key_heads)
            return batch.split(_summed(whole, layout.reduced(dims)).astype(x.dtype), dims)

        def on_device(*leaves: jax.Array) -> list[jax.Array]:
            arguments = jax.tree.unflatten(params["tree"], map(local_heads, leaves, in_dims))
            if len(self.arrays) == 1:
                arguments = with_positions(arguments, layout, row_devices)
                arguments = with_own_starts(arguments, layout)
            else:
                first = with_positions(arguments[0], layout, row_devices)
                arguments = (first, *arguments[1:])
            local, tree = jax.tree.flatten(arguments)
            results = self.primitive.bind(*local, **{**params, "tree": tree})
            return list(map(result, results, out_dims))

        def shardings(dims: Sequence[str]) -> list[NamedSharding]:
            return [NamedSharding(mesh, layout.spec(names)) for names in dims]

        return mesh, on_device, shardings(out_dims), tuple(shardings(in_dims))

    def options_of(self, part: BatchAxes) -> Options:
        """The options of one device's program, which has this part of the batch."""
        options = self.params["options"]

        def divisor(indices: int, divisor: int) -> int:
            return part.later(self.batch.run(indices, divisor))

        divisors = changed(self.operands, options.divisors, divisor)
        return dataclasses.replace(options, divisors=divisors, batch_axes=part.sizes)

    def layout(self, given: Sequence[Any]) -> tuple[Layout, DeviceAxes]:
        """The sharding of the call, for operands of these shardings, and its mesh."""
        arrays = items(self.operands)
        dims_of_arrays = self.dims[0][: len(arrays)]
        limit = limits(self.operands, self.params["options"])
        strides = [
            _strides_of(sharding, len(dims.split()))
            for sharding, dims in zip(given[: len(arrays)], dims_of_arrays, strict=True)
        ]
        axes = DeviceAxes((1, self.devices), self.axes)
        for stride in itertools.chain.from_iterable(itertools.chain(*filter(None, strides))):
            axes = axes.cut_at(stride.stride, stride.end)
        sizes = [
            self.batch.split_shape(item.array.shape, dims)
            for item, dims in zip(arrays, dims_of_arrays, strict=True)
        ]
        for dim, size, array_strides in zip(
            dims_of_arrays[0].split(), sizes[0], strides[0] or (), strict=False
        ):
            if dim == "heads":
                axes = axes.cut_evenly(array_strides, heads_of(self.operands)[1])
            axes = axes.cut_evenly(array_strides, limit[dim].units if dim in limit else size)
        sharded = [
            Sharded(
                item.operand,
                item.title,
                shape,
                dims.split(),
                axes.spec(array_strides),
                item.array.dtype.itemsize,
            )
            for item, shape, dims, array_strides in zip(
                arrays, sizes, dims_of_arrays, strides, strict=True
            )
        ]
        found, moves = fitted(sharded, axes, limit)
        if self.primitive.name == "attention_fwd":  # the other primitives have the same operands
            _log_moves(self.site, moves)
        return found, axes


def _strides_of(sharding: Any, rank: int) -> list[list[Stride]] | None:
    devices = compat.devices_of_parts(sharding, rank)
    return None if devices is None else strides_of_dims(devices, rank)


_raised: dict[str, Exception] = {}
"""The errors of :meth:`_ShardedCall.partition` by text, until JAX raises them."""


def _error_of_partition(error: Exception) -> Exception | None:
    """The error of :meth:`_ShardedCall.partition` whose text XLA put into an error of its own."""
    text = str(error)
    return next((_raised.pop(own) for own in list(_raised) if own in text), None)


compat.replace_compile_errors(_error_of_partition)


def _summed(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The sum over devices, rounded once."""
    if not axes:
        return x
    accumulator = score_dtype(x.dtype)
    return jax.lax.psum(x.astype(accumulator), axes).astype(x.dtype)


_LOGGER = logging.getLogger("jax_memeff")

_logged: set[str] = set()


def _log_moves(site: str, moves: Sequence[Move]) -> None:
    """The transfers that a call at this place makes because of its operands' shardings."""
    size = sum(move.bytes for move in moves)
    reasons = ". ".join(reason for move in moves for reason in move.reasons)
    if moves:
        _once(f"{site}: each device gathers {size:,} bytes. {reasons}")


def _log_axes_left_over(site: str, axes: Axes) -> None:
    """A call inside a ``jax.shard_map`` that is not manual over these axes."""
    _once(
        f"{site}: inside jax.shard_map it is left to the compiler over {text(axes)}, which gathers "
        "the operands of kernels; name these axes in shard_map's axis_names as well, or enter a "
        "second jax.shard_map over them around the call"
    )


def _once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _LOGGER.warning(message)
