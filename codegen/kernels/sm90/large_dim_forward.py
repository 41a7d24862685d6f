"""The wgmma forward for head dims above 256: two consumers divide the columns of the output, and
for the largest head dims two CTAs divide the columns of all operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from jax_memeff.codegen import shared_memory
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
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec, Row
from jax_memeff.codegen.strategy import Strategy

_CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Tile(WgmmaTile):
    """A row of the table. ``stages`` counts buffers of 64 columns of the keys."""

    modifiers: tuple[str, ...] = ("soft cap", *MASK_MODIFIERS)
    value_stages: int = 1
    """Buffers of each consumer's values, which are half of the CTA's columns."""
    column_ctas: int = 1
    """The CTAs of a cluster, which divide the columns and add up their scores."""


TILES: Mapping[tuple[int, int], Tile] = {
    (320, 384): Tile(64, 64, 10, "two KV blocks in 176 of 179 KB", value_stages=2),
    (384, 384): Tile(64, 64, 9, "168 of 171 KB", value_stages=2),
    (448, 512): Tile(64, 64, 12, "160 of 163 KB"),
    (512, 512): Tile(64, 64, 11, "152 of 155 KB"),
    (576, 512): Tile(64, 64, 10, "144 of 147 KB"),
    (768, 768): Tile(
        64, 64, 7, "152 of 155 KB: a tile of scores takes 16 KB", value_stages=2, column_ctas=2
    ),
    (1024, 1024): Tile(64, 64, 9, "136 of 139 KB", column_ctas=2),
}
"""By the padded head dims of query and value. The queries, a tile of probabilities and one of
scores, if it is added up, leave the rest of shared memory for keys and values. TMA fills padding
with zeros."""


class FmhaFwdLargeDimSm90(WgmmaKernel):
    """The wgmma forward for large head dims and 16-bit elements."""

    stem = "sm90/large_dim_forward"
    direction = "forward"
    class_name = "FmhaForwardLargeDimSm90"
    own_problems = tuple((pair, {}) for pair in ((320, 320), (512, 512), (576, 512), (1024, 1024)))

    tiles: ClassVar[Mapping[tuple[int, int], Tile]] = TILES

    def padded_rows(self) -> Iterator[Row]:
        for (head, value), tile in self.tiles.items():
            yield Row(head, value, tile)

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        if max(problem.head_dim, problem.value_dim) <= PADDED_DIMS[-1]:
            return [f"it is for head dims above {PADDED_DIMS[-1]}"]
        return []

    def consumers(self, spec: KernelSpec) -> int:
        return _CONSUMERS

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        return False

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Queries, rings of panels of keys and of the values of each consumer, the probabilities of
        a KV block, and scores of other columns; for each row a softmax reference and two sums; and
        barriers: two for each buffer, one for the probabilities of each consumer, one for the
        queries, and those of a sum of scores.
        """
        tile = _tile(spec)
        columns = spec.padded_head_dim // tile.column_ctas + tile.key
        columns += tile.stages * panel_columns(spec.padded_head_dim)
        columns += tile.value_stages * spec.padded_value_dim // tile.column_ctas
        buffers = tile.stages + _CONSUMERS * tile.value_stages
        barriers = _CONSUMERS + 1 + shared_memory.COLUMN_SUM_BARRIERS * (tile.column_ctas > 1)
        return (
            tile.query * columns * spec.element_bytes
            + shared_memory.column_sum_bytes(tile.column_ctas, tile.query, tile.key)
            + tile.query * (shared_memory.STATISTICS_BYTES + _CONSUMERS * 4)
            + buffers * shared_memory.PIPELINE_BYTES
            + barriers * shared_memory.BARRIER_BYTES
        )

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
