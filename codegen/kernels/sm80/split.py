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
from jax_memeff.codegen.kernels.common.base import packed_row_tiles, query_tiles, stage
from jax_memeff.codegen.kernels.sm80.base import MmaKernel, MmaTables, MmaTile
from jax_memeff.codegen.launch import EntryPoint, Grid, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec, Row
from jax_memeff.codegen.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Tile(MmaTile):
    """A row of the tables below."""

    key_warps: int = 1
    """The number of warps, or groups of warps, that divide the keys of a tile."""
    stages: int = 1
    """The stages of keys and values in shared memory."""


def _split(
    query: int,
    key: int,
    warps: int,
    blocks: int,
    key_warps: int,
    stages: int,
    reason: str,
) -> Tile:
    return Tile(query, key, warps, blocks, reason, key_warps=key_warps, stages=stages)


# Nothing for sm_75 was measured: see sm80/forward.py.
_SM75 = {
    32: (
        _split(16, 128, 4, 1, 4, 2, "33 KB"),
        _split(64, 128, 4, 1, 2, 2, "36 KB"),
    ),
    64: (
        _split(16, 64, 4, 1, 4, 2, "34 KB; 128 keys need 66 KB"),
        _split(64, 64, 4, 1, 2, 2, "40 KB"),
    ),
    96: (
        _split(16, 64, 4, 1, 4, 2, "51 KB"),
        _split(64, 64, 4, 1, 2, 2, "60 KB"),
    ),
    128: (
        _split(16, 32, 2, 1, 2, 2, "36 KB; 64 keys need 68 KB"),
        _split(64, 32, 8, 1, 2, 2, "48 KB; with 4 warps 32 rows each spill"),
    ),
    192: (
        _split(16, 32, 2, 1, 2, 2, "54 KB"),
        _split(64, 16, 4, 1, 1, 2, "48 KB"),
    ),
    256: (
        _split(64, 16, 4, 1, 1, 2, "64 KB, all there is, and 16 rows need no less for two warps"),
    ),
}

# If each warp has its own keys, no warp waits for another; 64 rows need the registers of two warps.
# About 64 KB of copies in flight per SM hide the memory latency.
_16x128 = _split(16, 128, 4, 2, 4, 3, "hd 64: 4.3 TB/s on an H200, as with 3 or 4 blocks")
_16x64 = _split(16, 64, 4, 2, 4, 3, "hd 128: 4.46 TB/s on an H200; 2 stages 4.06")
_64x128 = _split(64, 128, 4, 2, 2, 2, "hd 64: 134 us for T 32 of S 4096 on an H200, 64x256 154")
# For a few draft tokens: every warp has all rows, so no other warp reads its keys from shared
# memory, and fewer rows are padding. Not measured.
_32x128 = _split(32, 128, 4, 2, 4, 3, "hd 64: 98 KB for each of two blocks")
_32x64 = _split(32, 64, 4, 2, 4, 3, "hd 128: 104 KB for each of two blocks")
_64x64 = (
    dataclasses.replace(
        _split(64, 64, 4, 2, 2, 3, "hd 128: 4.28 TB/s on an H200, 8 warps 3.71"), modifiers=()
    ),
    _split(64, 64, 8, 1, 2, 3, "with 4 warps soft cap, bias and random bits spill"),
)

# Times are of decode steps with 32 query and 8 key heads on an H200, as PTX for compute_80.
_SM80 = {
    32: (_16x128, _64x128),
    64: (
        _split(16, 128, 4, 1, 4, 4, "B 16, S 8192: 63 us; two blocks with 2 stages 71"),
        _64x128,
    ),
    96: (_16x64, _split(64, 64, 4, 1, 2, 3, "84 KB of 163 KB")),
    128: (
        _split(
            16,
            64,
            4,
            1,
            4,
            4,
            "B 16, S 8192: 123 us, B 1, S 32768: 36.5; two blocks with 2 stages 133, 39.5; 16x128 "
            "with 8 warps 121, 37.3",
        ),
        _split(64, 64, 4, 1, 2, 3, "112 KB of 163 KB"),
    ),
    192: (
        _split(16, 64, 4, 1, 4, 3, "150 KB of 163 KB"),
        _split(64, 64, 8, 1, 2, 2, "120 KB of 163 KB"),
    ),
    256: (
        _split(16, 64, 4, 1, 4, 2, "136 KB of 163 KB"),
        _split(64, 64, 8, 1, 2, 2, "160 KB of 163 KB"),
    ),
}

