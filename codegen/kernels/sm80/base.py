"""The bases of the mma.sync kernels: their tiles, and how their warps share products."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import ClassVar

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import DELTA_FROM_SCORES, FUNCTIONS
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import (
    EVERY_MASK,
    EVERY_MODIFIER,
    LARGE_DIM,
    PADDED_DIMS,
    UNALIGNED_ROWS,
    Backward,
    Entries,
    Masks,
    stage,
)
from jax_memeff.codegen.launch import BlockMask, EntryPoint, Grid
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import Kernel, KernelSpec
from jax_memeff.codegen.strategy import Strategy

COLUMN_STEP_BYTES = 128
"""Bytes of each row that one step of a kernel for large head dims copies to shared memory."""


@dataclasses.dataclass(frozen=True)
class MmaTile:
    """The tile of scores of a CTA, its warps, and how many CTAs share an SM."""

    query: int
    key: int
    warps: int
    blocks_per_sm: int
    reason: str
    modifiers: tuple[str, ...] = (*EVERY_MODIFIER, UNALIGNED_ROWS)
    """Titles of the features that the tile also serves, alone and together."""
    masks: Masks = EVERY_MASK
    spill_bytes: int = 0
    """Bytes that a thread may spill, if that was measured to be faster than spilling nothing."""
    vector_reductions: bool = False
    """Whether a backward adds four floats at a time to sums in global memory."""


class MmaKernel(Kernel):
    """An mma.sync kernel, for every architecture from sm_75 on."""

    family = "sm80"
    warp_rows: ClassVar[tuple[int, ...]] = (16, 32)
    """How many rows of a product a warp may own."""

    def dims(self) -> Iterable[tuple[int, int]]:
        return itertools.product(PADDED_DIMS, PADDED_DIMS)

    def threads(self, spec: KernelSpec) -> int:
        return 32 * mma_tile(spec).warps

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        """The matrix products that the warps of a CTA share, as (rows, columns)."""
        raise NotImplementedError

    def rows_of_warps(self, spec: KernelSpec) -> tuple[int, ...]:
        """How many rows of a product a warp of this spec may own."""
        return self.warp_rows

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        warps = self.threads(spec) // 32
        return [
            f"{warps} warps cannot share its {rows}x{columns} {product}"
            for product, (rows, columns) in self.products(spec).items()
            if not any(
                _warps_fit(rows, columns, warps, height) for height in self.rows_of_warps(spec)
            )
        ]

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = mma_tile(spec)
        return {"kWarps": tile.warps, "kBlocksPerSm": tile.blocks_per_sm}

    def main(self, spec: KernelSpec, grid: Grid, block_mask: BlockMask | None = None) -> EntryPoint:
        """The main entry point."""
        return EntryPoint(
            spec.name,
            spec.threads,
            spec.shared_bytes,
            grid,
            block_mask=block_mask,
            cpp_class=f"{self.class_name}<Config>",
            blocks="Config::kBlocksPerSm",
        )


@dataclasses.dataclass(frozen=True)
class LargeDimTile(MmaTile):
    """A row of the tables of kernels for large head dims."""

    chunk: int = 0
    """The columns of out or of a gradient that a CTA computes at a time."""


class LargeDimKernel(MmaKernel):
    """A kernel for head dims that accumulators cannot hold: it processes columns in steps and
    chunks.
    """

    reads_bias_by_elements = True
    moves_unaligned_rows_in_pieces = True

    def dims(self) -> Iterable[tuple[int, int]]:
        return ((LARGE_DIM, LARGE_DIM),)

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        """False for segment ids and boolean masks without a mask function: that case has not run on
        a GPU yet.
        """
        return spec[FUNCTIONS] is not None

    def dims_word(self, spec: KernelSpec) -> str:
        return "large"

    def columns(self, spec: KernelSpec) -> tuple[int, int]:
        chunk = large_dim_tile(spec).chunk
        return chunk, chunk


class MmaBackward(Backward, MmaKernel):
    """The common base of the mma.sync backward kernels."""

    def completed(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> KernelSpec:
        vectors = gpu.has_vector_reductions(problem.arch)
        tile = dataclasses.replace(mma_tile(spec), vector_reductions=vectors)
        return dataclasses.replace(super().completed(spec, problem, strategy), tile=tile)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        vectors = mma_tile(spec).vector_reductions
        return {**super().constants(spec), "kVectorReductions": vectors}

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        """One row for each row of warps."""
        return spec.tile.query // 16

    def delta(self, spec: KernelSpec) -> Entries:
        """The kernel that takes delta from the scores, if it is asked for: two buffers of one step
        of query and key, the statistics of the rows, and two sums of each row for each of the warps
        that share it.
        """
        if spec[DELTA_FROM_SCORES] is None:
            return ()
        query, key, warps = spec.tile.query, spec.tile.key, spec.threads // 32
        sharing = key // columns_of_warp(query, key, warps)
        shared_bytes = 2 * (query + key) * COLUMN_STEP_BYTES
        shared_bytes += query * (shared_memory.STATISTICS_BYTES + 8 * sharing)
        block_mask = spec.block_mask("queries")
        name = "FmhaBackwardDelta<Config>"
        return (stage(spec, "delta", name, spec.threads, shared_bytes, block_mask=block_mask),)


def mma_tile(spec: KernelSpec) -> MmaTile:
    """The tile of an mma.sync kernel."""
    assert isinstance(spec.tile, MmaTile)
    return spec.tile


def large_dim_tile(spec: KernelSpec) -> LargeDimTile:
    """The tile of a kernel for large head dims."""
    assert isinstance(spec.tile, LargeDimTile)
    return spec.tile


def column_step_buffers(spec: KernelSpec) -> int:
    """The size of two buffers, each for one step of both operands of the scores, or of a chunk: as
    many rows of a step as the chunk has columns.
    """
    tile = large_dim_tile(spec)
    return 2 * max(tile.query + tile.key, tile.chunk) * COLUMN_STEP_BYTES


def columns_of_warp(rows: int, columns: int, warps: int) -> int:
    """The columns of a product that each of ``warps`` warps computes in a ``WarpGrid``. A warp of
    that grid has 32 rows if they fit, else 16.

    >>> columns_of_warp(64, 128, 8), columns_of_warp(64, 64, 8)
    (32, 16)
    """
    own_rows = 32 if _warps_fit(rows, columns, warps, 32) else 16
    return columns // (warps // (rows // own_rows))


def _warps_fit(rows: int, columns: int, warps: int, owned_rows: int) -> bool:
    """Whether warps with ``owned_rows`` rows and a multiple of 16 columns each tile the product."""
    row_warps = rows // owned_rows
    return (
        owned_rows % 16 == 0
        and rows % owned_rows == 0
        and row_warps > 0
        and warps % row_warps == 0
        and columns % (16 * (warps // row_warps)) == 0
    )
