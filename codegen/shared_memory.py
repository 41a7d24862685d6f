"""How many bytes of dynamic shared memory a block of each kernel takes.

The compiler asserts these numbers against those of the device headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_memeff.codegen.tiles import sm80, sm90

if TYPE_CHECKING:
    from .spec import KernelSpec

_BARRIER_BYTES = 8
_WORK_TILE_BYTES = 16
_SWIZZLE_BYTES = 1024
_TICKET_BYTES = 8
"""Of which four align barriers."""


def forward_sm90(spec: KernelSpec, tile: sm90.Tile) -> int:
    """Rings of query, key and value tiles, the bias of each warp's rows, what teams add up, and
    what controls them.

    Each buffer has two barriers, the queries' for each 64 rows; the ring of the next pieces of
    work, of four, holds a work item and a length beside them.
    """
    row_warpgroups = spec.consumers // spec.consumer_groups
    queries = row_warpgroups * _operand_bytes(spec, sm90.WARPGROUP_ROWS, spec.padded_head_dim)
    keys, values = (
        _operand_bytes(spec, tile.key, columns)
        for columns in (spec.padded_head_dim, spec.padded_value_dim)
    )
    buffers = tile.query_stages * row_warpgroups + 2 * tile.stages + 4
    control = buffers * 2 * _BARRIER_BYTES + 4 * _WORK_TILE_BYTES
    bias = spec.computing_threads // 32 * _bias_bytes(spec, 16)
    operands = tile.query_stages * queries + tile.stages * (keys + values)
    return operands + bias + _merge_bytes(spec, spec.consumer_groups, 2) + control


def _operand_bytes(spec: KernelSpec, rows: int, columns: int) -> int:
    """A buffer of rows of query, key or value; halved ones have a factor each, and the next buffer
    begins where a swizzle does (ffi/include/memeff/layout/f16x3_tiles.cuh).
    """
    elements = rows * columns * spec.element_bytes
    if not spec.f16x3:
        return elements
    return -(-(elements + 4 * rows) // _SWIZZLE_BYTES) * _SWIZZLE_BYTES


def backward_sm90(spec: KernelSpec, tile: sm90.Tile) -> int:
    """Tiles of key and value, rings of query, its rows' statistics (2 f32), dO and bias, or the
    bias of each warp's 16 keys, and two dS. A kernel whose blocks wait for each other has two
    barriers more, and a ticket.
    """
    dims = spec.padded_head_dim + spec.padded_value_dim
    elements = (tile.key + tile.stages * tile.query) * dims + 2 * tile.query * tile.key
    statistics = tile.stages * tile.query * 8
    buffers = 2 * tile.stages + 1
    bias = tile.key // 16 * _bias_bytes(spec, tile.query, 16)
    if spec.tma_bias:
        bias = tile.stages * tile.query * tile.key * spec.element_bytes
    order = 2 * _BARRIER_BYTES + _TICKET_BYTES if spec.orders_queries else 0
    control = buffers * 2 * _BARRIER_BYTES + order
    return elements * spec.element_bytes + statistics + bias + control


def dbias_sm90(spec: KernelSpec) -> tuple[int, int]:
    """A square of the bias, and a ring of pairs of parts of operands: bytes, and how many pairs
    fit. No more than those of two visits help.
    """
    rows = max(spec.tile.query, spec.tile.key)
    bias = _bias_bytes(spec, rows, rows)
    if spec.tma_bias:
        bias = rows * rows * spec.element_bytes + 2 * _BARRIER_BYTES
    pair = 2 * rows * sm90.PART_COLUMNS * spec.element_bytes + 2 * _BARRIER_BYTES
    visit = (spec.padded_head_dim + spec.padded_value_dim) // sm90.PART_COLUMNS
    stages = min(2 * visit, (sm80.part(sm90.ARCH).shared_bytes(blocks=1) - bias) // pair)
    return bias + stages * pair, stages


def dq_sm90(spec: KernelSpec) -> int:
    """Tiles of query and dO, rings of key and, a buffer less, of value."""
    query, key, stages = spec.tile.query, spec.tile.key, spec.tile.stages
    head, value = spec.padded_head_dim, spec.padded_value_dim
    elements = query * (head + value) + key * (stages * head + (stages - 1) * value)
    buffers = 1 + stages + stages - 1
    return elements * spec.element_bytes + buffers * 2 * _BARRIER_BYTES


def dkdv_sm90(spec: KernelSpec) -> tuple[int, sm90.KeyBuffers]:
    """Tiles of key and value, and rings of as many rows of query and dO, of statistics (2 f32)
    beside both, of P and of dS, and a tile of the bias: bytes, and the buffers of the rings.
    """
    key, head, value = spec.tile.key, spec.padded_head_dim, spec.padded_value_dim
    biases = int(spec.tma_bias)

    def size(rings: sm90.KeyBuffers) -> int:
        elements = key * (1 + rings.visit) * (head + value)
        elements += (rings.probability + 2 + biases) * key * key
        statistics = 2 * rings.visit * key * 8
        buffers = 2 + 2 * rings.visit + rings.probability + 2 + biases
        return elements * spec.element_bytes + statistics + buffers * 2 * _BARRIER_BYTES

    fits = sm80.part(sm90.ARCH).shared_bytes(blocks=1)
    rings = next(rings for rings in sm90.KEY_BUFFERS if size(rings) <= fits)
    return size(rings), rings


def forward_sm80(spec: KernelSpec) -> int:
    """One tile each of query, key, value and bias, and over them at the end that of the output."""
    assert isinstance(spec.tile, sm80.Tile)
    query, key = spec.tile.query, spec.tile.key
    loop = query * spec.padded_head_dim + key * (spec.padded_head_dim + spec.padded_value_dim)
    parked = 0
    if spec.tile.stage_registers:
        # Pointers of a thread, and maximum and sum (f32) of each row that it holds elements of.
        pointers = 3 if _bias_rows(spec, query) else 2
        parked = spec.threads * (8 * pointers + 8 * (2 * query // (16 * spec.tile.warps)))
    loop_bytes = loop * spec.element_bytes + parked + _warp_biases(spec, spec.tile.warps)
    return max(loop_bytes, query * spec.padded_value_dim * spec.element_bytes)


def split_sm80(spec: KernelSpec) -> int:
    """A tile of query and stages of key and value, and over them, at the end, what the teams of
    warps add up: maximum and sum of their rows, and the f32 outputs of all teams but one.
    """
    tile = spec.tile
    assert isinstance(tile, sm80.Tile)
    stage = tile.key * (spec.padded_head_dim + spec.padded_value_dim) * spec.element_bytes
    loop = tile.query * spec.padded_head_dim * spec.element_bytes + tile.stages * stage
    return max(loop, _merge_bytes(spec, tile.key_warps, 2 * spec.warp_rows[0] // 16))


def _merge_bytes(spec: KernelSpec, consumer_groups: int, rows: int) -> int:
    """Maximum and sum of the ``rows`` that each thread holds elements of, and the f32 outputs of
    all consumer_groups but one (ffi/include/memeff/collective/consumer_groups.cuh).
    """
    if consumer_groups == 1:
        return 0
    outputs = (consumer_groups - 1) * spec.tile.query * spec.padded_value_dim * 4
    return spec.computing_threads * 8 * rows + outputs


def backward_sm80(spec: KernelSpec) -> int:
    """Tiles of query, dO, key, value, P, dS, bias, and row statistics (2 f32) of those of query."""
    assert isinstance(spec.tile, sm80.Tile)
    query, key, buffers = spec.tile.query, spec.tile.key, spec.tile.query_buffers
    elements = query * (buffers * spec.padded_head_dim + spec.padded_value_dim)
    elements += key * (spec.padded_head_dim + spec.padded_value_dim)
    elements += 2 * query * key
    return elements * spec.element_bytes + buffers * query * 8 + _bias_bytes(spec, query)


def dbias_sm80(spec: KernelSpec) -> int:
    """Tiles of query, dO, key, value and bias, and two of the rows' statistics (2 f32)."""
    query, key = spec.tile.query, spec.tile.key
    elements = (query + key) * (spec.padded_head_dim + spec.padded_value_dim)
    return elements * spec.element_bytes + 2 * query * 8 + _bias_bytes(spec, query)


