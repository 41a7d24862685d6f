// Rows of a pool with small pages, which a warp copies to shared memory one by one.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

// The rows of the pool for kKeys keys of a sequence: lane l has those of keys l, l + 32, and so on.
// All lanes of a warp call the functions.
template <class Config, int kKeys>
struct GatheredRows {
  static constexpr int kOwn = ceil_div(kKeys, kWarpSize);
  int rows[kOwn];  // -1 if the key does not exist

  // Loads the entries of the page table for the keys from `first` on.
  CUTE_DEVICE void load(PageTable<Config> const& pages, int first, int key_length) {
    int const lane_key = first + int(threadIdx.x % kWarpSize);
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      int const key = lane_key + i * kWarpSize;
      rows[i] = key < key_length ? pages.entry(key) : -1;
    }
  }

  // Finds the rows in these entries. Returns whether a page is missing.
  CUTE_DEVICE bool find(PageTable<Config> const& pages, int first, int key_length) {
    int const lane_key = first + int(threadIdx.x % kWarpSize);
    int const left = key_length - lane_key;
    int lowest = 0;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      rows[i] = pages.row_of(rows[i], lane_key + i * kWarpSize);
      lowest = min(lowest, left > i * kWarpSize ? rows[i] : 0);
    }
    return lowest < 0;
  }

  // Starts the copies of `columns` columns, from that of `pool` on, which points to row 0 of the
  // pool. Rows of keys that do not exist become zero. All panels of some rows follow each other, so
  // that memory reads contiguous bytes.
  template <class Tile>
  CUTE_DEVICE void copy(uint32_t tile, char const* pool, unsigned row_bytes, int columns) const {
    static_assert(Tile::kRows == kKeys);
    constexpr int kStepRows = kWarpSize / Tile::kChunks;
    // The rows of all steps have the same swizzle, or alternate between two.
    static_assert(Tile::kElementBytes == 2 && (kStepRows == 8 || kStepRows == 4));
    int const lane_row = int(threadIdx.x % kWarpSize / Tile::kChunks);
    int const chunk = int(threadIdx.x % Tile::kChunks);
    tile += Tile::byte_offset(lane_row, chunk);
    pool += chunk * 16;
    int own[kOwn];
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) own[i] = rows[i];
    // Unrolled, it would take more registers than the producer has.
    CUTE_NO_UNROLL
    for (int begin = 0; begin < kKeys; begin += kWarpSize) {
      CUTE_UNROLL
      for (int first = 0; first < kWarpSize; first += kStepRows) {
        if (kKeys % kWarpSize > 0 && begin + first >= kKeys) break;
        int const row = __shfl_sync(0xffffffffu, own[0], first + lane_row);
        uint32_t const flip = kStepRows == 8 ? 0 : Tile::swizzle(first) * 16;
        uint32_t const target = (tile ^ flip) + first * Tile::kRowBytes;
        char const* const source = pool + (unsigned long long)(unsigned(row)) * row_bytes;
        CUTE_UNROLL
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          int const column = panel * Tile::kPanelColumns + chunk * Tile::kChunkColumns;
          copy_async(target + panel * Tile::kPanelBytes, source + panel * Tile::kRowBytes,
                     row >= 0 && column < columns);
        }
      }
      tile += kWarpSize * Tile::kRowBytes;
      CUTE_UNROLL
      for (int i = 1; i < kOwn; ++i) own[i - 1] = own[i];
    }
  }
};

}  // namespace memeff
