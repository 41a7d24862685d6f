"""Dense calls with few queries and head dims above 256, whose kernels do not split the keys.

A decode step of such heads would give each head a tile with one row, and each tile all keys. Here
the heads that share a key head become the rows of a tile, each part of the keys becomes a batch
index, and XLA merges the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff._call import merging
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import Operands, QkvPackedOperands
from jax_memeff._call.options import Divisors, Options
from jax_memeff.codegen.kernels.common.base import PADDED_DIMS
from jax_memeff.codegen.strategy import ceil_div

_TILE_ROWS = 64
_MOST_ROWS = 8 * _TILE_ROWS
"""Calls with more rows for a key head fill tiles of their own heads."""
_LEAST_KEYS = 256
"""The least keys of a part: with fewer, merging would take longer than what it saves."""
_TILES = 128
"""The tiles that fill a GPU: about its number of SMs."""


class Split(NamedTuple):
    """The sizes of a call whose keys are split."""

    batch: int
    rows: int
    heads: int
    key_heads: int
    parts: int
    part_keys: int

    def convert(self, given: Operands) -> Operands:
        """The call in parts. Its rows are the queries and heads of a key head."""
        batch, parts, keys = self.batch, self.parts, self.part_keys
        group = self.heads // self.key_heads
        query = given.query.reshape(batch, self.rows, self.key_heads, group, -1)
        query = query.swapaxes(2, 3).reshape(batch, 1, self.rows * group, self.key_heads, -1)
        query = jnp.repeat(query, parts, 1).reshape(batch * parts, *query.shape[2:])
        key, value = (
            x.reshape(batch * parts, keys, self.key_heads, -1) for x in (given.key, given.value)
        )
        lengths = given.mask.key_lengths
        if lengths is not None:
            first = keys * jnp.arange(parts, dtype=jnp.int32)
            lengths = (lengths[:, None] - first).clip(0, keys).reshape(-1)
        mask = Mask() if lengths is None else Mask.lengths(None, lengths)
        return given._replace(query=query, key=key, value=value, mask=mask)

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        """The shape of the logsumexp of the parts."""
        group = self.heads // self.key_heads
        return self.batch * self.parts, self.rows * group, self.key_heads

    def merged(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The results of the call from those of its parts."""
        outs, lses = (x.reshape(self.batch, self.parts, *x.shape[1:]) for x in (out, lse))
        of_parts = [(outs[:, part], lses[:, part]) for part in range(self.parts)]
        out, lse = merging.merged(of_parts)
        return self._of_heads(out), self._of_heads(lse)

    def _of_heads(self, x: jax.Array) -> jax.Array:
        """[B, rows, heads, ...] from [B, rows * group, key heads, ...]."""
        group = self.heads // self.key_heads
        split = x.reshape(self.batch, self.rows, group, self.key_heads, *x.shape[3:])
        return split.swapaxes(2, 3).reshape(self.batch, self.rows, self.heads, *x.shape[3:])


def split_of(types: Operands | QkvPackedOperands, options: Options) -> Split | None:
    """How a forward is split; None if it stays whole."""
    if isinstance(types, QkvPackedOperands) or types.sequences is not None:
        return None
    if max(types.query.shape[3], types.value_dim) <= PADDED_DIMS[-1]:
        return None
    batch, heads, rows, columns = sizes = types.scores_shape
    if not all(isinstance(size, int) and size for size in sizes):
        return None  # symbolic or empty
    key_heads = types.key.shape[2]
    tiles = key_heads * ceil_div(rows * (heads // key_heads), _TILE_ROWS)
    whole_tiles = heads * ceil_div(rows, _TILE_ROWS)
    if rows * (heads // key_heads) > _MOST_ROWS:
        return None
    if not _has_only_lengths(types, rows) or options.row_maxima:
        return None
    if options.divisors != Divisors() or {types.key.shape[0], types.value.shape[0]} != {batch}:
        return None  # batch indices share keys
    parts = _parts(columns, most=ceil_div(_TILES, batch * tiles))
    if parts == 1 and 2 * tiles > whole_tiles:
        return None  # XLA would reorder queries and outputs for little
    return Split(batch, rows, heads, key_heads, parts, columns // parts)


def _parts(columns: int, most: int) -> int:
    """The largest number of equal parts, up to ``most``, with at least ``_LEAST_KEYS`` keys.

    >>> _parts(8192, 20), _parts(8200, 20), _parts(8191, 20), _parts(300, 20)
    (16, 20, 1, 1)
    """
    most = min(most, columns // _LEAST_KEYS)
    return max((n for n in range(1, most + 1) if columns % n == 0), default=1)


def _has_only_lengths(types: Operands, rows: int) -> bool:
    """Whether elements are masked by lengths of keys alone, and nothing else reads positions.

    A single row at the end of its sequence sees all keys under a causal mask.
    """
    mask, absent = types.mask, (types.bias, types.sinks, types.functions, types.dropout)
    end = mask.bottom_right
    is_last = rows == 1 and end is not None and (end.left, end.right) == (None, 0)
    allowed = {"key_lengths", *(("bottom_right",) if is_last else ())}
    is_plain = mask.kinds() <= allowed and not mask.more_lengths and not mask.block_masks
    return is_plain and all(x is None for x in (*absent, types.position)) and not types.captured
