"""The sharding of a call over the axes of a mesh: which dims may be sharded.

Each device computes a smaller problem of the same kind:

- The batch is sharded alike in all operands.
- The query heads are sharded evenly. A device gets the key heads that its query heads read: some of
  its own if the devices divide the key heads, otherwise copies, and gradients are summed.
- The rows of the query may be sharded if every device has all keys.
- The sequences of a paged call may be sharded if all have the same number of query rows. Every
  device has the whole pool.

The type of the mesh axes determines what applies the sharding:

- Manual axes (inside ``jax.shard_map``): nothing, because the arrays are already local.
- Explicit axes: the types have the shardings, and ``explicit.py`` enters ``jax.shard_map``. Nothing
  is gathered: :func:`layout` raises an error.
- Auto axes: the compiler has the shardings and calls ``automatic.py``. It gathers what cannot stay
  divided (:func:`fitted`), because nobody may have asked for these shardings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jax_memeff._call.operands import OperandRow
from jax_memeff._sharding.dims import EVEN
from jax_memeff._sharding.mesh_axes import Axes, MeshAxes

_WHOLE_SEQUENCES = (
    "every device needs whole sequences of keys: shard the batch, the heads or the query's "
    "sequence over it, or use jax_memeff.ring_attention inside jax.shard_map"
)
_WHOLE_TOKENS = (
    "packed sequences cannot be cut: shard the heads over it, or give every device sequences of "
    "its own inside jax.shard_map"
)
_WHOLE_POOL = (
    "key_pages and value_pages cannot be divided by pages: shard their heads over it, or give "
    "every device a pool of its own inside jax.shard_map"
)
_WHOLE_HEAD_DIM = "every device needs whole heads: shard the batch or the heads over it"

_NOT_SHARDED = {
    "columns": ("sequence dim", _WHOLE_SEQUENCES),
    "positions": ("sequence dim", _WHOLE_SEQUENCES),
    "query_tokens": ("token dim", _WHOLE_TOKENS),
    "key_tokens": ("token dim", _WHOLE_TOKENS),
    "pool_tokens": ("dim of the tokens of all pages", _WHOLE_POOL),
    "sequences": ("dim of the sequences", _WHOLE_TOKENS),
    "head_dim": ("head dim", _WHOLE_HEAD_DIM),
    "value_dim": ("head dim", _WHOLE_HEAD_DIM),
    "slots": ("dim of query, key and value", "every device needs all three of them"),
    "one": ("dim of size 1", "it cannot be divided"),
}
"""The titles, in messages, of dims that are never sharded, and the remedies."""

_SHARDED = {
    "batch": "batch dim",
    "heads": "heads",
    "key_heads": "heads",
    "rows": "sequence dim",
    "even_tokens": "dim of the tokens",
    "even_sequences": "dim of the sequences",
}
"""The titles of the other dims; :func:`batch_names` gives the names of a batch's axes."""


def _title(dim: str) -> str | None:
    return "axis of jax.vmap" if dim.startswith("vmap") else _SHARDED.get(dim)


class Limit(NamedTuple):
    """A dim of the query that cannot be divided among any number of devices."""

    units: int
    """The number of devices has to divide it."""
    text: Callable[[int, str], str]
    """The message about a number of devices along these mesh axes, with the remedy."""


NO_LIMITS: Mapping[str, Limit] = {}


class KeyHeadCopies(NamedTuple):
    """The key heads that a device reads, out of those that several devices hold.

    Device i has the query heads ``i * heads`` to ``(i + 1) * heads``, and query head h reads key
    head ``h // group``.
    """

    axes: Axes
    """The mesh axes of these devices."""
    heads: int
    """The number of query heads of a device."""
    group: int
    """The number of query heads per key head."""

    @property
    def group_on_device(self) -> int:
        """The largest number of query heads per key head that is the same on every device.

        >>> KeyHeadCopies(("model",), 3, 2).group_on_device  # heads 0 0 1, then 1 2 2
        1
        """
        return math.gcd(self.heads, self.group)


