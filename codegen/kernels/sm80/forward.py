"""The mma.sync forward: a CTA owns the rows of a tile and iterates over its KV blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.common.base import BOOLEAN_MASK, modifiers, query_tile_grid
from jax_memeff.codegen.kernels.sm80.base import MmaKernel, MmaTile
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes


@dataclasses.dataclass(frozen=True)
class Tile(MmaTile):
    """A row of the tables below."""

    stage_registers: bool = False
    """Whether row statistics and pointers are staged in shared memory during products, because the
    accumulators of scores and output leave no registers for them."""
    column_warps: int = 1
    """Warps that share rows: each has a part of the keys and of the columns of the output."""


# Tiles by padded head dim. Two CTAs hide each other's softmax, and four warps with 32 rows each
# read shared memory less often than eight with 16. Figures are TFLOP/s at T 2048 on an H200: with
# bias as built for sm_90, others as PTX for compute_80, or compute_86 where it is named. Nothing
# for sm_75 was measured.
_64 = (
    Tile(
        128,
        128,
        4,
        2,
        "343 as built for sm_90, 128x64 297. With soft cap, bias or random bits it spills",
        modifiers=(),
    ),
    Tile(128, 64, 4, 2, "half the score accumulators"),
    Tile(128, 32, 4, 2, "with a bias two blocks fit in 99 KB"),
    Tile(64, 32, 4, 2, "with a bias two blocks fit in 64 KB"),
)
_TILES: Mapping[int, Sequence[Tile]] = {
    32: _64,
    64: _64,
    96: (
        Tile(
            128,
            64,
            4,
            2,
            "spills unless row statistics wait in shared memory",
            stage_registers=True,
        ),
        Tile(128, 32, 4, 2, "two blocks in 99 KB"),
        Tile(64, 32, 4, 2, "two blocks in 64 KB"),
    ),
    128: (
        Tile(
            128,
            64,
            4,
            2,
            "spills unless row statistics wait in shared memory; with bias 260, 64x64 213. A "
            "boolean mask spills 20 to 36 bytes, and was not measured",
            modifiers=modifiers(*BOOLEAN_MASK),
            stage_registers=True,
        ),
        Tile(
            128,
            32,
            4,
            2,
            "two blocks in 99 KB",
            modifiers=modifiers(*BOOLEAN_MASK, "bias"),
        ),
        Tile(64, 64, 4, 2, "with both 128x32 spills 112 bytes"),
        Tile(64, 32, 4, 2, "two blocks in 64 KB, or with a bias in 99 KB"),
    ),
    192: (
        Tile(64, 64, 4, 2, "311; 128x32 with 8 warps 307, 128x64 in one block 267"),
        Tile(64, 32, 4, 2, "compute_86: 260; 64x64 in one block 228"),
    ),
    256: (
        Tile(64, 64, 4, 2, "soft cap spills", modifiers=()),
        Tile(
            64,
            32,
            4,
            2,
            "with a bias 262, a window of 128 118; 128x32 in one block 231, 102",
        ),
        Tile(64, 16, 4, 1, "with a bias 32 keys need 68 KB"),
    ),
}
_SM80_256 = Tile(
    128,
    64,
    8,
    1,
    "311, causal 280, random bits 261, a soft cap 282; if warps have 16 rows alone 286, 265, 228, "
    "232; 64x32 in two blocks 274, 253, 249, -",
    modifiers=modifiers("bias"),
    masks=("none", "causal"),
    column_warps=2,
)

# Figures for f32 are TFLOP/s at T 8192 on an H200, with three TF32 products.
_TILES_F32: Mapping[int, Sequence[Tile]] = {
    32: (
        Tile(128, 64, 4, 2, "with all modifiers together it spills 76 bytes", modifiers=()),
        Tile(128, 32, 4, 2, "half the score accumulators"),
    ),
    64: (
        Tile(128, 32, 4, 2, "67 without a spill; 64 keys spill 460 bytes, 66"),
        Tile(64, 32, 4, 2, "with a bias two blocks fit in 99 KB"),
    ),
    96: (Tile(64, 32, 4, 2, "128 queries spill 100 bytes"),),
    128: (Tile(64, 32, 4, 2, "128 queries spill 196 bytes"),),
    192: (
        Tile(
            64,
            16,
            4,
            2,
            "random bits and bias spill unless row statistics wait in shared memory",
            stage_registers=True,
        ),
    ),
    256: (
        Tile(
            64, 16, 4, 2, "spills unless row statistics wait in shared memory", stage_registers=True
        ),
        Tile(64, 16, 4, 1, "96 KB of 99 KB, which leaves no room to stage", spill_bytes=32),
        Tile(32, 16, 2, 1, "with a bias 64 queries need 102 KB"),
    ),
}


@functools.cache
def _configured(device: Gpu, is_f32: bool, dim: int) -> Sequence[Tile]:
    """Each tile twice on an SM before any of them once. Alone, a CTA of 128 rows has eight warps,
    which hide each other's waits.
    """
    tiles = (_TILES_F32 if is_f32 else _TILES)[dim]
    alone = (
        dataclasses.replace(tile, blocks_per_sm=1, warps=max(tile.warps, tile.query // 16))
        for tile in tiles
    )
    first = (_SM80_256,) if device is gpu.SM80 and dim == 256 and not is_f32 else ()
    return (*first, *(tile for tile in tiles if tile.blocks_per_sm == 2), *alone)


class FmhaFwdSm80(MmaKernel):
    """The mma.sync forward."""

    stem = "sm80/forward"
    direction = "forward"
    class_name = "FmhaForwardSm80"
    reads_pages = True

    def configure(self, problem: Problem, device: Gpu, padded: tuple[int, int]) -> Sequence[Tile]:
        return _configured(device, problem.dtype in F32_DTYPES, max(padded))

    def shared_bytes(self, spec: KernelSpec) -> int:
        """One tile each of query, key, value and bias, which the output overwrites at the end."""
        tile = _tile(spec)
        query, key = tile.query, tile.key
        loop = query * spec.padded_head_dim + key * (spec.padded_head_dim + spec.padded_value_dim)
        staged = 0
        if tile.stage_registers:
            # A thread's pointers, and the maximum and sum (f32) of each row of which it holds
            # elements.
            pointers = 3 if shared_memory.bias_rows(spec, query) else 2
            staged = spec.threads * (8 * pointers + 8 * (2 * query // (16 * tile.warps)))
        # Each warp has the bias of its own rows.
        bias = tile.warps * shared_memory.bias_bytes(spec, query // tile.warps)
        shared_rows = 0
        if tile.column_warps > 1:  # P, and a number for each row
            shared_rows = query * (key * spec.element_bytes + 4 * tile.column_warps)
        loop_bytes = loop * spec.element_bytes + staged + bias + shared_rows
        return max(loop_bytes, query * spec.padded_value_dim * spec.element_bytes)

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        query, key = spec.tile.query, spec.tile.key
        return {"S": (query, key), "out": (query, spec.padded_value_dim)}

    def rows_of_warps(self, spec: KernelSpec) -> tuple[int, ...]:
        """A warp owns whole rows, or shares them."""
        tile = _tile(spec)
        return (tile.query * tile.column_warps // tile.warps,)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        return (self.main(spec, query_tile_grid(spec), spec.block_mask("queries")),)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = _tile(spec)
        return {
            **super().constants(spec),
            "kStageRegisters": tile.stage_registers,
            "kColumnWarps": tile.column_warps,
        }

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield from ()


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