def _bias_rows(spec: KernelSpec, rows: int) -> int:
    """How many rows of the bias a tile of ``rows`` rows needs in shared memory."""
    if spec.bias is None or spec.bias_access == "rows":
        return 0
    return 1 if spec.bias_access == "columns" else rows


def _bias_bytes(spec: KernelSpec, rows: int, columns: int | None = None) -> int:
    """Shared memory of a tile of the bias (score/bias/tile.cuh), of as many columns as
    the tile of keys by default.
    """
    return _bias_rows(spec, rows) * ((columns or spec.tile.key) + 8) * int(spec.bias or 0) // 8


def _warp_biases(spec: KernelSpec, warps: int) -> int:
    """Shared memory of a tile of the bias of which each warp has its own rows."""
    return warps * _bias_bytes(spec, spec.tile.query // warps)


# Of the rows of an operand that one step of a wide kernel brings into shared memory; as many rows
# as elements in them where a chunk of its columns is what a product computes.
_COLUMN_STEP_BYTES = 128


def _column_step_buffers(spec: KernelSpec) -> int:
    """Two buffers, each for a step of both operands of the scores, or of a chunk."""
    tile = spec.tile
    return 2 * max(tile.query + tile.key, tile.chunk) * _COLUMN_STEP_BYTES


def large_dim_forward_sm80(spec: KernelSpec) -> int:
    """P, the buffers, and for each row two factors and a maximum of each warp that shares it."""
    query, key = spec.tile.query, spec.tile.key
    column_warps = (spec.threads // 32) // (query // 32)
    return (
        query * key * spec.element_bytes
        + _column_step_buffers(spec)
        + (column_warps + 2) * query * 4
    )


def large_dim_backward_sm80(spec: KernelSpec) -> int:
    """P and dS, the buffers, and two of the rows' statistics (2 f32)."""
    query, key = spec.tile.query, spec.tile.key
    return 2 * query * key * spec.element_bytes + _column_step_buffers(spec) + 2 * query * 8
