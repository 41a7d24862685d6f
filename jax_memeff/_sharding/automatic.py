"""Sharding over Auto mesh axes: a rule for XLA's partitioner around each primitive.

If the compiler partitions a program, a primitive is lowered to a call of
``jax.experimental.custom_partitioning``. Its rule propagates shardings along the batch, the heads
and the rows. For the final shardings the compiler asks :meth:`_Call.partition` for the program of
one device. That program is lowered like the inside of ``jax.shard_map``, so kernels are chosen for
the shapes of a device.

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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_memeff import _compat as compat
from jax_memeff._call.divisors import changed, gradient_shape
from jax_memeff._call.operands.arrays import QkvPackedOperands, batch_of
from jax_memeff._call.operands.gradients import gradients_needed, gradients_of
from jax_memeff._call.operands.table import Item, items, mapped
from jax_memeff._call.options import Options
from jax_memeff._call.values import score_dtype
from jax_memeff._compat import Primitive
from jax_memeff._sharding.batch_axes import BatchAxes
from jax_memeff._sharding.layout import (
    Layout,
    Sharded,
    dims,
    divides_groups,
    even_tokens,
    forward_dims,
    heads_of,
    layout,
    named_dims,
    result_dims,
)
from jax_memeff._sharding.local import (
    check_rows,
    check_sequences,
    put_own_key_heads,
    take_own_key_heads,
    with_own_starts,
    with_positions,
)

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
            raise ValueError(
                f"attention inside jax.shard_map was left to the compiler over {list(axes)}, which "
                "would gather its operands: name these axes in shard_map's axis_names as well, or "
                "enter a second jax.shard_map over them around the call"
            )
        if compat.devices_of_compiler(ctx) == 1:
            return lowering(ctx, *values, **params)
        avals = tuple(map(compat.local, typed))
        call = _Call(primitive, params, avals)
        digest = hashlib.sha256(_python_digest() + repr((avals, params)).encode())
        if kernel_digest is not None:
            digest.update(kernel_digest(avals, **params))
        rule = call.rule(compat.mesh_axes_of_compiler(ctx))
        in_jax = mlir.lower_fun(
            lambda *leaves: call.partitioned(leaves, rule, digest.hexdigest()),
            multiple_results=True,
        )
        return in_jax(ctx.replace(avals_in=avals), *values)

    return lower


def _axes_left_to_compiler(avals: Sequence[ShapedArray]) -> list[Any]:
    """The axes of more than one device over which an enclosing shard_map is not manual."""
    axes = {}
    for mesh in (aval.sharding.mesh for aval in avals):
        if AxisType.Manual in mesh.axis_types:
            axes.update(zip(mesh.axis_names, mesh.axis_types, strict=True))
            sizes = mesh.shape
    return [axis for axis, kind in axes.items() if kind != AxisType.Manual and sizes[axis] > 1]


@functools.cache
def _python_digest() -> bytes:
    """The digest of this package's modules; the kernels' digest covers the code generator."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


