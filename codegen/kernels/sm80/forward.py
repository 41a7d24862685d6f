"""The mma.sync forward: a CTA owns the rows of a tile and iterates over its KV blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import modifiers, query_tile_grid
from jax_memeff.codegen.kernels.sm80.base import MmaKernel, MmaTables, MmaTile
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec


@dataclasses.dataclass(frozen=True)
class Tile(MmaTile):
    """A row of the tables below."""

    stage_registers: bool = False
    """Whether row statistics and pointers are staged in shared memory during products, because the
    accumulators of scores and output leave no registers for them."""


# sm_75 has no cp.async: copies pass through registers, and a warp waits for its own copies. So two
# CTAs share an SM if they fit, or a CTA has eight warps, and these hide each other's waits. For the
# same reason nothing is prefetched. With 1024 threads per SM a thread would have 64 registers; the
# 256 threads of these rows have all that a thread can address. Nothing for sm_75 was measured.
_SM75 = {
    32: (
        Tile(128, 64, 4, 2, "16 KB"),
        Tile(128, 32, 4, 2, "with a bias 64 keys leave room for one block"),
    ),
    64: (
        Tile(128, 64, 4, 2, "32 KB: two blocks"),
        Tile(64, 32, 4, 2, "with a bias 64 keys leave room for one block"),
    ),
    96: (
        Tile(64, 32, 4, 2, "24 KB: two blocks"),
        Tile(64, 32, 4, 1, "with a 32-bit bias two blocks do not fit"),
    ),
    128: (
        Tile(64, 32, 4, 2, "32 KB: two blocks"),
        Tile(128, 32, 8, 1, "with a bias two blocks do not fit"),
        Tile(64, 32, 4, 1, "with a 32-bit bias 128 queries need 68 KB"),
    ),
    192: (Tile(64, 32, 4, 1, "48 KB; 128 queries leave room for 16 keys"),),
    256: (
        Tile(64, 32, 4, 1, "64 KB, all there is"),
        Tile(64, 16, 4, 1, "with a bias 32 keys need 68 KB"),
    ),
}

_64 = (
    Tile(128, 128, 4, 2, "48 KB: two blocks per SM everywhere", modifiers=()),
    Tile(
        128,
        64,
        4,
        2,
        "half the score accumulators: with 128 keys soft cap, bias and random bits spill",
    ),
)
# Figures are TFLOP/s at T 2048 on an H200, as PTX for compute_80 or compute_86.
_SM80 = {
    32: _64,
    64: _64,
    96: (
        Tile(128, 64, 4, 2, "54 KB: two blocks per SM; spills unless staged", stage_registers=True),
        Tile(64, 64, 4, 2, "54 KB with a 32-bit bias"),
    ),
    128: (
        Tile(
            128,
            64,
            4,
            2,
            "70 KB: two blocks; spills unless staged; with bias 260 TFLOP/s, 64x64 213, at T 2048 "
            "on an H200",
            modifiers=modifiers("a boolean mask"),
            stage_registers=True,
        ),
        Tile(64, 64, 4, 2, "half the accumulators: with 128 queries a boolean mask spills"),
    ),
    192: (
        Tile(64, 64, 4, 2, "311 TFLOP/s; 128x32 with 8 warps 307, 128x64 in one block 267"),
        Tile(64, 32, 4, 2, "with a 32-bit bias two blocks of 64 keys do not fit"),
    ),
    256: (
        Tile(
            128,
            64,
            8,
            1,
            "282 TFLOP/s, causal 264; 64x32 in two blocks 274, 253",
            modifiers=(),
            masks=("none", "causal"),
        ),
        Tile(
            64,
            32,
            4,
            2,
            "with dropout 249 TFLOP/s, a bias 262, a window of 128 118; 128x32 in one block 226, "
            "231, 102. With 64 keys soft cap spills",
        ),
    ),
}

_SM86 = {
    32: (*_64, Tile(128, 32, 4, 2, "with a bias: two blocks in 100 KB")),
    64: (*_64, Tile(128, 32, 4, 2, "with a bias: two blocks in 100 KB")),
    96: (
        Tile(128, 32, 4, 2, "36 KB: the short key tile keeps two blocks in 100 KB"),
        Tile(64, 32, 4, 2, "with a 32-bit bias: two blocks in 100 KB"),
    ),
    128: (
        Tile(128, 32, 4, 2, "48 KB: the short key tile keeps two blocks in 100 KB"),
        Tile(64, 32, 4, 2, "with a bias: two blocks in 100 KB"),
    ),
    192: (
        Tile(64, 32, 4, 2, "260 TFLOP/s; 64x64 in one block 228"),
        Tile(64, 32, 4, 1, "with a bias two blocks do not fit"),
    ),
    256: (
        Tile(64, 64, 4, 1, "96 KB of 99 KB", modifiers=()),
        Tile(64, 32, 4, 1, "with 64 keys soft cap spills"),
    ),
}

_SM90 = {
    **_SM80,
    256: (
        Tile(64, 64, 4, 2, "96 KB: two blocks hide each other's softmax", modifiers=()),
        Tile(64, 32, 4, 2, "with 64 keys soft cap spills"),
    ),
}

# Figures for f32 are TFLOP/s at T 8192 on an H200, with three TF32 products.
_F32 = {
    32: (
        Tile(128, 64, 4, 2, "32 KB: two blocks everywhere", modifiers=()),
        Tile(128, 32, 4, 2, "with 64 keys all modifiers together spill 76 bytes"),
    ),
    64: (Tile(128, 32, 4, 2, "67 without a spill; 64 keys spill 460 bytes, 66"),),
    96: (Tile(64, 32, 4, 2, "48 KB: two blocks everywhere; 128 queries spill 100 bytes"),),
    128: (Tile(64, 32, 4, 2, "64 KB: two blocks; 128 queries spill 196 bytes"),),
    192: (
        Tile(
            64,
            16,
            4,
            2,
            "76 KB: two blocks; random bits and bias spill unless staged",
            stage_registers=True,
        ),
    ),
    256: (Tile(64, 16, 4, 2, "100 KB: two blocks; spills unless staged", stage_registers=True),),
}

_F32_SM80 = {
    **_F32,
    192: (
        *_F32[192],
        Tile(64, 16, 4, 1, "with a bias two blocks do not fit", stage_registers=True),
    ),
    256: (Tile(64, 16, 4, 1, "100 KB; spills unless staged", stage_registers=True),),
}

_F32_SM86 = {
    **_F32,
    64: (*_F32[64], Tile(64, 32, 4, 2, "with a bias 128 queries leave room for one block")),
    96: (*_F32[96], Tile(64, 32, 4, 1, "with a bias two blocks do not fit")),
    128: (Tile(64, 32, 4, 1, "64 KB of 99 KB"),),
    192: (
        Tile(
            64,
            16,
            4,
            1,
            "76 KB of 99 KB; random bits and bias spill unless staged",
            stage_registers=True,
        ),
    ),
    256: (
        Tile(64, 16, 4, 1, "96 KB of 99 KB, which leaves no room to stage", spill_bytes=32),
        Tile(32, 16, 2, 1, "with a bias 64 queries need 102 KB"),
    ),
}

_TILES: MmaTables = {
    gpu.SM75: _SM75,
    gpu.SM80: _SM80,
    gpu.SM86: _SM86,
    gpu.SM90: _SM90,
}
_TILES_F32: MmaTables = {gpu.SM80: _F32_SM80, gpu.SM86: _F32_SM86, gpu.SM90: _F32}


class FmhaFwdSm80(MmaKernel):
    """The mma.sync forward."""

    stem = "sm80/forward"
    direction = "forward"
    class_name = "FmhaForwardSm80"
    reads_pages = True
    tiles = _TILES
    tiles_f32 = _TILES_F32

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
        loop_bytes = loop * spec.element_bytes + staged + bias
        return max(loop_bytes, query * spec.padded_value_dim * spec.element_bytes)

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        query, key = spec.tile.query, spec.tile.key
        return {"S": (query, key), "out": (query, spec.padded_value_dim)}

    def rows_of_warps(self, spec: KernelSpec) -> tuple[int, ...]:
        """A warp owns whole rows."""
        return (spec.tile.query // _tile(spec).warps,)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        return (self.main(spec, query_tile_grid(spec), spec.block_mask("queries")),)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        return {**super().constants(spec), "kStageRegisters": _tile(spec).stage_registers}

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield from ()


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
