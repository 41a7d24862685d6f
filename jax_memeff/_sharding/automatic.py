"""Sharding over Auto mesh axes: a rule around the primitives for XLA's partitioner.

Where the compiler divides a program among devices, a primitive is lowered to a call of
``jax.experimental.custom_partitioning``. Shardings spread through its rule along the batch and the
heads, and for the shardings that it ends with the compiler asks :meth:`_Call.partition` for the
program of one device. That program is lowered like the inside of ``jax.shard_map``, so kernels are
chosen for the shapes of a device.

In the program text the call is named by the address of a Python object, which another process may
give to another call. So that no cache takes one for the other, the call also carries a digest of
all that its program depends on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_memeff._call import compat, divisors
from jax_memeff._call.options import Gradients, Options, QkvPackedGradients, QkvPackedOperands
from jax_memeff._sharding import explicit as sharding
from jax_memeff._sharding.batch_axes import BatchAxes

Lowering = Callable[..., Sequence[Any]]


def by_shards(
    primitive: Primitive, lowering: Lowering, kernel_digest: Callable[..., bytes] | None = None
) -> Lowering:
    """A lowering that the compiler can divide among devices.

    Args:
        primitive: one of those of ``primitives.py``.
        lowering: for one device.
        kernel_digest: what the lowering depends on beside this package's Python; it takes the types
            of the operands and the primitive's parameters, and raises what the lowering would.
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
        in_jax = mlir.lower_fun(
            lambda *leaves: call.partitioned(leaves, digest.hexdigest()), multiple_results=True
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
    """Of this package's modules; the code generator's are a matter of the kernels' digest."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


class _Call(NamedTuple):
    """A call of a primitive with operands of all devices."""

    primitive: Primitive
    params: dict[str, Any]
    avals: tuple[ShapedArray, ...]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The types of the operands of attention, and of what follows them."""
        arrays: Any = jax.tree.unflatten(self.params["tree"], self.avals)
        return (arrays,) if hasattr(arrays, "_fields") else arrays

    @property
    def operands(self) -> Any:
        return self.arrays[0]

    @property
    def batch(self) -> BatchAxes:
        sizes = self.params["options"].batch_axes
        return BatchAxes(sizes or (divisors.batch_of(self.operands),))

    @property
    def dims(self) -> tuple[list[str], list[str]]:
        """The dims of the primitive's operands and results, by name."""
        arrays, operands, batch = self.arrays, self.operands, self.batch
        named = sharding.dims(operands)
        shares = divisors.of_leaves(operands, self.params["options"].divisors)
        own = jax.tree.map(
            lambda dims, aval, share: batch.named(dims, *aval.shape[:1], divisor=share),
            *(named, operands, shares),
        )
        kind = QkvPackedGradients if isinstance(operands, QkvPackedOperands) else Gradients
        whole = functools.partial(batch.named, elements=math.prod(batch.sizes))
        forward = tuple(map(whole, sharding.result_dims(operands)))
        gradients = jax.tree.map(whole, kind(*(getattr(named, name) for name in kind._fields)))
        if operands.bias is not None:
            gradients = gradients._replace(bias=self.bias_gradient_dims)
        names = {
            1: (own,),  # attention_fwd
            4: (own, *forward, gradients),  # attention_tangent
            5: (own, *forward, *forward),  # attention_bwd
        }[len(arrays)]
        present = jax.tree.map(
            lambda array, dims: None if array is None else dims,
            arrays,
            names,
            is_leaf=lambda array: array is None,
        )
        needs_grad = self.params.get("needs_grad")
        if needs_grad is None:
            return jax.tree.leaves(present), list(forward)
        wanted = [
            dims
            for name, dims in gradients._asdict().items()
            if getattr(needs_grad, "query" if name == "query_key_value" else name)
        ]
        return jax.tree.leaves(present), wanted

    @property
    def bias_gradient_dims(self) -> str:
        operands, bias = self.operands, self.operands.bias
        shared = self.params["options"].divisors
        shape = divisors.gradient_shape("bias", bias.shape, operands, shared)
        named = sharding.dims(operands._replace(bias=bias.update(shape=shape)))
        return self.batch.named(named.bias, shape[0], math.prod(self.batch.sizes) // shape[0])

    def partitioned(self, leaves: Sequence[Any], digest: str) -> list[jax.Array]:
        in_dims, out_dims = self.dims
        batch = self.batch

        def split(leaves: Sequence[Any], dims: Sequence[str]) -> list[Any]:
            return list(map(batch.split, leaves, dims))

        def bind(*leaves: Any) -> list[jax.Array]:
            whole = map(batch.joined, leaves, in_dims)
            return split(self.primitive.bind(*whole, **self.params), out_dims)

        function = custom_partitioning(bind)
        function.def_partition(self.partition, sharding_rule=self.rule(), decode_shardings=False)
        with set_xla_metadata(jax_memeff_digest=digest):
            results = function(*split(leaves, in_dims))
        return list(map(batch.joined, results, out_dims))

    def rule(self) -> SdyShardingRule:
        """Only batch and heads have factors that arrays share: nothing else is propagated."""
        fresh = (f"own{index}" for index in itertools.count())
        if isinstance(self.operands, QkvPackedOperands):
            key_heads = heads = self.operands.query_key_value.shape[3]
        else:
            heads, key_heads = self.operands.query.shape[2], self.operands.key.shape[2]
        group = heads // key_heads
        factors: dict[str, Any] = {"heads": "heads", "key_heads": "heads"}
        factors |= {name: name for name in self.batch.names}
        sizes: Any = {}
        if 1 < key_heads < heads:
            factors["heads"] = CompoundFactor("heads", "group")
            sizes = {"group": group}

        def mapping(dims: str) -> ArrayMapping:
            return ArrayMapping(*(factors.get(dim) or next(fresh) for dim in dims.split()))

        operands, results = (tuple(map(mapping, dims)) for dims in self.dims)
        return SdyShardingRule(operands, results, **sizes)

    def partition(self, mesh: Mesh, shapes: Any, results: Any) -> tuple[Any, ...]:
        """The program of one device, and the shardings that it needs and gives."""
        in_dims, out_dims = self.dims
        layout = self.layout(mesh, [shape.sharding for shape in shapes])

        batch = self.batch.of_device(layout, mesh)
        params = {**self.params, "options": self.options_of(batch)}

        def on_device(*leaves: jax.Array) -> list[jax.Array]:
            whole = map(batch.joined, leaves, in_dims)
            found = zip(self.primitive.bind(*whole, **params), out_dims, strict=True)
            return [batch.split(_summed(x, layout.reduced(dims)), dims) for x, dims in found]

        def shardings(dims: Sequence[str]) -> list[NamedSharding]:
            return [NamedSharding(mesh, layout.spec(names)) for names in dims]

        del results  # theirs follow from the operands'
        return mesh, on_device, shardings(out_dims), tuple(shardings(in_dims))

    def options_of(self, part: BatchAxes) -> Options:
        """Those of the program of a device, which has this part of the batch."""
        options = self.params["options"]

        def divisor(elements: int, divisor: int) -> int:
            return part.later(self.batch.run(elements, divisor))

        shared = divisors.changed(self.operands, options.divisors, divisor)
        return dataclasses.replace(options, divisors=shared, batch_axes=part.sizes)

    def layout(self, mesh: Mesh, given: Sequence[Any]) -> sharding.Layout:
        paths = jax.tree_util.tree_leaves_with_path(self.operands)
        in_dims = self.dims[0][: len(paths)]
        specs = [
            compat.spec_of(leaf, mesh, len(dims.split()))
            for leaf, dims in zip(given, in_dims, strict=False)
        ]
        layout = sharding.layout(
            [
                sharding.Sharded(
                    sharding.name_of(path),
                    self.batch.split_shape(aval.shape, dims),
                    dims.split(),
                    PartitionSpec() if spec is None else spec,
                )
                for (path, aval), dims, spec in zip(paths, in_dims, specs, strict=True)
            ],
            mesh.shape,
        )
        for (path, aval), leaf, spec in zip(paths, given, specs, strict=False):
            if spec is None:
                raise ValueError(
                    f"{sharding.name_of(path)} of shape {aval.shape} is sharded like {leaf}, which "
                    f"is not over whole axes of {mesh}: reshard it by jax.sharding.NamedSharding"
                )
        return layout


def _summed(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The sum over devices, rounded once."""
    if not axes:
        return x
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.psum(x.astype(accumulator), axes).astype(x.dtype)
