"""The float32 forward of wgmma: 3xFP16, three products of f16 for each product of f32. A kernel
that runs first writes every operand as hi and lo parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from jax_memeff.codegen.features import BROADCAST_BATCH
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.bases.families import (
    EVERY_MODIFIER,
    PROBABILITY_MODIFIERS,
    WARPGROUP_ROWS,
    stage,
)
from jax_memeff.codegen.kernels.fmha_fwd_sm90 import FmhaFwdSm90, Tile
from jax_memeff.codegen.launch import EntryPoint, Grid, TensorMap, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.sizes import Sizes, round_up
from jax_memeff.codegen.spec import KernelSpec, Row
from jax_memeff.codegen.strategy import Strategy

SPLIT_THREADS = 256
_SWIZZLE_BYTES = 1024

_128 = (
    Tile(
        128,
        64,
        2,
        "198 KB; invariants of the main loop spill: 8 bytes with NVRTC 13.0, 48 with 13.5, and 56 "
        "with row maxima, which a KV block of 1,700 instructions reads once",
        query_stages=1,
        modifiers=("soft cap", *PROBABILITY_MODIFIERS),
        spill_bytes=56,
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
        Tile(128, 128, 2, "200 KB", modifiers=PROBABILITY_MODIFIERS, masks=("none", "causal")),
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


class FmhaFwdF16x3Sm90(FmhaFwdSm90):
    """The 3xFP16 forward: the forward for 16-bit elements, with other operands."""

    reads_pages = False  # it would have to split the whole pool into hi and lo parts
    stem = "fmha_fwd_f16x3_sm90"
    header = "fmha_fwd_sm90"
    takes_f32 = True
    tiles = TILES

    def padded_rows(self) -> Iterator[Row]:
        for head, value in itertools.product(self.tiles, repeat=2):
            for tile in self.tiles[max(head, value)]:
                yield Row(head, value, tile)

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if spec[BROADCAST_BATCH]:
            reasons.append("it splits its operands once for each batch index of the call")
        return reasons

    def element(self, spec: KernelSpec) -> str:
        return "memeff::F16x3"

    def operand_bytes(self, spec: KernelSpec, rows: int, columns: int) -> int:
        """Hi and lo parts, and a factor of each row. The next buffer begins at a multiple of the
        swizzle (ffi/include/memeff/layout/f16x3_tiles.cuh).
        """
        return round_up(rows * columns * spec.element_bytes + 4 * rows, _SWIZZLE_BYTES)

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        return ()

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        # A CTA splits this many rows of query, key or value. The number divides every tile.
        rows, key = WARPGROUP_ROWS, spec.tile.key
        grid = Grid(f"B*N*T_or_1/{rows}+2*{key // rows}*B*K*S_or_1/{key}")
        split = stage(spec, "split", "FmhaForwardF16x3Split<Config>", SPLIT_THREADS, grid=grid)
        return (split, *super().entry_points(spec))

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        assert isinstance(spec.tile, Tile)
        return {**super().constants(spec), "kSequential": spec.tile.sequential}

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """Hi and lo parts of each element, and a factor of each row, in tiles of the rows of a
        consumer and of the KV blocks; every length has at least one tile.
        """
        yield from super().workspaces(spec, sizes, multiprocessors)
        lengths = sizes.with_rows()
        queries = lengths.padded_queries(WARPGROUP_ROWS)
        keys = lengths.padded_keys(spec.tile.key)
        yield Workspace("query_hi_lo", (queries * (spec.padded_head_dim + 1),))
        yield Workspace("key_hi_lo", (keys * (spec.padded_head_dim + 1),))
        yield Workspace("value_hi_lo", (keys * (spec.padded_value_dim + 1),))
