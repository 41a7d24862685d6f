"""Which tiles of scores hold a valid element, where segment ids or boolean arrays mask them.

What the kernels read is described in ffi/include/memeff/mask/block_mask.cuh. The maps are small and
computed by XLA before a kernel: of ids from those of each tile, of a boolean array from its own
elements, each read once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call.divisors import broadcastable, conjunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.options import Divisors
from jax_memeff.codegen.spec import BlockMask

_NONE, _ALL, _SOME = 0, 1, 2
"""Of the elements of a tile are valid. Segment ids may say "some" of a tile without any."""

_LINE_BYTES = 8
"""Lines of a map begin at multiples of it, with two int32 and then a byte for each tile."""


def lines(
    mask: Mask,
    tile: BlockMask,
    scores: tuple[int, int, int, int],
    divisors: Divisors,
) -> jax.Array:
    """The map of segment ids and boolean arrays: uint8 [B or 1, N or 1, lines, bytes of a line].

    Args:
        mask: has ids or boolean arrays; what else it has is not looked at.
        tile: the size of the tiles, and what lines are tiles of.
        scores: (B, N, T, S).
        divisors: how the batch shares boolean arrays of fewer elements.

    >>> ids = jnp.array([[0, 0, 0, 1, 1]])
    >>> found = lines(Mask.segments(ids, ids), BlockMask("queries", 2, 2), (1, 1, 5, 5), Divisors())
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
    valid = functools.reduce(lambda a, b: jnp.where((a > 0) & (b > 0), jnp.maximum(a, b), 0), found)
    shape = -(-length // tile.query), -(-key_length // tile.key)
    valid = jnp.broadcast_to(valid, (*valid.shape[:2], *shape))
    return _with_ranges(valid if tile.lines == "queries" else valid.swapaxes(2, 3))


def _of_ids(query_ids: jax.Array, key_ids: jax.Array, tile: BlockMask) -> jax.Array:
    """[B, 1, query tiles, key tiles]. Tiles whose ranges of ids do not meet hold nothing valid."""
    rows = _id_ranges(query_ids, tile.query)[:, :, None, :, None]
    columns = _id_ranges(key_ids, tile.key)[:, :, None, None, :]
    meets = (rows[1] <= columns[2]) & (columns[1] <= rows[2])
    same = (rows[0] == rows[2]) & (columns[0] == columns[2])
    return jnp.where(meets, jnp.where(same, _ALL, _SOME), _NONE).astype(jnp.uint8)


def _id_ranges(ids: jax.Array, tile: int) -> jax.Array:
    """[3, B, tiles]: smallest id, smallest id that is not negative, and largest id of each tile."""
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


def _any_bits(bits: jax.Array, axis: int, tile: int) -> jax.Array:
    """The bits that any element of a tile of ``axis`` has; a broadcast axis stays as it is."""
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
    """Lines of tiles, each behind the range that those with a valid element lie in."""
    count = valid.shape[3]
    index = jnp.arange(count, dtype=jnp.int32)
    begin = jnp.where(valid > 0, index, count).min(3)
    end = jnp.where(valid > 0, index + 1, 0).max(3)
    ranges = lax.bitcast_convert_type(jnp.stack([begin, end], 3), jnp.uint8)
    # At least one byte more, as the kernels ask for one behind the last tile.
    padding = (count // _LINE_BYTES + 1) * _LINE_BYTES - count
    tiles = jnp.pad(valid, ((0, 0),) * 3 + ((0, padding),))
    return jnp.concatenate([ranges.reshape(*valid.shape[:3], _LINE_BYTES), tiles], 3)
