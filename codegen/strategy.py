"""How the work of a call is divided over a GPU; which way is faster depends on the GPU's numbers.

``Problem`` describes the requirements; the same problem may use another kernel if its call has few
tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Literal

from jax_memeff.codegen import features, gpu
from jax_memeff.codegen.features.deterministic import DETERMINISTIC
from jax_memeff.codegen.features.mask import MASK, MaskKind
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.sizes import Sizes

QueryRows = Literal["16", "32", "64", "128", "256", "consumer_groups"]
QUERY_ROWS: tuple[QueryRows, ...] = ("16", "32", "64", "128", "256", "consumer_groups")

MULTIPROCESSORS = 132
"""The number on an H100 and on an H200. A program is lowered before its device is known, so this is
the default; the launcher limits what it launches to the device (ffi/src/splits.cc)."""

MOST_SPLIT_BLOCKS = 512
"""The most CTAs with partial results: the largest GPUs then have a few for each SM."""

FEW_ROWS = 16
"""The rows of the smallest tile, which holds one token of all query heads of a key head."""

_DRAFT_ROWS = 32
"""The rows of the tile for a few draft tokens. Only tiles with rows of several heads use it: a tile
of one head may have a block mask, for which warps with 32 rows have no registers.
"""
_PLAIN_ROWS = 128
_LARGE_ROWS = 192
"""The rows of the plain tile of a Hopper forward at the head dims of ``_FILLED_ROWS``."""
_FILLED_ROWS: Mapping[int, tuple[QueryRows, ...]] = {32: ("256",), 64: ("128", "256")}
_FILLED_TILES: Mapping[MaskKind, tuple[tuple[int, int], ...]] = {
    "none": ((2, 2),),
    "causal": ((1, 1), (2, 2), (4, 5)),
}
"""The numbers of tiles of a head, of 192 and of 128 rows, with which the smaller ones are faster at
head dim 64: queries up to 128, from 193 to 256, and from 577 to 640
(docs/tuning/sm90_forward.md)."""
ONE_TILE_FEATURES = (
    features.LENGTHS,
    features.SEGMENTS,
    features.SOFT_CAP,
    features.DROPOUT,
    features.BIAS,
)
"""Features of calls that may have a tile of 256 rows. Of these, lengths and soft cap were not
measured."""
_MOST_KEYS_OF_ONE_TILE = 256
"""The most keys of calls with such a tile. At T 2048 others are faster."""
_WARPGROUP_ROWS = 64
_LEAST_Q_BLOCKS = 4
"""Q blocks of 64 rows for each CTA of a split-Q backward; with fewer, the sums take longer."""
_CAUSAL_CTAS = 2
"""CTAs for each SM in a causal backward with few KV blocks. The first KV block has twice the mean
work, so with one CTA for each SM half of the SMs would be idle at the end."""
_MANY_Q_BLOCKS = 16
"""The least Q blocks of such a CTA, half of which the mask skips. With 8, it loses 15 to 30 %."""
_LEAST_GROUP = 4
"""The least group whose query heads CTAs divide under a causal mask. With two heads per group it
costs 9 % (H100, T 2048 and 4096)."""
_LARGE_GROUP = 8
"""From here on CTAs divide a group whatever the number of KV blocks."""
_KV_BLOCKS_FOR_FOUR = 8
"""The most KV blocks for each SM with which four CTAs divide a large group. With more, two give
most of the gain and take half of the memory."""
_LEAST_Q_BLOCKS_OF_HEADS = 32
"""Q blocks of 64 rows for each CTA that takes some heads of a group. The mask skips half of them.
"""
_LEAST_DETERMINISTIC_Q_BLOCKS = 64
"""The same if additions to dq have an order. With 32, T 1024 loses 6 % (H100, head dim 128)."""
_PARTS_A_Q_BLOCK = 2
"""The number of partial sums of dk and dv that can be read from L2 in the time of one Q block."""
_MOST_SEGMENT_BYTES = 1 << 27
_LEAST_SEGMENTS = 3
"""The least number of segments for each SM with which warps take whole segments. With fewer, some
warps would have none."""
_MMA_SYNC_COST = 2
"""Relative cost of a key without wgmma: mma.sync reaches half the throughput."""
_COMBINATION = 1024
"""Cost in keys of the combine kernel and of partial results in global memory: 3 us."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How one call divides its work; the default is one CTA for each tile.

    ``query_rows`` is set if a forward has few query rows, or too few tiles to fill the GPU:
    ``"16"``, ``"32"`` and ``"64"`` split the keys over CTAs, in tiles of this many rows (some GPUs
    have no tile of 32 and use that of 64); ``"consumer_groups"`` splits them over the consumer
    groups of one CTA. No kernel splits the keys of float32. ``"128"`` and ``"256"`` split nothing:
    they choose tiles of this many rows at the head dims that have them (:func:`filled_rows`).
    ``split_q`` lets several CTAs of a backward share a KV block. ``mma_sync`` excludes the wgmma
    kernels of float32.

    Raises ``ValueError`` for a ``query_rows`` that does not exist.
    """

    query_rows: QueryRows | None = None
    split_q: bool = False
    mma_sync: bool = False

    def __post_init__(self):
        if self.query_rows not in (None, *QUERY_ROWS):
            names = ", ".join(map(repr, (None, *QUERY_ROWS)))
            raise ValueError(f"expected query_rows to be one of {names}, got {self.query_rows!r}")

    @property
    def splits_keys(self) -> bool:
        """Whether CTAs or consumer groups divide the keys of a tile."""
        return self.query_rows not in (None, *itertools.chain(*_FILLED_ROWS.values()))

    def __str__(self) -> str:
        """The words that differ from the default."""
        words = [f"query_rows={self.query_rows}"] if self.query_rows else []
        flags = [name for name in ("split_q", "mma_sync") if getattr(self, name)]
        return ", ".join([*words, *flags])


PLAIN = Strategy()


def of_direction(direction: str) -> tuple[Strategy, ...]:
    """The strategies that a direction has besides the plain one."""
    of_float32 = Strategy(mma_sync=True)
    return {
        "forward": (*(Strategy(query_rows=rows) for rows in QUERY_ROWS), of_float32),
        "backward": (Strategy(split_q=True), of_float32),
    }.get(direction, ())


_forced: ContextVar[dict[str, Strategy]] = ContextVar("strategies")


@contextlib.contextmanager
def using(**strategies: Strategy) -> Iterator[None]:
    """Calls that are lowered in this context use ``strategies``, by direction, whatever their
    sizes. This serves to compare strategies, and to test each of them with small arrays. Programs
    that are already compiled keep theirs.

    >>> problem = Problem("forward", "bf16", 64, 64, "sm_90a")
    >>> sizes = Sizes(batch=1, queries=1, keys=4096, heads=32, key_heads=8)
    >>> with using(forward=PLAIN):
    ...     choose(problem, sizes, MULTIPROCESSORS)
    Strategy(query_rows=None, split_q=False, mma_sync=False)
    """
    token = _forced.set({**_forced.get({}), **strategies})
    try:
        yield
    finally:
        _forced.reset(token)


def choose(problem: Problem, sizes: Sizes, multiprocessors: int) -> Strategy:
    """The strategy for a call of these sizes on a GPU with this many multiprocessors.

    >>> plain = Problem("forward", "bf16", 64, 64, "sm_90a")
    >>> choose(plain, Sizes(batch=1, queries=1, keys=4096, heads=32, key_heads=8), 132)
    Strategy(query_rows='16', split_q=False, mma_sync=False)
    """
    if (strategy := _forced.get({}).get(problem.direction)) is not None:
        return strategy
    if problem.direction == "tangent":
        return PLAIN
    if problem.dtype in F32_DTYPES:
        return Strategy(mma_sync=_reads_keys_once(sizes, multiprocessors))
    if problem.direction == "forward":
        return Strategy(query_rows=query_rows(problem, sizes, multiprocessors))
    deterministic = problem[DETERMINISTIC] and "query" in problem.needs_grad
    return Strategy(split_q=q_splits(problem[MASK], sizes, multiprocessors, deterministic) > 1)


def _reads_keys_once(sizes: Sizes, multiprocessors: int) -> bool:
    """Whether each key of a float32 call is multiplied with a few queries of one head, in enough
    tiles to fill the GPU. Then it takes longer to write all keys and values as hi and lo parts than
    to multiply them on mma.sync. Heads of a group would read the same keys again.
    """
    few = sizes.group == 1 and sizes.queries <= FEW_ROWS and not sizes.packed
    return few and 2 * sizes.batch * sizes.heads > multiprocessors


def pack_gqa(problem: Problem) -> bool:
    """Whether a tile of a split forward has rows of all query heads that share a key head."""
    return not any(feature.separates_heads(problem) for feature in features.FEATURES)


def query_rows(problem: Problem, sizes: Sizes, multiprocessors: int) -> QueryRows | None:
    """The ``query_rows`` of a forward of these sizes.

    >>> plain = Problem("forward", "bf16", 64, 64, "sm_90a")
    >>> def rows(batch, queries, keys, heads, key_heads):
    ...     sizes = dict(batch=batch, queries=queries, keys=keys, heads=heads, key_heads=key_heads)
    ...     return query_rows(plain, Sizes(**sizes), 132)
    >>> rows(1, 1024, 1024, 8, 8), rows(1, 128, 32768, 8, 8), rows(8, 2048, 2048, 32, 8)
    ('consumer_groups', '64', None)
    """
    group = sizes.group if pack_gqa(problem) else 1
    rows = sizes.queries * group
    if problem[features.PAGES].is_invariant:
        return "16" if _takes_segments(problem, sizes, rows, multiprocessors) else "64"
    if problem[features.PAGES].dtype != "query":
        return "16" if rows <= FEW_ROWS else "64"  # no other kernel converts keys from float8
    slices = sizes.batch * sizes.heads
    plain_tiles = slices * -(-sizes.queries // _PLAIN_ROWS)
    # Tiles that leave half of the GPU idle.
    few_tiles = 2 * plain_tiles <= multiprocessors
    tiles, split_tiles = (
        slices // together * -(-sizes.queries * together // _WARPGROUP_ROWS)
        for together in (1, group)
    )
    groups = gpu.has_wgmma(problem.arch) and few_tiles
    is_packed = problem[features.PACKED] and not problem.asks(features.PAGES)
    if is_packed or problem[features.ROW_MAXIMA]:
        # Partial results have no maxima.
        return "consumer_groups" if groups else None
    if rows <= FEW_ROWS:
        return "16"
    if rows <= _DRAFT_ROWS and group > 1:
        return "32"
    by_groups = _consumer_groups_time(tiles, sizes.keys, multiprocessors)
    if groups and by_groups <= _split_time(split_tiles, sizes.keys, multiprocessors):
        return "consumer_groups"
    # If many heads share a key head, a tile of one head has few rows.
    by_tiles = -(-plain_tiles // multiprocessors) * sizes.keys
    saves_tiles = _split_time(split_tiles, sizes.keys, multiprocessors) < by_tiles
    if rows <= 64 or few_tiles or saves_tiles:
        return "64"
    return _rows_to_fill(problem, sizes)


def filled_rows(head_dim: int, value_dim: int) -> tuple[QueryRows, ...]:
    """The tiles that a Hopper forward with these padded head dims has besides those of 192 rows,
    for queries that fill them.

    >>> filled_rows(64, 64), filled_rows(64, 32)
    (('128', '256'), ())
    """
    return _FILLED_ROWS.get(head_dim, ()) if head_dim == value_dim else ()


def _rows_to_fill(problem: Problem, sizes: Sizes) -> QueryRows | None:
    """One of ``filled_rows``, if its tiles were faster than those of 192 rows. Kernels with 48
    columns have none of these tiles, and ignore it.
    """
    padded = (
        min((dim for dim in _FILLED_ROWS if dim >= own), default=own)
        for own in (problem.head_dim, problem.value_dim)
    )
    choices = filled_rows(*padded)
    if not (gpu.has_wgmma(problem.arch) and choices):
        return None
    mask = problem[MASK]
    asked = {feature for feature in features.FEATURES if problem.asks(feature)} - {MASK}
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


def _takes_segments(problem: Problem, sizes: Sizes, rows: int, multiprocessors: int) -> bool:
    """Whether the warps of a batch-invariant call have the same few rows and take whole segments.
    Each segment then has an output in global memory. If there are more tiles than SMs, all SMs have
    work without that. A kernel for functions has only the tile of 64 rows.
    """
    pool = problem[features.PAGES]
    plain = pool.dtype == "query" and not problem.asks(features.FUNCTIONS)
    tiles = sizes.batch * sizes.key_heads
    few = rows <= FEW_ROWS and tiles <= multiprocessors
    each = tiles * features.pages.segments(sizes.keys) // multiprocessors
    outputs = sizes.batch * sizes.heads * sizes.queries * problem.value_dim
    return (
        plain
        and few
        and each >= _LEAST_SEGMENTS
        and segments_fit(features.pages.segments(sizes.keys), outputs)
    )


def segments_fit(segments: int, outputs: int) -> bool:
    """Whether there is memory for ``outputs`` numbers for each segment of a batch-invariant call.
    If not, CTAs do not divide the keys of a tile, which changes no bit.
    """
    return segments <= most_segments(outputs)


def most_segments(outputs: int) -> int:
    """The segments for which there is memory, with ``outputs`` numbers for each of them."""
    return _MOST_SEGMENT_BYTES // (4 * outputs)


def _consumer_groups_time(tiles: int, keys: int, multiprocessors: int) -> float:
    """The time of CTAs whose consumer groups share 64 rows, in units of a key in one CTA."""
    return -(-tiles // multiprocessors) * keys


def _split_time(tiles: int, keys: int, multiprocessors: int) -> float:
    """The time of CTAs that split the keys, and of the combine kernel."""
    return _MMA_SYNC_COST * keys * tiles / multiprocessors + _COMBINATION


def q_splits(
    mask: MaskKind, sizes: Sizes, multiprocessors: int, deterministic: bool = False
) -> int:
    """How many CTAs of a backward may share a KV block.

    They divide query heads as far as the number and the group have common divisors, and Q blocks.
    In packed sequences they divide heads alone, because a Q block may belong to any sequence. So
    they do if dq is ``deterministic``, because each head has a sequence of additions of its own.
    The launcher takes fewer for Q blocks on a smaller device (ffi/src/splits.cc).

    >>> q_splits("none", Sizes(batch=1, queries=1024, keys=1024, heads=8, key_heads=8), 132)
    2
    >>> q_splits("none", Sizes(batch=2, queries=1024, keys=1024, heads=8, key_heads=8), 132)
    1
    >>> q_splits("causal", Sizes(batch=8, queries=4096, keys=4096, heads=32, key_heads=4), 132)
    4
    """
    if not sizes.heads:
        return 1
    kv_blocks = sizes.padded_keys(_PLAIN_ROWS) // _PLAIN_ROWS
    heads = (
        _head_splits(sizes, kv_blocks / multiprocessors, deterministic) if mask == "causal" else 1
    )
    if sizes.packed or deterministic:
        return heads
    q_blocks = sizes.queries * sizes.group // _WARPGROUP_ROWS
    # A CTA processes q_blocks / splits of them, and the last CTA reads `splits` parts.
    quickest = math.isqrt(_PARTS_A_Q_BLOCK * q_blocks)
    idle = min(multiprocessors // max(1, kv_blocks), q_blocks // _LEAST_Q_BLOCKS)
    uneven = min(_CAUSAL_CTAS * multiprocessors // max(1, kv_blocks), q_blocks // _MANY_Q_BLOCKS)
    return max(1, min(max(idle, uneven if mask == "causal" else 0), quickest), heads)


def _head_splits(sizes: Sizes, kv_blocks_per_sm: float, deterministic: bool) -> int:
    """How many CTAs divide the query heads of a group under a causal mask: the times are in
    docs/tuning/sm90_backward.md. The partial sums need at most as much memory as the sums of dq. If
    dq is ``deterministic``, large head dims divide any number of KV blocks: CTAs of one head wait
    for each other, and more heads run at a time.
    """
    always = deterministic and sizes.head_dim > 64
    if sizes.group >= _LARGE_GROUP:
        most = 4 if always or kv_blocks_per_sm <= _KV_BLOCKS_FOR_FOUR else 2
    else:
        few = always or kv_blocks_per_sm <= (4 if sizes.head_dim > 64 else 1.5)
        most = 2 if sizes.group >= _LEAST_GROUP and few else 1
    queries = (sizes.query_tokens or 0) // max(1, sizes.batch) if sizes.packed else sizes.queries
    q_blocks = queries * sizes.group // _WARPGROUP_ROWS
    most = min(
        most,
        q_blocks // (_LEAST_DETERMINISTIC_Q_BLOCKS if deterministic else _LEAST_Q_BLOCKS_OF_HEADS),
    )
    return max([splits for splits in (2, 4) if splits <= most and not sizes.group % splits] or [1])


def most_key_splits(tiles: int, keys: int, tile: int) -> int:
    """How many parts the keys of a split forward may be split into, of ``tile`` keys at least."""
    return min(MOST_SPLIT_BLOCKS // max(1, tiles), -(-keys // tile))
