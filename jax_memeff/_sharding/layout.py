"""The sharding of a call over the axes of a mesh: the names of dims, and which may be sharded.

Each device computes a smaller problem of the same kind, and nothing is gathered:

- The batch is sharded alike in all operands.
- The query heads are sharded evenly. A device gets the key heads that its query heads read: some of
  its own if the devices divide the key heads, otherwise copies, and gradients are summed.
- The rows of the query may be sharded if every device has all keys.
- The sequences of a paged call may be sharded if all have the same number of query rows. Every
  device has the whole pool.

The type of the mesh axes determines what applies the sharding:

- Manual axes (inside ``jax.shard_map``): nothing, because the arrays are already local.
- Explicit axes: the types have the shardings, and ``explicit.py`` enters ``jax.shard_map``.
- Auto axes: the compiler has the shardings and calls ``automatic.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jax_memeff._call.operands.arrays import QkvPackedOperands, batch_of, is_varlen, pages_of
from jax_memeff._call.operands.table import Operand, items, mapped
from jax_memeff._call.options import Options

Axes = tuple[Any, ...]
"""Names of mesh axes that one dim is sharded over; empty for none."""

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

_EVEN = {"query_tokens": "even_tokens", "sequences": "even_sequences"}
"""The names of dims of sequences with the same number of rows each, which may be sharded."""

_SHARDED = {
    "batch": "batch dim",
    "heads": "heads",
    "key_heads": "heads",
    "rows": "sequence dim",
    "even_tokens": "dim of the tokens",
    "even_sequences": "dim of the sequences",
}
"""The titles of the other dims; :func:`batch_names` gives the names of a batch's axes."""


def batch_names(axes: int) -> tuple[str, ...]:
    """The names of the axes of a batch: those that ``jax.vmap`` added, and the call's own.

    >>> batch_names(3)
    ('vmap0', 'vmap1', 'batch')
    """
    return (*(f"vmap{axis}" for axis in range(axes - 1)), "batch")


def _title(dim: str) -> str | None:
    return "axis of jax.vmap" if dim.startswith("vmap") else _SHARDED.get(dim)


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
        own |= dict.fromkeys(_EVEN.values(), self.sequences)
        return {**self.batch, **own}.get(dim, ())

    def reduced(self, dims: str) -> Axes:
        """The axes over which the parts of a gradient with these dims are summed."""
        own = {axis for dim in dims.split() for axis in self.axes(dim)}
        sharded = (*itertools.chain(*self.batch.values()), *self.heads, *self.rows)
        return tuple(axis for axis in sharded if axis not in own)


def dims(operands: Any) -> Any:
    """A tree like the operands, with the names of each array's dims in a string.

    A broadcast dim of size 1 is named ``one``, and so is a single key head.
    """
    return mapped(lambda item: named_dims(item.operand, item.array.shape, operands), operands)


def named_dims(operand: Operand, shape: tuple[int, ...], operands: Any) -> str:
    """The names of the dims of an operand with this shape."""
    names = operand.named_dims(is_varlen(operands)) if shape else ()
    if names[-1:] == ("...",):
        # The dims of an array that the user's function reads: every device needs all of them.
        names = (*names[:-1], *["captured"] * (len(shape) - len(names) + 1))
    named = itertools.starmap(_named, zip(names, shape, strict=True))
    return _shardable(" ".join(named), operands)


def even_tokens(operands: Any) -> int | None:
    """The query rows of each sequence of a paged call if sequences may be sharded, else None.

    They may be sharded if all have the same number of rows, and no operand is shared by several
    sequences, as can happen under ``jax.vmap``.
    """
    pages = pages_of(operands)
    if pages is None or pages.tokens_each is None:
        return None
    batch = batch_of(operands)
    is_even = batch > 1 and all(
        item.array.shape[0] in (1, batch)
        for item in items(operands)
        if item.array.shape and item.operand.varlen_dims[0].startswith("sequences")
    )
    return pages.tokens_each if is_even else None


def _shardable(names: str, operands: Any) -> str:
    """The names of dims. Sequences and tokens have other names if they may be sharded. The tokens
    of a pool always have a name of their own.
    """
    renamed = {} if pages_of(operands) is None else {"key_tokens": "pool_tokens"}
    if even_tokens(operands) is not None:
        renamed |= _EVEN
    return " ".join(renamed.get(name, name) for name in names.split())


def _named(dim: str, size: int) -> str:
    if size == 1 and (dim.endswith("|1") or dim == "key_heads"):
        return "one"
    return dim.removesuffix("|1")


def result_dims(operands: Any) -> tuple[str, str]:
    """The names of the dims of out and lse."""
    if is_varlen(operands):
        return (
            _shardable("one query_tokens heads value_dim", operands),
            _shardable("one query_tokens heads", operands),
        )
    return "batch rows heads value_dim", "batch rows heads"


