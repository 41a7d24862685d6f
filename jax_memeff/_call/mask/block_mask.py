"""Block masks: whether a mask makes none, some or all elements of each tile of scores valid.

Segment ids are compared by the range of ids in a tile, windows by the corners of a tile. A boolean
array is read once. The bounds of a mask function (``bounds.py``) decide most tiles; only the
others are evaluated element by element. No array of the size of the scores is stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call.mask import bounds
from jax_memeff._call.mask.bounds import Captured
from jax_memeff._call.mask.ranges import Range
from jax_memeff._call.offsets import Position
from jax_memeff.codegen.functions.program import Program

if TYPE_CHECKING:
    from jax_memeff._call.mask.mask import Mask

NONE, ALL, SOME = 0, 1, 2
"""Whether none, all or some elements of a tile are valid. SOME is always safe."""

_ELEMENTS_AT_A_TIME = 2**24
"""Elements evaluated at once. For smaller problems bounds would cost more than they save."""

_MOST_UNDECIDED = 2**22
"""Undecided tiles whose elements are evaluated. The rest stay SOME, which is always safe."""


class Tiling(NamedTuple):
    """The division of the scores into tiles."""

    sizes: tuple[int, int]
    """T and S."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of tiles along the rows and along the columns."""
        rows, columns = (-(-size // own) for size, own in zip(self.sizes, self.tile, strict=True))
        return rows, columns


class Indices(NamedTuple):
    """The user's indices of the elements of a call."""

    batch: jax.Array
    """int32[B], or [1] if the function does not depend on the batch index."""
    head: jax.Array
    """int32[N] or [1], likewise."""
    first_row: jax.Array
    """int32[B or 1]: the global index of row 0."""
    first_column: jax.Array
    """int32[B or 1]"""


def conjunction(masks: Sequence[jax.Array]) -> jax.Array:
    """The block mask of the conjunction of masks.

    >>> conjunction([jnp.array([0, 1, 1, 2]), jnp.array([1, 1, 2, 2])]).tolist()
    [0, 1, 2, 2]
    """
    return functools.reduce(
        lambda a, b: jnp.where((a > 0) & (b > 0), jnp.maximum(a, b), NONE), masks
    )


def of_ids(query_ids: jax.Array, key_ids: jax.Array, tiling: Tiling) -> jax.Array:
    """[B, 1, query tiles, key tiles]. Tiles with disjoint ranges of ids have no valid element."""
    rows = _id_ranges(query_ids, tiling.tile[0])[:, :, None, :, None]
    columns = _id_ranges(key_ids, tiling.tile[1])[:, :, None, None, :]
    overlap = (rows[1] <= columns[2]) & (columns[1] <= rows[2])
    same = (rows[0] == rows[2]) & (columns[0] == columns[2])
    return _levels(overlap, overlap & same)


def _levels(some: jax.Array, every: jax.Array) -> jax.Array:
    return jnp.where(some, jnp.where(every, ALL, SOME), NONE).astype(jnp.uint8)


def _id_ranges(ids: jax.Array, tile: int) -> jax.Array:
    """[3, B, tiles]: smallest id, smallest non-negative id, and largest id of each tile."""
    count = -(-ids.shape[1] // tile)
    padding = (0, 0), (0, count * tile - ids.shape[1])
    tiles = jnp.pad(ids, padding, mode="edge").reshape(-1, count, tile)
    natural = jnp.where(tiles < 0, np.iinfo(np.int32).max, tiles)
    return jnp.stack([tiles.min(2), natural.min(2), tiles.max(2)])


def of_booleans(mask: jax.Array, tiling: Tiling) -> jax.Array:
    """[B or 1, N or 1, query tiles or 1, key tiles or 1]."""
    valid, invalid = np.uint8(1), np.uint8(2)
    seen = jnp.where(mask, valid, invalid)
    for axis, size in zip((2, 3), tiling.tile, strict=True):
        seen = _any_bits(seen, axis, size)
    return _levels((seen & valid) > 0, (seen & invalid) == 0)


def _any_bits(bits: jax.Array, axis: int, tile: int) -> jax.Array:
    """The OR of the bits of each tile of ``axis``; a broadcast axis is unchanged."""
    size = bits.shape[axis]
    if size == 1:
        return bits
    count = -(-size // tile)
    padding = [(0, 0)] * bits.ndim
    padding[axis] = (0, count * tile - size)
    shape = *bits.shape[:axis], count, tile, *bits.shape[axis + 1 :]
    tiles = jnp.pad(bits, padding).reshape(shape)
    return lax.reduce(tiles, np.uint8(0), lax.bitwise_or, (axis + 1,))


def of_windows(mask: Mask, position: Position | None, tiling: Tiling) -> list[jax.Array]:
    """[B or 1, 1, query tiles, key tiles] for each traced window of a mask."""
    first_row, first_column = (
        jnp.arange(count, dtype=jnp.int32) * own
        for count, own in zip(tiling.counts, tiling.tile, strict=True)
    )
    last_row = jnp.minimum(first_row + tiling.tile[0], tiling.sizes[0]) - 1
    last_column = jnp.minimum(first_column + tiling.tile[1], tiling.sizes[1]) - 1
    found = []
    for window in mask.traced_windows:
        shift = jnp.int32(0)
        if position is not None:
            shift += position.key - position.query
        if window.alignment == "bottom_right":
            lengths = (mask.query_lengths, mask.key_lengths)
            query, key = (
                size if own is None else own
                for size, own in zip(tiling.sizes, lengths, strict=True)
            )
            shift -= key - query
        shift = _of_batch(shift)
        least = first_column - last_row[:, None] + shift
        most = last_column - first_row[:, None] + shift
        some, every = jnp.bool_(True), jnp.bool_(True)
        if window.left is not None:
            bound = -_of_batch(window.left)
            some, every = some & (most >= bound), every & (least >= bound)
        if window.right is not None:
            bound = _of_batch(window.right)
            some, every = some & (least <= bound), every & (most <= bound)
        found.append(_levels(some, every))
    return found


def _of_batch(x: jax.Array) -> jax.Array:
    """A number, or one for each batch index, [B or 1, 1, 1, 1]."""
    return x.reshape(-1, 1, 1, 1)


def of_function(
    program: Program,
    indices: Indices,
    captured: Sequence[Captured],
    tiling: Tiling,
    reached: jax.Array | None = None,
) -> jax.Array:
    """[B or 1, N or 1, query tiles, key tiles].

    Args:
        program: a mask function.
        indices: the user's indices of the elements.
        captured: the arrays of the program, with ``index`` int32[B] or None.
        tiling: the tiles.
        reached: bool, broadcasts to the result: other tiles are NONE and are not evaluated.
    """
    function = _Function(program, indices, captured, tiling)
    if function.tiles * math.prod(tiling.tile) <= _ELEMENTS_AT_A_TIME:
        found = function.of_elements(jnp.arange(function.tiles, dtype=jnp.int32))
        found = found.reshape(function.shape)
        return found if reached is None else jnp.where(reached, found, NONE).astype(jnp.uint8)
    return function.by_bounds(reached)


class _Function(NamedTuple):
    """A mask function on the tiles of a call; tile numbers are row-major in ``shape``."""

    program: Program
    indices: Indices
    captured: Sequence[Captured]
    tiling: Tiling

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.indices.batch.size, self.indices.head.size, *self.tiling.counts

    @property
    def tiles(self) -> int:
        return math.prod(self.shape)

    def by_bounds(self, reached: jax.Array | None) -> jax.Array:
        """The block mask; only the elements of undecided tiles are evaluated."""
        inputs = {
            "batch": Range.exact(_of_batch(self.indices.batch)),
            "head": Range.exact(self.indices.head[:, None, None]),
            "query": self._positions(0),
            "key": self._positions(1),
        }
        captured = [
            own if own.index is None else own._replace(index=_of_batch(own.index))
            for own in self.captured
        ]
        found = bounds.evaluate(self.program, inputs, captured)
        some = found.high if reached is None else found.high & reached
        levels = jnp.broadcast_to(_levels(some, found.low), self.shape).reshape(-1)
        undecided = levels == SOME
        at_a_time = max(_ELEMENTS_AT_A_TIME // math.prod(self.tiling.tile), 1)
        most = min(self.tiles, _MOST_UNDECIDED)
        (places,) = jnp.nonzero(undecided, size=most, fill_value=self.tiles)
        places = jnp.pad(places.astype(jnp.int32), (0, at_a_time), constant_values=self.tiles)

        def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return state[0] < jnp.minimum(jnp.sum(undecided, dtype=jnp.int32), most)

        def evaluated(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, levels = state
            own = lax.dynamic_slice_in_dim(places, first, at_a_time)
            found = self.of_elements(jnp.minimum(own, self.tiles - 1))
            return first + at_a_time, levels.at[own].set(found, mode="drop")

        _, levels = lax.while_loop(more, evaluated, (jnp.int32(0), levels))
        return levels.reshape(self.shape)

    def _positions(self, axis: int) -> Range:
        """The global rows (axis 0) or columns (axis 1) of each tile."""
        tile, size = self.tiling.tile[axis], self.tiling.sizes[axis]
        begin = jnp.arange(self.tiling.counts[axis], dtype=jnp.int32) * tile
        shape = (-1, 1) if axis == 0 else (1, -1)
        first = _of_batch(self.indices.first_column if axis else self.indices.first_row)
        low, high = (first + x.reshape(shape) for x in (begin, jnp.minimum(begin + tile, size) - 1))
        return Range(low, high, tile - 1)

    def of_elements(self, tiles: jax.Array) -> jax.Array:
        """The levels uint8[n] of the tiles with these numbers, int32[n], by evaluating elements."""
        batch, head, row, column = jnp.unravel_index(tiles, self.shape)
        rows, columns = (
            # The last tile is cut at the end of the axis: its last element counts several times.
            jnp.minimum(place[:, None] * own + jnp.arange(own, dtype=jnp.int32), size - 1)
            for place, own, size in zip(
                (row, column), self.tiling.tile, self.tiling.sizes, strict=True
            )
        )
        first_row, first_column = (
            x[batch % x.size][:, None] for x in (self.indices.first_row, self.indices.first_column)
        )
        inputs = {
            "batch": self.indices.batch[batch][:, None, None],
            "head": self.indices.head[head][:, None, None],
            "query": (rows + first_row)[:, :, None],
            "key": (columns + first_column)[:, None, :],
        }
        captured = [
            own if own.index is None else own._replace(index=own.index[batch][:, None, None])
            for own in self.captured
        ]
        exact = {name: Range.exact(x.astype(jnp.int32)) for name, x in inputs.items()}
        valid = bounds.evaluate(self.program, exact, captured).low
        valid = jnp.broadcast_to(valid, (tiles.size, *self.tiling.tile))
        bits = lax.reduce(
            jnp.where(valid, np.uint8(1), np.uint8(2)), np.uint8(0), lax.bitwise_or, (1, 2)
        )
        return _levels((bits & 1) > 0, (bits & 2) == 0)
