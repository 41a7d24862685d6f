"""The division of rows and columns of the scores into blocks.

All blocks of an axis have the same size. The last one ends at the end of the axis and may overlap
its neighbour, so nothing is padded. Overlapped elements count once, in the earlier block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.options import RANDOM_BLOCK
from jax_memeff._call.pages import INVARIANT_COLUMNS


class Blocks(NamedTuple):
    """The division of one axis into blocks."""

    length: int
    size: int

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    @property
    def overlap(self) -> bool:
        return self.length % self.size != 0

    def start(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The start of a block, and its first element not counted by an earlier block; int32."""
        first = index.astype(jnp.int32) * self.size
        return jnp.minimum(first, self.length - self.size), first


def _cut(length: int, longest: int) -> Blocks:
    """Blocks of equal size; if there are several, a multiple of the block size of random bits."""
    count = -(-length // longest)
    if count <= 1:
        return Blocks(length, length)
    size = -(-length // (RANDOM_BLOCK * count)) * RANDOM_BLOCK
    return Blocks(length, min(size, length))


def blocks(operands: Operands, longest: int) -> tuple[Blocks, Blocks]:
    """The blocks of rows and columns."""
    rows, columns = operands.query.shape[1], operands.columns
    if operands.pages is not None and operands.pages.is_invariant:
        # XLA's order of summation depends on a product's shape, so each row is a separate product.
        return Blocks(rows, 1), Blocks(columns, INVARIANT_COLUMNS)
    return _cut(rows, longest), _cut(columns, longest)
