"""The wgmma forward of latent attention (MLA with absorbed projections): the values are the first
columns of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax_memeff.codegen import shared_memory
from jax_memeff.codegen.features import PAGES, AskedPages, pages
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.features.pages import SCALES, key_box_rows
from jax_memeff.codegen.kernels.common.base import (
    gqa_row_tiles,
    pack_gqa,
    panel_columns,
    stage,
)
from jax_memeff.codegen.kernels.sm90.base import WgmmaKernel, WgmmaTile
from jax_memeff.codegen.launch import EntryPoint, Grid, TensorMap, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy, ceil_div, round_up

HEAD_DIM, VALUE_DIM = 576, 512
"""The columns of keys, and how many of them are values, in DeepSeek's models."""

_TILE = WgmmaTile(
    64,
    64,
    2,
    "queries and two buffers of keys take 216 KB, and each of two consumers holds 256 columns of "
    "the output in 128 registers a thread",
    modifiers=("soft cap", "user functions"),
)

_TILES = {(HEAD_DIM, VALUE_DIM): (_TILE,)}

_CLUSTER = 2
"""The CTAs of a cluster."""

CONSUMERS = 2
"""They divide the columns of the output, or of dq."""
_COLUMN_GROUPS = 3
"""The groups of columns of a buffer of keys that are released separately: the values of each
consumer, and the rest.
"""
_WORK_STAGES = 4
_KEY_PART_BYTES = 24
"""``KeyPart`` of codegen/memeff/schedule/balanced_keys.cuh."""
_TILE_PARTS_WORDS = 4
"""``TileParts`` of ffi/include/memeff/params.h."""

_COMBINE_ROWS, _COMBINE_SEGMENT_ROWS = 4, 8
"""The rows of a CTA of the combine kernel, and those of a batch-invariant call. Its loads of eight
rows, of one or two partial results, are in flight together.
"""

_COMBINE_BLOCKS_PER_SM = 6
"""CTAs of the combine kernel per SM, which loop over all rows. With 8 they spill."""

SMALL_GROUP = 16
"""Batch-invariant results have other segments if at most this many query heads share a key head: in
a decode step they fill a quarter of the rows of a tile, so segments cost less.
"""


