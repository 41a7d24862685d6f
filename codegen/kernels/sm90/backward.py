"""The wgmma backward for head dims up to 128: a CTA owns 128 keys and adds to global sums of dq."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax_memeff.codegen import shared_memory
from jax_memeff.codegen.features import BIAS, FUNCTIONS, MASK, PACKED
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.features.mask import MaskKind
from jax_memeff.codegen.functions.sums import Sum
from jax_memeff.codegen.kernels.common.base import (
    BOOLEAN_MASK,
    EVERY_MODIFIER,
    MASK_MODIFIERS,
    PROBABILITY_MODIFIERS,
    dq_semaphore_words,
    key_tile_grid,
    key_tiles,
    query_sums,
    summing_entry_points,
    tile_columns,
)
from jax_memeff.codegen.kernels.sm90.base import WARPGROUP_ROWS, WgmmaBackward, WgmmaTile
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import SPEC_GRADIENTS, KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy

_KEYS = 128
"""The keys of every tile below."""
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

_TICKET_BYTES = 8
"""The ticket is an int; four more bytes align the barriers."""


@dataclasses.dataclass(frozen=True)
class Tile(WgmmaTile):
    """A row of the table of this backward."""

    tma_dq: bool = False
    """Whether dQ passes through shared memory to its sums, instead of directly from registers."""
    exponentiates_under_dp: bool = False
    """Whether all exponentials are forced to come before the wait for dP."""
    light_functions: bool = False
    """Whether the only functions that it serves are those of ``FUNCTIONS.is_light``."""
    key_stages: int = 1
    """Buffers of keys and values. With two, CTAs are persistent: the keys and values of their next
    KV block arrive while the current ones are read.
    """


_ahead = functools.partial(Tile, tma_dq=True, exponentiates_under_dp=True)
"""A tile with registers for statistics that are read ahead of the exponentials."""

TILES: Mapping[int, Sequence[Tile]] = {
    32: (
        Tile(
            128,
            128,
            2,
            "forward + backward at T 2048 on an H200: 309 TFLOP/s, with 64 queries 275; positions "
            "spill, and features besides a boolean mask are not measured",
            modifiers=BOOLEAN_MASK,
            masks=("none", "causal"),
            spill_bytes=8,
            tma_dq=True,
        ),
    ),
    48: (
        _ahead(
            128,
            128,
            2,
            "as at 64; positions spill",
            masks=("none", "causal"),
            spill_bytes=16,
        ),
    ),
    64: (
        _ahead(
            128,
            128,
            2,
            "forward + backward at T 8192 on an H200: 523 TFLOP/s, with statistics read late "
            "503, with 64 queries 470; at T 512 360, with one buffer of keys 345",
            modifiers=BOOLEAN_MASK,
            masks=("none", "causal"),
            spill_bytes=24,
            key_stages=2,
        ),
        Tile(
            128,
            128,
            2,
            "a window spills 20 bytes more with statistics read ahead, mostly in the producer",
            modifiers=BOOLEAN_MASK,
            spill_bytes=48,
            tma_dq=True,
            key_stages=2,
        ),
        Tile(
            128,
            128,
            2,
            "causal window of 1024 as a function: 2 % faster than with dQ from registers; most "
            "spills are outside of the main loop",
            modifiers=("user functions",),
            spill_bytes=48,
            tma_dq=True,
            light_functions=True,
        ),
        Tile(
            128,
            128,
            2,
            "a table along diagonals takes 1775 instructions for 128 queries, 1147 for 64; with dQ "
            "by TMA its sums do not fit",
            modifiers=("user functions",),
            spill_bytes=8,
            light_functions=True,
        ),
        Tile(
            64,
            128,
            2,
            "with 128 queries S and dP take 128 registers a thread: a soft cap spills 496 bytes, "
            "segments 48",
            modifiers=EVERY_MODIFIER,
        ),
    ),
    80: (_ahead(64, 128, 3, "as at head dim 96", modifiers=BOOLEAN_MASK),),
    96: (
        _ahead(
            64,
            128,
            3,
            "forward + backward at T 4096 on an H200: 509 TFLOP/s, causal 454; with two buffers "
            "512 and 445, padded to 128 columns 448 and 398",
            modifiers=BOOLEAN_MASK,
        ),
    ),
    128: (
        _ahead(
            80,
            128,
            2,
            "forward + backward at T 8192 on an H200: 606 TFLOP/s; 80 queries read keys and values "
            "a fifth less often than 64",
            masks=("none",),
        ),
        _ahead(64, 128, 2, "80 queries skip fewer elements: causal, 540 TFLOP/s instead of 532"),
        _ahead(
            64,
            128,
            2,
            "80 queries leave no shared memory for the sums of a table; the warps that read a "
            "table and add up its sums spill 48 bytes",
            modifiers=("user functions",),
            spill_bytes=48,
            light_functions=True,
        ),
        Tile(
            64,
            128,
            2,
            "dk and dv take 128 registers a thread, S and dP 64; a soft cap spills one more",
            modifiers=("soft cap", "bias", "user functions", *PROBABILITY_MODIFIERS),
            spill_bytes=4,
        ),
        Tile(
            64,
            128,
            2,
            "with random bits, too, a soft cap spills 72",
            modifiers=("soft cap", "user functions", "segments"),
        ),
        *(
            Tile(64, 128, 2, "as 64", modifiers=("user functions", *PROBABILITY_MODIFIERS, *others))
            for others in (("bias", "segments"), MASK_MODIFIERS)
        ),
    ),
}
"""By the padded head dim of query, key and value, which must be the same."""


_EQUAL_DIMS = {(dim, dim): tiles for dim, tiles in TILES.items()}


class FmhaBwdSm90(WgmmaBackward):
    """The wgmma backward in one kernel."""

    stem = "sm90/backward"
    sums_function_gradients = True
    class_name = "FmhaBackwardSm90"
    tiles = _EQUAL_DIMS

    def completed(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> KernelSpec:
        return dataclasses.replace(spec, split_q=self._splits_q(spec, strategy))

    def _splits_q(self, spec: KernelSpec, strategy: Strategy) -> bool:
        """CTAs that own a bias gradient cannot use split-Q. Those that add to dq in a fixed order
        may divide query heads, which they do under causal masks, but not Q blocks.
        """
        owns_bias = bias_gradient(spec) not in ("none", "dbias_kernel")
        deterministic = spec.deterministic_dq and spec[MASK] != "causal"
        owned = bool({"key", "value"} & set(spec.gradients))
        free = not (spec.has_block_mask or owns_bias or deterministic)
        return strategy.split_q and owned and free

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if spec.split_q and not self._splits_q(spec, strategy):
            reasons.append(
                "several of its CTAs share a KV block (split-Q), which this call does not need or "
                "does not allow"
            )
        elif not spec.split_q and self._splits_q(spec, strategy):
            reasons.append(
                "each of its CTAs owns a KV block, and without split-Q there are too few KV blocks "
                "to fill the GPU, or too many query heads for each"
            )
        if _tile(spec).light_functions and not FUNCTIONS.is_light(spec):
            reasons.append(
                "its tile has registers only for sums along diagonals, and for mask functions "
                "without arrays"
            )
        return reasons

    def _is_persistent(self, spec: KernelSpec) -> bool:
        """Persistent CTAs get equally many KV blocks, so all must need the same work. CTAs that
        order additions, or share a KV block, take one. Calls for some gradients were not measured.
        """
        free = spec.gradients == SPEC_GRADIENTS and not (spec.deterministic_dq or spec.split_q)
        return _tile(spec).key_stages > 1 and _needs_equal_work(spec) and free

    def counts_kv_blocks(self, spec: KernelSpec) -> bool:
        """Under a causal mask the last CTAs have little work and end together, and a postprocess
        kernel beside them costs time: 581 µs instead of 570 at head dim 64, T 512 on an H200.
        """
        free = not (spec.deterministic_dq or spec.split_q)
        return _sums_by_tma(spec) and _needs_equal_work(spec) and free

    def stores_first_dq(self, spec: KernelSpec) -> bool:
        """The thread that adds by TMA can wait for another CTA. Consumers would lose time."""
        return _sums_by_tma(spec)

    def staggers_q_blocks(self, spec: KernelSpec) -> bool:
        """CTAs that are at the same Q block wait for the store of its first dQ and its publication.
        Masks stagger CTAs anyway. Calls with functions were not measured.
        """
        free = self.counts_kv_blocks(spec)
        return free and spec[MASK] == "none" and spec[FUNCTIONS] is None

    def _key_stages(self, spec: KernelSpec) -> int:
        return _tile(spec).key_stages if self._is_persistent(spec) else 1

    def consumers(self, spec: KernelSpec) -> int:
        """Each consumer owns 64 keys."""
        return spec.tile.key // WARPGROUP_ROWS

    def query_rows(self, spec: KernelSpec) -> int:
        return spec.tile.query

    def adds_linear_scores(self, spec: KernelSpec) -> bool:
        return FUNCTIONS.is_linear(spec) and spec[BIAS] is None

    def adds_score_function(self, spec: KernelSpec) -> bool:
        functions = spec[FUNCTIONS]
        has_gradients = functions is not None and bool(functions.gradients)
        return self.adds_linear_scores(spec) and not has_gradients

    def shares_diagonals(self, spec: KernelSpec) -> bool:
        """Whether the producer reads what a score function reads along diagonals. With 128 queries
        the main loop would then spill 136 bytes.
        """
        reads = FUNCTIONS.diagonal_reads(spec)
        fits = spec.tile.query < 128 and not self._is_persistent(spec)
        return fits and 0 < reads <= shared_memory.MOST_DIAGONAL_READS

    def producer_adds_strips(self, spec: KernelSpec) -> bool:
        """Whether a warp of the producer adds up the sums of all consumers, which must all be along
        diagonals. With 128 queries the main loop would then spill 120 bytes, and with fixed-point
        sums the producer 72. If dq is summed in a deterministic order, no warp may be free.
        """
        functions = spec[FUNCTIONS]
        fits = spec.tile.query == WARPGROUP_ROWS
        if functions is None or functions.fixed_point or spec.deterministic_dq or not fits:
            return False
        return Sum.DIAGONAL in functions.read_sums and Sum.QUERY not in functions.read_sums

    def gradient_words(self, spec: KernelSpec) -> list[str]:
        return ["splitq"] if spec.split_q else []

    def shared_bytes(self, spec: KernelSpec) -> int:
        """A ring of key and value; a ring of query, its rows' statistics, diagonals, dO and bias
        (or, outside of the ring, the bias of each warp's 16 keys); two dS; and the dQ of a Q block
        in f32 if TMA writes it, with two barriers. A deterministic kernel also has a ticket and two
        barriers. If the producer adds up sums along diagonals, it has a ring of sums for each read,
        and two barriers for each consumer.
        """
        tile = _tile(spec)
        dims = tile_columns(spec.padded_head_dim) + tile_columns(spec.padded_value_dim)
        key_stages = self._key_stages(spec)
        elements = (key_stages * tile.key + tile.stages * tile.query) * dims
        elements += 2 * tile.query * tile.key
        statistics = tile.stages * tile.query * shared_memory.STATISTICS_BYTES
        buffers = 2 * tile.stages + key_stages
        bias = tile.key // 16 * shared_memory.bias_bytes(spec, tile.query, 16)
        if spec.tma_bias:
            bias = tile.stages * tile.query * tile.key * spec.element_bytes
        control = buffers * shared_memory.PIPELINE_BYTES
        tma_dq = _sums_by_tma(spec)
        control += tma_dq * shared_memory.PIPELINE_BYTES
        if spec.deterministic_dq:
            control += shared_memory.PIPELINE_BYTES + _TICKET_BYTES
        rings, warps = 0, spec.computing_threads // 32
        if self.producer_adds_strips(spec):
            control += self.consumers(spec) * shared_memory.PIPELINE_BYTES
            rings = shared_memory.diagonal_sum_bytes(spec, warps, tile.query)
        query_gradient = 4 * tile.query * dq_columns(spec) * tma_dq
        diagonals = tile.stages * shared_memory.diagonal_bytes(spec) * self.shares_diagonals(spec)
        sums = shared_memory.captured_sum_bytes(spec, Sum.QUERY, warps, tile.query)
        buffers_bytes = elements * spec.element_bytes + query_gradient + statistics + diagonals
        return buffers_bytes + bias + sums + rings + control

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = _tile(spec)
        return {
            **super().constants(spec),
            "kTmaDq": tile.tma_dq,
            "kPersistent": self._is_persistent(spec),
            "kKeyStages": self._key_stages(spec),
            "kStaggersQBlocks": self.staggers_q_blocks(spec),
            "kLinearScores": self.adds_linear_scores(spec),
            "kSharedDiagonals": self.shares_diagonals(spec),
            "kProducerAddsStrips": self.producer_adds_strips(spec),
            "kExponentiatesUnderDp": tile.exponentiates_under_dp,
        }

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        grid = key_tile_grid(spec)
        if self._is_persistent(spec):
            grid = grid._replace(most_per_sm=1)
        if spec.split_q:
            grid = grid._replace(splits="each")
        tiles = ", memeff::BackwardTilesSm90<Config>"
        return summing_entry_points(
            spec,
            (*self.delta(spec), self.main(spec, grid, spec.block_mask("keys"))),
            self.dbias(spec, f"FmhaBackwardDbias<Config{tiles}>"),
            tiles,
            overlaps=self.counts_kv_blocks(spec),
        )

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """With split-Q, each CTA has partial dk and dv (codegen/memeff/schedule/split_q.cuh),
        and each KV block has a counter. If the sums of dq are deterministic, the semaphores of all
        CTAs come before the counters (codegen/memeff/schedule/dq_semaphore.cuh).
        """
        blocks = key_tiles(spec, sizes)
        splits = 1
        words = 0
        yield from super().workspaces(spec, sizes, multiprocessors)
        yield from query_sums(spec, sizes, dq_columns(spec), self.stores_first_dq(spec))
        if spec.split_q:
            columns = {"key": spec.padded_head_dim, "value": spec.padded_value_dim}
            parts = sum(columns[name] for name in columns if name in spec.gradients)
            rows = sizes.padded_keys(spec.tile.key)
            splits = q_splits(spec[MASK], sizes, multiprocessors, spec.deterministic_dq)
            yield Workspace("key_gradient_sum", (splits, rows * parts))
            words += blocks
        if spec.deterministic_dq:
            words += dq_semaphore_words(blocks * splits)
        if self.counts_kv_blocks(spec):
            words += sizes.batch * sizes.key_heads
        if words:
            yield Workspace("semaphores", (words,), "int32")


def q_splits(
    mask: MaskKind, sizes: Sizes, multiprocessors: int, deterministic: bool = False
) -> int:
    """How many CTAs of a backward may share a KV block.

    They divide query heads as far as the number and the group have common divisors, and Q blocks.
    In packed sequences they divide heads alone, because a Q block may belong to any sequence. So
    they do if dq is ``deterministic``, because each head has a sequence of additions of its own.
    The launcher takes fewer for Q blocks on a smaller device (ffi/src/launch.cc).

    >>> q_splits("none", Sizes(batch=1, queries=1024, keys=1024, heads=8, key_heads=8), 132)
    2
    >>> q_splits("none", Sizes(batch=2, queries=1024, keys=1024, heads=8, key_heads=8), 132)
    1
    >>> q_splits("causal", Sizes(batch=8, queries=4096, keys=4096, heads=32, key_heads=4), 132)
    4
    """
    if not sizes.heads:
        return 1
    kv_blocks = sizes.padded_keys(_KEYS) // _KEYS
    heads = (
        _head_splits(sizes, kv_blocks / multiprocessors, deterministic) if mask == "causal" else 1
    )
    if sizes.packed or deterministic:
        return heads
    q_blocks = sizes.queries * sizes.group // WARPGROUP_ROWS
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
    q_blocks = queries * sizes.group // WARPGROUP_ROWS
    most = min(
        most,
        q_blocks // (_LEAST_DETERMINISTIC_Q_BLOCKS if deterministic else _LEAST_Q_BLOCKS_OF_HEADS),
    )
    return max([splits for splits in (2, 4) if splits <= most and not sizes.group % splits] or [1])


def dq_columns(spec: KernelSpec) -> int:
    """The columns of the sums of dq (codegen/kernels/sm90/backward_tiles.cuh), rounded up
    to whole panels if two consumers divide them.
    """
    divides_columns = spec.tile.query == WARPGROUP_ROWS
    return tile_columns(spec.padded_head_dim) if divides_columns else spec.padded_head_dim


def _needs_equal_work(spec: KernelSpec) -> bool:
    """Whether all KV blocks need the same work."""
    return spec[MASK] != "causal" and not spec[PACKED] and not spec.has_block_mask


def _sums_by_tma(spec: KernelSpec) -> bool:
    return _tile(spec).tma_dq and "query" in spec.gradients


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
