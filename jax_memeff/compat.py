"""What differs, or may come to differ, between jax versions; nothing else reads jax's internals."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import ShapedArray


def cast_to_common_varying_axes(tree: Any) -> Any:
    """Make every leaf vary over the manual mesh axes that any leaf varies over.

    Inside ``jax.shard_map`` a primitive wants operands of one set of varying axes. Casting before
    the differentiable call puts the cast's transpose, a sum over devices, outside the rule.
    """
    leaves, structure = jax.tree.flatten(tree)
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    common = frozenset().union(*varying)
    cast = [
        jax.lax.pcast(leaf, tuple(sorted(common - axes, key=str)), to="varying")
        if common - axes
        else leaf
        for leaf, axes in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)


def leading_dims(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result laid out as ``aval`` in its first three dims, for any fourth.

    Derived from ``aval`` rather than built, so varying axes and explicit shardings survive.
    """
    spec = [*aval.sharding.spec[:3], None][: len(shape)]
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


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
