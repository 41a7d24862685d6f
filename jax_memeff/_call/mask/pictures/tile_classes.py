"""The class of each tile of scores: kernels skip it, compute it, or compute and test it.

The rules for windows and lengths repeat those of ``IntervalMask`` in
codegen/memeff/mask/interval.cuh, and a test compares the two. All other conditions come from
the block mask that kernels read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jax_memeff._call.mask.block_mask import ALL, NONE, SOME, Tiling
from jax_memeff._call.mask.computed_blocks import of_mask
from jax_memeff._call.offsets import Offsets

if TYPE_CHECKING:
    from jax_memeff._call.mask.mask import Mask

SKIPPED, FULL, PARTIAL = NONE, ALL, SOME
"""A skipped tile is never loaded. The elements of a full one are all valid, so a kernel tests none
of them; it tests each element of a partial one."""

_NO_BOUND = 2**30


def of_slice(
    mask: Mask,
    scores: tuple[int, int, int, int],
    tile: tuple[int, int],
    offsets: Offsets,
    batch: int,
    head: int,
) -> np.ndarray:
    """The class of each tile of one (batch, head) slice, uint8 [Q blocks, KV blocks].

    Args:
        mask: canonical, with at most one function.
        scores: (B, N, T, S).
        tile: rows and columns.
        offsets: those of the call.
        batch, head: local indices of the slice.
    """
    tiling = Tiling(scores[2:], tile)
    computed, tested = _of_intervals(mask, tiling, offsets, batch)
    levels = of_mask(mask, scores, offsets, tiling)
    if levels is not None:
        found = np.asarray(levels)
        found = found[batch % found.shape[0], head % found.shape[1]]
        computed &= found != NONE
        tested |= found == SOME
    return np.where(computed, np.where(tested, PARTIAL, FULL), SKIPPED).astype(np.uint8)


def _of_intervals(
    mask: Mask, tiling: Tiling, offsets: Offsets, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Whether static windows and lengths let a tile be computed, and whether they test it.

    Both are bool [Q blocks, KV blocks]. Uses only NumPy, so that drawing a window needs no device.
    """
    (rows, columns), (tile_rows, tile_columns) = tiling.sizes, tiling.tile
    queries = rows if mask.query_lengths is None else int(mask.query_lengths[batch])
    keys = columns if mask.key_lengths is None else int(mask.key_lengths[batch])
    shift = _index(offsets.query, batch) - _index(offsets.key, batch)
    first, last = -_NO_BOUND, _NO_BOUND
    for window, distance in (
        (mask.top_left, shift),
        (mask.bottom_right, shift + keys - queries),
    ):
        if window is not None and window.left is not None:
            first = max(first, distance - window.left)
        if window is not None and window.right is not None:
            last = min(last, distance + window.right)

    def begin(row: np.ndarray) -> np.ndarray:
        return np.maximum(row + first, 0)

    def end(row: np.ndarray) -> np.ndarray:
        return np.minimum(row + last + 1, keys)

    row = np.arange(tiling.counts[0], dtype=np.int64)[:, None] * tile_rows
    column = np.arange(tiling.counts[1], dtype=np.int64) * tile_columns
    last_row = np.minimum(row + tile_rows, queries) - 1
    stop = np.maximum(end(last_row), 0)
    start = np.minimum(begin(row), stop) // tile_columns * tile_columns
    computed = (last_row >= row) & (column >= start) & (column < stop)
    tested = (column + tile_columns > end(row)) | (column < begin(row + tile_rows - 1))
    return computed, tested


def _index(position: object, batch: int) -> int:
    """The global index of the first row or column of a batch index."""
    own = np.asarray(position).reshape(-1)
    return int(own[batch % own.size])
