"""Block masks: whether a mask makes none, some or all elements of each tile of scores valid.

Segment ids are compared by the range of ids in a tile, windows by the corners of a tile. A boolean
array is read once. A mask function is evaluated on the bounds (``bounds.py``) of parts of a tile,
which are single elements if there are few scores. No array of the size of the scores is stored, and
no loop waits for the device: on a GPU a loop whose end depends on its data costs 0.2 ms.

``Mask.blocks`` stores the block mask of a call (:func:`with_blocks`) for others to reuse.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call import values
from jax_memeff._call.mask import bounds, expression
from jax_memeff._call.mask.bounds import Captured
from jax_memeff._call.mask.conditions import AnyMask, Conditions
from jax_memeff._call.mask.ranges import Range
from jax_memeff._call.offsets import Offsets, Position
from jax_memeff.codegen.functions.program import Program

NONE, ALL, SOME = 0, 1, 2
"""Whether none, all or some elements of a tile are valid. SOME is always safe."""

BLOCK = 64
"""Rows and columns of a tile of the block mask that ``Mask.blocks`` stores for many calls. The tile
sizes of most kernels are multiples of it, or else 16 or 32; :func:`of_tiles` converts to all of
them."""

_MOST_EVALUATIONS = 2**22
"""A mask function is evaluated on at most this many parts of tiles, which takes a few microseconds
on a GPU. If there are more tiles, it is evaluated on one part of each."""


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
    """The user's indices of the elements of a call. Sizes of 1 broadcast with B."""

    batch: jax.Array
    """int32[B], or [1] if the function does not depend on the batch index."""
    head: jax.Array
    """int32[N], or [1] if the function does not depend on the head."""
    first_row: jax.Array
    """int32[B or 1]: the global index of row 0."""
    first_column: jax.Array
    """int32[B or 1]"""

    @property
    def sizes(self) -> tuple[int, int]:
        """B and N of the block mask."""
        of_batch = self.batch, self.first_row, self.first_column
        # The batch size of an exported program may be symbolic.
        (batch,) = jnp.broadcast_shapes(*(x.shape for x in of_batch))
        return batch, self.head.size


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
    return levels_of(overlap, overlap & same)


def levels_of(some: jax.Array, every: jax.Array) -> jax.Array:
    """The levels of tiles of which some, or all, elements are valid."""
    return jnp.where(some, jnp.where(every, ALL, SOME), NONE).astype(jnp.uint8)


