// Keys and values in a pool of pages: the rows of the pool that the keys of a sequence are.
#pragma once

#include <memeff/core/feature_arrays.cuh>

namespace memeff {

// Rows of the pool are [pages * kPageSize]; kPageSize is a multiple of kPageStep, so that many rows
// from a multiple of it on are in one page.
constexpr int kPageStep = 16;

// The rows of a TMA box of keys: as many as a tile and a page are multiples of. The tensor maps of
// the spec have the same (codegen/features/pages.py).
template <class Config>
CUTE_HOST_DEVICE constexpr int key_box_rows() {
  int a = Config::kTileKey, b = Config::kPageSize;
  while (b != 0) {
    int const rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

template <class Config, bool kOn = (Config::kPageSize > 0)>
struct PageTable {
  static constexpr bool kPaged = false;

  template <class Params>
  CUTE_DEVICE PageTable(Params const&, int) {}
};

template <class Config>
struct PageTable<Config, true> {
  static constexpr bool kPaged = true;
  static constexpr int kPageSize = Config::kPageSize;
  static_assert(kPageSize % kPageStep == 0);

  int const* entries;  // of the sequence
  int pages;           // of the pool

  template <class Params>
  CUTE_DEVICE PageTable(Params const& params, int batch)
      : pages(params.shape.key_tokens / kPageSize) {
    ArrayView const& table = feature_array(params, Config::kPageTableArray);
    entries = static_cast<int const*>(table.data) + batch * table.sizes[1];
  }

  // The row of the pool of a key, or -1 if the pool does not have its page. Hazard: entries beyond
  // the length of the sequence may not be read; the table may end there.
  CUTE_DEVICE int row(int key) const {
    int const page = __ldg(entries + key / kPageSize);
    return unsigned(page) < unsigned(pages) ? page * kPageSize + key % kPageSize : -1;
  }
};

}  // namespace memeff
