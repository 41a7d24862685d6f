"""The wgmma backward of latent attention, for lists of keys: the values are the first columns of
the keys, and each query has its own keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax_memeff.codegen import shared_memory
from jax_memeff.codegen.features import DETERMINISTIC, AskedPages
from jax_memeff.codegen.kernels.common.base import Backward, gqa_row_tiles, pack_gqa, stage
from jax_memeff.codegen.kernels.sm90.base import WgmmaTile
from jax_memeff.codegen.kernels.sm90.latent import (
    CONSUMERS,
    HEAD_DIM,
    SEVERAL_HEADS,
    VALUE_DIM,
    LatentKernel,
)
from jax_memeff.codegen.launch import EntryPoint, Grid, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, Strategy, ceil_div

_TILE = WgmmaTile(
    64,
    64,
    1,
    "queries, dO and a buffer of keys take 208 KB, and each of two consumers holds 288 columns of "
    "dQ in 144 registers a thread",
    masks=("none",),
)

_TILES = {(HEAD_DIM, VALUE_DIM): (_TILE,)}

_PANEL_COLUMNS = 64
_PANEL_GROUPS = 3
_ROUNDED_COLUMNS, _ROUNDING_THREADS = 16, 256
"""The columns of a thread of the kernel that rounds the sums, and its threads."""


class FmhaBwdLatentSm90(Backward, LatentKernel):
    """The backward for values that are columns of the keys, with 16-bit elements and pages of one
    key.
    """

    stem = "sm90/latent_backward"
    class_name = "FmhaBackwardLatentSm90"
    owns_outputs = True
    """Of dq. Its sums of the gradient of the keys have no order."""
    tiles = _TILES
    own_problems = (
        ((HEAD_DIM, VALUE_DIM), {"packed": True, "pages": AskedPages(1, is_latent=True)}),
    )

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        if not pack_gqa(problem):
            reasons.append(SEVERAL_HEADS)
        if problem[DETERMINISTIC] and "key" in spec.gradients:
            reasons.append("CTAs add to the gradient of the keys in any order")
        return reasons

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        return (_PANEL_COLUMNS, _PANEL_COLUMNS // 2, spec.padded_value_dim // CONSUMERS)

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Queries, dO, keys, P and dS; for each row the statistics, for each key of two KV blocks
        its row of the pool; and barriers: one for each group of panels that arrives, and one for
        the release.
        """
        rows, keys = spec.tile.query, spec.tile.key
        columns = spec.padded_head_dim + spec.padded_value_dim + spec.padded_head_dim + 2 * keys
        barriers = _PANEL_GROUPS + 1
        return (
            rows * columns * spec.element_bytes
            + rows * shared_memory.STATISTICS_BYTES
            + 2 * keys * 4
            + barriers * shared_memory.BARRIER_BYTES
        )

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        main = self.main(spec, Grid(lambda sizes: gqa_row_tiles(sizes, spec.tile.query)))
        if "key" not in spec.gradients:
            return (main,)

        def rounding(sizes: Sizes) -> int:
            rows = (sizes.key_tokens or 0) * sizes.key_heads
            return ceil_div(rows * (spec.padded_head_dim // _ROUNDED_COLUMNS), _ROUNDING_THREADS)

        class_name = f"{self.class_name}Postprocess<Config>"
        grid = Grid(rounding)
        return main, stage(spec, "postprocess", class_name, _ROUNDING_THREADS, grid=grid)

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        if "key" in spec.gradients:
            rows = (sizes.key_tokens or 0) * sizes.key_heads
            yield Workspace("key_gradient_sum", (rows * spec.padded_head_dim,), zeroed=True)
