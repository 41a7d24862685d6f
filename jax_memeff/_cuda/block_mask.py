"""The block masks that kernels read.

codegen/memeff/mask/block_mask.cuh documents the layout. Block masks are small. XLA computes
them before a kernel, unless they are the same in each call.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call.divisors import broadcastable, conjunction
from jax_memeff._call.mask import Mask, block_mask
from jax_memeff._call.mask.block_mask import Indices, Tiling, of_tiles
from jax_memeff._call.mask.bounds import Captured
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import FunctionState, captured_name
from jax_memeff._call.options import Divisors
from jax_memeff._call.sequences import Sequences
from jax_memeff.codegen.launch import BlockMask

_LINE_BYTES = 8
"""Alignment in bytes of a row of blocks, which holds two int32 and then one byte for each tile."""

_MOST_TILES_OF_SEQUENCES = 2**24
"""Each packed sequence gets as many tiles as the longest sequence that the call allows. With more
tiles than this in total, every tile is SOME, and kernels test every element."""

_MOST_CONSTANT_BYTES = 2**20
"""The largest block mask that a program holds as a constant: 160,000 tokens at head dim 64."""


def lines(
    mask: Mask,
    functions: FunctionState | None,
    position: Position | None,
    tile: BlockMask,
    scores_shape: tuple[int, int, int, int],
    divisors: Divisors,
    sequences: Sequences | None = None,
) -> jax.Array:
    """The block mask of a kernel: uint8 [B or 1, N or 1, rows of blocks, bytes].

    Args:
        mask: has ids, boolean arrays or a function; its other conditions are ignored. Conditions
            that a block mask of ``Mask.blocks`` covers are not evaluated again.
        functions: the user's indices, for a function.
        position: the global index of row 0 and column 0, for a function.
        tile: the size of the tiles and the parts of their rows, and whether rows of blocks belong
            to queries or keys.
        scores_shape: (B, N, T, S).
        divisors: those of arrays with fewer batch indices.
        sequences: the packed sequences, which then are the batch; tiles begin at their starts.

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
    batch, _, length, key_length = scores_shape
    # Kernels have a row and a column at least, also if the longest packed sequence is empty.
    tiling = Tiling((max(length, 1), max(key_length, 1)), (tile.query // tile.parts, tile.key))
    if sequences is not None:
        mask = _of_sequences(mask, sequences, tiling)
    masks = [
        broadcastable(of_tiles(levels, tiling), divisors[f"mask.block_masks.{index}"], batch)
        for index, levels in enumerate(mask.block_masks)
    ]
    if not mask.block_masks or mask.beyond_block_masks:
        reached = None if sequences is None else _reached(sequences, tiling)
        masks += _of_conditions(mask, functions, position, tiling, batch, divisors, reached)
    levels = block_mask.conjunction(masks)
    levels = jnp.broadcast_to(levels, (*levels.shape[:2], *tiling.counts))
    if sequences is not None and levels.size > _MOST_TILES_OF_SEQUENCES:
        levels = jnp.full((1, 1, *tiling.counts), block_mask.SOME, jnp.uint8)
    levels = _of_whole_tiles(levels, tile.parts)
    return _with_ranges(levels if tile.lines == "queries" else levels.swapaxes(2, 3))


@functools.lru_cache(maxsize=128)
def constant_lines(
    mask: Mask, tile: BlockMask, scores_shape: tuple[int, int, int, int]
) -> np.ndarray | None:
    """``lines`` for a mask without arrays. Layers with the same mask compute them once.

    None if the mask depends on the batch or head index, if the result is large, or if
    ``JAX_PLATFORMS`` excludes the CPU, which computes it.

    >>> window = Mask.function(lambda b, h, q, k: q - k < 2).canonical(1, 4, 4)
    >>> constant_lines(window, BlockMask("queries", 2, 2), (1, 1, 4, 4))[0, 0, :, 8:10]
    array([[1, 1],
           [2, 1]], dtype=uint8)
    """
    (program,) = mask.functions
    if {"batch", "head"} & program.dependence(program.results[0]):
        return None
    unread: Any = np.zeros(1, np.int32)
    compute = functools.partial(
        lines, mask, FunctionState(unread, unread), None, tile, scores_shape, Divisors()
    )
    if jax.eval_shape(compute).size > _MOST_CONSTANT_BYTES:
        return None
    # Contexts of the caller do not apply to another thread. In that of a mesh, all devices of the
    # mesh would compute, also those of other processes.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_on_cpu, compute).result()


def _on_cpu(function: Callable[[], jax.Array]) -> np.ndarray | None:
    """The result, or None if JAX does not use the CPU."""
    try:
        (cpu, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:
        return None
    with jax.default_device(cpu):
        return jax.device_get(jax.jit(function)())


def _of_conditions(
    mask: Mask,
    functions: FunctionState | None,
    position: Position | None,
    tiling: Tiling,
    batch: int,
    divisors: Divisors,
    reached: jax.Array | None,
) -> list[jax.Array]:
    """The block masks of ids, boolean arrays, the function and traced windows.

    For the function, tiles that are not ``reached``, [B, 1, Q blocks, KV blocks], are NONE.
    """
    masks = [block_mask.of_ids(*pair, tiling) for pair in mask.segment_ids]
    if mask.booleans:
        boolean, divisor = conjunction(mask, divisors, batch)
        masks.append(broadcastable(block_mask.of_booleans(boolean, tiling), divisor, batch))
    if mask.functions:
        assert functions is not None
        masks.append(_of_function(mask, functions, position, tiling, divisors, reached))
    return masks + block_mask.of_windows(mask, position, tiling)


def _of_function(
    mask: Mask,
    state: FunctionState,
    position: Position | None,
    tiling: Tiling,
    divisors: Divisors,
    reached: jax.Array | None,
) -> jax.Array:
    """[B or 1, N or 1, query tiles, key tiles]."""
    (program,) = mask.functions
    depends = program.dependence(program.results[0])
    has_own_position = position is not None and any(x.ndim for x in position)
    per_batch = has_own_position or "batch" in depends or reached is not None
    per_batch = per_batch or any(x.shape[0] != 1 for x in mask.captured)
    batch = state.batch_index if per_batch else state.batch_index[:1]
    firsts = (jnp.int32(0), jnp.int32(0)) if position is None else position
    place = jnp.arange(batch.size, dtype=jnp.int32)
    captured = [
        Captured(
            x,
            None
            if x.shape[0] == 1
            else place // divisors[f"mask.{captured_name(index)}"] % x.shape[0],
        )
        for index, x in enumerate(mask.captured)
    ]
    indices = Indices(
        batch,
        state.head_index if "head" in depends else state.head_index[:1],
        *(x.reshape(-1) for x in firsts),
    )
    return block_mask.of_function(program, indices, captured, tiling, reached)


def _of_sequences(mask: Mask, sequences: Sequences, tiling: Tiling) -> Mask:
    """The mask with the lengths of packed sequences, and with ids [sequences, positions]."""
    longest_query, longest_key = tiling.sizes
    query = sequences.query_starts, sequences.query_lengths, longest_query
    key = sequences.key_starts, sequences.key_lengths, longest_key
    return dataclasses.replace(
        mask,
        query_lengths=sequences.query_lengths,
        key_lengths=sequences.key_lengths,
        segment_ids=tuple(
            (_ids_of_sequences(query_ids, *query), _ids_of_sequences(key_ids, *key))
            for query_ids, key_ids in mask.segment_ids
        ),
    )


def _ids_of_sequences(
    ids: jax.Array, starts: jax.Array, lengths: jax.Array, longest: int
) -> jax.Array:
    """The ids [1, tokens] by sequence, [B, longest]; the last id repeats beyond the end."""
    last = jnp.maximum(lengths - 1, 0)[:, None]
    tokens = starts[:-1, None] + jnp.minimum(jnp.arange(longest, dtype=jnp.int32)[None], last)
    return jnp.take(ids[0], tokens, mode="clip")


def _reached(sequences: Sequences, tiling: Tiling) -> jax.Array:
    """Whether each tile has an element within the lengths, bool[B, 1, Q blocks, KV blocks]."""
    rows, columns = (
        jnp.arange(count, dtype=jnp.int32)[None] * own < lengths[:, None]
        for count, own, lengths in zip(
            tiling.counts,
            tiling.tile,
            (sequences.query_lengths, sequences.key_lengths),
            strict=True,
        )
    )
    return rows[:, None, :, None] & columns[:, None, None, :]


def _of_whole_tiles(levels: jax.Array, parts: int) -> jax.Array:
    """One byte for ``parts`` neighbouring tiles along the rows, with two bits for each of them."""
    B, N, rows, columns = levels.shape
    padded = jnp.pad(levels, ((0, 0), (0, 0), (0, -rows % parts), (0, 0)))
    shifts = jnp.arange(0, 2 * parts, 2, dtype=jnp.uint8).reshape(1, 1, 1, parts, 1)
    return (padded.reshape(B, N, -1, parts, columns) << shifts).sum(3, dtype=jnp.uint8)


def _with_ranges(valid: jax.Array) -> jax.Array:
    """Rows of blocks, each preceded by the range of its tiles with a valid element.

    XLA computes the ranges in one kernel and the rows in a second one. A cast of two stacked
    integers to bytes would take a third, and one of two separate reductions may become a loop of
    each thread that writes a row.
    """
    count = valid.shape[3]
    index = lax.broadcasted_iota(jnp.int32, (1, 1, 1, count), 3)
    begin, end = lax.reduce(
        (jnp.where(valid > 0, index, count), jnp.where(valid > 0, index + 1, 0)),
        (jnp.int32(count), jnp.int32(0)),
        lambda x, y: (lax.min(x[0], y[0]), lax.max(x[1], y[1])),
        (3,),
    )
    # At least one more byte, because kernels read one byte past the last tile.
    padding = (count // _LINE_BYTES + 1) * _LINE_BYTES - count
    tiles = jnp.pad(valid, ((0, 0),) * 3 + ((0, padding),))
    return jnp.concatenate([_little_endian(begin), _little_endian(end), tiles], 3)


def _little_endian(integers: jax.Array) -> jax.Array:
    """The four bytes of each, uint8 [..., 4], lowest first."""
    shifts = lax.broadcasted_iota(jnp.int32, (*integers.shape, 4), integers.ndim) * 8
    return (integers[..., None] >> shifts).astype(jnp.uint8)
