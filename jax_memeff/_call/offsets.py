"""Where the arrays of one call stand in a larger attention problem."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Position(NamedTuple):
    """The place of local row 0 and column 0 in the global score matrix."""

    query: jax.Array
    """int32[]"""
    key: jax.Array
    """int32[]"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offsets:
    """The global position of a shard, a ring step or a chunk.

    A call that is given the offsets of its arrays computes exactly its part of the unsharded
    answer: windows count from the global rows and columns, and the dropout bits are those of the
    global element. Every field is an ``int`` or an integer scalar array, which may be traced.

    Args:
        batch: global index of the first batch element.
        head: global index of the first query head.
        num_heads: global number of query heads; None is the number of heads of the call.
        query: global index of the first query row; with dropout in the kernels a multiple of 16.
        key: global index of the first key column; likewise.

    >>> Offsets(query=512).position()
    Position(query=Array(512, dtype=int32), key=Array(0, dtype=int32))
    """

    batch: int | jax.Array = 0
    head: int | jax.Array = 0
    num_heads: int | jax.Array | None = None
    query: int | jax.Array = 0
    key: int | jax.Array = 0

    def position(self) -> Position:
        """The row and column part, int32."""
        return Position(jnp.asarray(self.query, jnp.int32), jnp.asarray(self.key, jnp.int32))
