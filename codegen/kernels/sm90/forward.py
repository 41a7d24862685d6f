"""The wgmma forward: persistent CTAs, a producer that copies tiles by TMA, and consumers of 64 rows
each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from jax_memeff.codegen import features, gpu, shared_memory
from jax_memeff.codegen.features import BIAS, FUNCTIONS, PAGES
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.features.mask import MaskKind
from jax_memeff.codegen.features.pages import key_box_rows
from jax_memeff.codegen.functions.regions import block_sizes
from jax_memeff.codegen.kernels.common.base import (
    BOOLEAN_MASK,
    EVERY_MODIFIER,
    modifiers,
    panel_columns,
    query_tiles,
    tile_columns,
)
from jax_memeff.codegen.kernels.sm90.base import (
    WARPGROUP_ROWS,
    PersistentSm90,
    PersistentTile,
    WgmmaTile,
    by_pair,
)
from jax_memeff.codegen.launch import TensorMap
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import QueryRows, Sizes, Strategy, ceil_div

_LEAST_TILE = 64
"""Each head dim has a tile whose rows and columns are this number or twice it."""


@dataclasses.dataclass(frozen=True)
class Tile(PersistentTile):
    """A row of the table of a forward."""

    consumer_groups: int = 1
    """Groups of consumers that share the ``query`` rows and take their KV blocks in turn, for calls
    with few tiles. It divides ``stages``."""
    output_first: bool = False
    """Whether a consumer waits for the product with the values of the previous KV block before it
    computes exponentials. The exponentials then overlap only the products of other consumers."""
    sequential: bool = False
    """In a 3xFP16 forward: whether a consumer computes scores only after the product with the
    values of the previous KV block has ended, so that both products use the same registers."""
    aligned_bias: bool = False
    """Whether each row of a bias must begin at a multiple of 16 bytes. Other rows are copied in
    words, which takes more registers."""


_MOST_ADDED_DIM = 128
"""The largest padded head dim of kernels whose products add a linear score function. Above it,
elementwise evaluation costs little, and shared memory is full."""

_COLUMN_ROW_BYTES = 64
"""A row of the constant operand of that product, for each key of a KV block."""

_NO_SEGMENTS = modifiers("segments")
_NO_SEGMENTS_OR_BIAS = modifiers("segments", "bias")

_GROUPS = Tile(
    64,
    128,
    4,
    "two consumers share 64 rows: 128 blocks for 1024 queries of 8 heads, each with half of the KV "
    "blocks",
    query_stages=1,
    modifiers=EVERY_MODIFIER,
    consumer_groups=2,
)
_SHORT_GROUPS = dataclasses.replace(
    _GROUPS, key=64, reason="as at head dim 64; a consumer group has two buffers of its own"
)

_ONE_TILE = Tile(
    256,
    64,
    2,
    "one work tile for 193 to 256 queries: at head dim 32, T 256 on an H100, with segments 0.76 of "
    "the time of mma.sync. Four consumers have no registers for 128 keys",
    modifiers=EVERY_MODIFIER,
    output_first=True,
)

TILES: Mapping[int, Sequence[Tile]] = {
    64: (
        _GROUPS,
        Tile(
            192,
            128,
            2,
            "three consumers read K and V a third less often than two. Forward at T 8192 on an "
            "H200: 536 TFLOP/s, with exponentials under the product 507; with a bias at T 2048 on "
            "an H100 0.88 of the time of two consumers. With a bias of T 2046 on an H200 two "
            "consumers take 0.80 of the time if it has 32 bits, 0.92 if 16",
            modifiers=_NO_SEGMENTS,
            masks=("none", "causal"),
            output_first=True,
            aligned_bias=True,
        ),
        Tile(128, 128, 2, "three consumers spill with a window", modifiers=EVERY_MODIFIER),
        _ONE_TILE,
    ),
    96: (
        _SHORT_GROUPS,
        Tile(
            192,
            112,
            2,
            "forward at T 4096 on an H200: 575 TFLOP/s, with 96 keys 554, with 128 x 128 533; at "
            "T 1024 456, with 128 x 128 477",
            masks=("none", "causal"),
            output_first=True,
        ),
        Tile(128, 128, 2, "as at head dim 128", modifiers=EVERY_MODIFIER),
    ),
    128: (
        _SHORT_GROUPS,
        Tile(
            128,
            128,
            2,
            "192 KB: two buffers of everything. Forward at T 8192 on an H200: 663 TFLOP/s, with "
            "exponentials under the product 647",
            modifiers=EVERY_MODIFIER,
            output_first=True,
        ),
        Tile(128, 64, 2, "a bias of 32 bits takes 36 KB, and 68 above", modifiers=EVERY_MODIFIER),
    ),
    192: (
        Tile(
            128,
            112,
            2,
            "221 KB: forward at T 4096 on an H200: 681 TFLOP/s, with 96 keys 673; a soft cap at "
            "T 2048 on an H100 takes 0.96 of the time with exponentials under the product",
            query_stages=1,
            modifiers=_NO_SEGMENTS_OR_BIAS,
            masks=("none",),
            output_first=True,
        ),
        Tile(
            128,
            96,
            2,
            "causal at T 4096: 618 TFLOP/s, with 112 keys 610, with exponentials under the product "
            "578",
            query_stages=1,
            modifiers=BOOLEAN_MASK,
            masks=("causal",),
            output_first=True,
        ),
        Tile(
            128,
            96,
            2,
            "S 48 and O 96 registers a thread",
            query_stages=1,
            modifiers=modifiers("bias"),
        ),
        Tile(
            128,
            64,
            2,
            "a warp copies rows of the bias whose vectors divide its lanes",
            query_stages=1,
            modifiers=EVERY_MODIFIER,
        ),
    ),
    256: (
        Tile(
            128,
            80,
            2,
            "224 KB: forward at T 8192 on an H200: 708 TFLOP/s, with exponentials under the "
            "product 678; with 64 keys 638, but at T 512 334 rather than 320",
            query_stages=1,
            modifiers=_NO_SEGMENTS_OR_BIAS,
            masks=("none",),
            output_first=True,
        ),
        Tile(
            128,
            64,
            2,
            "causal: 633 TFLOP/s, with exponentials under the product 630",
            query_stages=1,
            modifiers=BOOLEAN_MASK,
            masks=("causal",),
            output_first=True,
        ),
        Tile(
            128,
            64,
            2,
            "S 32 and O 128 registers a thread",
            query_stages=1,
            modifiers=EVERY_MODIFIER,
        ),
    ),
}
"""By the larger of the two padded head dims. TMA fills padding with zeros."""

PAIR_TILES: Mapping[tuple[int, int], Sequence[Tile]] = {
    (32, 32): (
        Tile(
            192,
            128,
            2,
            "as at head dim 64; 292 TFLOP/s at T 4096 on an H200, with exponentials under the "
            "product 282",
            modifiers=_NO_SEGMENTS,
            masks=("none", "causal"),
            output_first=True,
        ),
        Tile(
            192,
            128,
            2,
            "a window of 1024 on an H100: 0.80 of the time of mma.sync, with output first 0.87",
            masks=("window",),
        ),
        Tile(
            192,
            128,
            2,
            "documents of 512 on an H100: 0.86 of the time of mma.sync, with output first 0.94",
            modifiers=("segments", *BOOLEAN_MASK),
            masks=("none", "causal"),
        ),
        Tile(
            128,
            128,
            2,
            "with three consumers windows and segments spill with other features",
            modifiers=EVERY_MODIFIER,
        ),
        _ONE_TILE,
    ),
    (48, 48): (
        Tile(
            192,
            128,
            2,
            "as at head dim 64",
            modifiers=BOOLEAN_MASK,
            masks=("none", "causal"),
            output_first=True,
        ),
    ),
    (80, 80): (
        Tile(
            192,
            112,
            2,
            "as at head dim 96",
            modifiers=BOOLEAN_MASK,
            masks=("none", "causal"),
            output_first=True,
        ),
    ),
    (160, 160): (
        Tile(
            128,
            128,
            2,
            "200 KB, as (192, 128)",
            query_stages=1,
            modifiers=BOOLEAN_MASK,
            masks=("none", "causal"),
            output_first=True,
        ),
    ),
    (192, 128): (
        Tile(
            128,
            128,
            2,
            "208 KB; S 64 and O 64 registers a thread. Forward at T 8192 on an H200: 702 TFLOP/s, "
            "with exponentials under the product 656",
            query_stages=1,
            modifiers=BOOLEAN_MASK,
            masks=("none", "causal"),
            output_first=True,
        ),
        Tile(128, 128, 2, "a window", query_stages=1, modifiers=BOOLEAN_MASK),
    ),
}
"""By the padded head dims of query and value. They are tried before those of ``TILES``."""

ALIGNED_DIMS = (160,)
"""Padded head dims whose tiles have panels of 64 bytes, while those of the next larger dims have
128. At head dim 152, whose rows are not multiples of 32 bytes, the tile of the larger dim is
faster: 495 rather than 411 TFLOP/s at T 4096 on an H200.
"""


_LARGE_ROWS, _PLAIN_ROWS = 192, 128
_FILLED_ROWS: Mapping[int, tuple[QueryRows, ...]] = {32: ("256",), 64: ("128", "256")}
"""Tiles besides those of ``_LARGE_ROWS``, for queries that fill them, by padded head dim."""

_FILLED_TILES: Mapping[MaskKind, tuple[tuple[int, int], ...]] = {
    "none": ((2, 2),),
    "causal": ((1, 1), (2, 2), (4, 5)),
}
"""(192-row, 128-row) tile counts per head at which 128-row tiles win at head dim 64: T up to 128,
193 to 256, and 577 to 640 (docs/tuning/sm90_forward.md)."""

ONE_TILE_FEATURES = (
    features.LENGTHS,
    features.SEGMENTS,
    features.SOFT_CAP,
    features.BIAS,
    *(feature for feature in features.FEATURES if feature.modifies == "probabilities"),
)
"""Features of calls that may have a tile of 256 rows. Of these, lengths and soft cap were not
measured."""

_MOST_KEYS_OF_ONE_TILE = 256
"""The most keys of calls with a tile of 256 rows. At T 2048 others are faster."""


def rows_to_fill(problem: Problem, sizes: Sizes) -> QueryRows | None:
    """One of ``_FILLED_ROWS``, if its tiles are faster than those of 192 rows. Kernels with 48
    columns have none of these tiles, and ignore it.
    """
    padded = (
        min((dim for dim in _FILLED_ROWS if dim >= own), default=own)
        for own in (problem.head_dim, problem.value_dim)
    )
    choices = _filled_rows(*padded)
    if not (gpu.has_wgmma(problem.arch) and choices):
        return None
    mask = problem[features.MASK]
    asked = {feature for feature in features.FEATURES if problem.asks(feature)} - {features.MASK}
    tiles = tuple(-(-sizes.queries // rows) for rows in (_LARGE_ROWS, _PLAIN_ROWS))
    if "128" not in choices:
        fills_one = mask != "window"
    else:
        # If the last KV block is partial, masking 64 keys takes less time than masking 128.
        fills_one = mask == "none" and (bool(asked) or sizes.keys % _PLAIN_ROWS > 0)
    is_short = tiles == (2, 2) and sizes.keys <= _MOST_KEYS_OF_ONE_TILE
    if fills_one and is_short and asked <= {*ONE_TILE_FEATURES}:
        return "256"
    fills_smaller = tiles in _FILLED_TILES.get(mask, ()) and "128" in choices
    return "128" if fills_smaller and (not asked or features.BIAS in asked) else None


def consumer_groups_time(sizes: Sizes, multiprocessors: int) -> float:
    """The time of CTAs whose consumer groups share 64 rows, in units of a key in one CTA."""
    return ceil_div(query_tiles(sizes, WARPGROUP_ROWS), multiprocessors) * sizes.keys


def _filled_rows(head_dim: int, value_dim: int) -> tuple[QueryRows, ...]:
    return _FILLED_ROWS.get(head_dim, ()) if head_dim == value_dim else ()


def _by_pair() -> Mapping[tuple[int, int], Sequence[Tile]]:
    """The output reuses the buffer of the queries, so both must have panels of the same width."""
    tiles = {pair: (*own,) for pair, own in PAIR_TILES.items()}
    for (head, value), own in by_pair(TILES).items():
        if panel_columns(head) == panel_columns(value):
            tiles[head, value] = (*tiles.get((head, value), ()), *own)
    return tiles


class FmhaFwdSm90(PersistentSm90):
    """The wgmma forward for 16-bit elements."""

    stem = "sm90/forward"
    direction = "forward"
    class_name = "FmhaForwardSm90"
    reads_pages = True
    own_problems = tuple(((dim, dim), {}) for dim in (48, 80, 160))
    tiles: ClassVar[Mapping[tuple[int, int], Sequence[WgmmaTile]]] = _by_pair()

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if spec.padded_head_dim in ALIGNED_DIMS and problem.head_dim % 16:
            reasons.append("TMA reads such rows at two thirds of its rate into panels of 64 bytes")
        if not self.takes_f32:
            reasons += _filling_reasons(spec, strategy)
        if _tile(spec).aligned_bias and (bias := spec[BIAS]) and bias.access == "words":
            reasons.append("its tile has no registers left for a bias that is copied in words")
        asked = problem[FUNCTIONS]
        if asked is None or asked.mask is None:
            return reasons
        # A tile that spans two Q blocks of a mask function would process the KV blocks of both.
        for axis, size in (("query", spec.tile.query), ("key", spec.tile.key)):
            for block in sorted(block_sizes(asked.mask, axis)):
                if block % _LEAST_TILE == 0 and block % size and size % block:
                    rows = "rows" if axis == "query" else "columns"
                    reasons.append(f"its tile of {size} {rows} cuts blocks of {block}")
        return reasons

    def consumer_groups(self, spec: KernelSpec) -> int:
        return _tile(spec).consumer_groups

    def words(self, spec: KernelSpec) -> list[str]:
        return ["groups"] if self.consumer_groups(spec) > 1 else []

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        return (*super().widths(spec), spec.padded_value_dim)

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        return self.consumer_groups(spec) == 1

    def adds_linear_scores(self, spec: KernelSpec) -> bool:
        dim = max(spec.padded_head_dim, spec.padded_value_dim)
        return FUNCTIONS.is_linear(spec) and spec[BIAS] is None and dim <= _MOST_ADDED_DIM

    def adds_score_function(self, spec: KernelSpec) -> bool:
        shares = self.shares_diagonals(spec) and FUNCTIONS.adds_along_diagonals(spec)
        return shares or self.adds_linear_scores(spec)

    def shares_diagonals(self, spec: KernelSpec) -> bool:
        """Whether the producer reads what a score function reads along diagonals."""
        dim = max(spec.padded_head_dim, spec.padded_value_dim)
        reads = FUNCTIONS.diagonal_reads(spec)
        return 0 < reads <= shared_memory.MOST_DIAGONAL_READS and dim <= _MOST_ADDED_DIM

    def operand_bytes(self, spec: KernelSpec, rows: int, columns: int) -> int:
        """The bytes of a buffer for rows of query, key or value."""
        return rows * tile_columns(columns) * spec.element_bytes

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Rings of query, key and value tiles, the columns that a linear score function
        multiplies, diagonals, the outputs that consumer groups merge, ``ring_bytes``, and with
        small pages a flag.
        """
        tile = _tile(spec)
        row_warpgroups = self.consumers(spec) // tile.consumer_groups
        queries = row_warpgroups * self.operand_bytes(spec, WARPGROUP_ROWS, spec.padded_head_dim)
        keys, values = (
            self.operand_bytes(spec, tile.key, columns)
            for columns in (spec.padded_head_dim, spec.padded_value_dim)
        )
        operands = tile.query_stages * queries + tile.stages * (keys + values)
        if self.adds_linear_scores(spec):
            operands += tile.key * _COLUMN_ROW_BYTES
        operands += tile.stages * shared_memory.diagonal_bytes(spec) * self.shares_diagonals(spec)
        merged = shared_memory.merge_bytes(
            spec.computing_threads, tile.consumer_groups, 2, tile.query, spec.padded_value_dim
        )
        flag = shared_memory.FLAG_BYTES * spec[PAGES].is_small
        return operands + merged + self.ring_bytes(spec) + flag

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        head, value = panel_columns(spec.padded_head_dim), panel_columns(spec.padded_value_dim)
        return (
            TensorMap("query", WARPGROUP_ROWS, head),
            TensorMap("key", key_box_rows(spec), head),
            TensorMap("value", key_box_rows(spec), value),
        )

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = _tile(spec)
        return {
            **super().constants(spec),
            "kConsumerGroups": tile.consumer_groups,
            "kOutputFirst": tile.output_first,
            "kLinearScores": self.adds_linear_scores(spec),
            "kSharedDiagonals": self.shares_diagonals(spec),
        }


def _filling_reasons(spec: KernelSpec, strategy: Strategy) -> Iterator[str]:
    rows = strategy.query_rows
    if rows in _filled_rows(spec.padded_head_dim, spec.padded_value_dim):
        if spec.tile.query != int(rows):
            yield f"the queries fill tiles of {rows} rows, and it has {spec.tile.query}"
    elif spec.tile.query == _ONE_TILE.query:
        yield "its tile is for queries that fill one"


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