def forward_dims(operands: Any, options: Options) -> tuple[str, ...]:
    """The names of the dims of all results of a forward; row maxima have those of lse."""
    out, lse = result_dims(operands)
    return (out, lse, lse) if options.row_maxima else (out, lse)


def heads_of(operands: Any) -> tuple[int, int]:
    """The numbers of query heads and of key heads."""
    if isinstance(operands, QkvPackedOperands):
        heads = operands.query_key_value.shape[3]
        return heads, heads
    return operands.query.shape[2], operands.key.shape[2]


def divides_groups(heads: int, key_heads: int, mesh_axes: Sequence[int]) -> bool:
    """Whether the heads on a device are whole groups, or part of one, over any of the mesh axes.

    Args:
        heads: the number of query heads, K * G.
        key_heads: K.
        mesh_axes: the sizes of the mesh axes.

    >>> divides_groups(12, 6, (2, 3)), divides_groups(12, 6, (4,))
    (True, False)
    """
    counts = {1}
    for size in mesh_axes:
        counts |= {count * size for count in counts}
    return all(
        key_heads % count == 0 or count % key_heads == 0 for count in counts if heads % count == 0
    )


def layout(arrays: Sequence[Sharded], sizes: Mapping[Any, int]) -> Layout:
    """The sharding of a call, derived from the shardings of its operands.

    Args:
        arrays: the operands.
        sizes: the sizes of the mesh axes.

    Raises:
        ValueError: a dim that every device needs whole is sharded, a size is not divisible by its
            number of devices, or operands are sharded differently.
    """
    query = arrays[0]
    batch = {dim: query.axes(dim) for dim in query.dims if dim == "batch" or dim.startswith("vmap")}
    heads = query.axes("heads")
    key_heads, copies = _key_heads(arrays, heads, sizes)
    rows = query.axes("rows") or query.axes("positions")
    found = Layout(batch, heads, key_heads, rows, query.axes("even_tokens"), copies)
    for array in arrays:
        if array.operand.placement == "internal":
            continue
        array.check_whole(sizes)
        if array.operand.placement == "like query":
            array.check_divisible(found, sizes)
        array.check_same(found, sizes)
    return found


class Sharded(NamedTuple):
    """An operand, its name in messages, its dims and its sharding."""

    operand: Operand
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
                raise ValueError(f"{self}: its {title} is sharded over {text(axes)}; {remedy}")

    def check_divisible(self, layout: Layout, sizes: Mapping[Any, int]) -> None:
        for dim, size in zip(self.dims, self.shape, strict=True):
            axes = layout.axes(dim)
            devices = math.prod(sizes[axis] for axis in axes)
            if size % devices:
                raise ValueError(
                    f"{self}: its {_title(dim)}, {size}, cannot be divided by {devices}, the size "
                    f"of {text(axes)}; pad it, or shard it over fewer devices"
                )

    def check_same(self, layout: Layout, sizes: Mapping[Any, int]) -> None:
        may_be_sliced = self.operand.placement == "like query or replicated"
        for dim in self.dims:
            if _title(dim) is None:
                continue
            axes, expected = (_larger_than_1(x, sizes) for x in (self.axes(dim), layout.axes(dim)))
            # Slicing an array that every device has transfers nothing.
            can_slice = may_be_sliced or dim == "key_heads"
            if axes == expected or (can_slice and axes == expected[: len(axes)]):
                continue
            raise ValueError(
                f"{self}: its {_title(dim)} must be sharded like query's, over {text(expected)}, "
                f"got {text(axes)}; reshard it to {layout.spec(' '.join(self.dims))}, by "
                "jax.sharding.reshard over explicit mesh axes and by "
                "jax.lax.with_sharding_constraint over others"
            )


def _key_heads(
    arrays: Sequence[Sharded], heads: Axes, sizes: Mapping[Any, int]
) -> tuple[Axes, KeyHeadCopies | None]:
    """``Layout.key_heads`` and ``Layout.key_head_copies``."""
    array = next((array for array in arrays if "key_heads" in array.dims), None)
    if array is None:
        return heads, None
    query = arrays[0]
    query_heads = query.shape[query.dims.index("heads")]
    key_heads = array.shape[array.dims.index("key_heads")]
    devices = math.prod(sizes[axis] for axis in heads)
    if key_heads % devices == 0:
        return heads, None
    first: Axes = ()
    for axis in heads:
        if key_heads % math.prod(sizes[axis] for axis in (*first, axis)):
            break
        first = (*first, axis)
    if key_heads == math.prod(sizes[axis] for axis in first):
        return first, None
    copies = KeyHeadCopies(heads[len(first) :], query_heads // devices, query_heads // key_heads)
    return first, copies


def _larger_than_1(axes: Axes, sizes: Mapping[Any, int]) -> Axes:
    return tuple(axis for axis in axes if sizes[axis] > 1)


def text(axes: Axes) -> str:
    if not axes:
        return "no mesh axis"
    names = ", ".join(map(repr, axes))
    return f"mesh axis {names}" if len(axes) == 1 else f"mesh axes ({names})"
