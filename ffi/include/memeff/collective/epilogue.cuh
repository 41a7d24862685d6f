// Writes a tile of accumulators to global memory through shared memory, 16 bytes a thread.
#pragma once

#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/vector.cuh>

namespace memeff {

// Stores a shared tile. `rows` points to element (0, 0) of the tile in global memory; only rows
// below row_bound and columns below column_bound are written.
template <class Tile, int kThreads, int kAlignment = 16>
CUTE_DEVICE void store_rows(uint32_t tile, char* rows, long long row_bytes, int row_bound,
                            int column_bound) {
  constexpr int kRowChunks = Tile::kColumns / Tile::kChunkColumns;
  CUTE_UNROLL
  for (int i = threadIdx.x; i < Tile::kRows * kRowChunks; i += kThreads) {
    int const row = i / kRowChunks;
    int const chunk = i % kRowChunks;
    if (row < row_bound && chunk * Tile::kChunkColumns < column_bound) {
      store_vector<kAlignment>(rows + row * row_bytes + chunk * 16,
                               load_shared_vector(tile + Tile::byte_offset(row, chunk)),
                               column_bound * Tile::kElementBytes - chunk * 16);
    }
  }
}

// The same from accumulators. The shared tile must be free on entry for all threads of the CTA.
template <class Element, class Tile, class Grid, int kThreads, int kAlignment, class Accumulators>
CUTE_DEVICE void store_tile(uint32_t tile, Accumulators const& accumulators, char* rows,
                            long long row_bytes, int row_bound, int column_bound) {
  store_accumulators<Element, Tile, Grid>(tile, accumulators);
  __syncthreads();
  store_rows<Tile, kThreads, kAlignment>(tile, rows, row_bytes, row_bound, column_bound);
}

}  // namespace memeff
