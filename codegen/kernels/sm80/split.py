"""The forward with split keys, for few query rows: CTAs divide the keys of a tile, and a second
kernel combines their results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import FUNCTIONS, PACKED, PAGES, pages
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.common.base import pack_gqa, query_tiles, split_row_tiles, stage
from jax_memeff.codegen.kernels.sm80.base import MmaKernel, MmaTile
from jax_memeff.codegen.launch import EntryPoint, Grid, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import QueryRows, Sizes, Strategy, ceil_div

FEW_ROWS = 16
"""The rows of the smallest tile, which holds one token of all query heads of a key head."""

_DRAFT_ROWS = 32
"""The rows of the tile for a few draft tokens. Only tiles with rows of several heads use it: a tile
of one head may have a block mask, for which warps with 32 rows have no registers.
"""

ROWS = 64
"""The rows of the largest tile. With at most as many query rows of a key head, half of a plain tile
would be empty."""

_MOST_CTAS = 512
"""The most CTAs with partial results: the largest GPUs then have a few for each SM."""

_LEAST_SEGMENTS = 3
"""The least number of segments for each SM with which warps take whole segments. With fewer, some
warps would have none."""

_MMA_SYNC_COST = 2
"""Relative cost of a key without wgmma: mma.sync reaches half the throughput."""

_COMBINATION = 1024
"""Cost in keys of the combine kernel and of partial results in global memory: 3 us."""


def gqa_rows(problem: Problem, sizes: Sizes) -> int:
    """The query rows that read the keys of one head together."""
    return sizes.queries * (sizes.group if pack_gqa(problem) else 1)


def required_rows(problem: Problem, sizes: Sizes, multiprocessors: int) -> QueryRows | None:
    """The tile of calls that no other kernel serves: batch-invariant ones, and float8 pools."""
    pool, few = problem[PAGES], gqa_rows(problem, sizes) <= FEW_ROWS
    if pool.is_invariant:
        return "16" if few and _takes_segments(problem, sizes, multiprocessors) else "64"
    if pool.dtype != "query":
        return "16" if few else "64"
    return None


def few_rows(problem: Problem, sizes: Sizes) -> QueryRows | None:
    """The tile of a decode step, or of a few draft tokens, whatever the number of keys."""
    rows = gqa_rows(problem, sizes)
    if rows <= FEW_ROWS:
        return "16"
    return "32" if rows <= _DRAFT_ROWS and rows > sizes.queries else None


def split_time(problem: Problem, sizes: Sizes, multiprocessors: int) -> float:
    """The time of CTAs that split the keys, and of the combine kernel, in units of a key in one
    CTA of the forward.
    """
    tiles = split_row_tiles(sizes, ROWS, pack_gqa(problem))
    return _MMA_SYNC_COST * sizes.keys * tiles / multiprocessors + _COMBINATION


def _takes_segments(problem: Problem, sizes: Sizes, multiprocessors: int) -> bool:
    """Whether the warps of a batch-invariant call have the same few rows and take whole segments.
    Each segment then has an output in global memory. If there are more tiles than SMs, all SMs have
    work without that. A kernel for functions has only the tile of 64 rows.
    """
    if problem[PAGES].dtype != "query" or problem.asks(FUNCTIONS):
        return False
    tiles, segments = sizes.batch * sizes.key_heads, pages.segments(sizes.keys)
    outputs = sizes.batch * sizes.heads * sizes.queries * problem.value_dim
    enough = tiles * segments // multiprocessors >= _LEAST_SEGMENTS
    return tiles <= multiprocessors and enough and segments <= pages.most_segments(outputs)


@dataclasses.dataclass(frozen=True)
class Tile(MmaTile):
    """The tile of a CTA, and how its warps divide it."""

    key_warps: int = 1
    """The number of warps, or groups of warps, that divide the keys of a tile."""
    stages: int = 1
    """The stages of keys and values in shared memory."""


_FLOAT8_SM90: Mapping[int, Sequence[Tile]] = {
    64: (
        Tile(16, 256, 8, 1, "162 KB of 227 KB", key_warps=8, stages=5),
        Tile(64, 128, 4, 2, "56 KB: two blocks per SM", key_warps=2, stages=3),
    ),
    128: (
        Tile(16, 256, 8, 1, "196 KB of 227 KB", key_warps=8, stages=3),
        Tile(64, 64, 4, 2, "80 KB: two blocks per SM", modifiers=(), key_warps=2, stages=4),
        Tile(64, 64, 8, 1, "80 KB; for modifiers, as with 16 bits", key_warps=2, stages=4),
    ),
    192: (
        Tile(16, 128, 8, 1, "198 KB of 227 KB", key_warps=8, stages=4),
        Tile(64, 64, 8, 1, "120 KB of 227 KB", key_warps=2, stages=4),
    ),
    256: (
        Tile(16, 128, 8, 1, "200 KB of 227 KB", key_warps=8, stages=3),
        Tile(64, 64, 8, 1, "160 KB of 227 KB", key_warps=2, stages=4),
    ),
}
"""Tiles of a float8 pool with 227 KB, by padded head dim. At head dim 128 and 128 keys a CTA of
four warps alone on its SM took 1.17 us for a tile on an H200 (3.6 TB/s), because its warps wait for
their own instructions. The launcher often starts one CTA per SM, which is enough to saturate
memory, so a CTA has eight warps."""

_COPIES_IN_FLIGHT = "about 64 KB of copies in flight per SM hide the latency of memory"


def _residencies(device: Gpu, *choices: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Numbers of CTAs per SM and of stages. Without asynchronous copies a third stage is idle."""
    most = 4 if device.async_copies else 2
    yield from dict.fromkeys((blocks, min(stages, most)) for blocks, stages in choices)


