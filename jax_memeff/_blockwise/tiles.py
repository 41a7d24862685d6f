"""Tiles of scores, for the forward and the backward of the blockwise path.

All arithmetic is float32 (float64 for float64 inputs): 16-bit operands are widened tile by tile,
and results are rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise import functions, pages
from jax_memeff._blockwise.functions import Coordinates
from jax_memeff._blockwise.pages import Pools
from jax_memeff._call import dropout
from jax_memeff._call.divisors import as_gradient, broadcastable, expanded, of_booleans, summed
from jax_memeff._call.mask import tiles as mask_tiles
from jax_memeff._call.mask.tiles import slice_axis, slice_tile
from jax_memeff._call.operands import Operands, captured_name
from jax_memeff._call.options import RANDOM_BLOCK, Options
from jax_memeff._call.sequences import INVARIANT_COLUMNS
from jax_memeff._call.values import likely_batch, score_dtype
from jax_memeff._compat import varying_axes

LONGEST_BLOCK = 512
_SHORTEST_BLOCK = 64
_LARGEST_TILE = 2**20
"""The most elements of a tile over the batch and all heads; blocks are halved until a tile fits.

Measured on two CPU cores, H = 64, T = 1024, forward and backward. With 4 heads, blocks of 512 take
0.85 of the time of 256. With 8 heads a tile of 512 has 2**21 elements and takes 1.4 times as long.
With B = 8 and 8 heads at T = 512, blocks of 128 take 0.5 of the time of 256.
"""


def has_probabilities(lse: jax.Array) -> jax.Array:
    """Whether the probabilities of a row can be recomputed from its logsumexp.

    A row without keys has none. Floats from 2**24 on (2**53 in float64) are whole numbers. If all
    elements of a row have a bias of -1e9, its logsumexp therefore loses the logarithm of the sum,
    and recomputed probabilities would be wrong by a factor, 0 or inf.
    """
    return jnp.logical_not(jnp.abs(lse) >= 2.0 ** (jnp.finfo(lse.dtype).nmant + 1))


Index = int | jax.Array
"""int32[], or a number if there is only one block."""

ArraysByIndex = dict[int, jax.Array]
"""Some of the captured arrays, or their gradients, by index."""


class Tile(NamedTuple):
    scores: jax.Array
    """[B, K, G, rows, cols], -inf where invalid."""
    pull: Callable[[jax.Array, ArraysByIndex], tuple[jax.Array, ArraysByIndex]]
    """A function from the gradient of the scores, and from captured arrays in the form of
    ``Problem.captured``, to the gradients of the scaled products and of these arrays."""
    keep: jax.Array | None
    """Whether each probability is kept; None if all are."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call and its blocks. Arrays are transposed tile by tile, as they are widened: a copy of
    all keys and values would take longer than a decode step."""

    operands: Operands
    options: Options
    pools: Pools | None
    """With pages."""
    captured: tuple[jax.Array, ...]
    """The captured arrays, with one batch index for each gradient; floats are widened."""
    accumulator: jnp.dtype
    rows: Blocks
    cols: Blocks

    @classmethod
    def of(cls, operands: Operands, options: Options, pools: Pools | None = None) -> Problem:
        query = operands.query
        batch, _, heads, _ = query.shape
        accumulator = score_dtype(query.dtype)
        longest = LONGEST_BLOCK
        while (
            longest > _SHORTEST_BLOCK and likely_batch(batch) * heads * longest**2 > _LARGEST_TILE
        ):
            longest //= 2
        return cls(
            operands,
            options,
            pools,
            tuple(
                _widened(
                    as_gradient(captured_name(index), x, operands, options.divisors), accumulator
                )
                for index, x in enumerate(operands.captured)
            ),
            accumulator,
            *blocks(operands, longest),
        )

    @property
    def group_shape(self) -> tuple[int, int, int]:
        """B, K and G, the leading dims of a tile of scores."""
        batch, _, heads, _ = self.operands.query.shape
        kv_heads = self.operands.key.shape[2]
        return batch, kv_heads, heads // kv_heads if kv_heads else 1

    def zeros(self, *shape: int) -> jax.Array:
        """Zeros of the accumulator's dtype.

        Inside ``shard_map`` they are derived from an operand. A loop's initial state then varies
        over the same mesh axes as its later states.
        """
        query = self.operands.query
        if not varying_axes(query):
            return jnp.zeros(shape, self.accumulator)
        return jnp.broadcast_to(jnp.sum(query[:0], dtype=self.accumulator), shape)

    def row_tile(self, x: jax.Array, start: Index) -> jax.Array:
        """The rows of one Q block of an array [B, T, N, .], [B, K, G, rows, .]."""
        return grouped(_sliced(x, start, self.rows.size), self.operands.key.shape[2])

    def query_tile(self, start: Index) -> jax.Array:
        """The query rows of one block."""
        return self.row_tile(self._query(start, self.rows.size), 0)

    def whole_query(self) -> jax.Array:
        """All queries, [B, K, G, T, H]."""
        return grouped(self._query(0, self.rows.length), self.operands.key.shape[2])

    def _query(self, start: Index, size: int) -> jax.Array:
        """Queries from row ``start`` on. They are zero beyond the lengths, even if they are NaN."""
        lengths = self.operands.mask.query_lengths
        tile = _sliced(self.operands.query, start, size)
        return _select_rows(tile, None if lengths is None else lengths - start)

    def key_tile(self, row: Index, col: Index) -> jax.Array:
        """The keys of the tile at (row, col), [B, K, cols, H]."""
        if self.pools is not None:
            rows = self._pool_rows(row, col)
            return pages.key_tile(self.operands, self.pools, rows, self.accumulator)
        tile = _sliced(self.operands.key, col, self.cols.size)
        return self._by_key_head(tile, self.options.divisors["key"], col)

    def value_tile(self, row: Index, col: Index) -> jax.Array:
        """The values of the tile at (row, col), [B, K, cols, Hv]."""
        if self.pools is not None:
            rows = self._pool_rows(row, col)
            return pages.value_tile(self.operands, self.pools, rows, self.accumulator)
        tile = _sliced(self.operands.value, col, self.cols.size)
        return self._by_key_head(tile, self.options.divisors["value"], col)

    def _pool_rows(self, row: Index, col: Index) -> jax.Array:
        mask, position = self.operands.mask, self.operands.position
        sizes = self.rows.length, self.cols.length
        reached = mask_tiles.reached_columns(mask, sizes, (row, col), self.cols.size, position)
        reached = None if reached is None else reached[0]
        return pages.needed_rows(self.operands, col, self.cols.size, reached)

    def whole_key_and_value(self) -> tuple[jax.Array, jax.Array]:
        """All keys and all values, [B, K, S, H] and [B, K, S, Hv]."""
        operands, divisors = self.operands, self.options.divisors
        return (
            self._by_key_head(operands.key, divisors["key"], 0),
            self._by_key_head(operands.value, divisors["value"], 0),
        )

    def _by_key_head(self, rows: jax.Array, divisor: int, start: Index) -> jax.Array:
        """Keys or values from row ``start`` on, [b, rows, K, .] to [B, K, rows, .]. They are zero
        beyond the lengths, even if they are NaN there."""
        rows = expanded(rows, divisor, self.group_shape[0])
        lengths = self.operands.mask.key_lengths
        rows = _select_rows(rows, None if lengths is None else lengths - start)
        return rows.transpose(0, 2, 1, 3)

    def bias_tile(self, row: Index, col: Index) -> jax.Array | None:
        """The bias of one tile, [b, k, g, rows or 1, cols or 1]."""
        bias = self.operands.bias
        if bias is None:
            return None
        tile = slice_tile(bias, (row, col), (self.rows.size, self.cols.size))
        tile = broadcastable(tile, self.options.divisors["bias"], self.group_shape[0])
        return self.per_head(tile)

    def per_head(self, tile: jax.Array) -> jax.Array:
        """[b, n, rows, cols] to [b, K or 1, G or 1, rows, cols]."""
        kv_heads = self.operands.key.shape[2] if tile.shape[1] != 1 else 1
        return tile.reshape(tile.shape[0], kv_heads, -1, *tile.shape[2:])

    def may_attend(self, row: Index) -> jax.Array | None:
        """Whether the tile of each KV block can have valid elements, bool[KV blocks]; None if every
        tile can.
        """
        mask, position = self.operands.mask, self.operands.position
        sizes, shape = (self.rows.length, self.cols.length), (self.rows.size, self.cols.size)

        def one(col: jax.Array) -> jax.Array | None:
            return mask_tiles.may_attend(mask, sizes, (row, col), shape, position)

        return jax.vmap(one)(self.cols.start(self.cols.indices)[0])

    def products(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """The product of each row [B, K, G, rows, .] with each key or value [B, K, cols, .]."""
        return dot("bkgth,bksh->bkgts", rows, keys)

    def weighted(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """Sums [B, K, G, rows, .] of keys or values, with weights [B, K, G, rows, cols]."""
        return dot("bkgts,bksh->bkgth", weights, keys)

    def added_by_key(
        self, sums: jax.Array, weights: jax.Array, rows: jax.Array, row: Index, col: Index
    ) -> jax.Array:
        """``sums``, [B, K, S, .], plus the sums of rows with these weights, for a tile's keys."""
        if self.is_one_tile:
            part = dot("bkgts,bkgth->bksh", weights, rows)
        else:
            # XLA for CPUs would transpose the weights, which takes a tenth of the backward's time.
            # With T 16, products of this form take longer than that: 1.4 times the whole time.
            part = dot("bkgth,bkgts->bkhs", rows, weights).swapaxes(2, 3)
        return added(sums, part, (2, col))

    def added_to_bias(
        self, sums: jax.Array, dscores: jax.Array, row: Index, col: Index
    ) -> jax.Array:
        """The gradient of the bias plus that of a tile of scores, [B, K, G, rows, cols]."""
        sizes = self.rows.size, self.cols.size
        flat = dscores.reshape(dscores.shape[0], -1, *sizes)
        part = slice_tile(sums, (row, col), sizes)
        part = part + summed(flat, part.shape).astype(sums.dtype)
        return written(sums, part, (2, row), (3, col))

    @property
    def bias_accumulator(self) -> jnp.dtype:
        """The dtype in which the gradient of the bias is summed.

        If the bias is not broadcast over T, a single tile writes each element, so its own dtype is
        exact: overlapping tiles only add zeros.
        """
        bias = self.operands.bias
        if bias is None or bias.shape[2] == 1:
            return self.accumulator
        return bias.dtype

    @property
    def is_one_tile(self) -> bool:
        """Whether the blocks are so large that there is one of each."""
        return self.rows.count == self.cols.count == 1

    @property
    def has_rows_in_tile(self) -> bool:
        """Whether a backward takes sums over rows of scores from single tiles."""
        return self.is_one_tile

    def each_key_block(self, row: Index, body: Callable[[Index, Any], Any], state: Any) -> Any:
        """``state = body(index of the block, state)`` for KV blocks in ascending order.

        KV blocks without valid elements in the Q block at ``row`` are left out.
        """
        if self.is_one_tile:
            return body(0, state)
        possible = self.may_attend(row)
        if possible is None:
            return self.cols.each(body, state)
        count = self.cols.count

        def possible_from(index: Index) -> jax.Array:
            indices = self.cols.indices
            return jnp.min(jnp.where(possible & (indices >= index), indices, count))

        def step(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            index, state = carry
            return possible_from(index + 1), body(index, state)

        return lax.while_loop(lambda carry: carry[0] < count, step, (possible_from(0), state))[1]

    def tile(
        self,
        query: jax.Array,
        key: jax.Array,
        bias: jax.Array | None,
        row: Index,
        col: Index,
        first_row: Index | None,
        first_col: Index,
    ) -> Tile:
        """Scores of one tile, masked.

        Args:
            query: [B, K, G, rows, H].
            key: the result of :meth:`key_tile`.
            bias: the result of :meth:`bias_tile`.
            row, col: the first element of the tile.
            first_row, first_col: another tile counts the elements before these, so they are invalid
                here; ``first_row`` is None if rows may be computed twice.
        """
        options = self.options
        if bias is not None:
            bias = bias.astype(self.accumulator)
        coordinates = self._coordinates(row, col)
        valid = self._valid(bias, coordinates, row, col, first_row, first_col)
        products = scaled(self.products(query, key), options.scaling.scale)
        scores, slope = options.scaling.capped(products)
        function = None
        if coordinates is not None and options.score_function is not None:
            function = functools.partial(self._function, coordinates, valid)
            before = scores
            scores, valid = function(scores, {})
        if bias is not None:
            scores = scores + bias
        if valid is not None:
            scores = jnp.where(valid, scores, -jnp.inf)

        def pull(dscores: jax.Array, captured: ArraysByIndex) -> tuple[jax.Array, ArraysByIndex]:
            gradients: ArraysByIndex = {}
            if function is not None:
                _, transpose, _ = jax.vjp(function, before, captured, has_aux=True)
                dscores, gradients = transpose(dscores)
            return dscores if slope is None else dscores * slope, gradients

        return Tile(scores, pull, self._kept(row, col))

    def _kept(self, row: Index, col: Index) -> jax.Array | None:
        """Whether dropout keeps each element of a tile; None if it keeps all."""
        shape = self.rows.size, self.cols.size
        kept = dropout.kept(self.operands, self.options, row, col, shape)
        return None if kept is None else self.per_head(kept)

    def _valid(
        self,
        bias: jax.Array | None,
        coordinates: Coordinates | None,
        row: Index,
        col: Index,
        first_row: Index | None,
        first_col: Index,
    ) -> jax.Array | None:
        """Whether mask and bias keep each element of a tile, [b, k, g, rows, cols].

        The arguments are those of :meth:`tile`; a result of None means all of them.
        """
        operands, batch = self.operands, self.group_shape[0]
        sizes, shape = (self.rows.length, self.cols.length), (self.rows.size, self.cols.size)
        mask = dataclasses.replace(operands.mask, booleans=())
        valid = mask_tiles.valid_elements(mask, sizes, (row, col), shape, operands.position)
        divisors = self.options.divisors
        for array, divisor in zip(
            operands.mask.booleans, of_booleans(operands.mask, divisors), strict=True
        ):
            valid = _and(valid, broadcastable(slice_tile(array, (row, col), shape), divisor, batch))
        if operands.pages is not None:
            in_pool = pages.are_in_pool(operands, col, shape[1])
            valid = _and(valid, in_pool[None, None, None, :])
        if self.cols.overlap:
            columns = (col + lax.iota(jnp.int32, shape[1]))[None, None, None, :]
            valid = _and(valid, columns >= first_col)
        if self.rows.overlap and first_row is not None:
            rows = (row + lax.iota(jnp.int32, shape[0]))[None, None, :, None]
            valid = _and(valid, rows >= first_row)
        valid = None if valid is None else self.per_head(valid)
        return self._valid_by_values(valid, bias, coordinates)

    def _valid_by_values(
        self, valid: jax.Array | None, bias: jax.Array | None, coordinates: Coordinates | None
    ) -> jax.Array | None:
        """``valid`` without the elements that the bias or the user's mask functions mask."""
        operands, divisors, batch = self.operands, self.options.divisors, self.group_shape[0]
        if bias is not None:
            valid = _and(valid, jnp.logical_not(functions.is_masked(bias)))
        if coordinates is None:
            return valid
        for program in operands.mask.functions:
            arrays = [
                broadcastable(x, divisors[f"mask.{captured_name(index)}"], batch)
                for index, x in enumerate(operands.mask.captured)
            ]
            valid = _and(valid, functions.holds(program, coordinates, arrays))
        return valid

    def _coordinates(self, row: Index, col: Index) -> Coordinates | None:
        """The user's indices of the elements of a tile; None if no function reads them."""
        state = self.operands.functions
        if state is None:
            return None
        heads = state.head_index.reshape(1, self.operands.key.shape[2], -1, 1, 1)
        batch = state.batch_index[:, None, None, None, None]
        return Coordinates(batch, heads, *self.positions(row, col))

    def positions(self, row: Index, col: Index) -> tuple[jax.Array, jax.Array]:
        """The global rows and columns of a tile, [1|B, 1, 1, rows, 1] and [1|B, 1, 1, 1, cols]."""
        return self._global(
            (row + lax.iota(jnp.int32, self.rows.size)).reshape(1, 1, 1, -1, 1),
            (col + lax.iota(jnp.int32, self.cols.size)).reshape(1, 1, 1, 1, -1),
        )

    def _global(self, rows: jax.Array, cols: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The global indices of local rows and columns, of rank 5."""
        if self.operands.position is None:
            return rows, cols
        first, second = (x.reshape(-1, 1, 1, 1, 1) for x in self.operands.position)
        return rows + first, cols + second

    def _function(
        self,
        coordinates: Coordinates,
        valid: jax.Array | None,
        scores: jax.Array,
        captured: ArraysByIndex,
    ) -> tuple[jax.Array, jax.Array]:
        """The score function, with ``captured`` in place of some of the captured arrays."""
        program, batch = self.options.score_function, self.group_shape[0]
        assert program is not None
        replaced = (captured.get(index, x) for index, x in enumerate(self.captured))
        arrays = [
            x if x.shape[0] == 1 else expanded(x, batch // x.shape[0], batch) for x in replaced
        ]
        return functions.modified(program, scores, coordinates, arrays, valid)


def _widened(x: jax.Array, accumulator: jnp.dtype) -> jax.Array:
    """Floats in at least the accumulator's precision; other arrays unchanged."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(max(score_dtype(x.dtype), accumulator, key=lambda dtype: dtype.itemsize))


def _sliced(x: jax.Array, start: Index, size: int) -> jax.Array:
    """Part of axis 1.

    Small floats are sliced as integers: XLA for CPUs would convert the whole array to float32 to
    slice it.
    """
    if size == x.shape[1] or x.dtype.itemsize >= 4:
        return slice_axis(x, start, size, 1)
    # The barrier makes the array a part of the loop's body. XLA would otherwise convert all of it
    # to integers before the loop, which copies it.
    x, start = lax.optimization_barrier((x, start))
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(slice_axis(bits, start, size, 1), x.dtype)


def _select_rows(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``x`` with zeros beyond the lengths, even if it holds NaN there."""
    if lengths is None:
        return x
    row = lax.broadcasted_iota(jnp.int32, x.shape[:2], 1)
    return jnp.where((row < lengths[:, None])[..., None, None], x, 0)


def grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] to [B, K, G, T, H]."""
    batch, length, heads, dim = x.shape
    groups = heads // kv_heads if kv_heads else 1
    return x.reshape(batch, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)


def ungrouped(x: jax.Array) -> jax.Array:
    """[B, K, G, T, H] to [B, T, N, H]."""
    batch, kv_heads, groups, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product in at least float32. Products of two numbers of 16 bits are exact there, so XLA may
    multiply such arrays as they are; other arrays are widened.
    """
    dtype = max(score_dtype(a.dtype), score_dtype(b.dtype), key=lambda dtype: dtype.itemsize)
    if a.dtype != b.dtype:
        a, b = a.astype(dtype), b.astype(dtype)
    # By default, GPUs and TPUs round float32 operands to fewer bits.
    precision = lax.Precision.HIGHEST
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=dtype)


def _and(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b


def select(condition: jax.Array | None, x: jax.Array) -> jax.Array:
    """``x`` if the condition holds (None: everywhere), else 0."""
    return x if condition is None else jnp.where(condition, x, 0)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


def when(condition: jax.Array | None, update, state):
    """``update(state)`` if the condition holds (None: always), else the state."""
    if condition is None:
        return update(state)
    return lax.cond(condition, update, lambda state: state, state)


def read_block(x: jax.Array | None, start: Index, size: int, axis: int) -> jax.Array | None:
    """Part of an axis; None stays None."""
    return None if x is None else slice_axis(x, start, size, axis)


def write_block(
    x: jax.Array | None, tile: jax.Array | None, *starts: tuple[int, Index]
) -> jax.Array | None:
    """Like :func:`written`; None stays None."""
    return None if x is None or tile is None else written(x, tile, *starts)


def added(x: jax.Array, tile: jax.Array, start: tuple[int, Index]) -> jax.Array:
    """``x`` plus a tile that starts at ``(axis, start)``."""
    axis, first = start
    part = slice_axis(x, first, tile.shape[axis], axis)
    return written(x, part + tile, start)


def written(x: jax.Array, tile: jax.Array, *starts: tuple[int, Index]) -> jax.Array:
    """``x`` with a tile at (axis, start) pairs; axes of size 1 start at 0."""
    if x.shape == tile.shape:
        return tile
    first = [jnp.int32(0)] * x.ndim
    for axis, start in starts:
        first[axis] = jnp.int32(start) if x.shape[axis] != 1 else first[axis]
    return lax.dynamic_update_slice(x, tile, first, allow_negative_indices=False)


class Blocks(NamedTuple):
    """The division of one axis into blocks."""

    length: int
    size: int

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    @property
    def overlap(self) -> bool:
        return self.length % self.size != 0

    @property
    def indices(self) -> jax.Array:
        return lax.iota(jnp.int32, self.count)

    def each(self, body: Callable[[Index, Any], Any], state: Any) -> Any:
        """``state = body(index, state)`` for each block.

        XLA fuses a single block with what surrounds it, so that has no loop.
        """
        if self.count == 1:
            return body(0, state)
        return lax.fori_loop(0, self.count, body, state)

    def start(self, index: Any) -> tuple[Any, Any]:
        """The start of a block, and its first element not counted by an earlier block; int32."""
        if isinstance(index, int):
            first = index * self.size
            return min(first, self.length - self.size), first
        first = index.astype(jnp.int32) * self.size
        return jnp.minimum(first, self.length - self.size) if self.overlap else first, first


def _cut(length: int, longest: int) -> Blocks:
    """Blocks of equal size; if there are several, a multiple of the block size of random bits."""
    count = -(-length // longest)
    if count <= 1:
        return Blocks(length, length)
    size = -(-length // (RANDOM_BLOCK * count)) * RANDOM_BLOCK
    return Blocks(length, min(size, length))


def blocks(operands: Operands, longest: int) -> tuple[Blocks, Blocks]:
    """The blocks of rows and columns."""
    rows, columns = operands.query.shape[1], operands.columns
    if operands.pages is not None and operands.pages.is_invariant:
        # XLA's order of summation depends on a product's shape, so each row is a separate product.
        return Blocks(rows, 1), Blocks(columns, INVARIANT_COLUMNS)
    return _cut(rows, longest), _cut(columns, longest)
