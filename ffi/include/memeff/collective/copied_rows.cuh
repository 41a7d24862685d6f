// The keys or the values of a work tile, copied to shared memory by cp.async one KV block at a
// time.
#pragma once

#include <memeff/collective/load_tile.cuh>

namespace memeff {

// A row pointer in a register. StagedPointer keeps it in shared memory instead.
struct RowPointer {
  char const* pointer;
  CUTE_DEVICE char const* get() const { return pointer; }
};

// kThreads threads copy a block of rows as a `Tile`.
template <class Tile, int kThreads, int kAlignment = 16, class Pointer = RowPointer>
struct CopiedRows {
  Pointer first_row;
  long long row_bytes;
  int rows;  // rows beyond become zero, and so do columns
  int columns;

  // Starts the copy of the rows from `row` on; the caller commits the group.
  CUTE_DEVICE void load(int row, uint32_t tile, int thread = thread_index()) const {
    TileLoader<Tile, kThreads, kAlignment>::copy(tile, first_row.get() + row * row_bytes, row_bytes,
                                                 rows - row, columns, thread);
  }
};

}  // namespace memeff