def _tiles_of_few_rows(device: Gpu, dim: int, most_keys: int) -> Iterator[Tile]:
    """Tiles of 16 rows for a decode step, and of 32 for a few draft tokens.

    Every warp has all rows and its own keys, so no warp waits for another. Rates on an H200 as
    built for sm_90: head dim 64 4.3 TB/s with two to four CTAs, head dim 128 4.46 (with two stages
    4.06). Decode steps with 32 query and 8 key heads as compute_80: head dim 64, B 16, S 8192 63 us
    (two CTAs with two stages 71); head dim 128, the same, 123 us, and B 1, S 32768 36.5 (two CTAs
    with two stages 133, 39.5; one of 128 keys and eight warps 121, 37.3). 32 rows were not
    measured.
    """
    for rows, keys in itertools.product((16, 32), (128, 64, 32)):
        if keys > most_keys or (rows == 32 and dim > _MOST_COLUMNS_OF_32_ROWS):
            continue
        warps = min(4, keys // 16)
        for blocks, stages in _residencies(device, (2, 3), (1, 4), (1, 3), (1, 2)):
            yield Tile(rows, keys, warps, blocks, _COPIES_IN_FLIGHT, key_warps=warps, stages=stages)


def _tiles_of_64_rows(device: Gpu, dim: int) -> Iterator[Tile]:
    """Two groups of warps divide the keys. Rates on an H200 as built for sm_90: head dim 64 134 us
    for T 32 of S 4096, 256 keys 154; head dim 128 4.28 TB/s, with eight warps 3.71.
    """
    for keys in (128, 64, 32, 16) if dim <= 64 else (64, 32, 16):
        residencies = ((2, 2), (1, 2)) if keys == 128 else ((2, 3), (1, 3), (1, 2))
        groups = 2 if keys > 16 else 1
        if dim <= _MOST_COLUMNS_OF_32_ROWS or groups == 1:
            # A warp with 32 rows and 128 columns spills soft cap, bias and random bits.
            features = MmaTile.modifiers if dim <= 64 or groups == 1 else ()
            for blocks, stages in _residencies(device, *residencies):
                reason = _COPIES_IN_FLIGHT
                yield Tile(64, keys, 4, blocks, reason, features, key_warps=groups, stages=stages)
        if groups == 2:
            for _, stages in _residencies(device, *residencies[1:]):
                reason = "a warp has 16 rows"
                yield Tile(64, keys, 8, 1, reason, key_warps=groups, stages=stages)


def _invariant_tiles(device: Gpu, dim: int, most_keys: int) -> Iterator[Tile]:
    """Tiles of batch-invariant calls. A warp has its own rows and all keys, so outputs of a segment
    need no merge. Above head dim 128 the sum of the segments, which is used once per 256 keys,
    spills. In a decode step one warp of 64 rows has any. With 227 KB each warp has the same 16 rows
    instead, and takes whole segments.

    Hazard: the bits depend on the keys of a KV block, so all tiles of a GPU have the same.
    """
    for keys in (128, 64, 32, 16):
        if keys > most_keys:
            continue
        if device is gpu.SM90 and dim <= _MOST_COLUMNS_OF_32_ROWS:
            for warps, stages in ((4, 3), (4, 2), (3, 2)):
                reason = "a warp takes whole segments"
                yield Tile(16, keys, warps, 1, reason, key_warps=warps, stages=stages)
        for blocks, stages in _residencies(device, (2, 3), (2, 2), (1, 3), (1, 2)):
            yield Tile(64, keys, 4, blocks, "no merge of key warps", stages=stages)


_MOST_COLUMNS_OF_32_ROWS = 128
"""The most columns of the output of which a warp has 32 rows: 128 accumulators of a thread."""

COMBINE_THREADS = 128
_COMBINE_GRID = Grid(lambda sizes: query_tiles(sizes, 1), splits="some", most_per_sm=8)
"""The CTAs of the combine kernel loop over all rows."""


_ELEMENT_BYTES = 2
_FLOAT8_ELEMENT_BYTES = 1

_MOST_ELEMENTS_WITH_BLOCK_MASK = 16 * 128
"""Elements of a warp's output; each 1024 of them take 32 registers per lane. With twice as many,
kernels with segment ids and boolean masks spilled 24 to 56 bytes."""


@functools.cache
def _configured(
    device: Gpu, padded: tuple[int, int], is_float8: bool, is_invariant: bool
) -> Sequence[Tile]:
    """For each number of rows and warps the first tile that fits the GPU."""
    if is_float8 and any(dim % 64 for dim in padded):
        return ()  # rows of float8 in shared memory have a multiple of 64 bytes
    dim = max(padded)
    most_keys = 128 if dim * _key_element_bytes(is_float8) <= 128 else 64
    if is_invariant:
        tiles = _invariant_tiles(device, dim, most_keys)
    elif is_float8 and device is gpu.SM90:
        tiles = iter(_FLOAT8_SM90[dim])
    else:
        tiles = itertools.chain(
            _tiles_of_few_rows(device, dim, most_keys), _tiles_of_64_rows(device, dim)
        )
    chosen: dict[tuple[int, int], Tile] = {}
    for tile in tiles:
        bytes_ = _shared_bytes(tile, padded, is_float8, is_invariant, has_page_scales=is_float8)
        if bytes_ <= device.shared_bytes(tile.blocks_per_sm):
            chosen.setdefault((tile.query, tile.warps), tile)
    if is_invariant:  # the bits depend on the keys
        keys = max((tile.key for tile in chosen.values()), default=0)
        return tuple(tile for tile in chosen.values() if tile.key == keys)
    return tuple(chosen.values())


def _key_element_bytes(is_float8: bool) -> int:
    return _FLOAT8_ELEMENT_BYTES if is_float8 else _ELEMENT_BYTES


def _shared_bytes(
    tile: Tile,
    padded: tuple[int, int],
    is_float8: bool,
    is_invariant: bool,
    has_page_scales: bool,
) -> int:
    """A tile of query and stages of key and value, and with a float8 pool a factor for each query
    row and two scales for each part of a page. At the end the groups of warps that split the keys
    overwrite them with maximum and sum of their rows, and f32 outputs.
    """
    key_bytes = sum(padded) * _key_element_bytes(is_float8)
    loop = tile.query * padded[0] * _ELEMENT_BYTES
    loop += tile.stages * _keys_of_cta(tile, is_invariant) * key_bytes
    if is_float8:
        parts = tile.stages * tile.key // pages.MULTIPLE if has_page_scales else 0
        loop += 4 * (tile.query + 2 * parts)
    rows = tile.query * tile.key_warps // tile.warps
    threads = 32 * tile.warps
    merge = shared_memory.merge_bytes(
        threads, tile.key_warps, 2 * rows // 16, tile.query, padded[1]
    )
    return max(loop, merge)


class FmhaFwdSplitSm80(MmaKernel):
    """The forward with split keys, which does not support f32."""

    stem = "sm80/split"
    direction = "forward"
    class_name = "FmhaForwardSplitSm80"
    splits_keys = True
    decides_mask_tiles = True
    reads_pages = True
    reads_float8_pages = True

    def configure(self, problem: Problem, device: Gpu, padded: tuple[int, int]) -> Sequence[Tile]:
        if problem.dtype in F32_DTYPES:
            return ()
        pool = problem[PAGES]
        return _configured(device, padded, pool.dtype != "query", bool(pool.is_invariant))

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = []
        if problem[PACKED] and not problem.asks(PAGES):
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

    def completed(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> KernelSpec:
        return dataclasses.replace(spec, pack_gqa=pack_gqa(problem))

    def alignment(self, problem: Problem) -> int:
        return 16

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        """A row of the block mask takes three registers, too many next to larger output tiles."""
        (rows,) = self.rows_of_warps(spec)
        return rows * spec.padded_value_dim <= _MOST_ELEMENTS_WITH_BLOCK_MASK

    def shared_bytes(self, spec: KernelSpec) -> int:
        pool = spec[PAGES]
        return _shared_bytes(
            _tile(spec),
            (spec.padded_head_dim, spec.padded_value_dim),
            pool.is_float8,
            pool.is_invariant,
            has_page_scales="pages" in (pool.key_scale, pool.value_scale),
        )

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        keys = _keys_of_cta(_tile(spec), spec[PAGES].is_invariant)
        return {"S": (spec.tile.query, keys)}

    def rows_of_warps(self, spec: KernelSpec) -> tuple[int, ...]:
        """A warp owns whole rows, of some of the keys."""
        tile = _tile(spec)
        return (tile.query * tile.key_warps // tile.warps,)

    def words(self, spec: KernelSpec) -> list[str]:
        return ["split", *(["gqa"] if spec.pack_gqa else [])]

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        rows, packs_gqa = spec.tile.query, spec.pack_gqa
        grid = Grid(lambda sizes: split_row_tiles(sizes, rows, packs_gqa), splits="each")
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
            "kPackGqa": spec.pack_gqa,
        }

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """The f32 logsumexps and outputs of each part of the keys. The launcher
        (ffi/src/launch.cc) chooses the number of parts for the device; this is the
        largest number that the program has room for.
        """
        tiles = split_row_tiles(sizes, spec.tile.query, spec.pack_gqa)
        splits = min(_MOST_CTAS // max(1, tiles), ceil_div(sizes.keys, spec.tile.key))
        all_rows = sizes.batch * sizes.heads * sizes.queries
        if spec[PAGES].is_invariant:
            # Each segment has a place, whichever CTA computes it.
            outputs = all_rows * spec.padded_value_dim
            segments = pages.segments(sizes.keys)
            divides = tiles <= multiprocessors and segments <= pages.most_segments(outputs)
            divides = divides or _groups_take_segments(spec)
            splits = segments if divides else 1
        if splits > 1 or _groups_take_segments(spec):
            shape = splits, all_rows
            yield Workspace("partial_logsumexp", shape)
            yield Workspace("partial_out", (*shape, spec.padded_value_dim))


def _groups_take_segments(spec: KernelSpec) -> bool:
    """``kGroupsTakeSegments`` of codegen/kernels/sm80/split.cuh."""
    return spec[PAGES].is_invariant and _tile(spec).key_warps > 1


def _keys_of_cta(tile: Tile, is_invariant: bool) -> int:
    """The keys that all warps of a CTA process at a time: if the call is batch invariant, groups of
    warps have a KV block of a segment each.
    """
    return tile.key * (tile.key_warps if is_invariant else 1)


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
