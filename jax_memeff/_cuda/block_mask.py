"""Block masks: whether segment ids and boolean arrays make none, some or all of a tile valid.

ffi/include/memeff/mask/block_mask.cuh has the layout that kernels read. Block masks are small, and
XLA computes them before a kernel: for ids from the range of each tile, for a boolean array from
its elements, each read once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call.divisors import broadcastable, conjunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import FunctionState, captured_name
from jax_memeff._call.options import Divisors
from jax_memeff._cuda import traced_windows
from jax_memeff._functions.evaluate import evaluate
from jax_memeff.codegen.launch import BlockMask

_NONE, _ALL, _SOME = 0, 1, 2
"""Whether none, all or some elements of a tile are valid. For ids, "some" may include none."""

_LINE_BYTES = 8
"""Alignment of a row of blocks, which has two int32 and then one byte for each tile."""


def lines(
    mask: Mask,
    functions: FunctionState | None,
    position: Position | None,
    tile: BlockMask,
    scores: tuple[int, int, int, int],
    divisors: Divisors,
) -> jax.Array:
    """The block mask of ids and boolean arrays: uint8 [B or 1, N or 1, rows of blocks, bytes].

    Args:
        mask: has ids, boolean arrays or a function; its other conditions are ignored.
        functions: the user's indices, for a function.
        position: the global index of row 0 and column 0, for a function.
        tile: the size of the tiles, and whether rows of blocks belong to queries or keys.
        scores: (B, N, T, S).
        divisors: those of boolean arrays with fewer batch indices.

    >>> ids = jnp.array([[0, 0, 0, 1, 1]])
    >>> mask, tile = Mask.segments(ids, ids), BlockMask("queries", 2, 2)
    >>> found = lines(mask, None, None, tile, (1, 1, 5, 5), Divisors())
    >>> found[0, 0, :, :4].astype(int)  # the first tile with a valid element
    Array([[0, 0, 0, 0],
           [0, 0, 0, 0],
           [1, 0, 0, 0]], dtype=int32)
    >>> found[0, 0, :, 8:11].astype(int)
    Array([[1, 2, 0],
           [2, 2, 2],
           [0, 2, 1]], dtype=int32)
    """
    batch, _, length, key_length = scores
    found = [_of_ids(*pair, tile) for pair in mask.segment_ids]
    if mask.booleans:
        boolean, divisor = conjunction(mask, divisors, batch)
        found.append(broadcastable(_of_booleans(boolean, tile), divisor, batch))
    if mask.functions:
        assert functions is not None
        sizes = (length, key_length)
        found.append(_of_function(mask, functions, position, tile, sizes, divisors))
    found += _of_windows(mask, position, tile, (length, key_length))
    valid = functools.reduce(lambda a, b: jnp.where((a > 0) & (b > 0), jnp.maximum(a, b), 0), found)
    shape = -(-length // tile.query), -(-key_length // tile.key)
    valid = jnp.broadcast_to(valid, (*valid.shape[:2], *shape))
    return _with_ranges(valid if tile.lines == "queries" else valid.swapaxes(2, 3))


def _of_ids(query_ids: jax.Array, key_ids: jax.Array, tile: BlockMask) -> jax.Array:
    """[B, 1, query tiles, key tiles]. Tiles with disjoint ranges of ids have no valid element."""
    rows = _id_ranges(query_ids, tile.query)[:, :, None, :, None]
    columns = _id_ranges(key_ids, tile.key)[:, :, None, None, :]
    overlap = (rows[1] <= columns[2]) & (columns[1] <= rows[2])
    same = (rows[0] == rows[2]) & (columns[0] == columns[2])
    return jnp.where(overlap, jnp.where(same, _ALL, _SOME), _NONE).astype(jnp.uint8)


def _id_ranges(ids: jax.Array, tile: int) -> jax.Array:
    """[3, B, tiles]: smallest id, smallest non-negative id, and largest id of each tile."""
    count = -(-ids.shape[1] // tile)
    padding = (0, 0), (0, count * tile - ids.shape[1])
    tiles = jnp.pad(ids, padding, mode="edge").reshape(-1, count, tile)
    natural = jnp.where(tiles < 0, np.iinfo(np.int32).max, tiles)
    return jnp.stack([tiles.min(2), natural.min(2), tiles.max(2)])


def _of_booleans(mask: jax.Array, tile: BlockMask) -> jax.Array:
    """[B or 1, N or 1, query tiles or 1, key tiles or 1]."""
    valid, invalid = np.uint8(1), np.uint8(2)
    seen = jnp.where(mask, valid, invalid)
    for axis, size in ((2, tile.query), (3, tile.key)):
        seen = _any_bits(seen, axis, size)
    some = jnp.where(seen & invalid, np.uint8(_SOME), np.uint8(_ALL))
    return jnp.where(seen & valid, some, np.uint8(_NONE))


def _of_windows(
    mask: Mask, position: Position | None, tile: BlockMask, sizes: tuple[int, int]
) -> list[jax.Array]:
    """[B or 1, 1, query tiles, key tiles] for each traced window; others are intervals."""
    return [
        jnp.where(some, jnp.where(every, _ALL, _SOME), _NONE).astype(jnp.uint8)
        for some, every in traced_windows.tiles(mask, position, sizes, (tile.query, tile.key))
    ]


def _of_function(
    mask: Mask,
    state: FunctionState,
    position: Position | None,
    tile: BlockMask,
    sizes: tuple[int, int],
    divisors: Divisors,
) -> jax.Array:
    """[B or 1, N or 1, query tiles, key tiles]; nothing of the size of the scores is stored."""
    (program,) = mask.functions
    depends = program.dependence(program.results[0])
    own = position is not None and any(x.ndim for x in position)
    per_batch = "batch" in depends or own or any(x.shape[0] != 1 for x in mask.captured)
    batch = state.batch_index if per_batch else state.batch_index[:1]
    heads = state.head_index if "head" in depends else state.head_index[:1]
    rows, columns = (
        # The last tile ends at the end of the axis: its last element counts several times.
        jnp.minimum(jnp.arange(-(-size // own) * own, dtype=jnp.int32), size - 1).reshape(-1, own)
        for size, own in zip(sizes, (tile.query, tile.key), strict=True)
    )
    firsts = (0, 0) if position is None else position
    first_row, first_column = (jnp.broadcast_to(x, batch.shape) for x in firsts)
    arrays = [
        broadcastable(x, divisors[f"mask.{captured_name(index)}"], batch.shape[0])
        for index, x in enumerate(mask.captured)
    ]
    axes = tuple(0 if x.shape[0] != 1 else None for x in arrays)

    def seen(index: jax.Array, row: jax.Array, column: jax.Array, *arrays: jax.Array) -> jax.Array:
        """[N or 1, query tiles, key tiles], a bit for valid and one for invalid elements."""
        valid = evaluate(
            program,
            None,
            index,
            heads[:, None, None, None, None],
            (rows + row)[:, None, :, None],
            (columns + column)[None, :, None, :],
            [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)],
        )
        shape = (heads.size, rows.shape[0], columns.shape[0], tile.query, tile.key)
        bits = jnp.where(jnp.broadcast_to(valid, shape), np.uint8(1), np.uint8(2))
        return lax.reduce(bits, np.uint8(0), lax.bitwise_or, (3, 4))

    bits = jax.vmap(seen, (0, 0, 0, *axes))(batch, first_row, first_column, *arrays)
    some = jnp.where(bits & 2, np.uint8(_SOME), np.uint8(_ALL))
    return jnp.where(bits & 1, some, np.uint8(_NONE))


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


def _with_ranges(valid: jax.Array) -> jax.Array:
    """Rows of blocks, each preceded by the range of its tiles with a valid element."""
    count = valid.shape[3]
    index = jnp.arange(count, dtype=jnp.int32)
    begin = jnp.where(valid > 0, index, count).min(3)
    end = jnp.where(valid > 0, index + 1, 0).max(3)
    ranges = lax.bitcast_convert_type(jnp.stack([begin, end], 3), jnp.uint8)
    # At least one more byte, because kernels read one after the last tile.
    padding = (count // _LINE_BYTES + 1) * _LINE_BYTES - count
    tiles = jnp.pad(valid, ((0, 0),) * 3 + ((0, padding),))
    return jnp.concatenate([ranges.reshape(*valid.shape[:3], _LINE_BYTES), tiles], 3)
