"""The names of the dims of a call's arrays, as sharding sees them, and the axes of its batch.

A batch has the axes that ``jax.vmap`` added, and the call's own. They are separate dims, so the
compiler may shard each of them. An operand that is broadcast over part of the batch has a
contiguous run of the axes, and each device's part of the operand is broadcast in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_memeff._call.operands import (
    OperandRow,
    QkvPackedOperands,
    batch_of,
    is_packed,
    items,
    mapped,
    pages_of,
)
from jax_memeff._call.options import Options

EVEN = {"query_tokens": "even_tokens", "sequences": "even_sequences"}
"""The names of dims of sequences with the same number of rows each, which may be sharded."""


def batch_names(axes: int) -> tuple[str, ...]:
    """The names of the axes of a batch: those that ``jax.vmap`` added, and the call's own.

    >>> batch_names(3)
    ('vmap0', 'vmap1', 'batch')
    """
    return (*(f"vmap{axis}" for axis in range(axes - 1)), "batch")


def dims(operands: Any) -> Any:
    """A tree like the operands, with the names of each array's dims in a string.

    A broadcast dim of size 1 is named ``one``, and so is a single key head.
    """
    return mapped(lambda item: named_dims(item.operand, item.array.shape, operands), operands)


def named_dims(operand: OperandRow, shape: tuple[int, ...], operands: Any) -> str:
    """The names of the dims of an operand with this shape."""
    names = operand.named_dims(is_packed(operands)) if shape else ()
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
        if item.array.shape and item.operand.packed_dims[0].startswith("sequences")
    )
    return pages.tokens_each if is_even else None


def _shardable(names: str, operands: Any) -> str:
    """The names of dims. Sequences and tokens have other names if they may be sharded. The tokens
    of a pool always have a name of their own.
    """
    renamed = {} if pages_of(operands) is None else {"key_tokens": "pool_tokens"}
    if even_tokens(operands) is not None:
        renamed |= EVEN
    return " ".join(renamed.get(name, name) for name in names.split())


def _named(dim: str, size: int) -> str:
    if size == 1 and (dim.endswith("|1") or dim == "key_heads"):
        return "one"
    return dim.removesuffix("|1")


def result_dims(operands: Any) -> tuple[str, str]:
    """The names of the dims of out and lse."""
    if is_packed(operands):
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


class BatchAxes(NamedTuple):
    """The sizes of the axes, outermost first.

    >>> axes = BatchAxes((3, 4))
    >>> axes.named("batch columns key_heads head_dim", indices=12)
    'vmap0 batch columns key_heads head_dim'
    >>> axes.named("batch columns key_heads head_dim", indices=4)
    'batch columns key_heads head_dim'
    >>> axes.named("batch heads rows columns", indices=3, divisor=4)
    'vmap0 heads rows columns'
    """

    sizes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return batch_names(len(self.sizes))

    def run(self, indices: int, divisor: int) -> slice:
        """The axes of an operand with this many batch indices and this divisor."""
        if indices == math.prod(self.sizes):
            return slice(0, len(self.sizes))
        of_later = [math.prod(self.sizes[axis:]) for axis in range(len(self.sizes) + 1)]
        return slice(of_later.index(indices * divisor), of_later.index(divisor))

    def later(self, run: slice) -> int:
        """The divisor of an operand whose axes are this run."""
        return math.prod(self.sizes[run.stop :])

    def of_device(self, devices: Callable[[str], int]) -> BatchAxes:
        """The sizes of the axes on one device; ``devices`` has the number along each axis."""
        return BatchAxes(
            tuple(size // devices(name) for name, size in zip(self.names, self.sizes, strict=True))
        )

    def named(self, dims: str, indices: int, divisor: int = 1) -> str:
        """The dims of an array, with the batch replaced by its axes."""
        if not dims.startswith("batch"):
            return dims
        own = self.names[self.run(indices, divisor)] or ("one",)
        return " ".join((*own, *dims.split()[1:]))

    def split_shape(self, shape: tuple[int, ...], dims: str) -> tuple[int, ...]:
        """The shape of :meth:`split`'s result, whose dims have these names."""
        names = dims.split()
        own = [size for name, size in zip(self.names, self.sizes, strict=True) if name in names]
        return (*own, *shape[1:]) if own else shape

    def split(self, x: jax.Array, dims: str) -> jax.Array:
        """The array with the first dim split into the axes of the batch."""
        return x.reshape(self.split_shape(x.shape, dims))

    def joined(self, x: jax.Array, dims: str) -> jax.Array:
        """The inverse of :meth:`split`."""
        own = sum(name in self.names for name in dims.split())
        return x.reshape(-1, *x.shape[own:]) if own else x
