"""Padded head dims, grids, and the stages of a backward, for all generations."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jax_memeff.codegen.features import BIAS, DETERMINISTIC, FEATURES, PACKED
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType, Modified
from jax_memeff.codegen.launch import EntryPoint, Grid, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import SPEC_GRADIENTS, Kernel, KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy, ceil_div, round_up

PADDED_DIMS = (32, 64, 96, 128, 192, 256)
"""Padded head dims that kernels are compiled for; a dim takes the smallest that holds it."""

LARGE_DIM = 65536
"""The padded head dim of the kernels for all larger ones, up to this one."""

UNALIGNED_ROWS = "unaligned rows"
"""Rows that are copied in pieces need registers in a kernel for large head dims, as features do."""

Masks = tuple[Literal["none", "causal", "window"], ...]
EVERY_MASK: Masks = ("none", "causal", "window")


def modifiers(*without: str) -> tuple[str, ...]:
    """Titles of all features that need their own registers in a main loop, ``without`` some.

    >>> others = set(modifiers("soft cap", "user functions", "bias"))
    >>> others == {*MASK_MODIFIERS, *PROBABILITY_MODIFIERS}
    True
    """
    return tuple(
        feature.title for feature in FEATURES if feature.modifies and feature.title not in without
    )


def _modifiers_of(modified: Modified) -> tuple[str, ...]:
    return tuple(feature.title for feature in FEATURES if feature.modifies == modified)


EVERY_MODIFIER = modifiers()
MASK_MODIFIERS = _modifiers_of("mask")
PROBABILITY_MODIFIERS = _modifiers_of("probabilities")
BOOLEAN_MASK = ("a boolean mask",)
"""Its bits take one or two registers a lane, for which most tiles have room."""

Entries = tuple[EntryPoint, ...]
"""In launch order."""


class Backward(Kernel):
    """A backward in one or more kernels, after a preprocess kernel that writes row statistics."""

    direction = "backward"

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        asked = tuple(name for name in SPEC_GRADIENTS if name in problem.needs_grad)
        reasons = super().reasons(spec, problem, strategy)
        if problem.direction == "backward" and spec.gradients != asked:
            reasons.append(
                f"it computes the gradients of {', '.join(spec.gradients)}, "
                f"not of {', '.join(asked)}"
            )
        return reasons

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        needs_grad = {
            f"k{name.capitalize()}Gradient": name in spec.gradients for name in SPEC_GRADIENTS
        }
        return {
            **super().constants(spec),
            **needs_grad,
            "kDeterministicDq": spec.deterministic_dq,
            "kSplitQ": spec.split_q,
            "kCountsKvBlocks": self.counts_kv_blocks(spec),
            "kStoresFirstDq": self.stores_first_dq(spec),
        }

    def counts_kv_blocks(self, spec: KernelSpec) -> bool:
        """Whether the main kernel counts finished KV blocks, so that the postprocess kernel may run
        beside its last CTAs (codegen/kernels/common/dq_sums.cuh).
        """
        return False

    def stores_first_dq(self, spec: KernelSpec) -> bool:
        """Whether the main kernel stores the first dQ of a Q block, so that its sums need no zeros
        (codegen/kernels/common/dq_sums.cuh).
        """
        return False

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        """The rows of sums that each KV block of a (batch, head) slice has for the gradient of a
        bias that is broadcast over rows, if the sums are deterministic.
        """
        raise NotImplementedError

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield Workspace("row_statistics", (2 * sizes.padded_queries(spec.tile.query),))
        bias = spec[BIAS]
        if bias is not None and bias.gradient in ("common", "columns"):
            yield Workspace("bias_gradient_sum", (self._bias_sums(spec, sizes),), zeroed=True)

    def _bias_sums(self, spec: KernelSpec, sizes: Sizes) -> int:
        """The size of the sums of codegen/memeff/score/bias/gradient.cuh."""
        slices = sizes.bias_gradient[0] * sizes.bias_gradient[1]
        rows = 1
        if bias_gradient(spec) == "common":
            rows = round_up(sizes.queries, spec.tile.query)
        elif spec[DETERMINISTIC]:
            slices = sizes.batch * sizes.heads
            rows = self.bias_sum_rows(spec)
        return slices * rows * round_up(sizes.keys, spec.tile.key)


def pack_gqa(problem: Problem) -> bool:
    """Whether a tile of a split forward has rows of all query heads that share a key head."""
    return not any(feature.separates_heads(problem) for feature in FEATURES)


def has_token_grid(spec: KernelSpec) -> bool:
    """Whether grids cover only the tiles that the tokens of packed sequences fill. A kernel that
    writes every element of a bias gradient also processes tiles beyond the lengths.
    """
    return spec[PACKED] and bias_gradient(spec) in ("none", "dbias_kernel")


def query_tile_grid(spec: KernelSpec, rows: int | None = None) -> Grid:
    """A CTA for each tile of queries of a head, of ``rows`` rows or as large as the spec's."""
    tile, by_tokens = rows or spec.tile.query, has_token_grid(spec)
    return Grid(lambda sizes: query_tiles(sizes, tile, by_tokens))


