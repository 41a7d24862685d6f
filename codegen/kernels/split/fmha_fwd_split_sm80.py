"""The forward with split keys, for few query rows: CTAs divide the keys of a tile, and a second
kernel combines their results.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from jax_memeff.codegen import gpu, shared_memory, strategy
from jax_memeff.codegen.features import FUNCTIONS, PAGES, VARLEN, pages
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.bases.families import MmaKernel, stage
from jax_memeff.codegen.kernels.split.tiles import (
    TILES,
    TILES_F32,
    TILES_FLOAT8,
    TILES_INVARIANT,
    Tile,
)
from jax_memeff.codegen.launch import EntryPoint, Grid, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec, Row
from jax_memeff.codegen.strategy import Strategy

COMBINE_THREADS = 128
_COMBINE_GRID = Grid("B*N*T*combines", most_per_sm=8)
"""The CTAs of the combine kernel loop over all rows."""


_FLOAT8_ELEMENT_BYTES = 1

_MOST_ELEMENTS_WITH_BLOCK_MASK = 16 * 128
"""Elements of a warp's output; each 1024 of them take 32 registers per lane. With twice as many,
kernels with segment ids and boolean masks spilled 24 to 56 bytes."""


class FmhaFwdSplitSm80(MmaKernel):
    """The forward with split keys, which does not support f32."""

    stem = "fmha_fwd_split_sm80"
    direction = "forward"
    class_name = "FmhaForwardSplitSm80"
    splits_keys = True
    decides_mask_tiles = True
    reads_pages = True
    reads_float8_pages = True
    tiles = TILES
    tiles_f32 = TILES_F32

    def rows(self, problem: Problem) -> Iterator[Row]:
        is_float8 = problem[PAGES].dtype != "query"
        if problem.dtype in F32_DTYPES or not (is_float8 or problem[PAGES].is_invariant):
            yield from super().rows(problem)
            return
        tables = TILES_INVARIANT if problem[PAGES].is_invariant else TILES_FLOAT8
        table = tables[gpu.of(problem.arch)]
        # Rows of float8 in shared memory have a multiple of 64 bytes.
        dims = [dim for dim in table if not is_float8 or dim % 64 == 0]
        for padded in itertools.product(dims, dims):
            for tile in table[max(padded)]:
                yield Row(*padded, tile)

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = []
        if problem[VARLEN] and not problem.asks(PAGES):
            reasons.append("it does not split the keys of packed sequences yet")
        elif not strategy.splits_keys and not spec[PAGES].is_float8:
            reasons.append("it splits the keys, and work tiles fill the GPU without splits")
        rows = {"16": 16, "32": 32}.get(strategy.query_rows or "", 64)
        if (strategy.splits_keys or spec[PAGES].is_float8) and spec.tile.query < rows:
            reasons.append(f"its tile has {spec.tile.query} rows, not {rows}")
        if _groups_take_segments(spec) and problem.asks(FUNCTIONS):
            reasons.append("its warps have different segments, and functions need a common one")
        if _groups_take_segments(spec) and spec[PAGES].is_float8:
            reasons.append("its warps have different segments, which it supports for 16 bits only")
        return reasons + super().reasons(spec, problem, strategy)

    def completed(self, spec: KernelSpec, problem: Problem, strategy_: Strategy) -> KernelSpec:
        return dataclasses.replace(spec, pack_heads=strategy.pack_heads(problem))

    def alignment(self, problem: Problem) -> int:
        return 16

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        """A row of the block mask takes three registers, too many next to larger output tiles."""
        (rows,) = self.rows_of_warps(spec)
        return rows * spec.padded_value_dim <= _MOST_ELEMENTS_WITH_BLOCK_MASK

    def shared_bytes(self, spec: KernelSpec) -> int:
        """A tile of query and stages of key and value. At the end the groups of warps that split
        the keys overwrite them with maximum and sum of their rows, and f32 outputs.
        """
        tile, is_float8 = _tile(spec), spec[PAGES].is_float8
        key_bytes = _FLOAT8_ELEMENT_BYTES if is_float8 else spec.element_bytes
        buffers = _keys_of_cta(spec) * (spec.padded_head_dim + spec.padded_value_dim) * key_bytes
        loop = tile.query * spec.padded_head_dim * spec.element_bytes + tile.stages * buffers
        if is_float8:
            loop += _float8_scale_bytes(spec)
        (rows,) = self.rows_of_warps(spec)
        return max(loop, shared_memory.merge_bytes(spec, tile.key_warps, 2 * rows // 16))

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        return {"S": (spec.tile.query, _keys_of_cta(spec))}

    def rows_of_warps(self, spec: KernelSpec) -> tuple[int, ...]:
        """A warp owns whole rows, of some of the keys."""
        tile = _tile(spec)
        return (tile.query * tile.key_warps // tile.warps,)

    def words(self, spec: KernelSpec) -> list[str]:
        return ["split", *(["gqa"] if spec.pack_heads else [])]

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        rows = "K*group_rows" if spec.pack_heads else "N*T"
        grid = Grid(f"B*{rows}/{spec.tile.query}*splits")
        class_name = "FmhaForwardCombine<Config>"
        combine_grid = _COMBINE_GRID
        if _groups_take_segments(spec):
            combine_grid = combine_grid._replace(product="B*N*T")  # without splits, too
        combine = stage(spec, "combine", class_name, COMBINE_THREADS, grid=combine_grid)
        return self.main(spec, grid, spec.block_mask("queries")), combine

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = _tile(spec)
        return {
            **super().constants(spec),
            "kKeyWarps": tile.key_warps,
            "kStages": tile.stages,
            "kPackHeads": spec.pack_heads,
        }

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """The f32 logsumexps and outputs of each part of the keys. The launcher
        (ffi/src/launch/key_splits.cc) chooses the number of parts for the device; this is the
        largest number that the program has room for.
        """
        tile_heads = sizes.key_heads if spec.pack_heads else sizes.heads
        rows = sizes.queries * sizes.heads // max(1, tile_heads)
        tiles = sizes.batch * tile_heads * -(-rows // spec.tile.query)
        splits = strategy.most_key_splits(tiles, sizes.keys, spec.tile.key)
        all_rows = sizes.batch * sizes.heads * sizes.queries
        if spec[PAGES].is_invariant:
            # Each segment has a place, whichever CTA computes it.
            outputs = all_rows * spec.padded_value_dim
            segments = pages.segments(sizes.keys)
            divides = tiles <= multiprocessors and strategy.segments_fit(segments, outputs)
            divides = divides or _groups_take_segments(spec)
            splits = segments if divides else 1
        if splits > 1 or _groups_take_segments(spec):
            shape = splits, all_rows
            yield Workspace("partial_logsumexp", shape)
            yield Workspace("partial_out", (*shape, spec.padded_value_dim))


def _float8_scale_bytes(spec: KernelSpec) -> int:
    """The bytes of one factor per query row, and of two scales per part of a page in a stage."""
    tile = _tile(spec)
    by_page = "pages" in (spec[PAGES].key_scale, spec[PAGES].value_scale)
    parts = tile.stages * tile.key // pages.MULTIPLE if by_page else 0
    return 4 * (tile.query + 2 * parts)


def _groups_take_segments(spec: KernelSpec) -> bool:
    """``kGroupsTakeSegments`` of ffi/include/memeff/kernels/forward/split/operands.cuh."""
    return spec[PAGES].is_invariant and _tile(spec).key_warps > 1


def _keys_of_cta(spec: KernelSpec) -> int:
    """The keys that all warps of a CTA process at a time."""
    tile = _tile(spec)
    return tile.key * (tile.key_warps if _groups_take_segments(spec) else 1)


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
