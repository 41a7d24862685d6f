"""The two families of kernels: mma.sync (sm80) and wgmma (sm90)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from jax_memeff.codegen import gpu
from jax_memeff.codegen.features import FEATURES, FUNCTIONS, PAGES, VARLEN
from jax_memeff.codegen.features.feature import Constant, CppType, Modified
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.bases.grids import query_tile_grid
from jax_memeff.codegen.launch import BlockMask, EntryPoint, Grid
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import Kernel, KernelSpec, Row
from jax_memeff.codegen.strategy import Strategy

PADDED_DIMS = (32, 64, 96, 128, 192, 256)
"""Padded head dims that kernels are compiled for; a dim takes the smallest that holds it."""

LARGE_DIM = 65536
"""The padded head dim of the kernels for all larger ones, up to this one."""

COLUMN_STEP_BYTES = 128
"""Bytes of each row that one step of a kernel for large head dims copies to shared memory."""

WARPGROUP_ROWS = 64
"""Rows of a product that a consumer owns: the height of one wgmma."""
WARPGROUP_THREADS = 128

UNALIGNED_ROWS = "unaligned rows"
"""Rows that are copied in pieces need registers in a kernel for large head dims, as features do."""

_BASIC_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)
"""The column counts of wgmma that CuTe offers by default."""
# Defined only if needed, because CuTe's file with the other shapes takes seconds to parse.
_EXTENDED_SHAPES = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n"

Masks = tuple[Literal["none", "causal", "window"], ...]
EVERY_MASK: Masks = ("none", "causal", "window")


def modifiers(*without: str) -> tuple[str, ...]:
    """Titles of all features that need their own registers in a main loop, ``without`` some.

    >>> others = set(modifiers("soft cap", "user functions", "bias"))
    >>> others == {*MASK_MODIFIERS, *PROBABILITY_MODIFIERS}
    True
    """
    return tuple(
        feature.title for feature in FEATURES if feature.modifies and feature.title not in without
    )


def _modifiers_of(modified: Modified) -> tuple[str, ...]:
    return tuple(feature.title for feature in FEATURES if feature.modifies == modified)


EVERY_MODIFIER = modifiers()
MASK_MODIFIERS = _modifiers_of("mask")
PROBABILITY_MODIFIERS = _modifiers_of("probabilities")


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


MmaTables = Mapping[Gpu, Mapping[int, Sequence[MmaTile]]]
"""Rows by GPU and the larger of the two padded head dims; those of one entry are tried in order."""


@dataclasses.dataclass(frozen=True)
class WgmmaTile:
    """The tile of scores of a CTA, and the depth of its rings of buffers."""

    query: int
    key: int
    stages: int
    """Buffers of keys and of values; in a backward of queries and of dO."""
    reason: str
    modifiers: tuple[str, ...] = ()
    """Titles of the features that the tile also serves, alone and together."""
    masks: Masks = EVERY_MASK
    spill_bytes: int = 0
    """Bytes that a thread may spill, if that was measured to be faster than spilling nothing."""

    @property
    def blocks_per_sm(self) -> int:
        """Always 1, because a CTA takes all registers of an SM."""
        return 1


class MmaKernel(Kernel):
    """An mma.sync kernel, for every architecture from sm_75 on.

    Tiles are looked up by GPU and by the larger of the two padded head dims. f32 takes twice the
    shared memory of 16-bit elements, so it has its own tables.
    """

    family = "sm80"
    tiles: ClassVar[MmaTables]
    tiles_f32: ClassVar[MmaTables]
    dims: ClassVar[tuple[tuple[int, int], ...]] = tuple(itertools.product(PADDED_DIMS, PADDED_DIMS))
    warp_rows: ClassVar[tuple[int, ...]] = (16, 32)
    """How many rows of a product a warp may own."""

    def rows(self, problem: Problem) -> Iterator[Row]:
        tables = self.tiles_f32 if problem.dtype in F32_DTYPES else self.tiles
        table = tables.get(gpu.of(problem.arch), {})
        for padded in self.dims:
            for tile in table.get(max(padded), ()):
                yield Row(*padded, tile)

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
            if not any(_warps_fit(rows, columns, warps, own) for own in self.rows_of_warps(spec))
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
    dims = ((LARGE_DIM, LARGE_DIM),)

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


class WgmmaKernel(Kernel):
    """A Hopper kernel: a producer warpgroup that copies, and consumers that multiply."""

    family = "sm90"
    sums_common_bias = False  # the two extra wgmma products cost less than sums in global memory
    takes_f32: ClassVar[bool] = False

    def consumer_groups(self, spec: KernelSpec) -> int:
        """The number of consumer groups, which take the KV blocks of their rows in turn."""
        return 1

    def consumers(self, spec: KernelSpec) -> int:
        """The number of computing warpgroups, of 64 rows each."""
        return spec.tile.query // WARPGROUP_ROWS * self.consumer_groups(spec)

    def threads(self, spec: KernelSpec) -> int:
        return WARPGROUP_THREADS * (self.consumers(spec) + 1)

    def computing_threads(self, spec: KernelSpec) -> int:
        return WARPGROUP_THREADS * self.consumers(spec)

    def alignment(self, problem: Problem) -> int:
        return 16

    def rows(self, problem: Problem) -> Iterator[Row]:
        if not gpu.has_wgmma(problem.arch) or problem.dtype == "tf32":
            return
        if (problem.dtype == "f32") == self.takes_f32:
            yield from self.padded_rows()

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        return {"kStages": wgmma_tile(spec).stages}

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        """The column counts of the kernel's products; CuTe's default ones may be among them."""
        return (spec.tile.query, spec.tile.key)

    def defines(self, spec: KernelSpec) -> str:
        return "" if set(self.widths(spec)) <= set(_BASIC_COLUMNS) else _EXTENDED_SHAPES

    def padded_rows(self) -> Iterator[Row]:
        """The rows of the table, for one dtype."""
        raise NotImplementedError

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = []
        by_groups = self.consumer_groups(spec) > 1
        # Other kernels split the keys, but not those of float32 and of packed sequences.
        can_split = spec.dtype not in F32_DTYPES and (not spec[VARLEN] or spec[PAGES].size > 0)
        if by_groups and strategy.query_rows != "consumer_groups":
            reasons.append("its consumer groups are for few work tiles whose keys are not long")
        elif not by_groups and strategy.splits_keys and can_split:
            reasons.append(
                "it does not split the keys, and the work tiles alone do not fill the GPU"
            )
        smaller = min(spec.padded_head_dim, spec.padded_value_dim)
        if 2 * max(problem.head_dim, problem.value_dim) <= smaller:
            reasons.append("half of its columns would be padding")
        return reasons

    def main(self, spec: KernelSpec, grid: Grid, block_mask: BlockMask | None = None) -> EntryPoint:
        """The main entry point."""
        return EntryPoint(
            spec.name,
            spec.threads,
            spec.shared_bytes,
            grid,
            takes_maps=bool(spec.tensor_maps),
            block_mask=block_mask,
            cpp_class=f"{self.class_name}<Config>",
            blocks=str(spec.tile.blocks_per_sm),
        )


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


def rows_of_pairs(tiles: Mapping[int, Sequence[WgmmaTile]]) -> Iterator[Row]:
    """All pairs of the padded dims of a table. A pair has the tiles of the larger dim."""
    for head, value in itertools.product(tiles, repeat=2):
        for tile in tiles[max(head, value)]:
            yield Row(head, value, tile)


def wgmma_tile(spec: KernelSpec) -> WgmmaTile:
    """The tile of a wgmma kernel."""
    assert isinstance(spec.tile, WgmmaTile)
    return spec.tile


def stage(
    spec: KernelSpec,
    suffix: str,
    class_name: str,
    threads: int,
    shared_bytes: int = 0,
    grid: Grid | None = None,
    **rest: Any,
) -> EntryPoint:
    """An entry point before, after or instead of the main one. By default its grid has a CTA for
    each tile of queries.
    """
    name = f"{spec.name}_{suffix}"
    grid = grid or query_tile_grid(spec)
    return EntryPoint(name, threads, shared_bytes, grid, cpp_class=class_name, **rest)


def panel_columns(dim: int) -> int:
    """The columns of the panels of a tile in shared memory with ``dim`` columns."""
    return 64 if dim % 64 == 0 else 32


def tile_columns(dim: int) -> int:
    """The columns that a tile with ``dim`` columns takes in shared memory: those of whole panels.

    >>> tile_columns(80), tile_columns(128)
    (96, 128)
    """
    panel = panel_columns(dim)
    return -(-dim // panel) * panel


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
