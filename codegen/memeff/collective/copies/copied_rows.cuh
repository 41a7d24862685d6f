// The keys or the values of a work tile, copied to shared memory by cp.async one KV block at a
// time.
#pragma once

#include <memeff/collective/copies/load_tile.cuh>

namespace memeff {

// A row pointer in a register. StagedPointer keeps it in shared memory instead.
struct RowPointer {
  char const* pointer;
  CUTE_DEVICE char const* get() const { return pointer; }
};

// The rows of one operand; a main loop calls load() for each KV block, and kThreads threads copy it
// as a `Tile`.
template <class Tile, int kThreads, int kAlignment, class Pointer>
struct CopiedRows {
  using Loader = TileLoader<Tile, kThreads, kAlignment>;

  Pointer first_row;
  long long row_bytes;
  int rows;  // rows beyond become zero, and so do columns
  int columns;

  // Starts the copy of the rows from `row` on, a multiple of Pages::kStep; the caller commits the
  // group. `pages` is the page table of the source, or a window of it.
  template <class Pages>
  CUTE_DEVICE void load(int row, uint32_t tile, Pages const& pages,
                        int thread = thread_index()) const {
    if constexpr (Pages::kPaged) {
      Loader::copy_pages(tile, first_row.get(), row_bytes, pages, row, rows, columns, thread);
    } else {
      Loader::copy(tile, first_row.get() + row * row_bytes, row_bytes, rows - row, columns, thread);
    }
  }
};

}  // namespace memeff
