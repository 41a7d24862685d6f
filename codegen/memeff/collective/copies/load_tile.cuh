// Copies a [rows, columns] tile of a tensor to shared memory, with all threads of the CTA or of a
// consumer group.
//
// The start and length of rows are multiples of kAlignment bytes. cp.async copies 16, 8 or 4 bytes;
// rows that begin at any 2 bytes go through registers.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

// Divides the copies of a tile over kThreads threads. Callers commit the group and wait for it.
template <class Tile, int kThreads, int kAlignment = 16>
struct TileLoader {
  static constexpr int kThreadRows = kThreads / Tile::kChunks;  // rows of one panel in one pass
  static_assert(kThreads % Tile::kChunks == 0);
  static constexpr int kPasses = ceil_div(Tile::kRows, kThreadRows);

  // Starts the copies of rows [0, row_bound) and columns [0, column_bound). The rest of the tile
  // becomes zero, even if memory holds NaN there. `rows` points to element (0, 0) of the tile;
  // `thread` is the index among the kThreads that divide the work.
  CUTE_DEVICE static void copy(uint32_t tile, char const* rows, long long row_bytes, int row_bound,
                               int column_bound, int thread = thread_index()) {
    if constexpr (kAlignment < 16) {
      copy_pieces(
          tile, [&](int row) { return Row{rows + row * row_bytes, row < row_bound}; }, column_bound,
          thread);
      return;
    }
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
          bool const valid = row < row_bound && chunk * Tile::kChunkColumns < column_bound;
          copy_async(tile + row_offset(pass, thread_row, thread_chunk) + panel * Tile::kPanelBytes,
                     source + panel * (Tile::kChunks * 16), valid);
        }
      }
      source += kThreadRows * row_bytes;
    }
  }

  // Starts the copies of keys [first, first + Tile::kRows) of a sequence in pages. `first` is a
  // multiple of Pages::kStep, and `pool` points to the first row of the pool. Keys from `bound` on,
  // keys that are not needed (FirstKey), and keys of pages outside the pool become zero. All table
  // entries are read before the first copy, so their latencies overlap.
  template <class Pages>
  CUTE_DEVICE static void copy_pages(uint32_t tile, char const* pool, long long row_bytes,
                                     Pages const& pages, int first, int bound, int column_bound,
                                     int thread = thread_index()) {
    if constexpr (kAlignment < 16) {
      copy_pieces(
          tile,
          [&](int row) {
            int found = first + row < bound ? pages.row(first + row) : -1;
            if constexpr (Pages::kFirstKey) found = pages.needs(first + row) ? found : -1;
            return Row{pool + max(found, 0) * row_bytes, found >= 0};
          },
          column_bound, thread);
      return;
    }
    constexpr int kStep = Pages::kStep;
    static_assert(kThreadRows % kStep == 0 || kStep % kThreadRows == 0);
    constexpr int kPartPasses = kThreadRows < kStep ? kStep / kThreadRows : 1;
    constexpr int kParts = ceil_div(kPasses, kPartPasses);
    int const thread_row = thread / Tile::kChunks;
    int const thread_chunk = thread % Tile::kChunks;
    int found[kParts];  // the row of the pool for this thread's first row of a part of a page
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      int const part = i * kPartPasses * kThreadRows + thread_row / kStep * kStep;
      // A branch for keys beyond the bound would cost more than reading the last entry again.
      int const key = Pages::kEndsAtLength ? max(min(first + part, bound - 1), 0) : first + part;
      int const row = pages.row(key);
      found[i] = row < 0 ? row : row + thread_row % kStep;
    }
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      unsigned long long const offset =
          (unsigned long long)unsigned(max(found[i], 0)) * unsigned(row_bytes);
      char const* source = pool + offset + thread_chunk * 16;
      CUTE_UNROLL
      for (int pass = i * kPartPasses; pass < (i + 1) * kPartPasses && pass < kPasses; ++pass) {
        int const row = thread_row + pass * kThreadRows;
        if (Tile::kRows % kThreadRows == 0 || row < Tile::kRows) {
          CUTE_UNROLL
          for (int panel = 0; panel < Tile::kPanels; ++panel) {
            int const chunk = thread_chunk + panel * Tile::kChunks;
            bool valid =
                found[i] >= 0 && first + row < bound && chunk * Tile::kChunkColumns < column_bound;
            if constexpr (Pages::kFirstKey) valid = valid && pages.needs(first + row);
            copy_async(
                tile + row_offset(pass, thread_row, thread_chunk) + panel * Tile::kPanelBytes,
                source + panel * (Tile::kChunks * 16), valid);
          }
        }
        source += kThreadRows * row_bytes;
      }
    }
  }

 private:
  // If kThreadRows is a multiple of 8, every pass has the swizzle of the first, and offsets are
  // constants.
  CUTE_DEVICE static int row_offset(int pass, int thread_row, int chunk) {
    int const rows = pass * kThreadRows;
    return kThreadRows % 8 == 0 ? Tile::byte_offset(thread_row, chunk) + rows * Tile::kRowBytes
                                : Tile::byte_offset(thread_row + rows, chunk);
  }

  // For rows that are not aligned to 16 bytes: adjacent lanes copy adjacent pieces, so a warp reads
  // whole sectors.
  static constexpr int kPiece = kAlignment < 4 ? 4 : kAlignment;
  static constexpr int kRowPieces = Tile::kPanels * Tile::kRowBytes / kPiece;
  static constexpr int kUnroll = 2;

  struct Row {
    char const* first;
    bool valid;  // otherwise the row becomes zero
  };

  // row_at(index) returns a Row.
  template <class RowAt>
  CUTE_DEVICE static void copy_pieces(uint32_t tile, RowAt row_at, int column_bound, int thread) {
    int const bytes = column_bound * Tile::kElementBytes;
#pragma unroll kUnroll
    for (int i = thread; i < Tile::kRows * kRowPieces; i += kThreads) {
      int const row = i / kRowPieces;
      int const byte = i % kRowPieces * kPiece;
      uint32_t const target = tile + Tile::byte_offset(row, byte / 16) + byte % 16;
      Row const found = row_at(row);
      char const* const source = found.first + byte;
      int const valid_bytes = found.valid ? bytes - byte : 0;
      if constexpr (kAlignment >= 4) {
        copy_piece_async<kPiece>(target, source, valid_bytes > 0);
      } else {
        store_shared(target, load_pair(source, valid_bytes));
      }
    }
  }

  CUTE_DEVICE static uint32_t load_pair(char const* source, int valid_bytes) {
    uint16_t const* const elements = reinterpret_cast<uint16_t const*>(source);
    uint32_t const low = valid_bytes > 0 ? elements[0] : 0;
    uint32_t const high = valid_bytes > 2 ? elements[1] : 0;
    return low | high << 16;
  }
};

// The keys or the values of a work tile, copied to shared memory by cp.async one KV block at a
// time.

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
