"""The bases of the Hopper kernels: a producer warpgroup copies, and consumers multiply."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import BIAS, BROADCAST_BATCH, DELTA_FROM_SCORES, PACKED, PAGES
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.common.base import (
    EVERY_MASK,
    Backward,
    Entries,
    Masks,
    bias_grid,
    panel_columns,
    query_tile_grid,
    stage,
)
from jax_memeff.codegen.launch import BlockMask, EntryPoint, Grid, TensorMap, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import Kernel, KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy

WARPGROUP_ROWS = 64
"""Rows of a product that a consumer owns: the height of one wgmma."""
WARPGROUP_THREADS = 128

_BASIC_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)
"""The column counts of wgmma that CuTe offers by default."""
# Defined only if needed, because CuTe's file with the other shapes takes seconds to parse.
_EXTENDED_SHAPES = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n"

PART_COLUMNS = 64
"""Columns of the operands that the dbias kernel copies at a time."""

_DELTA_ROWS = 128
"""Queries of a CTA of the delta kernel: two consumers hide each other's exponentials."""

# ``TileCounter`` of ffi/include/memeff/params.h.
_TILE_COUNTER_WORDS = 4

_TILE_RING = 4
"""The slots of the ring of work tiles."""
_WORK_TILE_BYTES = 16

_FEW_F32_QUERIES = 16

SPLIT_THREADS = 256
_FACTOR_BYTES = 4


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


@dataclasses.dataclass(frozen=True)
class PersistentTile(WgmmaTile):
    """A row of the table of a persistent kernel."""

    query_stages: int = 2
    """Buffers of queries. With two, the next work tile's queries arrive while the current ones are
    read.
    """


class WgmmaKernel(Kernel):
    """A Hopper kernel: a producer warpgroup that copies, and consumers that multiply."""

    family = "sm90"
    sums_common_bias = False  # the two extra wgmma products cost less than sums in global memory
    takes_f32: ClassVar[bool] = False
    tiles: ClassVar[Mapping[tuple[int, int], Sequence[WgmmaTile]]]
    """By padded head dims, the first that serves a problem is chosen. Each row has its figure, and
    that of the tile that lost."""

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

    def dims(self) -> Iterable[tuple[int, int]]:
        return self.tiles

    def configure(self, problem: Problem, own: Gpu, padded: tuple[int, int]) -> Sequence[WgmmaTile]:
        if not gpu.has_wgmma(problem.arch) or problem.dtype == "tf32":
            return ()
        return self.tiles[padded] if (problem.dtype == "f32") == self.takes_f32 else ()

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        return {"kStages": wgmma_tile(spec).stages}

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        """The column counts of the kernel's products; CuTe's default ones may be among them."""
        return (spec.tile.query, spec.tile.key)

    def defines(self, spec: KernelSpec) -> str:
        return "" if set(self.widths(spec)) <= set(_BASIC_COLUMNS) else _EXTENDED_SHAPES

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = []
        by_groups = self.consumer_groups(spec) > 1
        # Other kernels split the keys, but not those of float32 and of packed sequences.
        can_split = spec.dtype not in F32_DTYPES and (not spec[PACKED] or spec[PAGES].size > 0)
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


class PersistentSm90(WgmmaKernel):
    """A producer that hands out work tiles, and rings of queries, keys and values."""

    persistent = True

    def ring_bytes(self, spec: KernelSpec) -> int:
        """The bytes of barriers and work tiles, and of the bias of each warp's rows.

        Each buffer has two barriers; a buffer of queries has two for every 64 rows. Each slot of
        the ring of work tiles also has a work tile, and two more barriers, which signal when the
        next work tile may be taken.
        """
        tile = persistent_tile(spec)
        row_warpgroups = spec.tile.query // WARPGROUP_ROWS
        buffers = tile.query_stages * row_warpgroups + 2 * tile.stages + 2 * _TILE_RING
        control = buffers * shared_memory.PIPELINE_BYTES + _TILE_RING * _WORK_TILE_BYTES
        return control + spec.computing_threads // 32 * shared_memory.bias_bytes(spec, 16)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        grid = query_tile_grid(spec)._replace(most_per_sm=1)  # persistent blocks
        parts = spec.tile.query // WARPGROUP_ROWS
        return (self.main(spec, grid, spec.block_mask("queries", parts=parts)),)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        return {**super().constants(spec), "kQueryStages": persistent_tile(spec).query_stages}

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield Workspace("tile_counter", (_TILE_COUNTER_WORDS,), "int32")


class F16x3Kernel(WgmmaKernel):
    """Its operands are hi and lo parts, with one factor per row, which a kernel before it writes
    (codegen/memeff/layout/f16x3_tiles.cuh).
    """

    takes_f32 = True

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if strategy.mma_sync:
            reasons.append(
                "for few queries, splitting all keys and values costs more than it saves"
            )
        if spec[BROADCAST_BATCH]:
            reasons.append("it splits its operands once for each batch index of the call")
        return reasons

    def element(self, spec: KernelSpec) -> str:
        return "memeff::F16x3"

    def part_bytes(self, spec: KernelSpec, rows: int, columns: int) -> int:
        """Hi and lo parts of a tile in shared memory, and the factors of its rows."""
        return rows * (columns * spec.element_bytes + _FACTOR_BYTES)

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """Hi and lo parts of each element, and one factor per row, in tiles of the size of a
        consumer's rows and of KV blocks; every length has at least one tile.
        """
        yield from super().workspaces(spec, sizes, multiprocessors)
        lengths = sizes.with_rows()
        queries = lengths.padded_queries(WARPGROUP_ROWS)
        keys = lengths.padded_keys(spec.tile.key)
        yield Workspace("query_hi_lo", (queries * (spec.padded_head_dim + 1),))
        yield Workspace("key_hi_lo", (keys * (spec.padded_head_dim + 1),))
        yield Workspace("value_hi_lo", (keys * (spec.padded_value_dim + 1),))
        if spec.direction == "backward":
            yield Workspace("out_gradient_hi_lo", (queries * (spec.padded_value_dim + 1),))


