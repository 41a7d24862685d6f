"""Sharding over Explicit mesh axes: the call enters ``jax.shard_map`` as its types require."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jax_memeff import _compat as compat
from jax_memeff._call.operands.arrays import AnyOperands
from jax_memeff._call.operands.table import items
from jax_memeff._call.options import Options
from jax_memeff._sharding.layout import Sharded, dims, forward_dims, layout, text
from jax_memeff._sharding.local import (
    check_rows,
    check_sequences,
    take_key_heads,
    with_own_starts,
    with_positions,
)

Attention = Callable[[Any, Options], tuple[jax.Array, ...]]


def on_shards(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, ...]:
    """``function(operands, options)``; if mesh axes are explicit, on the shards of each device.

    Raises:
        ValueError: see :func:`layout`.
    """
    mesh = _mesh(operands)
    if mesh is None or not _explicit_axes(mesh):
        return function(compat.cast_to_common_varying_axes(operands), options)
    return _on_shards(function, operands, options)


# Outside of jit, JAX would evaluate shard_map op by op, which does not support custom_vjp with
# symbolic zeros.
@functools.partial(jax.jit, static_argnames=("function", "options"), inline=True)
def _on_shards(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, ...]:
    mesh = _mesh(operands)
    _check_not_mapped()
    found = layout(
        [
            Sharded(
                item.operand,
                item.title,
                item.array.shape,
                names.split(),
                jax.typeof(item.array).sharding.spec,
            )
            for item, names in zip(items(operands), jax.tree.leaves(dims(operands)), strict=True)
        ],
        mesh.shape,
    )
    specs = jax.tree.map(found.spec, dims(operands))
    # Replicated biases, masks and key heads are sliced locally; the rest already has this sharding.
    operands = jax.tree.map(
        lambda leaf, spec: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), operands, specs
    )
    row_devices = math.prod(mesh.shape[axis] for axis in found.rows)
    check_rows(operands, options, row_devices)
    check_sequences(operands, found, mesh.shape)

    def local(operands: AnyOperands) -> tuple[jax.Array, ...]:
        operands = with_own_starts(with_positions(operands, found, row_devices), found)
        operands = take_key_heads(operands, found)
        return function(compat.cast_to_common_varying_axes(operands), options)

    shards = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=tuple(map(found.spec, forward_dims(operands, options))),
        axis_names=_explicit_axes(mesh),
    )
    return shards(operands)


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


def _explicit_axes(mesh: Any) -> set[Any]:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, axis_type in axes if axis_type == AxisType.Explicit}