def key_tile_grid(spec: KernelSpec) -> Grid:
    """A CTA for each KV block of a key head."""
    return Grid(functools.partial(key_tiles, spec))


def bias_tile_grid(spec: KernelSpec) -> Grid:
    """A CTA for each tile of scores of the bias's own batch indices and heads."""
    return bias_grid(spec, spec.tile.query, spec.tile.key)


def bias_grid(spec: KernelSpec, rows: int, columns: int) -> Grid:
    """A CTA for each ``rows`` x ``columns`` scores of the bias's own batch indices and heads."""
    one_row = bias_gradient(spec) == "columns"

    def ctas(sizes: Sizes) -> int:
        tiles = ceil_div(1 if one_row else sizes.queries, rows) * ceil_div(sizes.keys, columns)
        return math.prod(sizes.bias_gradient) * tiles

    return Grid(ctas)


def query_tiles(sizes: Sizes, tile: int, by_tokens: bool = False) -> int:
    """The tiles of the queries of all heads: with ``by_tokens`` those of all packed sequences
    (layout/query_tiles.cuh), else those of as many sequences of the longest length.
    """
    if by_tokens:
        return sizes.padded_queries(tile) // tile
    return sizes.batch * sizes.heads * ceil_div(sizes.queries, tile)


def gqa_row_tiles(sizes: Sizes, tile: int) -> int:
    """The tiles of query rows, if a tile holds rows of all query heads of a key head."""
    rows = sizes.queries * sizes.heads // max(sizes.key_heads, 1)
    return sizes.batch * sizes.key_heads * ceil_div(rows, tile)


def split_row_tiles(sizes: Sizes, tile: int, packs_gqa: bool) -> int:
    """The tiles of query rows of a split forward."""
    return (gqa_row_tiles if packs_gqa else query_tiles)(sizes, tile)


def key_tiles(spec: KernelSpec, sizes: Sizes) -> int:
    """The number of CTAs of :func:`key_tile_grid`."""
    if has_token_grid(spec):
        return sizes.padded_keys(spec.tile.key) // spec.tile.key
    return sizes.batch * sizes.key_heads * ceil_div(sizes.keys, spec.tile.key)


def dq_semaphore_words(ctas: int) -> int:
    """A ticket counter and the semaphore of each CTA, for deterministic sums of dq
    (codegen/memeff/schedule/dq_semaphore.cuh).
    """
    return 1 + ctas


def stage(
    spec: KernelSpec,
    suffix: str,
    class_name: str,
    threads: int,
    shared_bytes: int = 0,
    grid: Grid | None = None,
    **rest: Any,
) -> EntryPoint:
    """An entry point before, after or instead of the main one. By default its grid has a CTA for
    each tile of queries.
    """
    name = f"{spec.name}_{suffix}"
    grid = grid or query_tile_grid(spec)
    return EntryPoint(name, threads, shared_bytes, grid, cpp_class=class_name, **rest)


def summing_entry_points(
    spec: KernelSpec, mains: Entries, dbias: EntryPoint, tiles: str = "", overlaps: bool = False
) -> Entries:
    """The entry points of a backward whose CTAs add to dq, ``mains`` among them. Kernels that round
    the sums read them in the layout of the main kernel's threads, so they have the same number of
    threads; ``tiles`` is the class of that layout. ``overlaps`` is whether the sums are rounded
    beside the last CTAs.
    """
    threads = spec.computing_threads

    def around(suffix: str, name: str, shared_bytes: int = 0, **rest) -> EntryPoint:
        class_name = f"FmhaBackward{name}<Config{tiles}>"
        return stage(spec, suffix, class_name, threads, shared_bytes, **rest)

    entries = [around("preprocess", "Preprocess"), *mains]
    if "query" in spec.gradients:
        query_tile = spec.tile.query * tile_columns(spec.padded_head_dim) * spec.element_bytes
        entries.append(around("postprocess", "Postprocess", query_tile, overlaps=overlaps))
    if bias_gradient(spec) in ("common", "columns"):
        entries.append(around("dbias_postprocess", "DbiasPostprocess", grid=bias_tile_grid(spec)))
    if bias_gradient(spec) == "dbias_kernel":
        entries.append(dbias)
    return tuple(entries)


def query_sums(
    spec: KernelSpec, sizes: Sizes, columns: int, has_states: bool = False
) -> Iterator[Workspace]:
    """The f32 sums of dq with ``columns`` columns, and the state of each Q block."""
    if "query" in spec.gradients:
        rows = sizes.padded_queries(spec.tile.query)
        yield Workspace("query_gradient_sum", (rows * columns,))
        if has_states:
            yield Workspace("query_gradient_states", (rows // spec.tile.query,), "int32")


def panel_columns(dim: int) -> int:
    """The columns of the panels of a tile in shared memory with ``dim`` columns."""
    return 64 if dim % 64 == 0 else 32


def tile_columns(dim: int) -> int:
    """The columns that a tile with ``dim`` columns takes in shared memory: those of whole panels.

    >>> tile_columns(80), tile_columns(128)
    (96, 128)
    """
    panel = panel_columns(dim)
    return -(-dim // panel) * panel
