"""The wgmma forward for head dims above 256: two consumers divide the columns of the output, and
for the largest head dims two CTAs divide the columns of all operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import (
    MASK_MODIFIERS,
    PADDED_DIMS,
    panel_columns,
    query_tile_grid,
)
from jax_memeff.codegen.kernels.sm90.base import WARPGROUP_ROWS, WgmmaKernel, WgmmaTile
from jax_memeff.codegen.launch import EntryPoint, TensorMap, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy, ceil_div

_CONSUMERS = 2
_ELEMENT_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Tile(WgmmaTile):
    """A row of the table. ``stages`` counts buffers of 64 columns of the keys."""

    modifiers: tuple[str, ...] = ("soft cap", *MASK_MODIFIERS)
    value_stages: int = 1
    """Buffers of each consumer's values, which are half of the CTA's columns."""
    column_ctas: int = 1
    """The CTAs of a cluster, which divide the columns and add up their scores."""


DIMS = ((320, 384), (384, 384), (448, 512), (512, 512), (576, 512), (768, 768), (1024, 1024))
"""The padded head dims of query and value. TMA fills padding with zeros."""

_ROWS = _KEYS = WARPGROUP_ROWS
_MOST_COLUMNS = 576
"""The most columns of a CTA. The outputs of 512 take 128 registers a thread of each consumer."""


def _configured(padded: tuple[int, int]) -> Tile:
    """Two KV blocks of values if the rest of shared memory holds at least one of keys, and as many
    panels of keys as fit.
    """
    ctas = ceil_div(max(padded), _MOST_COLUMNS)
    one_kv_block = padded[0] // panel_columns(padded[0]) // ctas
    tile = Tile(_ROWS, _KEYS, 0, "as many buffers of keys as fit", column_ctas=ctas)
    for value_stages in (2, 1):
        tile = dataclasses.replace(tile, value_stages=value_stages)
        rest = gpu.SM90.shared_bytes(blocks=1) - _shared_bytes(padded, tile)
        panels = rest // _panel_bytes(padded)
        if panels >= one_kv_block:
            return dataclasses.replace(tile, stages=panels)
    raise ValueError(f"expected head dims with room for a KV block, got {padded}")


def _panel_bytes(padded: tuple[int, int]) -> int:
    """A buffer of keys, and its barriers."""
    return _KEYS * panel_columns(padded[0]) * _ELEMENT_BYTES + shared_memory.PIPELINE_BYTES


def _shared_bytes(padded: tuple[int, int], tile: Tile) -> int:
    """Queries, rings of panels of keys and of the values of each consumer, the probabilities of a
    KV block, and scores of other columns; for each row a softmax reference and two sums; and
    barriers: two for each buffer, one for the probabilities of each consumer, one for the queries,
    and those of a sum of scores.
    """
    head, value = padded
    columns = head // tile.column_ctas + tile.key + tile.value_stages * value // tile.column_ctas
    barriers = _CONSUMERS + 1 + shared_memory.COLUMN_SUM_BARRIERS * (tile.column_ctas > 1)
    return (
        tile.query * columns * _ELEMENT_BYTES
        + tile.stages * _panel_bytes(padded)
        + shared_memory.column_sum_bytes(tile.column_ctas, tile.query, tile.key)
        + tile.query * (shared_memory.STATISTICS_BYTES + _CONSUMERS * 4)
        + _CONSUMERS * tile.value_stages * shared_memory.PIPELINE_BYTES
        + barriers * shared_memory.BARRIER_BYTES
    )


_TILES = {dims: (_configured(dims),) for dims in DIMS}


class FmhaFwdLargeDimSm90(WgmmaKernel):
    """The wgmma forward for large head dims and 16-bit elements."""

    stem = "sm90/large_dim_forward"
    direction = "forward"
    class_name = "FmhaForwardLargeDimSm90"
    own_problems = tuple((pair, {}) for pair in ((320, 320), (512, 512), (576, 512), (1024, 1024)))
    tiles = _TILES

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        if max(problem.head_dim, problem.value_dim) <= PADDED_DIMS[-1]:
            return [f"it is for head dims above {PADDED_DIMS[-1]}"]
        return []

    def consumers(self, spec: KernelSpec) -> int:
        return _CONSUMERS

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        return False

    def shared_bytes(self, spec: KernelSpec) -> int:
        return _shared_bytes((spec.padded_head_dim, spec.padded_value_dim), _tile(spec))

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        head, value = panel_columns(spec.padded_head_dim), panel_columns(spec.padded_value_dim)
        return (
            TensorMap("query", WARPGROUP_ROWS, head),
            TensorMap("key", spec.tile.key, head),
            TensorMap("value", spec.tile.key, value),
        )

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        ctas, grid = _tile(spec).column_ctas, query_tile_grid(spec)
        if ctas == 1:
            return (self.main(spec, grid),)
        return (self.main(spec, grid.times(ctas))._replace(cluster=ctas),)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        tile = _tile(spec)
        return {
            **super().constants(spec),
            "kValueStages": tile.value_stages,
            "kColumnCtas": tile.column_ctas,
        }

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        return iter(())


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
