"""Parts of a CTA's dynamic shared memory that several kernels use.

Each kernel adds up its own total in ``kernels/``, and the compiler asserts it against the device
headers.
"""

from __future__ import annotations

from jax_memeff.codegen.features import BIAS, FUNCTIONS
from jax_memeff.codegen.functions.sums import Sum, strips
from jax_memeff.codegen.spec import KernelSpec

BARRIER_BYTES = 8
PIPELINE_BYTES = 2 * BARRIER_BYTES
"""The barriers of one buffer: full and empty."""
MOST_DIAGONAL_READS = 2
"""A score function with more reads along diagonals does not pass them through shared memory."""
FLAG_BYTES = 8
"""A boolean and its padding."""
STATISTICS_BYTES = 8
"""Two f32 for each row: logsumexp and the sum of dO * O, or maximum and sum."""

COLUMN_SUM_BARRIERS = 2
"""A CTA that adds up scores with one that has other columns needs this many barriers."""


def column_sum_bytes(ctas: int, rows: int, columns: int) -> int:
    """The bytes of a tile of scores that arrives from the CTA with the other columns, if ``ctas``
    divide them (codegen/memeff/collective/column_sum.cuh).
    """
    return rows * columns * 4 if ctas > 1 else 0


def bias_rows(spec: KernelSpec, rows: int) -> int:
    """How many rows of the bias a tile of ``rows`` rows needs in shared memory."""
    bias = spec[BIAS]
    if bias is None or bias.access == "rows":
        return 0
    return 1 if bias.access == "columns" else rows


def bias_bytes(spec: KernelSpec, rows: int, columns: int | None = None) -> int:
    """The bytes of a bias tile (codegen/memeff/score/bias/tile.cuh), by default with as many
    columns as the KV block.
    """
    bias = spec[BIAS]
    bits = int(bias.bits) if bias else 0
    return bias_rows(spec, rows) * ((columns or spec.tile.key) + 8) * bits // 8


def merge_bytes(threads: int, groups: int, lane_rows: int, query: int, value_dim: int) -> int:
    """The bytes of maximum and sum of the ``lane_rows`` rows of which each thread has elements, and
    of the f32 outputs of all ``groups`` but one, for ``query`` rows of ``value_dim`` columns
    (codegen/memeff/collective/consumer_groups.cuh).
    """
    if groups == 1:
        return 0
    return threads * STATISTICS_BYTES * lane_rows + (groups - 1) * query * value_dim * 4


def captured_sum_bytes(spec: KernelSpec, columns: Sum, warps: int, warp_columns: int) -> int:
    """The bytes of the strips of all warps (codegen/memeff/score/function_gradient.cuh).

    ``columns`` is the dim along the columns of the scores' accumulators, ``Sum.QUERY`` or
    ``Sum.KEY``; each warp has ``warp_columns`` of them.
    """
    functions = spec[FUNCTIONS]
    if functions is None or spec.direction != "backward":
        return 0
    row_bytes = (warp_columns + 8 + 16) * 4
    return strips(functions.read_sums, columns) * warps * 8 * row_bytes


def diagonal_sum_bytes(spec: KernelSpec, warps: int, warp_columns: int) -> int:
    """The bytes in which one warp adds up sums along diagonals. For each read they hold the sums of
    a Q block from each of ``warps``, and a ring of 256 sums
    (codegen/memeff/score/function_gradient.cuh).
    """
    functions = spec[FUNCTIONS]
    rings = 0 if functions is None else functions.read_sums.count(Sum.DIAGONAL)
    return rings * (warps * (warp_columns + 16) + 256) * 4


def diagonal_bytes(spec: KernelSpec) -> int:
    """The bytes of the numbers that a score function reads along the diagonals of a tile. There are
    two copies, 16 banks apart (codegen/memeff/score/shared_diagonals.cuh).
    """
    words = (spec.tile.query + spec.tile.key + 1 - 16 + 31) // 32 * 32 + 16
    return FUNCTIONS.diagonal_reads(spec) * 2 * words * 4
