"""The forward for head dims above 256, and for smaller ones without a tile: it processes the
columns of the operands in steps, and those of the output in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_memeff.codegen.features import PAGES
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.common.base import query_tile_grid
from jax_memeff.codegen.kernels.sm80.base import (
    LargeDimKernel,
    LargeDimTile,
    column_step_buffers,
    large_dim_tile,
)
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy, round_up

# ``kLongSumColumns`` of ffi/include/memeff/params.h.
_LONG_SUM_COLUMNS = 8192

_TILES = (
    LargeDimTile(
        128,
        256,
        8,
        1,
        "162 KB: 256 keys halve the passes over the sums of out; a window spills 28 bytes",
        modifiers=(),
        chunk=256,
        spill_bytes=28,
    ),
    LargeDimTile(
        128,
        128,
        8,
        1,
        "with a soft cap 256 columns spill 68 bytes; on an H200 these take 0.98 of the time at "
        "head dim 1032, 1.10 at 2048",
        modifiers=("soft cap",),
        chunk=128,
    ),
    LargeDimTile(
        128,
        128,
        8,
        1,
        "98 KB; half the score accumulators, because modifiers need registers",
        chunk=256,
        spill_bytes=16,
    ),
    LargeDimTile(64, 64, 8, 1, "41 KB of 64 KB; 128 keys need 65 KB", chunk=128),
)
_TILES_F32 = (
    LargeDimTile(
        128,
        128,
        8,
        1,
        "130 KB; chunks of 256 columns spill 48 bytes, these 4 with row maxima",
        chunk=128,
        spill_bytes=4,
    ),
    LargeDimTile(128, 64, 8, 1, "82 KB of 99 KB", chunk=128),
)


class FmhaFwdLargeDimSm80(LargeDimKernel):
    """The forward for large head dims."""

    stem = "sm80/large_dim_forward"
    direction = "forward"
    class_name = "FmhaForwardLargeDimSm80"
    reads_pages = True

    def configure(
        self, problem: Problem, device: Gpu, padded: tuple[int, int]
    ) -> Sequence[LargeDimTile]:
        return _TILES_F32 if problem.dtype in F32_DTYPES else _TILES

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if spec[PAGES].size and not large_dim_tile(spec).modifiers:
            reasons.append("its tile has no registers left for a page table")
        return reasons

    def shared_bytes(self, spec: KernelSpec) -> int:
        """P, the buffers, and for each row two factors and a maximum per warp of the row."""
        query, key = spec.tile.query, spec.tile.key
        column_warps = (spec.threads // 32) // (query // 32)
        return (
            query * key * spec.element_bytes
            + column_step_buffers(spec)
            + (column_warps + 2) * query * 4
        )

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        query, key = spec.tile.query, spec.tile.key
        return {"S": (query, key), "out": (query, large_dim_tile(spec).chunk)}

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        return (self.main(spec, query_tile_grid(spec), spec.block_mask("queries")),)

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """Sums of the output across several KV blocks, and of the scores of a tile over more
        columns than one run takes.
        """
        tile = large_dim_tile(spec)
        rows = sizes.padded_queries(tile.query)
        if sizes.keys > tile.key:
            yield Workspace("out_sum", (rows * round_up(sizes.value_dim, tile.chunk),))
        if sizes.head_dim > _LONG_SUM_COLUMNS:
            yield Workspace("score_sum", (rows * tile.key,))
