"""A mask in the one form that internal code reads, and as a whole array."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_memeff._call import values
from jax_memeff._call.mask import arguments, checks, expression, segment_ids, tiles
from jax_memeff._call.mask.kv_blocks import KvBlocks
from jax_memeff._call.offsets import Position
from jax_memeff._functions.evaluate import evaluate

if TYPE_CHECKING:
    from jax_memeff._call.mask.mask import Mask


def canonical(mask: Mask, B: int, T: int, S: int, tokens: tuple[int, int] | None = None) -> Mask:
    """See :meth:`Mask.canonical`."""
    batch, rows, columns = (B, T, S) if tokens is None else (1, *tokens)
    query_lengths, key_lengths = mask.all_lengths()
    pairs = [pair for ids in mask.segment_ids for pair in segment_ids.as_int32(*ids)]
    return dataclasses.replace(
        mask,
        query_lengths=arguments.smallest(query_lengths, B, T),
        key_lengths=arguments.smallest(key_lengths, B, S),
        segment_ids=tuple(
            (
                arguments.broadcast(query_ids, batch, rows),
                arguments.broadcast(key_ids, batch, columns),
            )
            for query_ids, key_ids in pairs
        ),
        booleans=tuple(
            jnp.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape) for x in mask.booleans
        ),
        more_lengths=(),
        excluded=tuple(canonical(other, B, T, S, tokens) for other in mask.excluded),
        block_lists=tuple(x.table(S) if isinstance(x, KvBlocks) else x for x in mask.block_lists),
    )


def as_array(
    mask: Mask, B: int, N: int, T: int, S: int, position: Position | None = None
) -> jax.Array:
    """See :meth:`Mask.as_array`."""
    B, N, T, S = (
        values.size(name, value) for name, value in zip("BNTS", (B, N, T, S), strict=True)
    )
    if not isinstance(position, Position | None):
        raise TypeError(
            f"position must be None or the result of Offsets(...).position(), got {position!r:.80}"
        )
    mask = canonical(checks.of_mask(mask, (B, N, T, S), clamps=True), B, T, S)
    frame = expression.Frame.of(mask, (T, S))._replace(position=position)
    mask = expression.compiled(mask, frame)
    valid = tiles.valid_elements(mask, (T, S), (0, 0), (T, S), position)
    valid = jnp.broadcast_to(True if valid is None else valid, (B, N, T, S))
    for program in mask.functions:
        batch, head, row, column = jnp.ix_(*(jnp.arange(size) for size in (B, N, T, S)))
        if position is not None:
            row = row + position.query.reshape(-1, 1, 1, 1)
            column = column + position.key.reshape(-1, 1, 1, 1)
        arrays = tuple(x[0] for x in mask.captured)
        b, h, q, k = (x.astype(jnp.int32) for x in (batch, head, row, column))
        valid &= evaluate(program, None, b, h, q, k, arrays)
    return valid
