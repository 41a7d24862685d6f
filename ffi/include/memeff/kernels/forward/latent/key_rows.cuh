// The rows of keys that the producers of kernels/fmha_fwd_latent_sm90.cuh read.
#pragma once

#include <memeff/arch/tma.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/tensor_rows.cuh>

namespace memeff {

// A KV block is divided into boxes of contiguous rows.
template <class Config, class Kernel>
struct LatentKeyRows {
  using Control = typename Kernel::Control;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kBoxRows = PageTable<Config>::kPaged ? Config::kKeyBoxRows : kTileKey;
  static constexpr int kBoxes = kTileKey / kBoxRows;

  // Finds the first row in the tensor of each box of a KV block.
  CUTE_DEVICE static void find(ForwardParams const& params, Control& control,
                               KeyValueSource<Config> const& source, int key_length, int first,
                               int (&rows)[kBoxes]) {
    CUTE_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      rows[box] = row_of(params, control, source, key_length, first + box * kBoxRows);
    }
  }

  // The row in the tensor of the first key of a box. Keys without a valid page get a row beyond the
  // end of the pool, for which TMA fills in zeros.
  CUTE_DEVICE static int row_of(ForwardParams const& params, Control& control,
                                KeyValueSource<Config> const& source, int key_length, int key) {
    if constexpr (PageTable<Config>::kPaged) {
      int const row = key < key_length ? source.pages.row(key) : -1;
      if (row < 0 && key < key_length) control.may_miss_pages = true;
      return row < 0 ? params.shape.key_tokens : row;
    } else {
      return source.origin.row + key;
    }
  }

  // Prefetches the first `count` keys of a box into L2. Reading whole rows in order gives a higher
  // DRAM bandwidth than reading one panel of columns at a time.
  CUTE_DEVICE static void prefetch(ForwardParams const& params,
                                   KeyValueSource<Config> const& source, int count, int row) {
    using Element = KeyValueElement<Config>;
    int const valid = min(count, kBoxRows);
    bool const exists = !PageTable<Config>::kPaged || row < params.shape.key_tokens;
    if (valid <= 0 || !exists) return;
    prefetch_bytes(row_pointer<Element>(params.key, source.batch(params.key), row, source.head),
                   valid * int(row_bytes<Element>(params.key)));
  }
};

}  // namespace memeff
