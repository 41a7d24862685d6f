// Tiles of [batch, sequence, head, dim] tensors between global and shared memory, moved by the
// tensor memory accelerator through tensor maps.
#pragma once

#include <memeff/arch/bulk_copy.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

// Starts the copy of a box of rows, from row `row` of the tensor on, to row `tile_row` of a tile;
// rows and columns beyond the tensor's become zero. One thread calls it; the bytes arrive at
// `barrier`.
template <class Tile>
CUTE_DEVICE void load_bulk_tile(TensorMap const& map, uint64_t& barrier, uint32_t tile,
                                int tile_row, int row, int head, int batch, CacheHint hint) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    load_box(map, barrier, tile + panel * Tile::kPanelBytes + tile_row * Tile::kRowBytes,
             panel * Tile::kPanelColumns, row, head, batch, hint);
  }
}

// Starts the copy of a box of rows of a tile, from `tile_row` on, to row `row` on. What lies beyond
// the tensor is not written. Every writer of the shared rows has passed fence_bulk_store() and a
// barrier before.
template <class Tile>
CUTE_DEVICE void store_bulk_tile(TensorMap const& map, uint32_t tile, int tile_row, int row,
                                 int head, int batch) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    store_box(map, tile + panel * Tile::kPanelBytes + tile_row * Tile::kRowBytes,
              panel * Tile::kPanelColumns, row, head, batch);
  }
  commit_bulk_stores();
}

// Zeros rows of a tile from `first` on. Rows beyond a length are in the tensor, may be NaN, and
// 0 * NaN is not 0. kThreads threads share the work; they pass fence_bulk_store() and a barrier
// before a product reads the tile.
template <class Tile, int kThreads>
CUTE_DEVICE void clear_rows(uint32_t tile, int first) {
  constexpr int kChunks = Tile::kColumns / Tile::kChunkColumns;
  for (int i = first * kChunks + int(threadIdx.x) % kThreads; i < Tile::kRows * kChunks;
       i += kThreads) {
    store_shared_vector(tile + Tile::byte_offset(i / kChunks, i % kChunks), 0, 0, 0, 0);
  }
}

}  // namespace memeff