class Layout(NamedTuple):
    """The mesh axes that a call is sharded over."""

    batch: Mapping[str, Axes]
    """The mesh axes of each axis of the batch."""
    heads: Axes
    key_heads: Axes
    """A prefix of ``heads``."""
    rows: Axes
    """May have axes of size 1, which shard nothing but belong to the types of the results."""
    sequences: Axes = ()
    """The mesh axes of the sequences of a paged call, and of their tokens."""
    key_head_copies: KeyHeadCopies | None = None
    """Describes the remaining axes of ``heads``, if their devices have the same key heads."""

    def spec(self, dims: str) -> PartitionSpec:
        """The sharding of an operand, a result or a gradient."""
        return PartitionSpec(*(self.axes(dim) or None for dim in dims.split()))

    def axes(self, dim: str) -> Axes:
        own = {"heads": self.heads, "key_heads": self.key_heads}
        own |= {"rows": self.rows, "positions": self.rows}
        own |= dict.fromkeys(EVEN.values(), self.sequences)
        return {**self.batch, **own}.get(dim, ())

    def reduced(self, dims: str) -> Axes:
        """The axes over which the parts of a gradient with these dims are summed."""
        own = {axis for dim in dims.split() for axis in self.axes(dim)}
        sharded = (*itertools.chain(*self.batch.values()), *self.heads, *self.rows)
        return tuple(axis for axis in sharded if axis not in own)


def layout(
    arrays: Sequence[Sharded], mesh: MeshAxes, limits: Mapping[str, Limit] = NO_LIMITS
) -> Layout:
    """The sharding of a call, if its operands have the one that it needs.

    Args:
        arrays: the operands; the query first.
        mesh: the axes that they are sharded over.
        limits: see ``local.limits``.

    Raises:
        ValueError: a dim that every device needs whole is sharded, a size is not divisible by its
            number of devices, or operands are sharded differently.
    """
    query, *others = arrays
    found = _of_query(arrays, mesh)
    faults = query.faults(mesh, limits)
    for array in others:
        faults += array.differences(found, mesh, by_compiler=False).values()
    if faults:
        raise ValueError(faults[0])
    return found


class Move(NamedTuple):
    """What the compiler transfers because an operand is not sharded as the call needs it."""

    reasons: list[str]
    """One for each dim, with the remedy; none if it moves because the query does."""
    bytes: int
    """The size of the part of the operand that each device then has."""


def fitted(
    arrays: Sequence[Sharded], mesh: MeshAxes, limits: Mapping[str, Limit]
) -> tuple[Layout, list[Move]]:
    """The nearest sharding in which the call can be computed, and what the compiler transfers.

    The query stays divided as far as its sizes allow, and everything else follows the query.

    Args:
        arrays: see :func:`layout`.
        mesh: likewise.
        limits: likewise.

    Raises:
        ValueError: a pool is divided by pages.
    """
    query, *others = arrays
    for array in others:
        if fault := array.fault("pool_tokens", mesh):
            raise ValueError(fault)
    own = query.fitted(mesh, limits)
    found = _of_query((own, *others), mesh)
    follows = {dim: query.axes(dim) for dim in query.dims if query.axes(dim) != own.axes(dim)}
    if "heads" in follows:
        follows["key_heads"] = follows["heads"]
    moves = []
    if faults := query.faults(mesh, limits):
        moves.append(Move(faults, query.bytes_on_device(found, mesh)))
    for array in others:
        if differences := array.differences(found, mesh, by_compiler=True):
            # An operand that is sharded like the query moves because the query does.
            reasons = [
                reason
                for dim, reason in differences.items()
                if dim not in follows or array.axes(dim) != follows[dim]
            ]
            moves.append(Move(reasons, array.bytes_on_device(found, mesh)))
    return found, moves


def _of_query(arrays: Sequence[Sharded], mesh: MeshAxes) -> Layout:
    query = arrays[0]
    batch = {dim: query.axes(dim) for dim in query.dims if dim == "batch" or dim.startswith("vmap")}
    heads = query.axes("heads")
    key_heads, copies = _key_heads(arrays, heads, mesh)
    rows = query.axes("rows") or query.axes("positions")
    return Layout(batch, heads, key_heads, rows, query.axes("even_tokens"), copies)


