"""The common base of the backward kernels: gradients, their sums, and the stages around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import BIAS, DETERMINISTIC, EXACT_DELTA
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.bases.families import (
    COLUMN_STEP_BYTES,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    MmaKernel,
    WgmmaKernel,
    WgmmaTile,
    columns_of_warp,
    mma_tile,
    panel_columns,
    stage,
)
from jax_memeff.codegen.kernels.bases.grids import query_tile_grid
from jax_memeff.codegen.launch import EntryPoint, Grid, TensorMap, Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.sizes import Sizes, round_up
from jax_memeff.codegen.spec import SPEC_GRADIENTS, Kernel, KernelSpec
from jax_memeff.codegen.strategy import Strategy

Entries = tuple[EntryPoint, ...]
"""In launch order."""

PART_COLUMNS = 64
"""Columns of the operands that the dbias kernel copies at a time."""

_DELTA_ROWS = 128
"""Queries of a CTA of the delta kernel: two consumers hide each other's exponentials."""


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
            "kOrdersQueries": spec.orders_queries,
            "kSplitQ": spec.split_q,
            "kCountsKvBlocks": self.counts_kv_blocks(spec),
            "kStoresFirstDq": self.stores_first_dq(spec),
        }

    def counts_kv_blocks(self, spec: KernelSpec) -> bool:
        """Whether the main kernel counts finished KV blocks, so that the postprocess kernel may run
        beside its last CTAs (ffi/include/memeff/kernels/backward/dq_sums/finished.cuh).
        """
        return False

    def stores_first_dq(self, spec: KernelSpec) -> bool:
        """Whether the main kernel stores the first dQ of a Q block, so that its sums need no zeros
        (ffi/include/memeff/kernels/backward/dq_sums/first_store.cuh).
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
            yield Workspace("bias_gradient_sum", (self._bias_sums(spec, sizes),))

    def _bias_sums(self, spec: KernelSpec, sizes: Sizes) -> int:
        """The size of the sums of ffi/include/memeff/score/bias/gradient.cuh."""
        slices = sizes.bias_gradient[0] * sizes.bias_gradient[1]
        rows = 1
        if bias_gradient(spec) == "common":
            rows = round_up(sizes.queries, spec.tile.query)
        elif spec[DETERMINISTIC]:
            slices = sizes.batch * sizes.heads
            rows = self.bias_sum_rows(spec)
        return slices * rows * round_up(sizes.keys, spec.tile.key)


class MmaBackward(Backward, MmaKernel):
    """The common base of the mma.sync backward kernels."""

    def completed(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> KernelSpec:
        vectors = gpu.has_vector_reductions(problem.arch)
        tile = dataclasses.replace(mma_tile(spec), vector_reductions=vectors)
        return dataclasses.replace(super().completed(spec, problem, strategy), tile=tile)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        vectors = mma_tile(spec).vector_reductions
        return {**super().constants(spec), "kVectorReductions": vectors}

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        """One row for each row of warps."""
        return spec.tile.query // 16

    def delta(self, spec: KernelSpec) -> Entries:
        """The kernel that takes delta from the scores, if it is asked for: two buffers of one step
        of query and key, the statistics of the rows, and two sums of each row for each of the warps
        that share it.
        """
        if spec[EXACT_DELTA] is None:
            return ()
        query, key, warps = spec.tile.query, spec.tile.key, spec.threads // 32
        sharing = key // columns_of_warp(query, key, warps)
        shared_bytes = 2 * (query + key) * COLUMN_STEP_BYTES
        shared_bytes += query * (shared_memory.STATISTICS_BYTES + 8 * sharing)
        block_mask = spec.block_mask("queries")
        name = "FmhaBackwardDelta<Config>"
        return (stage(spec, "delta", name, spec.threads, shared_bytes, block_mask=block_mask),)


class WgmmaBackward(Backward, WgmmaKernel):
    """The common base of the wgmma backward kernels."""

    tiles: ClassVar[Mapping[int, Sequence[WgmmaTile]]]

    def has_tma_bias(self, spec: KernelSpec) -> bool:
        bias = spec[BIAS]
        return bias is not None and bias.bits == "16" and bias.access == "vectors"

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        return 1

    def widths(self, spec: KernelSpec) -> tuple[int, ...]:
        return (*super().widths(spec), spec.padded_head_dim, spec.padded_value_dim)

    def query_rows(self, spec: KernelSpec) -> int:
        """The rows of query and dO in one TMA box."""
        raise NotImplementedError

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        head, value = panel_columns(spec.padded_head_dim), panel_columns(spec.padded_value_dim)
        queries = self.query_rows(spec)
        bias = (TensorMap("bias", queries, panel_columns(spec.tile.key)),)
        return (
            TensorMap("query", queries, head),
            TensorMap("key", spec.tile.key, head),
            TensorMap("value", spec.tile.key, value),
            TensorMap("out_gradient", queries, value),
            TensorMap("query_gradient", WARPGROUP_ROWS, head),
            TensorMap("key_gradient", WARPGROUP_ROWS, head),
            TensorMap("value_gradient", WARPGROUP_ROWS, value),
            *(bias if spec.tma_bias else ()),
        )

    def dbias(self, spec: KernelSpec, class_name: str) -> EntryPoint:
        """The dbias kernel: squares of scores, from parts of the operands."""
        side = max(spec.tile.query, spec.tile.key)
        shared_bytes, _ = dbias_bytes_and_stages(spec)
        squares = f"bias_gradient.0*bias_gradient.1*T/{side}*S/{side}"
        grid = Grid(squares, most_per_sm=1)
        return stage(
            spec,
            "dbias",
            class_name,
            spec.threads,
            shared_bytes,
            grid=grid,
            takes_maps=True,
            block_mask=spec.block_mask("queries", side, side),
        )

    def delta(self, spec: KernelSpec) -> Entries:
        """The kernel that takes delta from the scores, if it is asked for: tiles of query and dO,
        and two buffers each of keys and of values.
        """
        if spec[EXACT_DELTA] is None:
            return ()
        columns = spec.padded_head_dim + spec.padded_value_dim
        shared_bytes = (_DELTA_ROWS + 2 * spec.tile.key) * columns * spec.element_bytes
        shared_bytes += (1 + 2 + 2) * shared_memory.PIPELINE_BYTES
        kernel = stage(
            spec,
            "delta",
            "FmhaBackwardSm90Delta<Config>",
            WARPGROUP_THREADS * (_DELTA_ROWS // WARPGROUP_ROWS + 1),
            shared_bytes,
            grid=query_tile_grid(spec, _DELTA_ROWS),
            takes_maps=True,
            block_mask=spec.block_mask("queries", _DELTA_ROWS),
        )
        return (kernel,)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        found = dict(super().constants(spec))
        if bias_gradient(spec) == "dbias_kernel":
            _, found["kDbiasStages"] = dbias_bytes_and_stages(spec)
        return found


def dbias_bytes_and_stages(spec: KernelSpec) -> tuple[int, int]:
    """The shared memory of the dbias kernel, for a square of the bias and a ring of pairs of
    operand parts, and how many pairs fit. More pairs than two Q blocks have do not help.
    """
    rows = max(spec.tile.query, spec.tile.key)
    bias = shared_memory.bias_bytes(spec, rows, rows)
    if spec.tma_bias:
        bias = rows * rows * spec.element_bytes + shared_memory.PIPELINE_BYTES
    pair = 2 * rows * PART_COLUMNS * spec.element_bytes + shared_memory.PIPELINE_BYTES
    q_block = (spec.padded_head_dim + spec.padded_value_dim) // PART_COLUMNS
    stages = min(2 * q_block, (gpu.SM90.shared_bytes(blocks=1) - bias) // pair)
    return bias + stages * pair, stages
