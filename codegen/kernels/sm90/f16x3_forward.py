"""The wgmma forward for float32: 3xFP16, three f16 products for each f32 product. A kernel that
runs first writes every operand as hi and lo parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import (
    EVERY_MODIFIER,
    PROBABILITY_MODIFIERS,
    query_tiles,
    stage,
)
from jax_memeff.codegen.kernels.sm90.base import SPLIT_THREADS, WARPGROUP_ROWS, F16x3Kernel, by_pair
from jax_memeff.codegen.kernels.sm90.forward import FmhaFwdSm90, Tile
from jax_memeff.codegen.launch import EntryPoint, Grid, TensorMap
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, ceil_div, round_up

_SWIZZLE_BYTES = 1024

_128 = (
    Tile(
        128,
        64,
        2,
        "198 KB; invariants of the main loop, which a KV block of 1,700 instructions reads once, "
        "spill with NVRTC 13.5: 48 bytes, with row maxima 56, with a causal mask 64",
        query_stages=1,
        modifiers=("soft cap", *PROBABILITY_MODIFIERS),
        spill_bytes=64,
    ),
    Tile(
        128,
        64,
        2,
        "a boolean mask spills 250 bytes, and modifiers together",
        query_stages=1,
        modifiers=EVERY_MODIFIER,
        sequential=True,
    ),
    Tile(
        128,
        64,
        1,
        "a bias takes 36 KB more, and spills 200 bytes",
        query_stages=1,
        modifiers=EVERY_MODIFIER,
        sequential=True,
    ),
)

TILES = {
    64: (
        Tile(
            128,
            128,
            2,
            "200 KB; one invariant of the main loop spills with NVRTC 13.5",
            modifiers=PROBABILITY_MODIFIERS,
            masks=("none", "causal"),
            spill_bytes=4,
        ),
        Tile(
            128,
            128,
            2,
            "a window, a soft cap and segment ids spill up to 60 bytes, a boolean mask 560",
            modifiers=EVERY_MODIFIER,
            sequential=True,
        ),
        Tile(128, 64, 2, "a bias takes 36 KB, and 68 above", modifiers=EVERY_MODIFIER),
    ),
    96: _128,
    128: _128,
}


class FmhaFwdF16x3Sm90(F16x3Kernel, FmhaFwdSm90):
    """The 3xFP16 forward: the forward for 16-bit elements, with other operands."""

    reads_pages = False  # it would have to split the whole pool into hi and lo parts
    stem = "sm90/f16x3_forward"
    header = "sm90/forward"
    tiles = by_pair(TILES)

    def operand_bytes(self, spec: KernelSpec, rows: int, columns: int) -> int:
        """The next buffer begins at a multiple of the swizzle
        (codegen/memeff/layout/f16x3_tiles.cuh).
        """
        return round_up(self.part_bytes(spec, rows, columns), _SWIZZLE_BYTES)

    def shares_diagonals(self, spec: KernelSpec) -> bool:
        return False  # shared memory is full

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        return ()

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        # A CTA splits this many rows of query, key or value into parts. It divides every tile.
        rows, key = WARPGROUP_ROWS, spec.tile.key

        def parts(sizes: Sizes) -> int:
            lengths = sizes.with_rows()
            heads = lengths.key_heads * ceil_div(lengths.keys, key)
            return query_tiles(lengths, rows) + 2 * (key // rows) * lengths.batch * heads

        grid = Grid(parts)
        split = stage(spec, "split", "FmhaForwardF16x3Split<Config>", SPLIT_THREADS, grid=grid)
        return (split, *super().entry_points(spec))

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        assert isinstance(spec.tile, Tile)
        return {**super().constants(spec), "kSequential": spec.tile.sequential}
