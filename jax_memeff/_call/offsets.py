"""The position of a call's arrays in a larger attention problem."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call.values import clipped

Index = int | np.integer | np.ndarray | jax.Array

MOST_POSITION = 2**29
"""The largest global index of a first row or column.

A call has at most 2**28 rows and columns. Up to this offset, sums of a row, a column, a window
bound and the shift of the diagonal fit int32, in the kernels too.
"""


class Position(NamedTuple):
    """The global indices of local row 0 and column 0.

    They are the same for all batch indices, or one for each.
    """

    query: jax.Array
    """int32[] or int32[B]"""
    key: jax.Array
    """int32[] or int32[B]"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offsets:
    """The global position of a shard, a ring step or a chunk.

    A call with the offsets of its arrays computes exactly its part of the unsharded result: windows
    use global rows and columns, and the dropout bits are those of the global element.
    Every field is an ``int`` or an integer scalar array, which may be traced;
    ``query`` and ``key`` may also be integer arrays ``[B]``, one for each batch index, or for each
    of the packed sequences: one call can have chunks of several prompts at different positions.

    Args:
        batch: global index of the first batch index.
        head: global index of the first query head.
        num_heads: global number of query heads, at least ``head`` and the heads of the call
            together; None is the number of heads of the call.
        query: global index of the first query row, at most 2**29; with dropout in the kernels a
            multiple of 16. Values of device arrays are clamped to [0, 2**29].
        key: global index of the first key column; likewise.

    Attention functions raise ValueError for Python and NumPy values out of range.

    >>> Offsets(query=512).position()
    Position(query=Array(512, dtype=int32), key=Array(0, dtype=int32))
    """

    batch: Index = 0
    head: Index = 0
    num_heads: Index | None = None
    query: Index = 0
    key: Index = 0

    def position(self) -> Position:
        """The row and column part, int32."""

        def index(value: Any) -> jax.Array:
            value = value if hasattr(value, "dtype") else np.asarray(value)
            return jnp.asarray(clipped(value, 0, MOST_POSITION))

        return Position(index(self.query), index(self.key))