class WgmmaBackward(Backward, WgmmaKernel):
    """The common base of the wgmma backward kernels."""

    def has_tma_bias(self, spec: KernelSpec) -> bool:
        bias = spec[BIAS]
        return bias is not None and bias.bits == "16" and bias.access == "vectors"

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        return 1

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        return (*super().widths(spec), spec.padded_head_dim, spec.padded_value_dim)

    def query_rows(self, spec: KernelSpec) -> int:
        """The rows of query and dO in one TMA box."""
        raise NotImplementedError

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        head, value = panel_columns(spec.padded_head_dim), panel_columns(spec.padded_value_dim)
        queries = self.query_rows(spec)
        bias = (TensorMap("bias", queries, panel_columns(spec.tile.key)),)
        return (
            TensorMap("query", queries, head),
            TensorMap("key", spec.tile.key, head),
            TensorMap("value", spec.tile.key, value),
            TensorMap("out_gradient", queries, value),
            TensorMap("query_gradient", WARPGROUP_ROWS, head),
            TensorMap("key_gradient", WARPGROUP_ROWS, head),
            TensorMap("value_gradient", WARPGROUP_ROWS, value),
            *(bias if spec.tma_bias else ()),
        )

    def dbias(self, spec: KernelSpec, class_name: str) -> EntryPoint:
        """The dbias kernel: squares of scores, from parts of the operands."""
        side = max(spec.tile.query, spec.tile.key)
        shared_bytes, _ = dbias_bytes_and_stages(spec)
        grid = bias_grid(spec, side, side)._replace(most_per_sm=1)
        return stage(
            spec,
            "dbias",
            class_name,
            spec.threads,
            shared_bytes,
            grid=grid,
            takes_maps=True,
            block_mask=spec.block_mask("queries", side, side),
        )

    def delta(self, spec: KernelSpec) -> Entries:
        """The kernel that takes delta from the scores, if it is asked for: tiles of query and dO,
        and two buffers each of keys and of values.
        """
        if spec[DELTA_FROM_SCORES] is None:
            return ()
        columns = spec.padded_head_dim + spec.padded_value_dim
        shared_bytes = (_DELTA_ROWS + 2 * spec.tile.key) * columns * spec.element_bytes
        shared_bytes += (1 + 2 + 2) * shared_memory.PIPELINE_BYTES
        kernel = stage(
            spec,
            "delta",
            "FmhaBackwardSm90Delta<Config>",
            WARPGROUP_THREADS * (_DELTA_ROWS // WARPGROUP_ROWS + 1),
            shared_bytes,
            grid=query_tile_grid(spec, _DELTA_ROWS),
            takes_maps=True,
            block_mask=spec.block_mask("queries", _DELTA_ROWS),
        )
        return (kernel,)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        found = dict(super().constants(spec))
        if bias_gradient(spec) == "dbias_kernel":
            _, found["kDbiasStages"] = dbias_bytes_and_stages(spec)
        return found


_T = TypeVar("_T", bound=WgmmaTile)


def by_pair(tiles: Mapping[int, Sequence[_T]]) -> Mapping[tuple[int, int], Sequence[_T]]:
    """Tiles by pairs of padded head dims: a pair has those of the larger dim."""
    return {pair: tiles[max(pair)] for pair in itertools.product(tiles, tiles)}


def prefers_mma_sync(sizes: Sizes, multiprocessors: int) -> bool:
    """Whether each key of a float32 call is multiplied with a few queries of one head, in enough
    tiles to fill the GPU. Then writing all keys and values as hi and lo parts takes longer than
    multiplying them on mma.sync. Heads of a group would read the same keys again.
    """
    few = sizes.group == 1 and sizes.queries <= _FEW_F32_QUERIES and not sizes.packed
    return few and 2 * sizes.batch * sizes.heads > multiprocessors


def wgmma_tile(spec: KernelSpec) -> WgmmaTile:
    """The tile of a wgmma kernel."""
    assert isinstance(spec.tile, WgmmaTile)
    return spec.tile


def persistent_tile(spec: KernelSpec) -> PersistentTile:
    """The tile of a persistent kernel."""
    assert isinstance(spec.tile, PersistentTile)
    return spec.tile


def dbias_bytes_and_stages(spec: KernelSpec) -> tuple[int, int]:
    """The shared memory of the dbias kernel, for a square of the bias and a ring of pairs of
    operand parts, and how many pairs fit. More pairs than two Q blocks have do not help.
    """
    rows = max(spec.tile.query, spec.tile.key)
    bias = shared_memory.bias_bytes(spec, rows, rows)
    if spec.tma_bias:
        bias = rows * rows * spec.element_bytes + shared_memory.PIPELINE_BYTES
    pair = 2 * rows * PART_COLUMNS * spec.element_bytes + shared_memory.PIPELINE_BYTES
    q_block = (spec.padded_head_dim + spec.padded_value_dim) // PART_COLUMNS
    stages = min(2 * q_block, (gpu.SM90.shared_bytes(blocks=1) - bias) // pair)
    return bias + stages * pair, stages
