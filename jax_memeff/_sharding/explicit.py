"""Sharding over Explicit mesh axes: the call enters ``jax.shard_map`` as its types require.

If the mesh also has Auto axes, the compiler partitions the call over all of them
(``automatic.py``). What the explicit axes allow stays the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jax_memeff import _compat as compat
from jax_memeff._call.operands import AnyOperands, items
from jax_memeff._call.options import Options
from jax_memeff._sharding.dims import dims, forward_dims
from jax_memeff._sharding.layout import Layout, Sharded, layout
from jax_memeff._sharding.local import limits, take_key_heads, with_own_starts, with_positions
from jax_memeff._sharding.mesh_axes import MeshAxes, text

Attention = Callable[[Any, Options], tuple[jax.Array, ...]]


def on_shards(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, ...]:
    """``function(operands, options)``; if mesh axes are explicit, on the shards of each device.

    Raises:
        ValueError: see :func:`layout`.
    """
    mesh = _mesh(operands)
    if mesh is None or not _axes(mesh, AxisType.Explicit):
        return function(compat.cast_to_common_varying_axes(operands), options)
    _check_not_mapped()
    if any(mesh.shape[axis] > 1 for axis in _axes(mesh, AxisType.Auto)):
        return _by_compiler(function, operands, options)
    return _on_shards(function, operands, options)


def _by_compiler(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, ...]:
    """The call over a mesh of which the compiler has some axes: it then gets the others, too.

    Inside a ``jax.shard_map`` over the explicit axes it would gather everything over its own.
    """
    mesh = _mesh(operands)
    found = _layout(operands, options)
    results = [found.spec(names) for names in forward_dims(operands, options)]
    call: Any = jax.sharding.auto_axes(
        lambda operands: function(operands, options),
        axes=_axes(mesh, AxisType.Explicit),
        out_sharding=tuple(NamedSharding(mesh, spec) for spec in results),
    )
    return call(operands)


# Outside of jit, JAX would evaluate shard_map op by op, which does not support custom_vjp with
# symbolic zeros.
@functools.partial(jax.jit, static_argnames=("function", "options"), inline=True)
def _on_shards(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, ...]:
    mesh = _mesh(operands)
    found = _layout(operands, options)
    specs = jax.tree.map(found.spec, dims(operands))
    # Replicated biases, masks and key heads are sliced locally; the rest already has this sharding.
    operands = jax.tree.map(
        lambda leaf, spec: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), operands, specs
    )
    row_devices = MeshAxes(mesh.shape).devices(found.rows)

    def local(operands: AnyOperands) -> tuple[jax.Array, ...]:
        operands = with_own_starts(with_positions(operands, found, row_devices), found)
        operands = take_key_heads(operands, found)
        return function(compat.cast_to_common_varying_axes(operands), options)

    shards = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=tuple(map(found.spec, forward_dims(operands, options))),
        axis_names=set(_axes(mesh, AxisType.Explicit)),
    )
    return shards(operands)


def _layout(operands: AnyOperands, options: Options) -> Layout:
    """The sharding of the call over the explicit axes, from the types of its operands."""
    arrays = [
        Sharded(
            item.operand,
            item.title,
            item.array.shape,
            names.split(),
            jax.typeof(item.array).sharding.spec,
        )
        for item, names in zip(items(operands), jax.tree.leaves(dims(operands)), strict=True)
    ]
    return layout(arrays, MeshAxes(_mesh(operands).shape), limits(operands, options))


def _check_not_mapped() -> None:
    """Refuse mapped explicit axes, which ``jax.shard_map`` does not support."""
    if mapped := tuple(sorted(compat.mapped_explicit_axes(), key=str)):
        raise ValueError(
            f"jax.vmap maps a dim that is sharded over {text(mapped)}, which jax.shard_map does "
            "not support over explicit axes: make that dim part of the call's batch, or enter "
            "jax.shard_map over it around jax.vmap"
        )


def _mesh(operands: AnyOperands) -> Any:
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands))
    return next((mesh for mesh in meshes if not mesh.empty), None)


def _axes(mesh: Any, kind: AxisType) -> tuple[Any, ...]:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, axis_type in axes if axis_type == kind)
