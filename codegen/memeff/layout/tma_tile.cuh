// TMA copies of tiles of [batch, sequence, head, dim] tensors, through tensor maps.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/sequences.cuh>

namespace memeff {

// Starts the copy of a box that begins at row `row` and column `column` of the tensor, to row
// `tile_row` of a tile. Rows and columns beyond the tensor become zero. One thread calls it; the
// bytes arrive at `barrier`.
template <class Tile>
CUTE_DEVICE void load_tma_tile(TensorMap const& map, uint64_t& barrier, uint32_t tile, int tile_row,
                               int row, int head, int batch, CacheHint hint, int column = 0) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    load_box(map, barrier, tile + panel * Tile::kPanelBytes + tile_row * Tile::kRowBytes,
             column + panel * Tile::kPanelColumns, row, head, batch, hint);
  }
}

// Starts the copy of a box from row `tile_row` of a tile to row `row` and column `column` of the
// tensor. Elements beyond the tensor are not written. Hazard: every writer of the shared rows must
// have passed fence_tma_store() and a barrier.
template <class Tile>
CUTE_DEVICE void store_tma_tile(TensorMap const& map, uint32_t tile, int tile_row, int row,
                                int head, int batch, int column = 0) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    store_box(map, tile + panel * Tile::kPanelBytes + tile_row * Tile::kRowBytes,
              column + panel * Tile::kPanelColumns, row, head, batch);
  }
  commit_tma_stores();
}

// Stores a warpgroup's 64 rows of a tile, from `tile_row` on; the tile begins at row `row` and
// column `first_column` of the tensor, which has `columns` columns. Rows of the tile from `bound`
// on are not written. A tensor map bounds only the whole tensor, so if a packed sequence ends
// inside the 64 rows, the threads write its last rows themselves. All threads of the warpgroup call
// this after fence_tma_store() and a barrier.
template <class Config, class Tile>
CUTE_DEVICE void store_part(TensorMap const& map, TensorView const& tensor, uint32_t tile,
                            int tile_row, int row, int bound, int head, int batch, int columns,
                            int first_column = 0) {
  using Element = typename Config::Element;
  int const thread = int(threadIdx.x) % kWarpgroupSize;
  if (!Config::kPacked || tile_row + kWarpgroupRows <= bound) {
    if (thread == 0 && tile_row < bound) {
      store_tma_tile<Tile>(map, tile, tile_row, row + tile_row, head, batch, first_column);
    }
    return;
  }
  constexpr int kChunks = Tile::kColumns / Tile::kChunkColumns;
  char* const rows = row_pointer<Element>(tensor, batch, row, head);
  for (int i = tile_row * kChunks + thread; i < bound * kChunks; i += kWarpgroupSize) {
    int const column = first_column + i % kChunks * Tile::kChunkColumns;
    if (column >= columns) continue;
    *reinterpret_cast<uint4*>(rows + (i / kChunks) * tensor.row_stride * sizeof(Element) +
                              column * sizeof(Element)) =
        load_shared_vector(tile + Tile::byte_offset(i / kChunks, i % kChunks));
  }
}

// Whether TMA has read rows beyond `length`, which may be NaN, into a tile that ends at `end`.
// Without packed sequences it fills rows beyond the tensor's `rows` with zeros.
template <class Config>
CUTE_DEVICE bool reads_beyond(int length, int end, int rows) {
  return length < (Config::kPacked ? end : min(end, rows));
}

// Clears the rows of a tile from `first` to `end`. Rows beyond a length exist in the tensor and may
// be NaN, and 0 * NaN is not 0. kThreads threads divide the work. Hazard: they must pass
// fence_tma_store() and a barrier before a product reads the tile.
template <class Tile, int kThreads>
CUTE_DEVICE void clear_rows(uint32_t tile, int first, int end = Tile::kRows) {
  constexpr int kChunks = Tile::kColumns / Tile::kChunkColumns;
  for (int i = first * kChunks + int(threadIdx.x) % kThreads; i < end * kChunks; i += kThreads) {
    store_shared_vector(tile + Tile::byte_offset(i / kChunks, i % kChunks), 0, 0, 0, 0);
  }
}

// The number of rows at the beginning of a tile of `rows` keys, the first of them at `column`, that
// come before the windows of all rows of queries from `query` on.
template <class Config, class Mask>
CUTE_DEVICE int unneeded_rows(Mask const& mask, int query, int column, int rows) {
  if constexpr (!kMayBeFreed<Config>) return 0;
  return min(max(mask.row_begin(query) - column, 0), rows);
}

}  // namespace memeff
