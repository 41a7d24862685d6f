"""What differs, or may come to differ, between jax versions; nothing else reads jax's internals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import compiler, core, dispatch
from jax._src.sharding import IndivisibleError
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec


def cast_to_common_varying_axes(tree: Any) -> Any:
    """Make every leaf vary over the manual mesh axes that any leaf varies over.

    Inside ``jax.shard_map`` a primitive takes operands of one set of varying axes. Casting before
    the differentiable call puts the cast's transpose, a sum over devices, outside the rule.
    """
    leaves, structure = jax.tree.flatten(tree)
    varying = list(map(varying_axes, leaves))
    common = frozenset().union(*varying)
    cast = [
        jax.lax.pcast(leaf, tuple(sorted(common - axes, key=str)), to="varying")
        if common - axes
        else leaf
        for leaf, axes in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which an array may differ from device to device."""
    return jax.typeof(x).manual_axis_type.varying


def mapped_explicit_axes() -> frozenset[Any]:
    """The explicit mesh axes that dims are sharded over which an enclosing ``jax.vmap`` maps."""
    return getattr(core.get_axis_env(), "explicit_mesh_axis_names", frozenset())


def leading_dims(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result laid out as ``aval`` in its first three dims, for any fourth.

    Derived from ``aval`` rather than built, so varying axes and explicit shardings survive.
    """
    spec = [*aval.sharding.spec[:3], None][: len(shape)]
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def batched(aval: Any, shape: tuple[int, ...], like: Any) -> Any:
    """The type of ``shape`` that differs from ``aval`` in the first dim at most, as in ``like``."""
    if aval.shape == shape:
        return aval.update(weak_type=False)
    spec = jax.sharding.PartitionSpec(like.sharding.spec[0], *aval.sharding.spec[1:])
    return aval.update(shape=shape, weak_type=False, sharding=aval.sharding.update(spec=spec))


def projection(aval: Any) -> Any:
    """The type [B, T, N, H] of one of the arrays that are slots of [B, T, slots, N, H]."""
    spec = [*aval.sharding.spec[:2], *aval.sharding.spec[3:]]
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    return aval.update(shape=(*aval.shape[:2], *aval.shape[3:]), sharding=sharding)


def local(aval: Any) -> ShapedArray:
    """The type of the array as one program sees it, without mesh axes.

    Lowering happens below sharding: code traced there must not be asked which mesh axes its loop
    carries vary over.
    """
    return ShapedArray(aval.shape, aval.dtype)


def lower_with_devices(primitive: Primitive) -> None:
    """Let the lowering rule of a primitive know the mesh, as that of custom_partitioning does."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def devices_of_compiler(ctx: mlir.LoweringRuleContext) -> int:
    """How many devices XLA divides the program among, at this place of it.

    Inside ``jax.shard_map`` that is one.
    """
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def mesh_axes_of_compiler(ctx: mlir.LoweringRuleContext) -> tuple[int, ...]:
    """The sizes of the mesh axes that XLA divides the program over; one axis if it has no mesh."""
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)
    if mesh is None or mesh.empty:
        return (devices_of_compiler(ctx),)
    return tuple(mesh.shape.values())


def replace_compile_errors(handler: Callable[[Exception], Exception | None]) -> None:
    """Let an error of the XLA compiler be raised as the one that the handler makes of it, if any.

    XLA turns what its Python callbacks raise into text in the middle of an error of its own.
    """
    compiler.register_xla_runtime_error_handler(handler)


def spec_of(sharding: Any, mesh: Mesh, rank: int) -> PartitionSpec | None:
    """The spec over a mesh of a sharding that custom_partitioning did not decode.

    None where no spec says it: it is made of parts of mesh axes, or the mesh is not known.
    """
    if sharding.is_fully_replicated:
        return PartitionSpec()
    if mesh.empty:
        return None
    try:
        (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(rank), mesh)
    except (IndivisibleError, KeyError):  # KeyError: the size of a part is that of another axis
        return None
    return spec
