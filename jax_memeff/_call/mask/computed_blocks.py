"""A mask with its block mask, computed once for many calls (``Mask.blocks``)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call import values
from jax_memeff._call.mask import block_mask, expression
from jax_memeff._call.mask.block_mask import ALL, NONE, SOME, Indices, Tiling
from jax_memeff._call.mask.ranges.bounds import Captured
from jax_memeff._call.offsets import Offsets

if TYPE_CHECKING:
    from jax_memeff._call.mask.mask import Mask

BLOCK = 64
"""Rows and columns of a block. The tile sizes of most kernels are multiples of it, or else 16 or
32; :func:`of_tiles` converts to all of them."""


def with_blocks(mask: Mask, scores: tuple[int, int, int, int], offsets: Offsets | None) -> Mask:
    """The mask of a call of (B, N, T, S) with its block mask.

    Static windows and lengths remain conditions of their own. One function combines
    ``Mask.function``, lists of blocks, traced windows, ``|`` and ``~``.
    """
    batch, _, rows, columns = scores
    values.require_static_sequences(scores=(rows, columns))
    canonical = mask.canonical(batch, rows, columns)
    frame = expression.Frame.of(canonical, (rows, columns), offsets)
    if canonical.traced_windows:
        # They become part of the function, so that lengths that `&` adds later do not shift them.
        traced = type(mask)(traced_windows=canonical.traced_windows)
        others = dataclasses.replace(canonical, traced_windows=())
        canonical = dataclasses.replace(others, excluded=(*others.excluded, ~traced))
    canonical = expression.compiled(canonical, frame)
    tiling = Tiling((rows, columns), (BLOCK, BLOCK))
    levels = of_mask(canonical, scores, offsets, tiling)
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
    mask: Mask, scores: tuple[int, int, int, int], offsets: Offsets | None, tiling: Tiling
) -> jax.Array | None:
    """The block mask of the arrays, functions and traced windows of a mask.

    Args:
        mask: canonical, with at most one function; static windows and lengths do not count.
        scores: (B, N, T, S).
        offsets: those of the call.
        tiling: the tiles.

    Returns:
        uint8 [B or 1, N or 1, query tiles or 1, key tiles or 1], or None if there are no such
        conditions.
    """
    position = None if offsets is None else offsets.position()
    found = [block_mask.of_ids(*pair, tiling) for pair in mask.segment_ids]
    found += [block_mask.of_booleans(array, tiling) for array in mask.booleans]
    found += [_of_function(mask, scores, offsets, tiling) for _ in mask.functions]
    found += block_mask.of_windows(mask, position, tiling)
    return block_mask.conjunction(found) if found else None


def _of_function(
    mask: Mask, scores: tuple[int, int, int, int], offsets: Offsets | None, tiling: Tiling
) -> jax.Array:
    offsets = Offsets() if offsets is None else offsets
    depends = mask.functions[0].dependence(mask.functions[0].results[0])
    per_batch = "batch" in depends or any(x.ndim > 0 for x in offsets.position())
    firsts = [x.reshape(-1) for x in offsets.position()]
    batch, head = (
        jnp.asarray(first).astype(jnp.int32) + lax.iota(jnp.int32, size if is_read else 1)
        for first, size, is_read in (
            (offsets.batch, scores[0], per_batch),
            (offsets.head, scores[1], "head" in depends),
        )
    )
    captured = [Captured(x, None) for x in mask.captured]
    indices = Indices(batch, head, *firsts)
    return block_mask.of_function(mask.functions[0], indices, captured, tiling)


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
