// Rows of a pool with small pages, which warps copy to shared memory one by one.
#pragma once

#include <memeff/arch/barrier.cuh>
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

// The rows of the pool for the keys of a KV block, which kWarps warps copy together: of the steps
// of one instruction each, a warp has every kWarps-th. A lane knows its own rows, so a copy takes
// few instructions.
template <class Config, class Panel, int kWarps>
struct DividedRows {
  static_assert(Panel::kPanels == 1 && Panel::kElementBytes == 2);
  static constexpr int kStepRows = kWarpSize / Panel::kChunks;
  static_assert(kStepRows == 4);
  static constexpr int kSteps = Panel::kRows / kStepRows;
  static constexpr int kOwn = ceil_div(kSteps, kWarps);
  static constexpr int kArrivals = kWarps * (kWarpSize + 1);  // at the barrier of a copy

  int rows[kOwn];  // -1 if the key does not exist

  // The key of the lane's row `i` in the KV block. The last step of a warp may not exist.
  CUTE_DEVICE static int key(int warp, int i) {
    return (warp + i * kWarps) * kStepRows + int(threadIdx.x % kWarpSize / Panel::kChunks);
  }
  CUTE_DEVICE static bool has_step(int warp, int i) {
    return kSteps % kWarps == 0 || warp + i * kWarps < kSteps;
  }

  // Loads the entries of the page table for the KV block that begins with `first`.
  CUTE_DEVICE void load(PageTable<Config> const& pages, int warp, int first, int key_length) {
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      int const own = first + key(warp, i);
      rows[i] = has_step(warp, i) && own < key_length ? pages.entry(own) : -1;
    }
  }

  // Finds the rows in these entries. Returns whether a page is missing.
  CUTE_DEVICE bool find(PageTable<Config> const& pages, int warp, int first, int key_length) {
    bool missing = false;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      int const own = first + key(warp, i);
      rows[i] = pages.row_of(rows[i], own);
      missing = missing || (rows[i] < 0 && has_step(warp, i) && own < key_length);
    }
    return missing;
  }

  // Starts the copies of kCount panels of a tile. `pool` points to row 0 of the pool, which has
  // `columns` columns. Rows of keys that do not exist become zero. The barrier completes when all
  // warps have copied, and then shows what they wrote before: arrivals of copies do not promise
  // that.
  //
  // Unrolled on purpose: a copy is then one instruction with constant offsets. A loop of ten
  // dependent instructions for each copy took longer than the products.
  template <int kCount>
  CUTE_DEVICE void copy(uint32_t tile, int warp, char const* pool, unsigned row_bytes, int columns,
                        int first_panel, uint64_t& arrived) const {
    int const lane_row = int(threadIdx.x % kWarpSize / Panel::kChunks);
    int const chunk = int(threadIdx.x % Panel::kChunks);
    uint32_t const target =
        tile + first_panel * Panel::kBytes + Panel::byte_offset(lane_row, chunk);
    int const first_column = first_panel * Panel::kPanelColumns + chunk * Panel::kChunkColumns;
    char const* const first_source = pool + first_column * Panel::kElementBytes;
    int const left = columns - first_column;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      if (!has_step(warp, i)) break;
      int const step_row = (warp + i * kWarps) * kStepRows;
      uint32_t const place =
          (target ^ (Panel::swizzle(step_row) * 16)) + step_row * Panel::kRowBytes;
      char const* const source = first_source + (unsigned long long)(unsigned(rows[i])) * row_bytes;
      CUTE_UNROLL
      for (int panel = 0; panel < kCount; ++panel) {
        copy_async(place + panel * Panel::kBytes, source + panel * Panel::kRowBytes,
                   rows[i] >= 0 && panel * Panel::kPanelColumns < left);
      }
    }
    arrive_when_copied(arrived);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive_barrier(arrived);
    random_sleep();
  }
};

}  // namespace memeff
