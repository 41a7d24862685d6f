"""The mma.sync backward: a CTA owns a KV block, iterates over its Q blocks, and adds to dq in
global memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import MASK
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.functions.sums import Sum
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.common.base import (
    EVERY_MASK,
    PROBABILITY_MODIFIERS,
    Masks,
    bias_tile_grid,
    dq_semaphore_words,
    key_tile_grid,
    key_tiles,
    modifiers,
    query_sums,
    stage,
    summing_entry_points,
)
from jax_memeff.codegen.kernels.sm80.base import MmaBackward, MmaTile, columns_of_warp
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy


@dataclasses.dataclass(frozen=True)
class Tile(MmaTile):
    """A row of the tables below."""

    query_buffers: int = 2
    """Query tiles in shared memory; with one, the next tile is loaded during the product dQ."""
    warp_pairs: bool = False
    """Whether of two warps one computes S and the other dP, for the columns of both."""
    deterministic_masks: Masks = EVERY_MASK
    """The masks under which it adds to dq in a fixed order, in three TF32 products."""


# Tiles by padded head dim. A CTA alone on an SM has eight warps, unless four with more registers
# are faster. Figures are TFLOP/s of forward + backward at T 2048 on an H200, as PTX for compute_80,
# or compute_86 where it is named. Nothing for sm_75 was measured.
_TILES: Mapping[int, Sequence[Tile]] = {
    32: (
        Tile(
            64,
            128,
            4,
            2,
            "244, causal 211; 128x64 in 2 CTAs 216, 64x64 in 3 209, 128x128 with 8 warps 203",
            modifiers=PROBABILITY_MODIFIERS,
        ),
        Tile(
            64,
            64,
            4,
            2,
            "with the gradient of a bias 127; 64x128 with 8 warps 111. compute_86: 195; 64x128 171",
        ),
        Tile(64, 128, 8, 1, "57 KB of 64 KB"),
        Tile(64, 64, 8, 1, "with a bias 128 keys need 73 KB"),
    ),
    64: (
        Tile(
            128,
            128,
            8,
            1,
            "283, with random bits 234; with these 64x64 in 3 CTAs with one query tile 230, in 2 "
            "CTAs 214",
            modifiers=PROBABILITY_MODIFIERS,
        ),
        Tile(
            64,
            64,
            4,
            2,
            "with the gradient of a bias 189; 64x128 with 8 warps 179, 128x128 with one query tile "
            "179. With a soft cap at T 4096 246; 64x128 232",
        ),
        Tile(
            64,
            64,
            4,
            2,
            "compute_86: 253, causal 235, random bits 208; 64x128 with 8 warps 248, 223, 196",
            query_buffers=1,
        ),
        Tile(64, 64, 8, 1, "with a bias two blocks need more than 99 KB"),
        Tile(32, 64, 8, 1, "with a 32-bit bias 64 queries need 67 KB of 64 KB"),
    ),
    96: (
        Tile(64, 64, 4, 2, "277, causal 252; 64x128 with 8 warps 266, 239; 128x64 236"),
        Tile(64, 128, 8, 1, "with a 32-bit bias two blocks do not fit"),
        Tile(
            32,
            64,
            4,
            2,
            "45 KB of 49 KB. compute_86: 245, causal 235; 64x64 with 8 warps 192, 192, with 8 in "
            "pairs 204, 191",
            query_buffers=1,
        ),
        Tile(64, 64, 8, 1, "76 KB of 99 KB"),
        Tile(32, 32, 4, 2, "28 KB of 32 KB"),
        Tile(32, 32, 4, 1, "with a bias two blocks need more than 64 KB"),
    ),
    128: (
        Tile(
            64,
            128,
            8,
            1,
            "306; with random bits 271, the gradient of a bias 235, a soft cap (T 4096) 301. 64x64 "
            "with 8 warps 207, 195 and 238 with these; in 2 CTAs with one query tile 295, 271 "
            "without a bias, 292",
            spill_bytes=8,
        ),
        Tile(
            64,
            64,
            4,
            1,
            "compute_86: 255, causal 226; 8 warps in pairs 239, 214, 8 warps with two query tiles "
            "225, 216",
            query_buffers=1,
            spill_bytes=8,
        ),
        Tile(32, 64, 8, 1, "56 KB of 64 KB"),
        Tile(32, 32, 4, 1, "with a 32-bit bias 64 keys need 65 KB"),
    ),
    192: (
        Tile(64, 64, 8, 1, "236; with one query tile 223"),
        Tile(32, 64, 8, 1, "92 KB of 99 KB"),
        Tile(32, 32, 4, 1, "with a 32-bit bias 70 KB of 99 KB; 52 KB of 64 KB"),
    ),
    256: (
        Tile(
            64,
            64,
            8,
            1,
            "270, causal 249; without pairs 257, 232",
            query_buffers=1,
            warp_pairs=True,
        ),
        Tile(
            64,
            64,
            8,
            1,
            "145 KB of 163 KB, for sums and a bias that do not fit beside what pairs exchange",
            query_buffers=1,
            spill_bytes=8,
        ),
        Tile(32, 64, 8, 1, "120 KB of 163 KB, for sums that do not fit beside 64 query rows"),
        # sm_75 has no tile: 32x32, the smallest that four warps can share, needs 68 KB.
        Tile(32, 32, 4, 1, "84 KB of 99 KB"),
    ),
}

_NO_SOFT_CAP = modifiers("soft cap")

# With vector reductions and 227 KB.
_TILES_SM90: Mapping[int, Sequence[Tile]] = {
    **_TILES,
    128: (
        Tile(64, 128, 8, 1, "145 KB of 227 KB", modifiers=_NO_SOFT_CAP, masks=("none",)),
        Tile(
            64,
            64,
            4,
            2,
            "causal forward+backward 266 TFLOP/s at T 2048 on an H200, 64x128 254: less waste at "
            "the diagonal",
            modifiers=_NO_SOFT_CAP,
            masks=("causal", "window"),
        ),
        Tile(64, 64, 8, 1, "with 128 keys soft cap beside a bias spills"),
    ),
    256: (
        Tile(
            64,
            64,
            8,
            1,
            "with its spills 253 TFLOP/s, forward+backward at T 2048 on an H200; 32x64, which has "
            "none, 223",
            spill_bytes=64,
        ),
    ),
}

# Figures for f32 are TFLOP/s at T 8192 on an H200, with three TF32 products. Nothing was measured
# for 99 KB.
_TILES_F32: Mapping[int, Sequence[Tile]] = {
    32: (
        Tile(64, 64, 4, 2, "two blocks in 163 KB"),
        Tile(32, 64, 4, 2, "two blocks in 99 KB, or with a bias"),
        Tile(64, 64, 4, 1, "73 KB of 99 KB"),
    ),
    64: (
        Tile(32, 64, 4, 2, "forward+backward 62 without a spill, 3 blocks of 168 registers 63"),
        Tile(32, 64, 4, 1, "73 KB of 99 KB"),
    ),
    96: (
        Tile(64, 64, 8, 1, "153 KB of 163 KB"),
        Tile(32, 64, 4, 1, "with a bias 64 query rows need 171 KB"),
        Tile(32, 32, 4, 1, "68 KB of 99 KB"),
    ),
    128: (
        Tile(
            64,
            64,
            8,
            1,
            "60 TFLOP/s at T 2048; 32x64 with two query tiles 54",
            modifiers=(),
            query_buffers=1,
        ),
        Tile(32, 64, 8, 1, "with 64 query rows soft cap spills 28 bytes; a bias does not fit"),
        Tile(32, 32, 4, 1, "88 KB of 99 KB"),
    ),
    # No more columns with 99 KB: kernels for large head dims serve them.
    192: (
        Tile(
            32,
            64,
            8,
            1,
            "53 TFLOP/s at T 2048; 32x32 with two query tiles 43",
            query_buffers=1,
        ),
        Tile(32, 32, 4, 1, "with a 32-bit bias 64 keys do not fit"),
    ),
    256: (
        Tile(
            32,
            32,
            4,
            1,
            "136 KB of 163 KB; two query tiles need 168 KB",
            query_buffers=1,
            spill_bytes=8,
        ),
    ),
}

_TILES_F32_SM90: Mapping[int, Sequence[Tile]] = {
    **_TILES_F32,
    64: (
        Tile(
            64,
            64,
            4,
            2,
            "forward+backward 67 with a spill, 113 KB: two blocks; 8 warps 59, 64x128 64",
            modifiers=(),
            spill_bytes=40,
        ),
        *_TILES_F32[64],
    ),
    128: (
        Tile(64, 64, 8, 1, "forward+backward 62; 32x64 59, 32x32 in 2 blocks 60", modifiers=()),
        Tile(32, 64, 8, 1, "with 64 query rows soft cap spills 28 bytes"),
    ),
    192: (
        Tile(
            32,
            64,
            8,
            1,
            "184 KB of 227 KB; the backward at T 2048 on an H200 takes 0.57 to 0.75 of the time of "
            "32x32, which spills nothing",
            spill_bytes=36,
        ),
    ),
    256: (
        Tile(
            32,
            32,
            4,
            1,
            "168 KB of 227 KB; the backward at T 2048 on an H200 takes 0.65 to 0.86 of the time of "
            "the kernel for large head dims, in TF32 0.42 to 0.61, but 1.18 if it is deterministic "
            "and has no mask",
            spill_bytes=44,
            deterministic_masks=("causal", "window"),
        ),
    ),
}


@functools.cache
def _configured(device: Gpu, is_f32: bool, dim: int) -> Sequence[Tile]:
    """Without asynchronous copies nothing arrives early, so one query tile is enough."""
    if device is gpu.SM90:
        tiles = (_TILES_F32_SM90 if is_f32 else _TILES_SM90)[dim]
    else:
        tiles = (_TILES_F32 if is_f32 else _TILES)[dim]
    if device.async_copies:
        return tiles
    return tuple(dataclasses.replace(tile, query_buffers=1) for tile in tiles)


class FmhaBwdSm80(MmaBackward):
    """The mma.sync backward."""

    stem = "sm80/backward"
    sums_function_gradients = True
    class_name = "FmhaBackwardSm80"

    def configure(self, problem: Problem, device: Gpu, padded: tuple[int, int]) -> Sequence[Tile]:
        return _configured(device, problem.dtype in F32_DTYPES, max(padded))

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if _tile(spec).warp_pairs and spec.padded_head_dim != spec.padded_value_dim:
            reasons.append("S and dP have operands of different sizes")
        deterministic = spec.deterministic_dq and spec.dtype == "f32"
        if deterministic and spec[MASK] not in _tile(spec).deterministic_masks:
            reasons.append(f"adding to dq in a fixed order is slow with mask {spec[MASK]}")
        return reasons

    def strips_of_sums(self, arch: str) -> int:
        """0 on sm_75, whose 64 KB of shared memory the tiles fill."""
        return super().strips_of_sums(arch) if gpu.of(arch) is not gpu.SM75 else 0

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Tiles of query, dO, key, value, P, dS and bias, the statistics of query rows, and what
        pairs of warps exchange.
        """
        tile = _tile(spec)
        query, key, buffers = tile.query, tile.key, tile.query_buffers
        elements = query * (buffers * spec.padded_head_dim + spec.padded_value_dim)
        elements += key * (spec.padded_head_dim + spec.padded_value_dim)
        elements += 2 * query * key
        statistics = buffers * query * shared_memory.STATISTICS_BYTES
        bytes_ = elements * spec.element_bytes + statistics + shared_memory.bias_bytes(spec, query)
        exchanged = 4 * query * key if tile.warp_pairs else 0
        return bytes_ + captured_sum_bytes(spec) + exchanged

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        query, key = spec.tile.query, spec.tile.key
        return {
            "S": (query, key),
            "dq": (query, spec.padded_head_dim),
            "dk": (key, spec.padded_head_dim),
            "dv": (key, spec.padded_value_dim),
        }

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        return summing_entry_points(
            spec,
            (*self.delta(spec), self.main(spec, key_tile_grid(spec), spec.block_mask("keys"))),
            stage(
                spec,
                "dbias",
                "FmhaBackwardDbias<Config>",
                spec.threads,
                dbias_bytes(spec),
                grid=bias_tile_grid(spec),
                block_mask=spec.block_mask("queries"),
            ),
        )

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = _tile(spec)
        return {
            **super().constants(spec),
            "kQueryBuffers": tile.query_buffers,
            "kWarpPairs": tile.warp_pairs,
        }

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield from super().workspaces(spec, sizes, multiprocessors)
        yield from query_sums(spec, sizes, spec.padded_head_dim)
        if spec.deterministic_dq:
            yield Workspace("semaphores", (dq_semaphore_words(key_tiles(spec, sizes)),), "int32")


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile


def captured_sum_bytes(spec: KernelSpec) -> int:
    """The bytes of the strips for the gradients of captured arrays."""
    warps = spec.threads // 32
    columns = columns_of_warp(spec.tile.query, spec.tile.key, warps)
    return shared_memory.captured_sum_bytes(spec, Sum.KEY, warps, columns)


def dbias_bytes(spec: KernelSpec) -> int:
    """Shared memory of the dbias kernel: tiles of query, dO, key, value and bias, and two copies of
    the rows' statistics.
    """
    query, key = spec.tile.query, spec.tile.key
    elements = (query + key) * (spec.padded_head_dim + spec.padded_value_dim)
    statistics = 2 * query * shared_memory.STATISTICS_BYTES
    return elements * spec.element_bytes + statistics + shared_memory.bias_bytes(spec, query)
