"""What kernels write beside their results: sizes known before the device is.

Each is large enough for the kernels of every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import jax.numpy as jnp
from jax.core import ShapedArray

from jax_memeff._call.divisors import gradient_shape
from jax_memeff._call.operands import NeedsGrad, Operands
from jax_memeff._call.options import Divisors
from jax_memeff._cuda import splits
from jax_memeff.codegen import support
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.tiles import sm90

# ``kLongSumColumns`` of ffi/include/memeff/params.h.
_LONG_SUM_COLUMNS = 8192

# ``TileCounter`` there.
_TILE_COUNTER_WORDS = 4


def forward(avals: Operands, specs: Iterable[KernelSpec]) -> Iterator[tuple[str, ShapedArray]]:
    """Names and types of the workspaces of a forward (ffi/include/memeff/params.h)."""
    specs = list(specs)
    yield from splits.partial_results(avals, specs).items()
    if any(spec.persistent for spec in specs):
        yield "tile_counter", _int32(_TILE_COUNTER_WORDS)
    for name, size_of in (
        ("out_sum", _out_sum),
        ("score_sum", _score_sum),
        ("query_hi_lo", _query_hi_lo),
        ("key_hi_lo", _key_hi_lo),
        ("value_hi_lo", _value_hi_lo),
    ):
        if size := max(size_of(avals, spec) for spec in specs):
            yield name, _float32(size)


def backward(
    avals: Operands, divisors: Divisors, specs: Iterable[KernelSpec], needs_grad: NeedsGrad
) -> Iterator[tuple[str, ShapedArray]]:
    """Names and types of the workspaces of a backward (ffi/include/memeff/params.h)."""
    specs = list(specs)

    def largest(size: Callable[[Operands, KernelSpec], int]) -> int:
        return max(size(avals, spec) for spec in specs)

    def bias_sums(avals: Operands, spec: KernelSpec) -> int:
        return _bias_sums(avals, divisors, spec)

    sizes = [("row_statistics", 2 * largest(_padded_queries))]
    sizes += [("query_gradient_sum", largest(_query_gradient_sum))] if needs_grad.query else []
    sizes += [("key_gradient_sum", largest(_key_gradient_sum))] if needs_grad.key else []
    sizes += [("value_gradient_sum", largest(_value_gradient_sum))] if needs_grad.value else []
    sizes += [("bias_gradient_sum", largest(bias_sums))] if needs_grad.bias else []
    yield from ((name, _float32(size)) for name, size in sizes if size)
    if any(shared := max(_split_q_sums(avals, spec) for spec in specs)):
        yield "key_gradient_sum", ShapedArray(shared, jnp.dtype(jnp.float32))
    if size := largest(_order):
        yield "semaphores", _int32(size)


def _float32(size: int) -> ShapedArray:
    return ShapedArray((size,), jnp.dtype(jnp.float32))


def _int32(size: int) -> ShapedArray:
    return ShapedArray((size,), jnp.dtype(jnp.int32))


def _padded_queries(avals: Operands, spec: KernelSpec) -> int:
    _, heads, length, _ = avals.scores
    return heads * _padded_rows(avals, avals.query.shape[1], length, spec.tile.query)


def _padded_keys(avals: Operands, spec: KernelSpec) -> int:
    heads, length = avals.key.shape[2], avals.scores[3]
    return heads * _padded_rows(avals, avals.key.shape[1], length, spec.tile.key)


def _padded_rows(avals: Operands, tokens: int, length: int, tile: int) -> int:
    """Rows of one head in the workspaces; packed sequences as in layout/query_tiles.cuh."""
    batch = avals.scores[0]
    if avals.sequences is not None:
        return (tokens // tile + batch) * tile
    return batch * _round_up(length, tile)


def _out_sum(avals: Operands, spec: KernelSpec) -> int:
    """A wide kernel sums between the tiles of keys, where there are several."""
    if not spec.large_dim or avals.scores[3] <= spec.tile.key:
        return 0
    return _padded_queries(avals, spec) * _round_up(avals.value.shape[3], spec.tile.chunk)


def _score_sum(avals: Operands, spec: KernelSpec) -> int:
    """Of more columns than that a wide kernel sums the scores of a tile in several runs."""
    if not spec.large_dim or avals.query.shape[3] <= _LONG_SUM_COLUMNS:
        return 0
    return _padded_queries(avals, spec) * spec.tile.key


def _query_hi_lo(avals: Operands, spec: KernelSpec) -> int:
    """Tiles of the rows of a consumer: layout/f16x3_tiles.cuh."""
    _, heads, length, _ = avals.scores
    tokens, tile = avals.query.shape[1], sm90.WARPGROUP_ROWS
    return spec.f16x3 * heads * _hi_lo_rows(avals, tokens, length, tile, spec.padded_head_dim)


def _key_hi_lo(avals: Operands, spec: KernelSpec) -> int:
    return spec.f16x3 * _hi_lo_keys(avals, spec, spec.padded_head_dim)


def _value_hi_lo(avals: Operands, spec: KernelSpec) -> int:
    return spec.f16x3 * _hi_lo_keys(avals, spec, spec.padded_value_dim)


def _hi_lo_keys(avals: Operands, spec: KernelSpec, columns: int) -> int:
    heads, length = avals.key.shape[2], avals.scores[3]
    return heads * _hi_lo_rows(avals, avals.key.shape[1], length, spec.tile.key, columns)


def _hi_lo_rows(avals: Operands, tokens: int, length: int, tile: int, columns: int) -> int:
    """Two halves of each element, and a factor of each row; no length has less than a tile."""
    return _padded_rows(avals, tokens, max(length, 1), tile) * (columns + 1)


def _query_gradient_sum(avals: Operands, spec: KernelSpec) -> int:
    if spec.two_kernel:
        return 0
    if not spec.large_dim:
        return _padded_queries(avals, spec) * spec.padded_head_dim
    if avals.scores[3] <= spec.tile.key:
        return 0
    return _padded_queries(avals, spec) * _round_up(avals.query.shape[3], spec.tile.chunk)


def _key_gradient_sum(avals: Operands, spec: KernelSpec) -> int:
    return _key_sums(avals, spec, avals.key.shape[3])


def _value_gradient_sum(avals: Operands, spec: KernelSpec) -> int:
    return _key_sums(avals, spec, avals.value.shape[3])


def _key_sums(avals: Operands, spec: KernelSpec, dim: int) -> int:
    """A wide kernel sums between the tiles of queries of all heads of a group."""
    _, heads, length, _ = avals.scores
    if not spec.large_dim or (length <= spec.tile.query and heads == avals.key.shape[2]):
        return 0
    return _padded_keys(avals, spec) * _round_up(dim, spec.tile.chunk)


def _bias_sums(avals: Operands, divisors: Divisors, spec: KernelSpec) -> int:
    """The sums of the gradient of a bias (ffi/include/memeff/score/bias/gradient.cuh)."""
    if avals.bias is None or spec.bias_gradient not in ("shared", "columns"):
        return 0
    batch, heads, _, _ = gradient_shape("bias", avals.bias.shape, avals, divisors)
    rows = 1
    if spec.bias_gradient == "shared":
        rows = _round_up(avals.scores[2], spec.tile.query)
    elif spec.deterministic:
        # Every batch element and head, and on mma.sync every row of warps in them, has sums of its
        # own.
        batch, heads, _, _ = avals.scores
        rows = 1 if spec.family == "sm90" else spec.tile.query // 16
    return batch * heads * rows * _round_up(avals.scores[3], spec.tile.key)


def _split_q_sums(avals: Operands, spec: KernelSpec) -> tuple[int, int]:
    """Of each of the blocks that share tiles of keys: schedule/split_q.cuh."""
    if not spec.split_q:
        return 0, 0
    columns = {"key": spec.padded_head_dim, "value": spec.padded_value_dim}
    wanted = sum(columns[name] for name in columns if name in spec.gradients)
    return q_splits(avals), _padded_keys(avals, spec) * wanted


def q_splits(avals: Operands) -> int:
    """How many blocks of a backward may share a tile of keys; none do of packed sequences."""
    batch, heads, queries, keys = avals.scores
    if avals.sequences is not None or not heads:
        return 1
    key_heads = avals.key.shape[2]
    group = heads // key_heads
    return support.q_splits(batch=batch, queries=queries, keys=keys, heads=key_heads, group=group)


def _order(avals: Operands, spec: KernelSpec) -> int:
    """A ticket counter and the progress of each key tile, or a counter for each of those that
    blocks share (ffi/include/memeff/schedule/dq_semaphore.cuh).
    """
    return 1 + _key_tiles(avals, spec) if spec.orders_queries or spec.split_q else 0


def _key_tiles(avals: Operands, spec: KernelSpec) -> int:
    """Of all key heads and batch elements; packed sequences may all be the longest."""
    batch, _, _, columns = avals.scores
    return batch * avals.key.shape[2] * -(-columns // spec.tile.key)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
