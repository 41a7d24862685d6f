"""The position of a call's arrays in a larger attention problem."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jax_memeff._call.values import (
    INT32_MAX,
    HoldsArrays,
    array,
    clipped,
    held,
    is_host,
    methods_take_objects,
)

Index = int | np.integer | np.ndarray | jax.Array

MOST_POSITION = 2**29
"""The largest global index of a first row or column.

A call has at most 2**28 rows and columns. Up to this offset, sums of a row, a column, a window
bound and the shift of the diagonal fit int32, in the kernels too.
"""


class Position(NamedTuple):
    """The global indices of local row 0 and column 0.

    They are either common to all batch indices or given for each.
    """

    query: jax.Array
    """int32[] or int32[B]"""
    key: jax.Array
    """int32[] or int32[B]"""


@methods_take_objects
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Offsets(HoldsArrays):
    """The global position of a shard, a ring step or a chunk.

    A call with the offsets of its arrays computes exactly its part of the unsharded result: windows
    use global rows and columns, and the dropout bits are those of the global element.
    Every field is an ``int`` or an integer scalar array, which may be traced;
    ``query`` and ``key`` may also be integer arrays ``[B]``, one entry per batch index or packed
    sequence: one call can have chunks of several prompts at different positions.

    Args:
        batch: global index of the first batch index.
        head: global index of the first query head.
        num_heads: global number of query heads, at least ``head`` plus the heads of the call; None
            means the heads of the call.
        query: global index of the first query row, at most 2**29; with dropout in the kernels, a
            multiple of 16. Values of device arrays are clamped to [0, 2**29].
        key: global index of the first key column; likewise.

    Attention functions raise ValueError for Python and NumPy values out of range. Offsets are equal
    if their numbers are, and those without arrays can be static arguments of ``jax.jit``.

    >>> Offsets(query=512).position()
    Position(query=Array(512, dtype=int32), key=Array(0, dtype=int32))
    """

    batch: Index = 0
    head: Index = 0
    num_heads: Index | None = None
    query: Index = 0
    key: Index = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Offsets):
            return NotImplemented
        return all(map(np.array_equal, self._values(), other._values()))

    def __hash__(self) -> int:
        if any(isinstance(value, np.ndarray | jax.Array) for value in self._values()):
            raise TypeError(
                "cannot hash Offsets that hold arrays; do not make them static arguments of jax.jit"
            )
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        return held((self.batch, self.head, self.num_heads, self.query, self.key))

    def position(self) -> Position:
        """The row and column offsets, int32."""

        def index(value: Any) -> jax.Array:
            value = value if hasattr(value, "dtype") else np.asarray(value)
            return jnp.asarray(clipped(value, 0, MOST_POSITION))

        return Position(index(self.query), index(self.key))


def checked(value: Any, batch: int, heads: int) -> Offsets | None:
    """``Offsets`` of integers in range, for a call with batch size B and N heads; or None.

    The offsets of query and key are scalars, or have one entry for each batch index. The others are
    scalars.
    """
    if value is None:
        return None
    if not isinstance(value, Offsets):
        raise TypeError(
            f"offsets must be jax_memeff.Offsets or None, got {value!r:.80} of type "
            f"{type(value).__name__}; pass jax_memeff.Offsets(query=..., key=...)"
        )
    known: dict[str, int] = {}
    for field in dataclasses.fields(value):
        name, number = field.name, getattr(value, field.name)
        if name == "num_heads" and number is None:
            known[name] = heads
            continue
        scalar = array(f"offsets.{name}", number)
        is_position = name in ("query", "key")
        shapes = [(), (batch,)] if is_position else [()]
        if scalar.shape not in shapes or not jnp.issubdtype(scalar.dtype, jnp.integer):
            raise TypeError(
                f"offsets.{name} must be an int or an integer array of shape "
                f"{' or '.join(map(str, shapes))}, got dtype "
                f"{scalar.dtype}, shape {tuple(scalar.shape)}"
            )
        if is_host(scalar) and scalar.size:
            known[name], least = int(scalar.max()), int(scalar.min())
            most = MOST_POSITION if is_position else INT32_MAX
            if least < 0:
                raise ValueError(f"offsets.{name} must be >= 0, got {least}")
            if known[name] > most:
                raise ValueError(f"offsets.{name} must be in [0, {most}], got {known[name]}")
    _heads_fit(known, batch, heads)
    return value


def _heads_fit(known: dict[str, int], batch: int, heads: int) -> None:
    """Check that the call's heads are among the global ones, and that uint32 can number them."""
    if "num_heads" not in known:
        return
    first = known.get("head", 0)
    if first + heads > known["num_heads"]:
        raise ValueError(
            f"offsets.num_heads must be at least offsets.head and the query heads of the call "
            f"together, {first} + {heads}, got {known['num_heads']}; pass the number of query "
            "heads of the whole problem"
        )
    if export.is_symbolic_dim(batch):
        return
    pairs = (known.get("batch", 0) + batch) * known["num_heads"]
    if pairs > 2**32:
        raise ValueError(
            "offsets.batch and the batch of the call together, times offsets.num_heads, must be at "
            f"most {2**32}, got {pairs}: random bits number them in 32 bits"
        )
