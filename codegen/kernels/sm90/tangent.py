"""The wgmma kernel for tangents: forward mode, from the output and logsumexp of a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import EVERY_MODIFIER, modifiers, panel_columns
from jax_memeff.codegen.kernels.sm90.base import (
    WARPGROUP_ROWS,
    PersistentSm90,
    PersistentTile,
    by_pair,
    persistent_tile,
)
from jax_memeff.codegen.launch import TensorMap
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import SPEC_GRADIENTS, KernelSpec
from jax_memeff.codegen.strategy import Strategy

_64 = (
    PersistentTile(
        128,
        96,
        2,
        "S, dS and the sums take 128 registers a thread, their operands 48, and queries 16",
        modifiers=modifiers("bias"),
    ),
    PersistentTile(
        128,
        64,
        2,
        "a warp copies rows of the bias whose vectors divide its lanes",
        modifiers=EVERY_MODIFIER,
    ),
)

TILES: Mapping[int, Sequence[PersistentTile]] = {
    32: _64,
    64: _64,
    96: (
        PersistentTile(
            128, 64, 2, "S, dS and the sums take 112 registers a thread", modifiers=EVERY_MODIFIER
        ),
        PersistentTile(
            128,
            64,
            2,
            "a bias of 32 bits takes 36 KB above; with all else it spills 28 bytes",
            query_stages=1,
            modifiers=EVERY_MODIFIER,
            spill_bytes=32,
        ),
    ),
    128: (
        PersistentTile(
            128,
            64,
            2,
            "193 KB; S, dS and the sums take 128 registers a thread, their operands and queries 64",
            query_stages=1,
            modifiers=EVERY_MODIFIER,
        ),
        PersistentTile(
            128,
            32,
            2,
            "a bias of 32 bits takes 36 KB above",
            query_stages=1,
            modifiers=EVERY_MODIFIER,
        ),
    ),
    192: (
        PersistentTile(128, 32, 2, "193 KB: two buffers", query_stages=1, modifiers=EVERY_MODIFIER),
    ),
    256: (
        PersistentTile(
            128,
            32,
            1,
            "193 KB: keys arrive while the product with the values runs, and the other way round; "
            "12 bytes spill outside of the main loop, and up to 96 with a boolean mask or a bias",
            query_stages=1,
            modifiers=modifiers("a boolean mask", "bias"),
            spill_bytes=48,
        ),
    ),
}
"""By the larger of the two padded head dims. TMA fills padding with zeros."""


class FmhaTangentSm90(PersistentSm90):
    """The tangents of output and logsumexp for 16-bit elements."""

    stem = "sm90/tangent"
    direction = "tangent"
    class_name = "FmhaTangentSm90"
    owns_outputs = True
    tiles = by_pair(TILES)

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        others = [name for name in problem.needs_grad if name not in SPEC_GRADIENTS]
        if others:
            reasons.append(
                f"it takes no tangent of {' and '.join(others)}: they are computed in plain JAX"
            )
        return reasons

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Rings of query, key and value tiles with their tangents, and ``ring_bytes``."""
        tile = persistent_tile(spec)
        query, key, value = (name in spec.gradients for name in SPEC_GRADIENTS)
        rows = tile.query_stages * tile.query * (1 + query) + tile.stages * tile.key * (1 + key)
        columns = rows * spec.padded_head_dim
        # The values themselves are read only if the scores have a tangent.
        value_rows = tile.stages * tile.key * ((query or key) + value)
        columns += value_rows * spec.padded_value_dim
        return columns * spec.element_bytes + self.ring_bytes(spec)

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        head, value = panel_columns(spec.padded_head_dim), panel_columns(spec.padded_value_dim)
        boxes = (
            ("query", WARPGROUP_ROWS, head),
            ("key", spec.tile.key, head),
            ("value", spec.tile.key, value),
        )
        tangents = (TensorMap(f"{name}_tangent", *box) for name, *box in boxes)
        return (*(TensorMap(*box) for box in boxes), *tangents)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        given = {f"k{name.capitalize()}Tangent": name in spec.gradients for name in SPEC_GRADIENTS}
        return {**super().constants(spec), **given}
