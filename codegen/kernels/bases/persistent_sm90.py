"""The common base of the wgmma kernels with persistent CTAs and work tiles of query rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jax_memeff.codegen import shared_memory
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.bases.families import (
    WARPGROUP_ROWS,
    WgmmaKernel,
    WgmmaTile,
)
from jax_memeff.codegen.kernels.bases.grids import query_tile_grid
from jax_memeff.codegen.launch import EntryPoint, Workspace
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec

# ``TileCounter`` of ffi/include/memeff/params.h.
_TILE_COUNTER_WORDS = 4

_TILE_RING = 4
"""The slots of the ring of work tiles."""
_WORK_TILE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class PersistentTile(WgmmaTile):
    """A row of the table of a persistent kernel."""

    query_stages: int = 2
    """Buffers of queries. With two, the next work tile's queries arrive while the current ones are
    read.
    """


class PersistentSm90(WgmmaKernel):
    """A producer that hands out work tiles, and rings of queries, keys and values."""

    persistent = True

    def ring_bytes(self, spec: KernelSpec) -> int:
        """The bytes of barriers and work tiles, and of the bias of each warp's rows.

        Each buffer has two barriers; a buffer of queries has two for every 64 rows. Each slot of
        the ring of work tiles also has a work tile, and two more barriers, which signal when the
        next work tile may be taken.
        """
        tile = persistent_tile(spec)
        row_warpgroups = spec.tile.query // WARPGROUP_ROWS
        buffers = tile.query_stages * row_warpgroups + 2 * tile.stages + 2 * _TILE_RING
        control = buffers * shared_memory.PIPELINE_BYTES + _TILE_RING * _WORK_TILE_BYTES
        return control + spec.computing_threads // 32 * shared_memory.bias_bytes(spec, 16)

    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        grid = query_tile_grid(spec)._replace(most_per_sm=1)  # persistent blocks
        parts = spec.tile.query // WARPGROUP_ROWS
        return (self.main(spec, grid, spec.block_mask("queries", parts=parts)),)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        return {**super().constants(spec), "kQueryStages": persistent_tile(spec).query_stages}

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield Workspace("tile_counter", (_TILE_COUNTER_WORDS,), "int32")


def persistent_tile(spec: KernelSpec) -> PersistentTile:
    """The tile of a persistent kernel."""
    assert isinstance(spec.tile, PersistentTile)
    return spec.tile
