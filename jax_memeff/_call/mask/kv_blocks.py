"""Block-sparse attention: a list of the KV blocks that each Q block attends to."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_memeff._call import values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KvBlocks(values.HoldsArrays):
    """The lists as the user passes them."""

    indices: jax.Array
    """[..., Q blocks, n], integers of rank 2 to 4."""
    counts: jax.Array | None
    """[..., Q blocks], integers of one rank less; None if all n indices are valid."""
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})
    """Rows of a Q block and columns of a KV block."""

    @staticmethod
    def of(indices: ArrayLike, counts: ArrayLike | None, block_size: Any) -> KvBlocks:
        """Check the arguments, except for the sizes that only a call determines.

        Raises:
            TypeError: an array does not have an integer dtype, or a block size is not an integer.
            ValueError: ranks or sizes do not match, or a block size is below 1 or beyond int32.
        """
        sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        if len(sizes) != 2:
            raise ValueError(
                f"block_size must be one number, or (rows, columns), got {block_size!r:.80}"
            )
        rows, columns = (_size(size) for size in sizes)
        array = values.integers("KV block indices", indices)
        if not 2 <= array.ndim <= 4:
            raise ValueError(
                "KV block indices must have shape [B, N, Q blocks, n], where B and N may be 1 or "
                f"absent, got {tuple(array.shape)}"
            )
        numbers = None if counts is None else values.integers("KV block counts", counts)
        if numbers is not None and numbers.shape != array.shape[:-1]:
            raise ValueError(
                f"KV block counts must have one number for each list, shape "
                f"{tuple(array.shape[:-1])}, got {tuple(numbers.shape)}"
            )
        return KvBlocks(array, numbers, (rows, columns))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the indices, left-padded with 1s to rank 4."""
        shape = self.indices.shape
        first, second, blocks, count = (1,) * (4 - len(shape)) + tuple(shape)
        return first, second, blocks, count

    def table(self, columns: int) -> BlockTable:
        """The lists as a table of all KV blocks of ``columns`` columns.

        Indices out of range are ignored, and repeated ones count once.

        >>> lists = KvBlocks.of(np.array([[1, 0], [2, 2], [-1, 7]]), np.array([1, 9, 2]), 64)
        >>> lists.table(192).listed[0, 0].astype(int)
        Array([[0, 1, 0],
               [0, 0, 1],
               [0, 0, 0]], dtype=int32)
        """
        batch, heads, blocks, count = self.shape
        key_blocks = -(-columns // self.block_size[1])
        indices = jnp.asarray(values.clipped(self.indices, -1, key_blocks)).reshape(self.shape)
        is_listed = (indices >= 0) & (indices < key_blocks)
        if self.counts is not None:
            counts = jnp.asarray(values.clipped(self.counts, 0, count)).reshape(self.shape[:3])
            is_listed &= lax.broadcasted_iota(jnp.int32, self.shape, 3) < counts[..., None]
        # An index beyond the table is dropped.
        indices = jnp.where(is_listed, indices, key_blocks)
        sharding = jax.typeof(indices).sharding
        if any(sharding.spec):
            # Every device reads the table with the indices of the whole call.
            indices = jax.sharding.reshard(indices, NamedSharding(sharding.mesh, PartitionSpec()))
        place = jnp.ogrid[:batch, :heads, :blocks]
        table = jnp.zeros((batch, heads, blocks, key_blocks), bool)
        listed = table.at[*(x[..., None] for x in place), indices].set(True, mode="drop")
        return BlockTable(listed, self.block_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockTable:
    """Whether each KV block is listed for each Q block; canonical masks have tables."""

    listed: jax.Array
    """bool[1|B, 1|N, Q blocks, KV blocks]"""
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def holds(self, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """Whether the block of the element with these local indices, int32[], is listed."""
        blocks = (
            lax.div(jnp.asarray(x), jnp.asarray(size, jnp.int32))
            for x, size in zip((row, column), self.block_size, strict=True)
        )
        if not self.listed.size:  # JAX cannot index it, and the call has no element that reads it
            return jnp.bool_(False)
        place = (batch, head, *blocks)
        own = tuple(
            x if axis >= 2 or size != 1 else 0
            for axis, (x, size) in enumerate(zip(place, self.listed.shape, strict=True))
        )
        return self.listed.at[own].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _size(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"block_size must be static integers, got {size!r:.80}")
    if size < 1:
        raise ValueError(f"block_size must be at least 1, got {size}")
    if size > values.INT32_MAX:
        raise ValueError(f"block_size must be at most {values.INT32_MAX}, got {size}")
    return int(size)
