// The rows and scales of the keys that float8_producer.cuh loads.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/kernels/forward/latent/key_rows.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// Where the keys of a part are, for a warp that loads its KV blocks one after the other. A lane has
// the row and the scale of one box, so that they hold one register each.
//
// Hazard: L1 returns loads in order, and a warp always has loads of keys in flight. So an entry of
// the page table is loaded one KV block before it is used, and a scale half a block before.
template <class Config, class Kernel>
struct LatentFloat8Keys {
  using Control = typename Kernel::Control;
  using KeyRows = LatentKeyRows<Config, Kernel>;
  using Mask = typename Kernel::Mask;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kBoxRows = KeyRows::kBoxRows;
  static constexpr int kBoxes = KeyRows::kBoxes;
  static constexpr int kScales = Config::kKeyScale == PoolScale::pages ? kBoxes : 1;

  KeyValueSource<Config> source;
  char const* base;  // row 0 of the key head
  int limit;         // the first key that the part does not have
  int first;         // the first key of the KV block that is loaded
  int row;           // in the tensor, of the lane's box in this block
  float scale;       // of this box
  int next_row;      // of the lane's box in the next block
  int next_entry;    // of the page table, for the block after that

  // One of the warps prefetches.
  CUTE_DEVICE LatentFloat8Keys(ForwardParams const& params, Control& control, KeyPart const& part,
                               bool prefetches)
      : source(params, part.batch, part.head),
        base(source.row(params.key)),
        limit(min(Mask(params.mask, params.shape, part.batch).key_length, part.end * kTileKey)),
        first(part.begin * kTileKey) {
    int const entry = find_entry(first);
    next_entry = find_entry(first + kTileKey);
    row = find_row(params, control, first, entry);
    scale = find_scale(params, part.head);
    if (prefetches) prefetch(params, first, row);
    find_next(params, control, prefetches);
  }

  // Moves to the next KV block.
  CUTE_DEVICE void advance(ForwardParams const& params, Control& control, bool prefetches) {
    first += kTileKey;
    row = next_row;
    if constexpr (Config::kKeyScale == PoolScale::pages) scale = find_scale(params, source.head);
    find_next(params, control, prefetches);
  }

  // The value that the lane of a box has. All lanes of a warp call it.
  template <class Value>
  CUTE_DEVICE static Value of_box(Value value, int box) {
    return kBoxes == 1 ? value : __shfl_sync(0xffffffffu, value, box);
  }

 private:
  CUTE_DEVICE static int lane_offset() { return int(threadIdx.x) % kBoxes * kBoxRows; }

  // Finds what comes after the current KV block, which is prefetched into L2.
  CUTE_DEVICE void find_next(ForwardParams const& params, Control& control, bool prefetches) {
    int const next = first + kTileKey;
    next_row = find_row(params, control, next, next_entry);
    next_entry = find_entry(next + kTileKey);
    if (prefetches) prefetch(params, next, next_row);
  }

  CUTE_DEVICE int find_entry(int block) const {
    int const key = block + lane_offset();
    return key < limit ? source.pages.entry(key) : 0;
  }

  CUTE_DEVICE int find_row(ForwardParams const& params, Control& control, int block,
                           int entry) const {
    int const key = block + lane_offset();
    int const found = key < limit ? source.pages.row_of_entry(key, entry) : -1;
    if (found < 0 && key < limit) control.may_miss_pages = true;
    return found < 0 ? params.shape.key_tokens : found;
  }

  CUTE_DEVICE float find_scale(ForwardParams const& params, int head) const {
    if constexpr (Config::kKeyScale == PoolScale::none) {
      return 1.0f;
    } else {
      PoolScales const pool(params, Config::kKeyScaleArray, head);
      if constexpr (Config::kKeyScale == PoolScale::heads) return __ldg(pool.first);
      // Hazard: a page outside of the pool has no scale.
      int const page = unsigned(row) / Config::kPageSize;
      return row < params.shape.key_tokens ? __ldg(pool.first + page * pool.page_stride) : 0.0f;
    }
  }

  // Prefetches a KV block into L2 if its rows are contiguous; a lane for each box.
  CUTE_DEVICE void prefetch(ForwardParams const& params, int block, int block_row) const {
    bool const has_box = int(threadIdx.x) % kWarpSize < kBoxes;
    if (params.key.row_stride != params.shape.head_dim || !has_box) return;
    int const count = min(limit - block - lane_offset(), kBoxRows);
    if (count <= 0 || block_row >= params.shape.key_tokens) return;
    int const bytes = params.shape.head_dim;
    prefetch_bytes(base + (long long)(block_row)*bytes, count * bytes);
  }
};

}  // namespace memeff
