"""The wgmma backward for head dims from 129 to 256: one kernel owns the rows of dq, another those
of dk and dv, because the accumulators of all three exceed the registers of a CTA.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import (
    MASK_MODIFIERS,
    PROBABILITY_MODIFIERS,
    bias_tile_grid,
    key_tile_grid,
    modifiers,
    stage,
)
from jax_memeff.codegen.kernels.sm90 import backward
from jax_memeff.codegen.kernels.sm90.base import (
    PART_COLUMNS,
    WARPGROUP_ROWS,
    WgmmaBackward,
    WgmmaTile,
    wgmma_tile,
)
from jax_memeff.codegen.launch import EntryPoint
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class KeyBuffers:
    """The buffers of the kernel that owns keys; dS has two."""

    q_block: int
    """The number of buffers of queries, and likewise of dO."""
    probability: int


KEY_BUFFERS = (KeyBuffers(3, 2), KeyBuffers(3, 1), KeyBuffers(2, 2), KeyBuffers(2, 1))
"""The first that fits is taken. With two buffers, the dK and dV products read one of them until the
next Q block begins, which then waits for its queries: at head dims (192, 128), a third buffer saves
11 % of the kernel's time.
"""

_TILE = WgmmaTile(
    128,
    64,
    2,
    "dq takes 128 registers a thread, as do dk and dv of 64 keys; 226 KB at head dim 256",
    modifiers=modifiers("bias"),
)
_BIAS = dataclasses.replace(
    _TILE,
    reason="lanes load the bias for dq; for dk and dv it has a buffer, at head dim 256 one of P's",
    modifiers=("user functions", *PROBABILITY_MODIFIERS, "bias"),
)

TILES: Mapping[int, Sequence[WgmmaTile]] = {
    160: (dataclasses.replace(_TILE, modifiers=()),),
    192: (_TILE, _BIAS),
    256: (
        dataclasses.replace(
            _TILE, modifiers=("user functions", *PROBABILITY_MODIFIERS, *MASK_MODIFIERS)
        ),
        dataclasses.replace(
            _TILE,
            reason="the derivative of a soft cap takes 32 registers; with random bits 24 spill",
            modifiers=("soft cap", "user functions", "segments"),
        ),
        _BIAS,
    ),
}
"""By the larger of the two padded head dims. A tile owns ``query`` queries in one kernel, which
takes ``key`` keys at a time, and ``key`` keys in the other."""

_ONE_KERNEL_DIMS = tuple(dim for dim in backward.TILES if dim % PART_COLUMNS == 0)
"""These leave out the dims that the dbias kernel cannot divide into parts."""

_EQUAL_DIMS = (160,)
"""Only calls whose two head dims are padded to the same width have kernels of these widths."""


_TILES = {
    (head, value): TILES[max(head, value)]
    for head, value in itertools.product((*_ONE_KERNEL_DIMS, *TILES), repeat=2)
    if max(head, value) in TILES and (head == value or {head, value}.isdisjoint(_EQUAL_DIMS))
}
"""Unequal dims up to 128 have no tile: the backward in one kernel pads them."""


class FmhaBwdTwoKernelSm90(WgmmaBackward):
    """The wgmma backward in two kernels."""

    stem = "sm90/two_kernel_backward"
    class_name = "FmhaBackwardTwoKernel"
    """Each of its entry points appends its own name."""
    owns_outputs = True
    tiles = _TILES

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        reasons = super().reasons(spec, problem, strategy)
        beside = {"full": "query", "columns": "key"}.get(bias_gradient(spec))
        if beside and beside not in spec.gradients:
            reasons.append(f"it computes the gradient of this bias only with that of the {beside}")
        if max(problem.head_dim, problem.value_dim) <= max(_ONE_KERNEL_DIMS):
            reasons.append(f"it is for head dims above {max(_ONE_KERNEL_DIMS)}")
        return reasons

    def query_rows(self, spec: KernelSpec) -> int:
        return WARPGROUP_ROWS

    def dq_bytes(self, spec: KernelSpec) -> int:
        """The bytes of tiles of query and dO, a ring of key and, one buffer shorter, of value."""
        tile = wgmma_tile(spec)
        query, key, stages = tile.query, tile.key, tile.stages
        head, value = spec.padded_head_dim, spec.padded_value_dim
        elements = query * (head + value) + key * (stages * head + (stages - 1) * value)
        buffers = 1 + stages + stages - 1
        return elements * spec.element_bytes + buffers * shared_memory.PIPELINE_BYTES

    def dkdv_bytes_and_buffers(self, spec: KernelSpec) -> tuple[int, KeyBuffers]:
        """The bytes of tiles of key and value, of rings of query and dO (equally many rows), of the
        statistics for both, of P and of dS, and of a tile of the bias; and the rings' buffers.
        """
        key, head, value = spec.tile.key, spec.padded_head_dim, spec.padded_value_dim
        biases = int(spec.tma_bias)

        def size(rings: KeyBuffers) -> int:
            elements = key * (1 + rings.q_block) * (head + value)
            elements += (rings.probability + 2 + biases) * key * key
            statistics = 2 * rings.q_block * key * shared_memory.STATISTICS_BYTES
            buffers = 2 + 2 * rings.q_block + rings.probability + 2 + biases
            control = buffers * shared_memory.PIPELINE_BYTES
            return elements * spec.element_bytes + statistics + control

        available = gpu.SM90.shared_bytes(blocks=1)
        rings = next(rings for rings in KEY_BUFFERS if size(rings) <= available)
        return size(rings), rings

    def shared_bytes(self, spec: KernelSpec) -> int:
        """The larger of the two kernels'."""
        key_bytes, _ = self.dkdv_bytes_and_buffers(spec)
        return max(self.dq_bytes(spec), key_bytes)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        def entry(suffix: str, name: str, shared_bytes: int, **rest) -> EntryPoint:
            class_name = f"{self.class_name}{name}<Config>"
            return stage(
                spec, suffix, class_name, spec.threads, shared_bytes, takes_maps=True, **rest
            )

        def around(suffix: str, name: str, **rest) -> EntryPoint:
            class_name = f"{self.class_name}{name}<Config>"
            return stage(spec, suffix, class_name, spec.computing_threads, **rest)

        gradient = bias_gradient(spec)
        entries = [around("preprocess", "Preprocess")]
        if "query" in spec.gradients:
            block_mask = spec.block_mask("queries")
            entries.append(entry("dq", "Dq", self.dq_bytes(spec), block_mask=block_mask))
        if {"key", "value"} & set(spec.gradients) or gradient == "columns":
            key_bytes, _ = self.dkdv_bytes_and_buffers(spec)
            block_mask = spec.block_mask("keys", WARPGROUP_ROWS)
            grid = key_tile_grid(spec)
            entries.append(entry("dkdv", "Dkdv", key_bytes, grid=grid, block_mask=block_mask))
        if gradient in ("common", "columns"):
            entries.append(
                around("dbias_postprocess", "DbiasPostprocess", grid=bias_tile_grid(spec))
            )
        if gradient == "dbias_kernel":
            entries.append(self.dbias(spec, f"{self.class_name}Dbias<Config>"))
        return tuple(entries)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        _, buffers = self.dkdv_bytes_and_buffers(spec)
        return {
            **super().constants(spec),
            "kQBlockStages": buffers.q_block,
            "kProbabilityStages": buffers.probability,
        }