_SM86 = {
    32: (
        _split(16, 128, 4, 1, 4, 3, "49 KB of 99 KB"),
        _split(64, 128, 4, 1, 2, 2, "36 KB of 99 KB"),
    ),
    64: (
        _split(16, 128, 4, 1, 4, 2, "66 KB of 99 KB"),
        _split(64, 128, 4, 1, 2, 2, "72 KB of 99 KB"),
    ),
    96: (
        _split(16, 64, 4, 1, 4, 3, "75 KB of 99 KB"),
        _split(64, 64, 4, 1, 2, 3, "84 KB of 99 KB"),
    ),
    128: (
        _split(16, 64, 4, 1, 4, 2, "68 KB of 99 KB"),
        _split(64, 64, 4, 1, 2, 2, "80 KB of 99 KB"),
    ),
    192: (
        _split(16, 32, 2, 1, 2, 3, "78 KB of 99 KB; with 64 keys two stages need 102 KB"),
        _split(64, 32, 8, 1, 2, 2, "72 KB of 99 KB"),
    ),
    256: (
        _split(16, 32, 2, 1, 2, 2, "72 KB of 99 KB"),
        _split(64, 32, 8, 1, 2, 2, "96 KB of 99 KB"),
    ),
}

_SM90 = {
    32: (_16x128, _32x128, _64x128),
    64: (_16x128, _32x128, _64x128),
    96: (_16x64, _32x64, *_64x64),
    128: (_16x64, _32x64, *_64x64),
    192: (
        _split(16, 64, 4, 1, 4, 4, "198 KB of 227 KB"),
        _split(64, 64, 8, 1, 2, 3, "168 KB of 227 KB; with 4 warps 32 rows each spill"),
    ),
    256: (
        _split(16, 64, 4, 1, 4, 3, "4.5 TB/s on an H200, as with 2 stages"),
        _split(64, 64, 8, 1, 2, 3, "224 KB of 227 KB; with 4 warps 32 rows each spill"),
    ),
}

TILES: MmaTables = {
    gpu.SM75: _SM75,
    gpu.SM80: _SM80,
    gpu.SM86: _SM86,
    gpu.SM90: _SM90,
}
TILES_F32: MmaTables = {}

# A tile of float8 keys and values has half the bytes, and its columns are multiples of 64 bytes.
# Nothing for GPUs other than sm_90 was measured.
_SM75_FLOAT8 = {
    64: (
        _split(16, 128, 4, 1, 4, 2, "34 KB"),
        _split(64, 128, 4, 1, 2, 2, "40 KB"),
    ),
    128: (
        _split(16, 64, 4, 1, 4, 2, "36 KB"),
        _split(64, 32, 8, 1, 2, 2, "32 KB"),
    ),
    192: (
        _split(16, 64, 4, 1, 4, 2, "54 KB"),
        _split(64, 16, 4, 1, 1, 2, "36 KB"),
    ),
    256: (_split(64, 16, 4, 1, 1, 2, "48 KB"),),
}

_SM80_FLOAT8 = {
    64: (
        _split(16, 128, 4, 2, 4, 3, "50 KB: two blocks per SM"),
        _split(64, 128, 4, 2, 2, 2, "40 KB: two blocks per SM"),
    ),
    128: (
        _split(16, 128, 4, 2, 4, 2, "68 KB: two blocks per SM"),
        _split(64, 64, 4, 1, 2, 4, "80 KB of 163 KB"),
    ),
    192: (
        _split(16, 64, 4, 2, 4, 3, "78 KB: two blocks per SM"),
        _split(64, 64, 8, 1, 2, 3, "96 KB of 163 KB"),
    ),
    256: (
        _split(16, 64, 4, 2, 4, 2, "72 KB: two blocks per SM"),
        _split(64, 64, 8, 1, 2, 3, "128 KB of 163 KB"),
    ),
}

_SM86_FLOAT8 = {
    64: (
        _split(16, 128, 4, 1, 4, 3, "50 KB of 99 KB"),
        _split(64, 128, 4, 1, 2, 2, "40 KB of 99 KB"),
    ),
    128: (
        _split(16, 128, 4, 1, 4, 2, "68 KB of 99 KB"),
        _split(64, 64, 4, 1, 2, 3, "64 KB of 99 KB"),
    ),
    192: (
        _split(16, 64, 4, 1, 4, 3, "78 KB of 99 KB"),
        _split(64, 32, 8, 1, 2, 3, "60 KB of 99 KB"),
    ),
    256: (
        _split(16, 64, 4, 1, 4, 2, "72 KB of 99 KB"),
        _split(64, 32, 8, 1, 2, 2, "64 KB of 99 KB"),
    ),
}