class _Call(NamedTuple):
    """A call of a primitive, with the global types of its operands."""

    primitive: Primitive
    params: dict[str, Any]
    avals: tuple[ShapedArray, ...]

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

        own = mapped(one, operands, dims(operands))
        indices = math.prod(batch.sizes)
        forward = tuple(batch.named(named, indices) for named in result_dims(operands))
        gradients = self.gradient_dims
        names = {
            1: (own,),  # attention_fwd
            4: (own, *forward, gradients_of(operands, gradients)),  # attention_tangent
            5: (own, *forward, *forward),  # attention_bwd
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
        found = {}
        for item in items(operands):
            if not item.operand.has_gradient:
                continue
            shape = gradient_shape(
                item.name, item.array.shape, operands, self.params["options"].divisors
            )
            named = named_dims(item.operand, shape, operands)
            found[item.name] = self.batch.named(named, shape[0], indices // shape[0])
        return found

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
        del results  # their shardings follow from those of the operands
        try:
            return self.program_of_device(mesh, [shape.sharding for shape in shapes])
        except Exception as error:
            # A traceback would keep the frames of this call alive; the copy has none.
            _raised[str(error)] = copy.copy(error)
            raise

    def program_of_device(self, mesh: Mesh, given: Sequence[Any]) -> tuple[Any, ...]:
        """:meth:`partition`, for operands of these shardings."""
        in_dims, out_dims = self.dims
        layout, mesh = self.layout(mesh, given)
        batch = self.batch.of_device(layout, mesh)
        params = {**self.params, "options": self.options_of(batch)}
        row_devices = math.prod(mesh.shape[axis] for axis in layout.rows)
        check_rows(self.operands, params["options"], row_devices)
        check_sequences(self.operands, layout, mesh.shape)
        first_key_axes = math.prod(mesh.shape[axis] for axis in layout.key_heads)
        key_heads = heads_of(self.operands)[1] // first_key_axes

        def own(x: jax.Array, dims: str) -> jax.Array:
            joined = batch.joined(x, dims)
            return take_own_key_heads(joined, layout) if "key_heads" in dims.split() else joined

        def result(x: jax.Array, dims: str) -> jax.Array:
            whole = x
            if "key_heads" in dims.split():
                whole = put_own_key_heads(x, layout, key_heads)
            return batch.split(_summed(whole, layout.reduced(dims)).astype(x.dtype), dims)

        def on_device(*leaves: jax.Array) -> list[jax.Array]:
            arguments = jax.tree.unflatten(params["tree"], map(own, leaves, in_dims))
            if len(self.arrays) == 1:
                arguments = with_positions(arguments, layout, row_devices)
                arguments = with_own_starts(arguments, layout)
            else:
                first = with_positions(arguments[0], layout, row_devices)
                arguments = (first, *arguments[1:])
            local, tree = jax.tree.flatten(arguments)
            found = self.primitive.bind(*local, **{**params, "tree": tree})
            return list(map(result, found, out_dims))

        def shardings(dims: Sequence[str]) -> list[NamedSharding]:
            return [NamedSharding(mesh, layout.spec(names)) for names in dims]

        return mesh, on_device, shardings(out_dims), tuple(shardings(in_dims))

    def options_of(self, part: BatchAxes) -> Options:
        """The options of one device's program, which has this part of the batch."""
        options = self.params["options"]

        def divisor(indices: int, divisor: int) -> int:
            return part.later(self.batch.run(indices, divisor))

        own = changed(self.operands, options.divisors, divisor)
        return dataclasses.replace(options, divisors=own, batch_axes=part.sizes)

    def layout(self, mesh: Mesh, given: Sequence[Any]) -> tuple[Layout, Mesh]:
        """The sharding of the call, and its mesh, of which one axis may be split in two."""
        arrays = items(self.operands)
        in_dims = self.dims[0][: len(arrays)]

        def specs_over(mesh: Mesh) -> list[PartitionSpec | None]:
            return [
                compat.spec_of(leaf, mesh, len(names.split()))
                for leaf, names in zip(given, in_dims, strict=False)
            ]

        mesh = self.with_key_head_axis(mesh, specs_over(mesh)[0])
        specs = specs_over(mesh)
        found = layout(
            [
                Sharded(
                    item.operand,
                    item.title,
                    self.batch.split_shape(item.array.shape, names),
                    names.split(),
                    PartitionSpec() if spec is None else spec,
                )
                for item, names, spec in zip(arrays, in_dims, specs, strict=True)
            ],
            mesh.shape,
        )
        for item, leaf, spec in zip(arrays, given, specs, strict=False):
            if spec is None:
                raise ValueError(
                    f"{item.title} of shape {item.array.shape} is sharded like {leaf}, which "
                    f"is not over whole axes of {mesh}: reshard it by jax.sharding.NamedSharding"
                )
        return found, mesh

    def with_key_head_axis(self, mesh: Mesh, query: PartitionSpec | None) -> Mesh:
        """The mesh, with an axis split in two if only its first part divides the key heads.

        The key heads are then sharded over the first part. The compiler does the same when it
        propagates shardings from the query to the key.
        """
        dims = self.dims[0][0].split()
        entry = None if query is None or len(query) < len(dims) - 1 else query[dims.index("heads")]
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        first = heads_of(self.operands)[1]
        for axis in axes:
            size = mesh.shape[axis]
            part = math.gcd(first, size)
            if 1 < part < size:
                place = mesh.axis_names.index(axis)
                shape = mesh.devices.shape
                devices = mesh.devices.reshape(
                    *shape[:place], part, size // part, *shape[place + 1 :]
                )
                split = (f"{axis}/key_heads", f"{axis}/rest")
                names = (*mesh.axis_names[:place], *split, *mesh.axis_names[place + 1 :])
                return Mesh(devices, names)
            if first % size:
                break
            first //= size
        return mesh


_raised: dict[str, Exception] = {}
"""The errors of :meth:`_Call.partition` by text, until JAX raises them."""


def _error_of_partition(error: Exception) -> Exception | None:
    """The error of :meth:`_Call.partition` whose text XLA put into an error of its own."""
    text = str(error)
    return next((_raised.pop(own) for own in list(_raised) if own in text), None)


compat.replace_compile_errors(_error_of_partition)


def _summed(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The sum over devices, rounded once."""
    if not axes:
        return x
    accumulator = score_dtype(x.dtype)
    return jax.lax.psum(x.astype(accumulator), axes).astype(x.dtype)
