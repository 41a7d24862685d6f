"""The wgmma backward for head dims above 256: one kernel owns the rows of dq, another those of dk
and dv, and in both the CTAs of a cluster divide the products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import SOFT_CAP
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import (
    MASK_MODIFIERS,
    PADDED_DIMS,
    key_tile_grid,
    query_tile_grid,
    stage,
)
from jax_memeff.codegen.kernels.sm90.base import WARPGROUP_ROWS, WgmmaBackward, WgmmaTile
from jax_memeff.codegen.launch import EntryPoint, Grid
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Strategy

_PANEL_COLUMNS = 64
_PANEL_BYTES = WARPGROUP_ROWS * _PANEL_COLUMNS * 2 + shared_memory.PIPELINE_BYTES
"""A panel in a ring, with its barriers."""


@dataclasses.dataclass(frozen=True)
class Tile(WgmmaTile):
    """A row of the table."""

    modifiers: tuple[str, ...] = ("soft cap", *MASK_MODIFIERS)
    column_ctas: int = 1
    """Groups of CTAs in a cluster, which divide the columns and add up their scores."""


@dataclasses.dataclass(frozen=True)
class _Role:
    """A CTA of a cluster: the columns of its operands, its own tiles of 64 rows, and the tiles of P
    or dS that arrive there.
    """

    columns: int
    own_tiles: int
    messages: int
    sum_bytes: int
    """The scores of other columns, which arrive there too, take this many bytes."""

    @property
    def fixed_bytes(self) -> int:
        """The bytes without the ring of panels."""
        columns = self.own_tiles * self.columns + self.messages * WARPGROUP_ROWS
        return WARPGROUP_ROWS * columns * 2 + self.sum_bytes


class _Cluster(NamedTuple):
    """The CTAs that compute S, and the one that computes dP."""

    scores: _Role
    out: _Role
    group_ctas: int
    groups: int
    has_statistics: bool

    @property
    def ctas(self) -> int:
        return self.group_ctas * self.groups


_TILE = Tile(
    2 * WARPGROUP_ROWS,
    WARPGROUP_ROWS,
    3,
    "a sum of 64 rows takes 80 to 128 registers a thread; S of fewer rows reads more shared memory",
)
_HALVES = dataclasses.replace(_TILE, column_ctas=2, reason="half of the columns are as at 512")
_LARGEST = (
    "the sum of dq or dk takes 144 registers a thread; with a soft cap and all masks 32 spill"
)

TILES: Mapping[tuple[int, int], Sequence[Tile]] = {
    **{(dim, dim): (_TILE,) for dim in (320, 384, 448, 512)},
    (576, 512): (
        dataclasses.replace(_TILE, reason=_LARGEST, modifiers=MASK_MODIFIERS),
        dataclasses.replace(_TILE, reason=_LARGEST, modifiers=("soft cap", "segments")),
    ),
    **{(dim, dim): (_HALVES,) for dim in (768, 1024)},
}
"""A tile owns ``query`` queries in one kernel and ``key`` keys in the other. A ring has panels of
at most ``stages`` blocks; more do not help.
"""


class FmhaBwdLargeDimSm90(WgmmaBackward):
    """The wgmma backward for large head dims and 16-bit elements."""

    stem = "sm90/large_dim_backward"
    class_name = "FmhaBackwardLargeDimSm90"
    """Each of its entry points appends its own name."""
    owns_outputs = True
    own_problems = tuple((pair, {}) for pair in ((320, 320), (512, 512), (576, 512), (1024, 1024)))
    tiles = TILES

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if max(problem.head_dim, problem.value_dim) <= PADDED_DIMS[-1]:
            reasons.append(f"it is for head dims above {PADDED_DIMS[-1]}")
        return reasons

    def query_rows(self, spec: KernelSpec) -> int:
        return WARPGROUP_ROWS

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        """Sums are products of a panel's columns, or of half of them."""
        return (_PANEL_COLUMNS, _PANEL_COLUMNS // 2)

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        return False

    def cluster(self, spec: KernelSpec, owner: str) -> _Cluster:
        """The clusters of the kernel that owns queries, or of the one that owns keys."""
        groups = _tile(spec).column_ctas
        head, value = spec.padded_head_dim // groups, spec.padded_value_dim // groups
        sums = shared_memory.column_sum_bytes(groups, WARPGROUP_ROWS, WARPGROUP_ROWS)
        scores = _Role(head, 1, 1, sums)
        if owner == "queries":
            return _Cluster(scores, _Role(value, 2, 2, sums), 3, groups, has_statistics=False)
        probabilities = 2 if spec[SOFT_CAP] else 1
        out = _Role(value, 1, probabilities, sums)
        return _Cluster(scores, out, 2, groups, has_statistics=True)

    def stages(self, spec: KernelSpec, owner: str) -> tuple[int, int]:
        """The panels in the rings of the CTAs that compute S, and of those that compute dP. In the
        kernel that owns keys, both have the same number.
        """
        cluster = self.cluster(spec, owner)
        most = _tile(spec).stages
        available = gpu.SM90.shared_bytes(blocks=1) - _control_bytes(cluster, most)

        def fitting(role: _Role) -> int:
            panels = (available - role.fixed_bytes) // _PANEL_BYTES
            return min(panels, most * role.columns // _PANEL_COLUMNS)

        scores, out = fitting(cluster.scores), fitting(cluster.out)
        return (scores, out) if owner == "queries" else (min(scores, out), min(scores, out))

    def cluster_bytes(self, spec: KernelSpec, owner: str) -> int:
        """Own tiles, messages and the ring of the larger role; the statistics of the rows in a
        ring; and barriers: two for each panel, one for the own rows, two for each link, and those
        of a sum of scores.
        """
        cluster = self.cluster(spec, owner)
        stages = self.stages(spec, owner)
        roles = (cluster.scores, cluster.out)
        tiles = max(
            role.fixed_bytes + count * (_PANEL_BYTES - shared_memory.PIPELINE_BYTES)
            for role, count in zip(roles, stages, strict=True)
        )
        control = _control_bytes(cluster, _tile(spec).stages)
        return tiles + control + max(stages) * shared_memory.PIPELINE_BYTES

    def shared_bytes(self, spec: KernelSpec) -> int:
        return max(self.cluster_bytes(spec, owner) for owner in ("queries", "keys"))

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        def entry(suffix: str, owner: str, grid: Grid) -> EntryPoint:
            ctas = self.cluster(spec, owner).ctas
            entry = stage(
                spec,
                suffix,
                f"{self.class_name}{suffix.capitalize()}<Config>",
                spec.threads,
                self.cluster_bytes(spec, owner),
                grid.times(ctas),
                takes_maps=True,
            )
            return entry._replace(cluster=ctas)

        preprocess = f"{self.class_name}Preprocess<Config>"
        entries = [stage(spec, "preprocess", preprocess, spec.computing_threads)]
        if "query" in spec.gradients:
            entries.append(entry("dq", "queries", query_tile_grid(spec)))
        if {"key", "value"} & set(spec.gradients):
            entries.append(entry("dkdv", "keys", key_tile_grid(spec)))
        return tuple(entries)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        query, query_out = self.stages(spec, "queries")
        key, _ = self.stages(spec, "keys")
        return {
            **super().constants(spec),
            "kQueryStages": query,
            "kQueryOutStages": query_out,
            "kKeyStages": key,
            "kColumnCtas": _tile(spec).column_ctas,
        }


def _control_bytes(cluster: _Cluster, blocks: int) -> int:
    """Everything besides tiles and the barriers of the ring, with statistics of some blocks."""
    statistics = blocks * WARPGROUP_ROWS * shared_memory.STATISTICS_BYTES
    barriers = 1 + 2 * (cluster.group_ctas - 1)
    barriers += shared_memory.COLUMN_SUM_BARRIERS * (cluster.groups > 1)
    return statistics * cluster.has_statistics + barriers * shared_memory.BARRIER_BYTES


def _tile(spec: KernelSpec) -> Tile:
    assert isinstance(spec.tile, Tile)
    return spec.tile