# At head dim 128 and 128 keys a CTA of four warps alone on its SM took 1.17 us for a tile on an
# H200 (3.6 TB/s), because its warps wait for their own instructions. The launcher often starts one
# CTA per SM, which is enough to saturate memory, so a CTA has eight warps.
_SM90_FLOAT8 = {
    64: (
        _split(16, 256, 8, 1, 8, 5, "162 KB of 227 KB"),
        _split(64, 128, 4, 2, 2, 3, "56 KB: two blocks per SM"),
    ),
    128: (
        _split(16, 256, 8, 1, 8, 3, "196 KB of 227 KB"),
        dataclasses.replace(_split(64, 64, 4, 2, 2, 4, "80 KB: two blocks per SM"), modifiers=()),
        _split(64, 64, 8, 1, 2, 4, "80 KB; for modifiers, as with 16 bits"),
    ),
    192: (
        _split(16, 128, 8, 1, 8, 4, "198 KB of 227 KB"),
        _split(64, 64, 8, 1, 2, 4, "120 KB of 227 KB"),
    ),
    256: (
        _split(16, 128, 8, 1, 8, 3, "200 KB of 227 KB"),
        _split(64, 64, 8, 1, 2, 4, "160 KB of 227 KB"),
    ),
}

# Batch-invariant results, by padded dim: keys of a KV block, CTAs per SM, stages. A warp has its
# own rows and all keys, so outputs of a segment need no merge. Above head dim 128 the sum of the
# segments, which is used once per 256 keys, spills.
_INVARIANT_SIZES = {
    gpu.SM75: {32: (128, 1, 2), 64: (64, 1, 2), 96: (64, 1, 2), 128: (32, 1, 2)}
    | dict.fromkeys((192, 256), (16, 1, 2)),
    gpu.SM80: {32: (128, 2, 3), 64: (128, 2, 2), 96: (64, 1, 3), 128: (64, 1, 3)}
    | dict.fromkeys((192, 256), (64, 1, 2)),
    gpu.SM86: {32: (128, 1, 2), 64: (128, 1, 2), 96: (64, 1, 3), 128: (64, 1, 2)}
    | dict.fromkeys((192, 256), (32, 1, 2)),
    gpu.SM90: {32: (128, 2, 3), 64: (128, 2, 3), 96: (64, 2, 4), 128: (64, 2, 3)}
    | dict.fromkeys((192, 256), (64, 1, 3)),
}
# In a decode step one warp of that tile has rows. Here each warp has all 16 rows, and takes whole
# segments: warps and stages by padded dim.
_INVARIANT_DECODE = {gpu.SM90: {32: (4, 3), 64: (3, 2), 96: (4, 2), 128: (3, 2)}}


def _invariant_tiles(own: gpu.Gpu, dim: int) -> tuple[Tile, ...]:
    """Both tiles have the same KV blocks, because the bits depend on these."""
    key, blocks, stages = _INVARIANT_SIZES[own][dim]
    tiles = (_split(64, key, 4, blocks, 1, stages, "no merge of key warps"),)
    if dim not in _INVARIANT_DECODE.get(own, {}):
        return tiles
    warps, stages = _INVARIANT_DECODE[own][dim]
    return _split(16, key, warps, 1, warps, stages, "a warp takes whole segments"), *tiles


TILES_INVARIANT: MmaTables = {
    own: {dim: _invariant_tiles(own, dim) for dim in sizes}
    for own, sizes in _INVARIANT_SIZES.items()
}

TILES_FLOAT8: MmaTables = {
    gpu.SM75: _SM75_FLOAT8,
    gpu.SM80: _SM80_FLOAT8,
    gpu.SM86: _SM86_FLOAT8,
    gpu.SM90: _SM90_FLOAT8,
}


COMBINE_THREADS = 128
_COMBINE_GRID = Grid(lambda sizes: query_tiles(sizes, 1), splits="some", most_per_sm=8)
"""The CTAs of the combine kernel loop over all rows."""


_FLOAT8_ELEMENT_BYTES = 1

_MOST_ELEMENTS_WITH_BLOCK_MASK = 16 * 128
"""Elements of a warp's output; each 1024 of them take 32 registers per lane. With twice as many,
kernels with segment ids and boolean masks spilled 24 to 56 bytes."""


class FmhaFwdSplitSm80(MmaKernel):
    """The forward with split keys, which does not support f32."""

    stem = "sm80/split"
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
        rows = spec.tile.query
        tiles = packed_row_tiles if spec.pack_heads else query_tiles
        grid = Grid(lambda sizes: tiles(sizes, rows), splits="each")
        class_name = "FmhaForwardCombine<Config>"
        combine_grid = _COMBINE_GRID
        if _groups_take_segments(spec):
            combine_grid = combine_grid._replace(splits="")  # without splits, too
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
        (ffi/src/splits.cc) chooses the number of parts for the device; this is the
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
    """``kGroupsTakeSegments`` of codegen/kernels/sm80/split.cuh."""
    return spec[PAGES].is_invariant and _tile(spec).key_warps > 1


def _keys_of_cta(spec: KernelSpec) -> int:
    """The keys that all warps of a CTA process at a time."""
    tile = _tile(spec)
    return tile.key * (tile.key_warps if _groups_take_segments(spec) else 1)


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
