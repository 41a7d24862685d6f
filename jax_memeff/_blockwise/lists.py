"""Tiles of listed keys (``Mask.keys``): the columns of a tile are the entries of each row's list.

A tile has a few rows and their whole lists, so a softmax needs no second tile. Its keys and values
are gathered when it is read, row by row, and their gradients are added to the rows of the whole
arrays. The entries of a list are distinct, so the additions of one row never meet and no sum
depends on their order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise import pages
from jax_memeff._blockwise.functions import Coordinates
from jax_memeff._blockwise.pages import Pools
from jax_memeff._blockwise.tiles import Blocks, Index, Problem, dot
from jax_memeff._call import dropout
from jax_memeff._call.divisors import broadcastable, expanded, of_booleans
from jax_memeff._call.mask import tiles as mask_tiles
from jax_memeff._call.mask.tiles import slice_axis
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options
from jax_memeff._call.values import likely_batch

_LARGEST_GATHER = 2**18
"""The most numbers of the keys and values, and of the scores, of a tile with several rows.

Measured on two CPU cores, with T 1024, 8 query heads on one key head of dim 64 and 128 keys a row:
2**16 and 2**20 take 1.5 and 1.3 times as long in a forward and backward, 2**22 4.5 times.
"""
_LARGEST_GATHER_ON_GPU = 2**24
"""Not measured: a tile should have work for a whole GPU, and takes some ten kernels."""


def problem_of(operands: Operands, options: Options, pools: Pools | None = None) -> Problem:
    """The tiles of a call."""
    kind = ListedProblem if operands.mask.key_lists else Problem
    return kind.of(operands, options, pools)


@dataclasses.dataclass(frozen=True)
class ListedProblem(Problem):
    """A call with lists of keys. ``cols`` are the entries of a list, in one block."""

    @classmethod
    def of(cls, operands: Operands, options: Options, pools: Pools | None = None) -> ListedProblem:
        dense: Any = super().of(operands, options, pools)
        batch, length, heads, head_dim = operands.query.shape
        count = operands.mask.key_lists[0].indices.shape[3] if operands.columns else 0
        per_row = max(operands.key.shape[2] * (head_dim + operands.value_dim), heads)
        largest = _LARGEST_GATHER_ON_GPU if options.has_gpu_tiles else _LARGEST_GATHER
        rows = largest // max(likely_batch(batch) * count * per_row, 1)
        if operands.pages is not None and operands.pages.is_invariant:
            rows = 1
        return dataclasses.replace(
            dense, rows=Blocks(length, min(max(rows, 1), length)), cols=Blocks(count, count)
        )

    def _listed(self, row: Index) -> tuple[jax.Array, jax.Array]:
        """The columns of a tile of rows, int32[1|B, 1|K, rows, n], 0 for those that are not valid;
        and which are valid, judging by lists, windows, lengths and segment ids.
        """
        operands, mask = self.operands, self.operands.mask
        lists = slice_axis(mask.key_lists[0].indices, row, self.rows.size, 2)
        divisor = self.options.divisors["mask.key_lists.0.indices"]
        lists = broadcastable(lists, divisor, self.group_shape[0])
        sizes, rows = (self.rows.length, operands.columns), self._rows(row)[0]
        valid = mask_tiles.listed_elements(mask, sizes, rows, lists, operands.position)
        for query_ids, key_ids in mask.segment_ids:
            query_tile = slice_axis(query_ids, row, self.rows.size, 1)[:, None, :, None]
            batch = lax.iota(jnp.int32, key_ids.shape[0]).reshape(-1, 1, 1, 1)
            key_tile = key_ids.at[batch, lists].get(
                mode="fill", fill_value=-1, wrap_negative_indices=False
            )
            valid &= (query_tile == key_tile) & (query_tile >= 0)
        columns = jnp.where(valid, lists, 0)
        if operands.pages is not None:
            pool_rows = operands.key.shape[1]
            valid &= operands.pages.rows(columns, pool_rows)[0] < pool_rows
        return columns, valid

    def key_tile(self, row: Index, col: Index) -> jax.Array:
        """The keys of a tile, [B, K, rows, n, H]."""
        return self._gathered("key", row)

    def value_tile(self, row: Index, col: Index) -> jax.Array:
        """The values of a tile, [B, K, rows, n, Hv]."""
        return self._gathered("value", row)

    def _gathered(self, name: str, row: Index) -> jax.Array:
        """Zeros stand for entries that are not valid, even if the keys there are NaN."""
        columns, valid = self._listed(row)
        if self.pools is not None:
            assert self.operands.pages is not None
            pool_rows = self.operands.key.shape[1]
            rows = self.operands.pages.rows(columns, pool_rows)[0]
            rows = jnp.where(valid, rows, pool_rows)[0]
            tile = pages.key_tile if name == "key" else pages.value_tile
            return tile(self.operands, self.pools, rows, self.accumulator)
        x = getattr(self.operands, name)
        if x.dtype.itemsize < 4:
            # Part of the loop's body: XLA for CPUs would widen the whole array before the loop.
            x, columns = lax.optimization_barrier((x, columns))
        batch = self._batch_of(x.shape[0], self.options.divisors[name]).reshape(-1, 1, 1, 1)
        heads = lax.iota(jnp.int32, x.shape[2]).reshape(1, -1, 1, 1)
        places = jnp.where(valid, columns, x.shape[1])
        return x.at[batch, places, heads].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )

    def _batch_of(self, indices: int, divisor: int) -> jax.Array:
        """The batch index of an operand that each batch index reads, int32[B]."""
        return expanded(lax.iota(jnp.int32, indices), divisor, self.group_shape[0])

    def bias_tile(self, row: Index, col: Index) -> jax.Array | None:
        """The bias of a tile, [b, k, g, rows or 1, n or 1]."""
        bias = self.operands.bias
        return None if bias is None else self._of_scores(bias, self.options.divisors["bias"], row)

    def _of_scores(self, array: jax.Array, divisor: int, row: Index) -> jax.Array:
        """The elements of an array [b, 1|N, 1|T, 1|S] for a tile."""
        places = self._places(array.shape, self._batch_of(array.shape[0], divisor), row)
        return array.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def _places(self, shape: tuple[int, ...], batch: jax.Array, row: Index) -> tuple[Any, ...]:
        """The indices of a tile's elements in an array of this shape; they broadcast to
        [B, K, G, rows, n].
        """
        columns, _ = self._listed(row)
        _, kv_heads, groups = self.group_shape
        places = (
            batch.reshape(-1, 1, 1, 1, 1),
            lax.iota(jnp.int32, kv_heads * groups).reshape(1, kv_heads, groups, 1, 1),
            self._rows(row),
            columns[:, :, None],
        )
        return tuple(
            jnp.zeros((1,) * 5, jnp.int32) if size == 1 else place
            for size, place in zip(shape, places, strict=True)
        )

    def may_attend(self, row: Index) -> jax.Array | None:
        """Whether the rows of a tile exist and have keys, bool[1]; None without lengths."""
        mask, possible = self.operands.mask, None
        if mask.query_lengths is not None:
            possible = row < mask.query_lengths
        if mask.key_lengths is not None:
            has_keys = mask.key_lengths > 0
            possible = has_keys if possible is None else possible & has_keys
        return None if possible is None else jnp.any(possible, keepdims=True)

    @property
    def has_rows_in_tile(self) -> bool:
        return True

    @property
    def bias_accumulator(self) -> jnp.dtype:
        return self.accumulator

    def products(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        return dot("bkgth,bktsh->bkgts", rows, keys)

    def weighted(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        return dot("bkgts,bktsh->bkgth", weights, keys)

    def added_by_key(
        self, sums: jax.Array, weights: jax.Array, rows: jax.Array, row: Index, col: Index
    ) -> jax.Array:
        part = dot("bkgts,bkgth->bktsh", weights, rows)
        columns, valid = self._listed(row)
        # Distinct, and out of bounds, where an entry is not valid.
        beyond = sums.shape[2] + lax.iota(jnp.int32, columns.shape[3])
        places = jnp.where(valid, columns, beyond)
        batch, heads = jnp.ogrid[: sums.shape[0], : sums.shape[1]]

        def add_row(index: Any, sums: jax.Array) -> jax.Array:
            own, terms = (lax.dynamic_index_in_dim(x, index, 2, False) for x in (places, part))
            at = sums.at[batch[..., None], heads[..., None], own]
            return at.add(terms, mode="drop", unique_indices=True, wrap_negative_indices=False)

        return Blocks(self.rows.size, 1).each(add_row, sums)

    def added_to_bias(
        self, sums: jax.Array, dscores: jax.Array, row: Index, col: Index
    ) -> jax.Array:
        batch, kv_heads, _, rows, count = dscores.shape
        indices, heads, _, columns = sums.shape
        if columns == 1:
            dscores = jnp.sum(dscores, 4, keepdims=True)
        if heads == 1:
            dscores = jnp.sum(dscores, 2, keepdims=True)
        own_batch = self._batch_of(indices, batch // indices)
        places = self._places(sums.shape, own_batch, row)
        places = [jnp.broadcast_to(x, dscores.shape) for x in places]
        _, valid = self._listed(row)
        beyond = columns + lax.iota(jnp.int32, count)
        if columns != 1:
            places[3] = jnp.where(valid[:, :, None], places[3], beyond)

        def add_row(index: Any, sums: jax.Array) -> jax.Array:
            # Rows, key heads and batch indices may have the same elements of the bias.
            b, rest = index // (kv_heads * rows), index % (kv_heads * rows)
            own = (b, rest // rows, slice(None), rest % rows)
            at = sums.at[tuple(x[own] for x in places)]
            terms = dscores[own].astype(sums.dtype)
            return at.add(terms, mode="drop", unique_indices=True, wrap_negative_indices=False)

        return Blocks(batch * kv_heads * rows, 1).each(add_row, sums)

    def _valid(
        self,
        bias: jax.Array | None,
        coordinates: Coordinates | None,
        row: Index,
        col: Index,
        first_row: Index | None,
        first_col: Index,
    ) -> jax.Array | None:
        _, valid = self._listed(row)
        valid = valid[:, :, None]
        if self.rows.overlap and first_row is not None:
            valid &= self._rows(row) >= first_row
        divisors = of_booleans(self.operands.mask, self.options.divisors)
        for array, divisor in zip(self.operands.mask.booleans, divisors, strict=True):
            valid = valid & self._of_scores(array, divisor, row)
        return self._valid_by_values(valid, bias, coordinates)

    def positions(self, row: Index, col: Index) -> tuple[jax.Array, jax.Array]:
        """The global rows [1|B, 1, 1, rows, 1] and columns [1|B, 1|K, 1, rows, n] of a tile."""
        columns, _ = self._listed(row)
        return self._global(self._rows(row), columns[:, :, None])

    def _rows(self, row: Index) -> jax.Array:
        """The local rows of a tile, [1, 1, 1, rows, 1]."""
        return (row + lax.iota(jnp.int32, self.rows.size)).reshape(1, 1, 1, -1, 1)

    def _kept(self, row: Index, col: Index) -> jax.Array | None:
        return dropout.kept_at(self.operands, self.options, *self.positions(row, col))
