"""The wgmma backward for float32: 3xFP16, three f16 products for each f32 product. One kernel owns
the rows of dq, another those of dk and dv. A kernel that runs first writes every operand as hi and
lo parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_memeff.codegen import gpu, shared_memory
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import (
    Backward,
    key_tile_grid,
    modifiers,
    query_tiles,
    stage,
)
from jax_memeff.codegen.kernels.sm90.base import (
    SPLIT_THREADS,
    WARPGROUP_ROWS,
    F16x3Kernel,
    WgmmaKernel,
    WgmmaTile,
    by_pair,
    wgmma_tile,
)
from jax_memeff.codegen.launch import EntryPoint, Grid
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes, ceil_div

_PROBABILITY_BUFFERS = 2
"""The buffers of P that one consumer of the dkdv kernel fills and the other one reads."""

_MOST_Q_BLOCK_BUFFERS = 4

_MODIFIERS = modifiers("bias")
_BUILT_IN = modifiers("bias", "user functions")


@dataclasses.dataclass(frozen=True)
class Tile(WgmmaTile):
    """A row of the table of this backward."""

    @property
    def modifier_registers(self) -> int:
        """Registers that the dq kernel leaves for masks and modifiers. With none, a boolean mask
        spills 20 bytes at head dim 128; with 16, functions of scores and masks combined with
        modifiers of probabilities spill 44.
        """
        return (16 if self.modifiers else 0) + 16 * ("user functions" in self.modifiers)


TILES: Mapping[int, Sequence[Tile]] = {
    64: (
        Tile(128, 64, 4, "221 KB for dkdv, with four buffers of queries and dO"),
        Tile(128, 64, 4, "fewer queries and dO in registers", modifiers=_BUILT_IN),
        Tile(128, 64, 4, "still fewer queries and dO in registers", modifiers=_MODIFIERS),
    ),
    96: (
        Tile(128, 64, 3, "219 KB for dq"),
        Tile(128, 64, 3, "fewer queries and dO in registers", modifiers=_BUILT_IN),
        Tile(128, 64, 3, "still fewer queries and dO in registers", modifiers=_MODIFIERS),
    ),
    128: (
        Tile(
            128,
            64,
            2,
            "227 KB; two buffers of queries and dO, so the next Q block arrives under all products",
        ),
        Tile(128, 64, 2, "fewer queries and dO in registers", modifiers=_BUILT_IN),
        Tile(128, 64, 2, "still fewer queries and dO in registers", modifiers=_MODIFIERS),
    ),
}
"""By the larger of the two padded head dims. The dq kernel owns ``query`` queries and takes ``key``
keys at a time from ``stages`` buffers; the dkdv kernel owns ``key`` keys."""


class FmhaBwdF16x3Sm90(F16x3Kernel, Backward, WgmmaKernel):
    """The 3xFP16 backward."""

    stem = "sm90/f16x3_backward"
    class_name = "FmhaBackwardF16x3"
    """Each of its entry points appends its own name."""
    owns_outputs = True
    tiles = by_pair(TILES)

    def _tile_bytes(self, spec: KernelSpec, columns: int) -> int:
        return self.part_bytes(spec, WARPGROUP_ROWS, columns)

    def dq_bytes(self, spec: KernelSpec) -> int:
        """The bytes of tiles of query and dO, a ring of key and, one buffer shorter, of value."""
        tile = wgmma_tile(spec)
        head = self._tile_bytes(spec, spec.padded_head_dim)
        value = self._tile_bytes(spec, spec.padded_value_dim)
        own = tile.query // WARPGROUP_ROWS
        tiles = (own + tile.stages) * head + (own + tile.stages - 1) * value
        return tiles + 2 * tile.stages * shared_memory.PIPELINE_BYTES

    def dkdv_bytes_and_buffers(self, spec: KernelSpec) -> tuple[int, int]:
        """The bytes of tiles of key and value, and of rings of query and dO (equally many), their
        statistics, and P in f32; and the number of buffers of query and of dO.
        """
        key = spec.tile.key
        pair = self._tile_bytes(spec, spec.padded_head_dim)
        pair += self._tile_bytes(spec, spec.padded_value_dim)

        def size(buffers: int) -> int:
            statistics = key * shared_memory.STATISTICS_BYTES
            probabilities = _PROBABILITY_BUFFERS * key * key * 4
            barriers = 2 + 2 * buffers + _PROBABILITY_BUFFERS
            control = barriers * shared_memory.PIPELINE_BYTES
            return pair + buffers * (pair + statistics) + probabilities + control

        available = gpu.SM90.shared_bytes(blocks=1)
        counts = range(_MOST_Q_BLOCK_BUFFERS, 1, -1)
        buffers = next(count for count in counts if size(count) <= available)
        return size(buffers), buffers

    def shared_bytes(self, spec: KernelSpec) -> int:
        """The larger of the two kernels'."""
        key_bytes, _ = self.dkdv_bytes_and_buffers(spec)
        return max(self.dq_bytes(spec), key_bytes)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        def entry(
            suffix: str, name: str, threads: int, shared_bytes: int = 0, **rest
        ) -> EntryPoint:
            class_name = f"{self.class_name}{name}<Config>"
            return stage(spec, suffix, class_name, threads, shared_bytes, **rest)

        # A CTA splits this many rows of one array.
        rows = WARPGROUP_ROWS

        def parts(sizes: Sizes) -> int:
            lengths = sizes.with_rows()
            heads = lengths.key_heads * ceil_div(lengths.keys, rows)
            return 2 * (query_tiles(lengths, rows) + lengths.batch * heads)

        grid = Grid(parts)
        entries = [
            entry("split", "Split", SPLIT_THREADS, grid=grid),
            entry("preprocess", "Preprocess", spec.computing_threads),
        ]
        if "query" in spec.gradients:
            block_mask = spec.block_mask("queries")
            size = self.dq_bytes(spec)
            entries.append(entry("dq", "Dq", spec.threads, size, block_mask=block_mask))
        if {"key", "value"} & set(spec.gradients):
            block_mask = spec.block_mask("keys", WARPGROUP_ROWS)
            size, _ = self.dkdv_bytes_and_buffers(spec)
            grid = key_tile_grid(spec)
            entries.append(
                entry("dkdv", "Dkdv", spec.threads, size, grid=grid, block_mask=block_mask)
            )
        return tuple(entries)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        assert isinstance(spec.tile, Tile)
        _, buffers = self.dkdv_bytes_and_buffers(spec)
        return {
            **super().constants(spec),
            "kModifierRegisters": spec.tile.modifier_registers,
            "kQBlockStages": buffers,
            "kProbabilityStages": _PROBABILITY_BUFFERS,
        }

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        raise NotImplementedError
