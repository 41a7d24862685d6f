// Copies a [rows, columns] tile of a tensor into shared memory with cp.async, all threads of the
// CTA.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

template <class Tile, int kThreads>
struct TileLoader {
  static constexpr int kThreadRows = kThreads / Tile::kChunks;  // rows of one panel in one pass
  static_assert(kThreads % Tile::kChunks == 0);
  static constexpr int kPasses = ceil_div(Tile::kRows, kThreadRows);

  // Starts the copies of rows [0, row_bound) and columns [0, column_bound); everything else of the
  // tile becomes zero, whatever stands in memory there. `rows` points to element (0, 0) of the
  // tile, `thread` counts the kThreads that share the work.
  CUTE_DEVICE static void copy(uint32_t tile, char const* rows, long long row_bytes, int row_bound,
                               int column_bound, int thread = thread_index()) {
    int const thread_row = thread / Tile::kChunks;
    int const thread_chunk = thread % Tile::kChunks;
    char const* source = rows + thread_row * row_bytes + thread_chunk * 16;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int const row = thread_row + pass * kThreadRows;
      if (Tile::kRows % kThreadRows == 0 || row < Tile::kRows) {
        CUTE_UNROLL
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          int const chunk = thread_chunk + panel * Tile::kChunks;
          bool const valid = row < row_bound && chunk * 8 < column_bound;
          copy_async(tile + row_offset(pass, thread_row, thread_chunk) + panel * Tile::kPanelBytes,
                     source + panel * (Tile::kChunks * 16), valid);
        }
      }
      source += kThreadRows * row_bytes;
    }
  }

 private:
  // Where kThreadRows is a multiple of 8, the swizzle is that of the first pass.
  CUTE_DEVICE static int row_offset(int pass, int thread_row, int chunk) {
    int const rows = pass * kThreadRows;
    return kThreadRows % 8 == 0 ? Tile::byte_offset(thread_row, chunk) + rows * Tile::kRowBytes
                                : Tile::byte_offset(thread_row + rows, chunk);
  }
};

}  // namespace memeff
