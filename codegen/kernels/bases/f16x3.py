"""3xFP16, the wgmma kernels for float32: three f16 products for each f32 product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from jax_memeff.codegen.features import BROADCAST_BATCH
from jax_memeff.codegen.kernels.bases.families import (
    WARPGROUP_ROWS,
    WgmmaKernel,
    WgmmaTile,
    rows_of_pairs,
)
from jax_memeff.codegen.launch import Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec, Row
from jax_memeff.codegen.strategy import Strategy

SPLIT_THREADS = 256
_FACTOR_BYTES = 4


class F16x3Kernel(WgmmaKernel):
    """A kernel that runs first writes every operand as hi and lo parts, with one factor per row
    (ffi/include/memeff/layout/f16x3_tiles.cuh).
    """

    takes_f32 = True
    tiles: ClassVar[Mapping[int, Sequence[WgmmaTile]]]

    def padded_rows(self) -> Iterator[Row]:
        yield from rows_of_pairs(self.tiles)

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if strategy.mma_sync:
            reasons.append(
                "for few queries, splitting all keys and values costs more than it saves"
            )
        if spec[BROADCAST_BATCH]:
            reasons.append("it splits its operands once for each batch index of the call")
        return reasons

    def element(self, spec: KernelSpec) -> str:
        return "memeff::F16x3"

    def part_bytes(self, spec: KernelSpec, rows: int, columns: int) -> int:
        """Hi and lo parts of a tile in shared memory, and the factors of its rows."""
        return rows * (columns * spec.element_bytes + _FACTOR_BYTES)

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """Hi and lo parts of each element, and one factor per row, in tiles of the size of a
        consumer's rows and of KV blocks; every length has at least one tile.
        """
        yield from super().workspaces(spec, sizes, multiprocessors)
        lengths = sizes.with_rows()
        queries = lengths.padded_queries(WARPGROUP_ROWS)
        keys = lengths.padded_keys(spec.tile.key)
        yield Workspace("query_hi_lo", (queries * (spec.padded_head_dim + 1),))
        yield Workspace("key_hi_lo", (keys * (spec.padded_head_dim + 1),))
        yield Workspace("value_hi_lo", (keys * (spec.padded_value_dim + 1),))
        if spec.direction == "backward":
            yield Workspace("out_gradient_hi_lo", (queries * (spec.padded_value_dim + 1),))