class Segments(NamedTuple):
    """The segments of the keys of a batch-invariant call: ``KeySegments`` of
    codegen/memeff/schedule/balanced_keys.cuh.

    A segment has ``keys`` keys if it begins before ``doubles_at``, else twice as many. Hazard: the
    bits depend on the segments, so these must depend on nothing that differs between calls with the
    same token.
    """

    keys: int
    doubles_at: int

    def count(self, keys: int) -> int:
        """The number of segments of a sequence."""
        short = min(keys, self.doubles_at)
        return -(-short // self.keys) + -(-(keys - short) // (2 * self.keys))


SMALL_GROUP_SEGMENTS, LARGE_GROUP_SEGMENTS = Segments(512, 32768), Segments(1024, 8192)
"""docs/tuning/sm90_forward.md compares them with others."""

_WARP_ROWS, _WEIGHT_NUMBERS = 16, 16
"""The rows of a block of ``SegmentTile`` (codegen/kernels/sm90/latent_combine.cuh), and the
numbers of its weights for each row.
"""

_MOST_BLOCKS = 144
"""One CTA for each SM of a full GH100."""


SEVERAL_HEADS = "the rows of its tiles belong to several heads"
"""The reason against tiles with the rows of all query heads of a key head."""


class LatentKernel(WgmmaKernel):
    """The common base of the kernels whose values are columns of the keys."""

    reads_pages = True
    reads_latent = True

    def consumers(self, spec: KernelSpec) -> int:
        return CONSUMERS

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        return False

    def words(self, spec: KernelSpec) -> list[str]:
        return ["latent"]


class FmhaFwdLatentSm90(LatentKernel):
    """The forward for values that are columns of the keys, with 16-bit elements."""

    stem = "sm90/latent"
    direction = "forward"
    class_name = "FmhaForwardLatentSm90"
    maps_type = "KeyMap"
    reads_float8_pages = True
    splits_keys = True
    persistent = True
    tiles = _TILES
    own_problems = tuple(
        ((HEAD_DIM, VALUE_DIM), {"packed": True, "pages": asked, **mask})
        for asked in (
            AskedPages(1, is_latent=True),
            AskedPages(64, is_latent=True),
            AskedPages(64, is_latent=True, is_invariant=True),
            *(AskedPages(64, "f8e4m3", is_latent=True, key_scale=scale) for scale in SCALES),
        )
        for mask in ({}, {"mask": "causal"})
    )

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = []  # not those of the base class, which refuse a split of the keys
        if not pack_gqa(problem):
            reasons.append(SEVERAL_HEADS)
        if spec[PAGES].is_float8 and spec.dtype != "bf16":
            # The keys times their scale may exceed the range of float16.
            reasons.append("it converts latent keys from float8 to bfloat16 only: cast the query")
        return reasons

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Queries, two buffers of keys and the probabilities of a KV block; for each row a softmax
        reference and two pairs of sums; barriers: one for each panel of columns of a buffer, each
        of its column groups, and the probabilities of each consumer; and whether pages may be
        missing.
        """
        rows, panels = spec.tile.query, spec.padded_head_dim // panel_columns(spec.padded_head_dim)
        stages = CONSUMERS
        operands = rows * (spec.padded_head_dim + spec.tile.key)
        operands += stages * spec.tile.key * spec.padded_head_dim
        barriers = stages * (panels + _COLUMN_GROUPS + 1)
        return (
            operands * spec.element_bytes
            + rows * (shared_memory.STATISTICS_BYTES + 2 * CONSUMERS * 4)
            + barriers * shared_memory.BARRIER_BYTES
            + _WORK_STAGES * shared_memory.PIPELINE_BYTES
            + _WORK_STAGES * _KEY_PART_BYTES
            + shared_memory.FLAG_BYTES
        )

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        if spec[PAGES].is_float8 or spec[PAGES].is_small:  # warps copy the keys
            return ()
        return (TensorMap("key", key_box_rows(spec), panel_columns(spec.padded_head_dim)),)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        tile = spec.tile

        def clusters(sizes: Sizes) -> int:
            return gqa_row_tiles(sizes, _CLUSTER * tile.query) * ceil_div(sizes.keys, tile.key)

        grid = Grid(clusters, most_per_sm=1).times(_CLUSTER)
        rows = Grid(
            lambda sizes: gqa_row_tiles(sizes, tile.query), most_per_sm=_COMBINE_BLOCKS_PER_SM
        )
        combine_grid = rows.times(tile.query // _combine_rows(spec))
        threads = spec.padded_value_dim // 4
        class_name = "FmhaForwardLatentCombine<Config>"
        combine = stage(spec, "combine", class_name, threads, grid=combine_grid)
        return self.main(spec, grid)._replace(cluster=_CLUSTER), combine

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        constants: dict[str, Constant | CppType] = {
            **super().constants(spec),
            "kCluster": _CLUSTER,
            "kCombineRows": _combine_rows(spec),
            "kCombineBlocksPerSm": _COMBINE_BLOCKS_PER_SM,
        }
        if spec[PAGES].is_invariant:
            constants |= {
                "kSmallGroup": SMALL_GROUP,
                "kSmallGroupSegmentKeys": SMALL_GROUP_SEGMENTS.keys,
                "kSmallGroupDoublesAt": SMALL_GROUP_SEGMENTS.doubles_at,
                "kLargeGroupSegmentKeys": LARGE_GROUP_SEGMENTS.keys,
                "kLargeGroupDoublesAt": LARGE_GROUP_SEGMENTS.doubles_at,
            }
        return constants

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """Each CTA of the main kernel's grid has two slots for partial results, and each row tile
        records the slots that hold its parts. In a batch-invariant call a CTA has a slot for its
        running sum, and there are others for segments. If these do not suffice, CTAs divide fewer
        row tiles, which changes no bit.
        """
        rows, columns = spec.tile.query, spec.padded_value_dim
        queries, tiles = sizes.queries * sizes.group, gqa_row_tiles(sizes, rows)
        clusters = gqa_row_tiles(sizes, _CLUSTER * rows) * ceil_div(sizes.keys, spec.tile.key)
        blocks = min(_CLUSTER * clusters, max(multiprocessors, _MOST_BLOCKS))
        yield Workspace("tile_parts", (tiles, _TILE_PARTS_WORDS), "int32")
        if spec[PAGES].is_invariant:
            of_group = SMALL_GROUP_SEGMENTS if sizes.group <= SMALL_GROUP else LARGE_GROUP_SEGMENTS
            used = min(rows, round_up(queries, _WARP_ROWS))
            outputs = used * (columns + _WEIGHT_NUMBERS)
            # The first segment of a row tile is part of a running sum.
            segments = tiles * max(of_group.count(sizes.keys) - 1, 0)
            slots = blocks + min(segments, pages.most_segments(outputs))
            yield Workspace("partial_out", (slots, used, columns + _WEIGHT_NUMBERS))
        else:
            slots = 2 * blocks * rows
            yield Workspace("partial_logsumexp", (slots,))
            yield Workspace("partial_out", (slots, columns))


def _combine_rows(spec: KernelSpec) -> int:
    return _COMBINE_SEGMENT_ROWS if spec[PAGES].is_invariant else _COMBINE_ROWS
