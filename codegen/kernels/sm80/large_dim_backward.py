"""The backward for head dims above 256, and for smaller ones without a tile: one kernel owns the
rows of dq, another those of dk and dv. Both recompute the scores for each chunk of columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features import FUNCTIONS
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.kernels.common.base import bias_tile_grid, key_tile_grid, stage
from jax_memeff.codegen.kernels.sm80.backward import captured_sum_bytes
from jax_memeff.codegen.kernels.sm80.base import (
    LargeDimKernel,
    LargeDimTile,
    MmaBackward,
    column_step_buffers,
    large_dim_tile,
)
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, round_up

_TILES = (
    LargeDimTile(
        128,
        128,
        8,
        1,
        "130 KB of 163 KB: square, because S and dP read both operands",
        modifiers=(),
        chunk=256,
        spill_bytes=24,
    ),
    LargeDimTile(
        64,
        128,
        8,
        1,
        "97 KB; modifiers spill pointers between products, with 128 queries up to 900 bytes",
        chunk=256,
        spill_bytes=24,
    ),
    LargeDimTile(64, 64, 8, 1, "49 KB of 64 KB", chunk=128),
)
_TILES_F32 = (
    LargeDimTile(
        64,
        128,
        8,
        1,
        "113 KB; if a vmap broadcasts, pointers spill between products; with 128 queries modifiers "
        "spill up to 220 bytes",
        chunk=128,
        spill_bytes=12,
    ),
    LargeDimTile(64, 64, 8, 1, "65 KB of 99 KB", chunk=128),
)


class FmhaBwdLargeDimSm80(MmaBackward, LargeDimKernel):
    """The backward for large head dims."""

    stem = "sm80/large_dim_backward"
    sums_function_gradients = True
    class_name = "FmhaBackwardLargeDim"
    """Each of its entry points appends its own name."""
    owns_outputs = True

    def configure(
        self, problem: Problem, device: Gpu, padded: tuple[int, int]
    ) -> Sequence[LargeDimTile]:
        return _TILES_F32 if problem.dtype in F32_DTYPES else _TILES

    def strips_of_sums(self, arch: str) -> int:
        """0 on GPUs with 64 or 99 KB of shared memory, which the tiles fill."""
        return 0 if gpu.of(arch) in (gpu.SM75, gpu.SM86) else super().strips_of_sums(arch)

    def shared_bytes(self, spec: KernelSpec) -> int:
        """P and dS, the buffers, and two statistics per row."""
        query, key = spec.tile.query, spec.tile.key
        statistics = 2 * query * shared_memory.STATISTICS_BYTES
        scores = 2 * query * key * spec.element_bytes
        return scores + column_step_buffers(spec) + statistics + captured_sum_bytes(spec)

    def products(self, spec: KernelSpec) -> dict[str, tuple[int, int]]:
        query, key, chunk = spec.tile.query, spec.tile.key, large_dim_tile(spec).chunk
        return {"S": (query, key), "dq": (query, chunk), "dk": (key, chunk), "dv": (key, chunk)}

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        def entry(suffix: str, shared_bytes: int = 0, **rest) -> EntryPoint:
            name = "".join(map(str.capitalize, suffix.split("_")))
            class_name = f"{self.class_name}{name}<Config>"
            return stage(spec, suffix, class_name, spec.threads, shared_bytes, **rest)

        gradient = bias_gradient(spec)
        without_sums = spec.shared_bytes - captured_sum_bytes(spec)
        entries = [entry("preprocess"), *self.delta(spec)]
        if "query" in spec.gradients:
            entries.append(entry("dq", without_sums, block_mask=spec.block_mask("queries")))
        sums_bias = gradient in ("full", "common", "columns")
        functions = spec[FUNCTIONS]
        sums_functions = functions is not None and bool(functions.gradients)
        if {"key", "value"} & set(spec.gradients) or sums_bias or sums_functions:
            block_mask = spec.block_mask("keys")
            grid = key_tile_grid(spec)
            entries.append(entry("dkdv", spec.shared_bytes, grid=grid, block_mask=block_mask))
        if gradient in ("common", "columns"):
            entries.append(entry("dbias_postprocess", grid=bias_tile_grid(spec)))
        if gradient == "dbias_kernel":
            block_mask = spec.block_mask("queries")
            grid = bias_tile_grid(spec)
            entries.append(entry("dbias", without_sums, grid=grid, block_mask=block_mask))
        return tuple(entries)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        return {**super().constants(spec), "kQueryBuffers": 2}

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """Sums of dq across several KV blocks, and of dk and dv across several Q blocks of all
        heads of a group.
        """
        yield from super().workspaces(spec, sizes, multiprocessors)
        tile = large_dim_tile(spec)
        if "query" in spec.gradients and sizes.keys > tile.key:
            rows, columns = sizes.padded_queries(tile.query), round_up(sizes.head_dim, tile.chunk)
            yield Workspace("query_gradient_sum", (rows * columns,))
        if sizes.queries <= tile.query and sizes.group == 1:
            return
        rows = sizes.padded_keys(tile.key)
        for name, dim in (("key", sizes.head_dim), ("value", sizes.value_dim)):
            if name in spec.gradients:
                yield Workspace(f"{name}_gradient_sum", (rows * round_up(dim, tile.chunk),))