def _id_ranges(ids: jax.Array, tile: int) -> jax.Array:
    """[3, B, tiles]: smallest id, smallest non-negative id, and largest id of each tile."""
    count = -(-ids.shape[1] // tile)
    padding = (0, 0), (0, count * tile - ids.shape[1])
    tiles = jnp.pad(ids, padding, mode="edge").reshape(ids.shape[0], count, tile)
    natural = jnp.where(tiles < 0, np.iinfo(np.int32).max, tiles)
    return jnp.stack([tiles.min(2), natural.min(2), tiles.max(2)])


def of_booleans(mask: jax.Array, tiling: Tiling) -> jax.Array:
    """[B or 1, N or 1, query tiles or 1, key tiles or 1]."""
    valid, invalid = np.uint8(1), np.uint8(2)
    seen = jnp.where(mask, valid, invalid)
    for axis, size in zip((2, 3), tiling.tile, strict=True):
        seen = _any_bits(seen, axis, size)
    return levels_of((seen & valid) > 0, (seen & invalid) == 0)


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


def of_windows(mask: Conditions, position: Position | None, tiling: Tiling) -> list[jax.Array]:
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
        least = (first_column[None, :] - last_row[:, None])[None, None] + shift
        most = (last_column[None, :] - first_row[:, None])[None, None] + shift
        some, every = jnp.bool_(True), jnp.bool_(True)
        if window.left is not None:
            bound = -_of_batch(window.left)
            some, every = some & (most >= bound), every & (least >= bound)
        if window.right is not None:
            bound = _of_batch(window.right)
            some, every = some & (least <= bound), every & (most <= bound)
        found.append(levels_of(some, every))
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
        reached: bool, broadcasts to the result; the other tiles are NONE.
    """
    found = _of_parts(program, indices, captured, tiling)
    return found if reached is None else jnp.where(reached, found, NONE).astype(jnp.uint8)


def _of_parts(
    program: Program, indices: Indices, captured: Sequence[Captured], tiling: Tiling
) -> jax.Array:
    """The block mask of a function, from the bounds of the parts of each tile."""
    batch, heads = indices.sizes
    tiles = math.prod((values.likely_batch(batch), heads, *tiling.counts))
    part = _part(tiling.tile, _MOST_EVALUATIONS // max(tiles, 1))

    def of_batch(x: jax.Array) -> jax.Array:
        return x.reshape(-1, 1, 1, 1, 1, 1)

    def positions(axis: int, first: jax.Array) -> Range:
        own, tile, size = part[axis], tiling.tile[axis], tiling.sizes[axis]
        begin = jnp.arange(tiling.counts[axis] * tile // own, dtype=jnp.int32) * own
        # The last tile is clipped to the end of the axis, so its last element counts several times.
        low, high = (jnp.minimum(x, size - 1) for x in (begin, begin + (own - 1)))
        shape = [1] * 6
        shape[2 + axis], shape[4 + axis] = -1, tile // own
        low, high = (of_batch(first) + x.reshape(shape) for x in (low, high))
        return Range.exact(low) if own == 1 else Range(low, high, own - 1)

    inputs = {
        "batch": Range.exact(of_batch(indices.batch)),
        "head": Range.exact(indices.head.reshape(1, -1, 1, 1, 1, 1)),
        "query": positions(0, indices.first_row),
        "key": positions(1, indices.first_column),
    }
    captured = [
        own if own.index is None else own._replace(index=of_batch(own.index)) for own in captured
    ]
    found = bounds.evaluate(program, inputs, captured)
    valid, invalid = np.uint8(1), np.uint8(2)
    bits = jnp.where(found.high, valid, 0) | jnp.where(found.low, 0, invalid)
    parts = (size // own for size, own in zip(tiling.tile, part, strict=True))
    shape = *indices.sizes, *tiling.counts, *parts
    bits = jnp.broadcast_to(bits.astype(jnp.uint8), shape)
    bits = lax.reduce(bits, np.uint8(0), lax.bitwise_or, (4, 5))
    return levels_of((bits & valid) > 0, (bits & invalid) == 0)


def _part(tile: tuple[int, int], most: int) -> tuple[int, int]:
    """Rows and columns of the smallest parts that divide a tile into at most ``most`` parts.

    >>> _part((128, 80), 10**6), _part((128, 80), 1280), _part((128, 80), 40), _part((128, 80), 1)
    ((1, 1), (4, 5), (16, 20), (128, 80))
    """
    part = tile
    while part != (1, 1):
        rows, columns = part
        smaller = (_divided(rows), columns) if rows >= columns else (rows, _divided(columns))
        if math.prod(tile) // math.prod(smaller) > most:
            break
        part = smaller
    return part


def _divided(size: int) -> int:
    return size // 2 if size % 2 == 0 else 1


def with_blocks(
    mask: AnyMask, scores_shape: tuple[int, int, int, int], offsets: Offsets | None
) -> AnyMask:
    """The mask of a call of (B, N, T, S) with its block mask.

    Static windows and lengths remain conditions of their own. One function combines
    ``Mask.function``, lists of blocks, traced windows, ``|`` and ``~``.
    """
    batch, _, rows, columns = scores_shape
    values.require_static_sequences(scores=(rows, columns))
    canonical = mask.canonical(batch, rows, columns)
    frame = expression.Frame.of(canonical, (rows, columns), offsets)
    if canonical.traced_windows:
        # They become part of the function, so that lengths that `&` adds later do not shift them.
        negated = type(mask)(excluded=(type(mask)(traced_windows=canonical.traced_windows),))
        others = dataclasses.replace(canonical, traced_windows=())
        canonical = dataclasses.replace(others, excluded=(*others.excluded, negated))
    canonical = expression.compiled(canonical, frame)
    tiling = Tiling((rows, columns), (BLOCK, BLOCK))
    levels = of_mask(canonical, scores_shape, offsets, tiling)
    if levels is None:
        return mask
    levels = jnp.broadcast_to(levels, (*levels.shape[:2], *tiling.counts))
    return dataclasses.replace(
        canonical,
        query_lengths=mask.query_lengths,
        key_lengths=mask.key_lengths,
        more_lengths=mask.more_lengths,
        captured=tuple(x[0] for x in canonical.captured),
        block_masks=(levels,),
        beyond_block_masks=False,
    )


def of_mask(
    mask: Conditions,
    scores_shape: tuple[int, int, int, int],
    offsets: Offsets | None,
    tiling: Tiling,
) -> jax.Array | None:
    """The block mask of the arrays, functions and traced windows of a mask.

    Args:
        mask: canonical, with at most one function; static windows and lengths do not count.
        scores_shape: (B, N, T, S).
        offsets: those of the call.
        tiling: the tiles.

    Returns:
        uint8 [B or 1, N or 1, query tiles or 1, key tiles or 1], or None if there are no such
        conditions.
    """
    position = None if offsets is None else offsets.position()
    found = [of_ids(*pair, tiling) for pair in mask.segment_ids]
    found += [of_booleans(array, tiling) for array in mask.booleans]
    found += [_of_function(mask, scores_shape, offsets, tiling) for _ in mask.functions]
    found += of_windows(mask, position, tiling)
    return conjunction(found) if found else None


def _of_function(
    mask: Conditions,
    scores_shape: tuple[int, int, int, int],
    offsets: Offsets | None,
    tiling: Tiling,
) -> jax.Array:
    offsets = Offsets() if offsets is None else offsets
    depends = mask.functions[0].dependence(mask.functions[0].results[0])
    per_batch = "batch" in depends or any(x.ndim > 0 for x in offsets.position())
    firsts = [x.reshape(-1) for x in offsets.position()]
    batch, head = (
        jnp.asarray(first).astype(jnp.int32) + lax.iota(jnp.int32, size if is_read else 1)
        for first, size, is_read in (
            (offsets.batch, scores_shape[0], per_batch),
            (offsets.head, scores_shape[1], "head" in depends),
        )
    )
    captured = [Captured(x, None) for x in mask.captured]
    indices = Indices(batch, head, *firsts)
    return of_function(mask.functions[0], indices, captured, tiling)


def of_tiles(levels: jax.Array, tiling: Tiling) -> jax.Array:
    """The block mask for other tiles, from the levels of the blocks that each tile touches.

    >>> blocks = jnp.array([[[[NONE, NONE, NONE, ALL, ALL]]]])
    >>> of_tiles(blocks, Tiling((64, 300), (64, 128)))[0, 0].tolist()
    [[0, 2, 1]]
    >>> of_tiles(blocks, Tiling((64, 300), (32, 96)))[0, 0].tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    valid, invalid = np.uint8(1), np.uint8(2)
    bits = jnp.where(levels == NONE, invalid, jnp.where(levels == ALL, valid, valid | invalid))
    for axis, (size, tile, count) in enumerate(
        zip(tiling.sizes, tiling.tile, tiling.counts, strict=True), 2
    ):
        first = np.arange(count) * tile // BLOCK
        last = (np.minimum(np.arange(1, count + 1) * tile, size) - 1) // BLOCK
        touched = jnp.take(bits, first, axis)
        for offset in range(1, int(np.max(last - first, initial=0)) + 1):
            touched |= jnp.take(bits, np.minimum(first + offset, last), axis)
        bits = touched
    some = jnp.where((bits & invalid) > 0, SOME, ALL)
    return jnp.where((bits & valid) > 0, some, NONE).astype(jnp.uint8)