class Sharded(NamedTuple):
    """An operand, its name in messages, its dims and its sharding."""

    operand: OperandRow
    name: str
    shape: tuple[int, ...]
    dims: Sequence[str]
    spec: PartitionSpec | None
    """None if it is not over the mesh of the other operands."""
    itemsize: int = 1

    def __str__(self) -> str:
        return f"{self.name} of shape {self.shape}"

    def axes(self, dim: str) -> Axes:
        if self.spec is None or dim not in self.dims or self.dims.index(dim) >= len(self.spec):
            return ()
        entry = self.spec[self.dims.index(dim)]
        return () if entry is None else entry if isinstance(entry, tuple) else (entry,)

    def faults(self, mesh: MeshAxes, limits: Mapping[str, Limit]) -> list[str]:
        """Why the query cannot be sharded as it is, with remedies."""
        found = (self.fault(dim, mesh, limits) for dim in self.dims)
        return list(dict.fromkeys(filter(None, found)))

    def fault(
        self, dim: str, mesh: MeshAxes, limits: Mapping[str, Limit] = NO_LIMITS
    ) -> str | None:
        """Why this dim of a query cannot be sharded as it is, with the remedy."""
        if self.spec is None:
            return self._on_another_mesh() if dim in self.dims else None
        axes = mesh.dividing(self.axes(dim))
        if not axes:
            return None
        if dim not in limits and _title(dim) is None:
            title, remedy = _NOT_SHARDED.get(dim, ("dim", "every device needs all of it"))
            return f"{self}: its {title} is sharded over {mesh.text(axes)}; {remedy}"
        devices, size = mesh.devices(axes), self.shape[self.dims.index(dim)]
        if dim in limits and limits[dim].units % devices:
            return limits[dim].text(devices, mesh.text(axes))
        if size % devices:
            return (
                f"{self}: its {_title(dim)}, {size}, cannot be divided by {devices}, the size "
                f"of {mesh.text(axes)}; pad it, or shard it over fewer devices"
            )
        return None

    def fitted(self, mesh: MeshAxes, limits: Mapping[str, Limit]) -> Sharded:
        """The query, each dim sharded over as many of its first axes as have no fault."""
        entries = []
        for dim in self.dims:
            axes, before = self.axes(dim), [None] * len(entries)
            while self._replace(spec=PartitionSpec(*before, axes)).fault(dim, mesh, limits):
                axes = axes[:-1]
            entries.append(axes)
        return self._replace(spec=PartitionSpec(*entries))

    def differences(self, layout: Layout, mesh: MeshAxes, by_compiler: bool) -> dict[str, str]:
        """Why a call of this layout cannot take the operand as it is sharded, with remedies.

        The reasons are by dim.

        Args:
            layout: that of the call.
            mesh: the axes that it is over.
            by_compiler: whether the compiler chose the sharding. The user is told what it
                transfers, and slicing an array that every device has transfers nothing.
        """
        if self.operand.placement == "internal":
            return {}
        if self.spec is None:
            return {"any": self._on_another_mesh()}
        may_be_sliced = by_compiler or self.operand.placement == "like query or replicated"
        remedy = mesh.remedy(layout.spec(" ".join(self.dims)))
        found = {}
        for dim in self.dims:
            axes, expected = mesh.dividing(self.axes(dim)), mesh.dividing(layout.axes(dim))
            is_wider = axes == expected[: len(axes)]
            if axes == expected or (is_wider and (may_be_sliced or dim == "key_heads")):
                continue
            if _title(dim) is not None:
                found[dim] = self.fault(dim, mesh) or (
                    f"{self}: its {_title(dim)} must be sharded like query's, over "
                    f"{mesh.text(expected)}, got {mesh.text(axes)}; {remedy}"
                )
            elif by_compiler and self.operand.placement != "like query":
                found[dim] = (
                    f"{self}: it is sharded over {mesh.text(axes)} in a dim that every device "
                    f"needs whole; {remedy}"
                )
            elif by_compiler or dim in _NOT_SHARDED:
                found[dim] = str(self.fault(dim, mesh))
        return found

    def _on_another_mesh(self) -> str:
        return (
            f"{self}: it is not sharded over the mesh of the other operands; constrain all of them "
            "to one mesh by jax.lax.with_sharding_constraint"
        )

    def bytes_on_device(self, layout: Layout, mesh: MeshAxes) -> int:
        """The size of each device's part of the operand."""
        devices = math.prod(mesh.devices(layout.axes(dim)) for dim in self.dims)
        return math.prod(self.shape) * self.itemsize // devices


def _key_heads(
    arrays: Sequence[Sharded], heads: Axes, mesh: MeshAxes
) -> tuple[Axes, KeyHeadCopies | None]:
    """``Layout.key_heads`` and ``Layout.key_head_copies``."""
    array = next((array for array in arrays if "key_heads" in array.dims), None)
    if array is None:
        return heads, None
    query = arrays[0]
    query_heads = query.shape[query.dims.index("heads")]
    key_heads = array.shape[array.dims.index("key_heads")]
    devices = mesh.devices(heads)
    if key_heads % devices == 0:
        return heads, None
    first: Axes = ()
    for axis in heads:
        if key_heads % mesh.devices((*first, axis)):
            break
        first = (*first, axis)
    if key_heads == mesh.devices(first):
        return first, None
    copies = KeyHeadCopies(heads[len(first) :], query_heads // devices, query_heads // key_heads)
    return first, copies
