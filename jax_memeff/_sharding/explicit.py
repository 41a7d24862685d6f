"""Sharding of the batch and of the heads over the axes of a mesh.

The dims of every array of a call have names. Those of the batch and of the heads may be sharded,
the heads of query and key alike, so that a device holds whole groups: it then has a smaller
problem of the same kind, and nothing is gathered. How that comes about depends on the mesh:

- Manual axes (inside ``jax.shard_map``): the arrays are local already.
- Explicit axes: types tell the shardings, and :func:`attention` enters ``jax.shard_map``.
- Auto axes: the compiler knows the shardings: ``partitioning.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_memeff._call import compat
from jax_memeff._call.options import DropoutState, Operands, Options, Position, QkvPackedOperands

AnyOperands = Operands | QkvPackedOperands
Attention = Callable[[Any, Options], tuple[jax.Array, jax.Array]]
Axes = tuple[Any, ...]
"""Names of mesh axes that one dim is sharded over; empty for none."""

_WHOLE_SEQUENCES = (
    "every device needs whole sequences: shard the batch or the heads over it, or use "
    "jax_memeff.ring_attention inside jax.shard_map"
)
_WHOLE_TOKENS = (
    "packed sequences cannot be cut: shard the heads over it, or give every device sequences of "
    "its own inside jax.shard_map"
)
_WHOLE_HEAD_DIM = "every device needs whole heads: shard the batch or the heads over it"

_NOT_SHARDED = {
    "rows": ("sequence dim", _WHOLE_SEQUENCES),
    "columns": ("sequence dim", _WHOLE_SEQUENCES),
    "query_tokens": ("token dim", _WHOLE_TOKENS),
    "key_tokens": ("token dim", _WHOLE_TOKENS),
    "sequences": ("dim of the sequences", _WHOLE_TOKENS),
    "head_dim": ("head dim", _WHOLE_HEAD_DIM),
    "value_dim": ("head dim", _WHOLE_HEAD_DIM),
    "slots": ("dim of query, key and value", "every device needs all three of them"),
    "one": ("dim of size 1", "it cannot be divided"),
}
"""What the dims that are never sharded are called in messages, and the remedy."""

_SHARDED = {"batch": "batch dim", "heads": "heads", "key_heads": "heads"}
"""Titles of the other dims; a batch of several axes has names of :func:`batch_names`."""


def batch_names(axes: int) -> tuple[str, ...]:
    """The names of the dims of a batch that ``jax.vmap`` put axes into, which are divided alone.

    >>> batch_names(3)
    ('vmap0', 'vmap1', 'batch')
    """
    return (*(f"vmap{axis}" for axis in range(axes - 1)), "batch")


def _title(dim: str) -> str | None:
    return "axis of jax.vmap" if dim.startswith("vmap") else _SHARDED.get(dim)


class Layout(NamedTuple):
    """The mesh axes that a call is sharded over."""

    batch: Mapping[str, Axes]
    """Of each of its axes."""
    heads: Axes
    rows: Axes = ()
    """Axes of size 1, which shard nothing but belong to the types of the results."""

    def spec(self, dims: str) -> PartitionSpec:
        """The sharding of an operand or a gradient."""
        return PartitionSpec(*(self.axes(dim) or None for dim in dims.split()))

    def axes(self, dim: str) -> Axes:
        return {**self.batch, "heads": self.heads, "key_heads": self.heads}.get(dim, ())

    def reduced(self, dims: str) -> Axes:
        """The axes whose devices have parts of one gradient, which is their sum."""
        own = {axis for dim in dims.split() for axis in self.axes(dim)}
        sharded = (*itertools.chain(*self.batch.values()), *self.heads)
        return tuple(axis for axis in sharded if axis not in own)

    def result_spec(self, dims: str) -> PartitionSpec:
        """The sharding of out or lse."""
        entries = zip(dims.split(), self.spec(dims), strict=True)
        return PartitionSpec(*((self.rows or None) if d == "rows" else s for d, s in entries))


def dims(operands: Any) -> Any:
    """The names of the dims of every array, in a string, in place of the array.

    A dim that is broadcast is ``one``; so is that of a key head which all query heads share.
    """
    sequences = getattr(operands, "sequences", None)
    batch, query, key = "batch", "batch rows", "batch columns"
    if sequences is not None:
        batch, query, key = "sequences", "one query_tokens", "one key_tokens"

    def broadcast(array: Any) -> str:
        scores = (batch, "heads", "rows", "columns")
        return " ".join(
            "one" if size == 1 else dim for dim, size in zip(scores, array.shape, strict=True)
        )

    def present(value: Any, names: Any) -> Any:
        return None if value is None else names

    mask = operands.mask
    named = operands._replace(
        bias=None if operands.bias is None else broadcast(operands.bias),
        mask=dataclasses.replace(
            mask,
            query_lengths=present(mask.query_lengths, batch),
            key_lengths=present(mask.key_lengths, batch),
            segment_ids=((query, key),) * len(mask.segment_ids),
            booleans=tuple(map(broadcast, mask.booleans)),
        ),
        dropout=present(operands.dropout, DropoutState._make((f"{batch} words", batch, "heads"))),
        position=present(operands.position, Position._make(("", ""))),
    )
    if isinstance(operands, QkvPackedOperands):
        return named._replace(query_key_value=f"{query} slots heads head_dim")
    key_heads = "one" if operands.key.shape[2] == 1 else "key_heads"
    if sequences is not None:
        sequences = dataclasses.replace(
            sequences,
            query_starts="starts",
            key_starts="starts",
            query_lengths=batch,
            key_lengths=batch,
        )
    return named._replace(
        query=f"{query} heads head_dim",
        key=f"{key} {key_heads} head_dim",
        value=f"{key} {key_heads} value_dim",
        sequences=sequences,
    )


def result_dims(operands: AnyOperands) -> tuple[str, str]:
    """The names of the dims of out and lse."""
    if isinstance(operands, QkvPackedOperands) or operands.sequences is None:
        return "batch rows heads value_dim", "batch rows heads"
    return "one query_tokens heads value_dim", "one query_tokens heads"


def layout(arrays: Sequence[Sharded], sizes: Mapping[Any, int]) -> Layout:
    """How the call is sharded, given how its operands are.

    Args:
        arrays: the operands.
        sizes: of the mesh axes.

    Raises:
        ValueError: a dim that devices need as a whole is sharded, a sharded dim cannot be divided,
            or operands are sharded differently.
    """
    query = arrays[0]
    batch = {dim: query.axes(dim) for dim in query.dims if dim == "batch" or dim.startswith("vmap")}
    found = Layout(batch, query.axes("heads"), query.axes("rows"))
    for array in arrays:
        # The others are made by the call itself, or are a few numbers.
        if array.name.startswith(("bias", "mask")):
            array.check_whole(sizes)
            array.check_same(found, sizes, may_be_replicated=True)
        elif array.name in ("query", "key", "value", "query_key_value"):
            array.check_whole(sizes)
            array.check_divisible(found, sizes)
            array.check_same(found, sizes, may_be_replicated=False)
    return found


def name_of(path: Any) -> str:
    """What messages call an operand."""
    return jax.tree_util.keystr(path).lstrip(".")


class Sharded(NamedTuple):
    """An operand, as messages name it, its dims, and how they are sharded."""

    name: str
    shape: tuple[int, ...]
    dims: Sequence[str]
    spec: PartitionSpec

    def __str__(self) -> str:
        return f"{self.name} of shape {self.shape}"

    def axes(self, dim: str) -> Axes:
        if dim not in self.dims or self.dims.index(dim) >= len(self.spec):
            return ()
        entry = self.spec[self.dims.index(dim)]
        return () if entry is None else entry if isinstance(entry, tuple) else (entry,)

    def check_whole(self, sizes: Mapping[Any, int]) -> None:
        for dim in self.dims:
            axes = _larger_than_1(self.axes(dim), sizes)
            if axes and dim in _NOT_SHARDED:
                title, remedy = _NOT_SHARDED[dim]
                raise ValueError(f"{self}: its {title} is sharded over {_text(axes)}; {remedy}")

    def check_divisible(self, layout: Layout, sizes: Mapping[Any, int]) -> None:
        for dim, size in zip(self.dims, self.shape, strict=True):
            axes = layout.axes(dim)
            devices = math.prod(sizes[axis] for axis in axes)
            if size % devices == 0:
                continue
            remedy = "pad it, or shard it over fewer devices"
            if dim == "key_heads":
                remedy = (
                    "every device needs whole groups of heads: shard the heads over fewer devices, "
                    "or repeat the heads of key and value (jnp.repeat along axis 2)"
                )
            raise ValueError(
                f"{self}: its {_title(dim)}, {size}, cannot be divided by {devices}, the size of "
                f"{_text(axes)}; {remedy}"
            )

    def check_same(
        self, layout: Layout, sizes: Mapping[Any, int], *, may_be_replicated: bool
    ) -> None:
        for dim in self.dims:
            if _title(dim) is None:
                continue
            axes, wanted = (_larger_than_1(x, sizes) for x in (self.axes(dim), layout.axes(dim)))
            if axes == wanted or (may_be_replicated and not axes):
                continue
            raise ValueError(
                f"{self}: its {_title(dim)} must be sharded like query's, over {_text(wanted)}, "
                f"got {_text(axes)}; reshard it to {layout.spec(' '.join(self.dims))}"
            )


def _larger_than_1(axes: Axes, sizes: Mapping[Any, int]) -> Axes:
    return tuple(axis for axis in axes if sizes[axis] > 1)


def _text(axes: Axes) -> str:
    if not axes:
        return "no mesh axis"
    names = ", ".join(map(repr, axes))
    return f"mesh axis {names}" if len(axes) == 1 else f"mesh axes ({names})"


def attention(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, jax.Array]:
    """``function(operands, options)``, on the shards of each device where axes are explicit.

    Raises:
        ValueError: as :func:`layout` says.
    """
    mesh = _mesh(operands)
    if mesh is None or not _explicit_axes(mesh):
        return function(compat.cast_to_common_varying_axes(operands), options)
    return _on_shards(function, operands, options)


# Without the jit a call outside of any would run shard_map op by op, which has no rule for
# custom_vjp with symbolic zeros.
@functools.partial(jax.jit, static_argnames=("function", "options"), inline=True)
def _on_shards(
    function: Attention, operands: AnyOperands, options: Options
) -> tuple[jax.Array, jax.Array]:
    mesh = _mesh(operands)
    _check_not_mapped()
    found = layout(
        [
            Sharded(name_of(path), leaf.shape, names.split(), leaf.sharding.spec)
            for (path, leaf), names in zip(
                jax.tree_util.tree_leaves_with_path(jax.tree.map(jax.typeof, operands)),
                jax.tree.leaves(dims(operands)),
                strict=True,
            )
        ],
        mesh.shape,
    )
    specs = jax.tree.map(found.spec, dims(operands))
    # A replicated bias or mask is cut where it is; query, key and value are sharded so already.
    operands = jax.tree.map(
        lambda leaf, spec: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), operands, specs
    )
    local = jax.shard_map(
        lambda operands: function(compat.cast_to_common_varying_axes(operands), options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=tuple(map(found.result_spec, result_dims(operands))),
        axis_names=_explicit_axes(mesh),
    )
    return local(operands)


def _check_not_mapped() -> None:
    """Refuse what ``jax.shard_map`` does not do."""
    if mapped := tuple(sorted(compat.mapped_explicit_axes(), key=str)):
        raise ValueError(
            f"jax.vmap maps a dim that is sharded over {_text(mapped)}, which jax.shard_map does "
            "not support over explicit axes: make that dim part of the call's batch, or enter "
            "jax.shard_map over it around jax.vmap"
        )


def _mesh(operands: AnyOperands) -> Any:
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands))
    return next((mesh for mesh in meshes if not mesh.empty), None)


def _explicit_axes(mesh: Any) -> set[Any]:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, axis_type in axes if axis_type == AxisType.Explicit}
