// Keys and values in a pool of pages: maps the keys of a sequence to rows of the pool.
#pragma once

#include <memeff/core/feature_arrays.cuh>

namespace memeff {

// The pool has pages * kPageSize rows. kPageSize is a multiple of kPageStep, so kPageStep rows from
// one of its multiples on lie in one page.
constexpr int kPageStep = 16;

// The scale of a pool of float8: none, one for each key head, or one for each page and key head.
enum class PoolScale { none, heads, pages };

// The page table of a sequence. Calls without pages have an empty one.
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

  int const* entries;  // the row of the table for the sequence
  int pages;           // the number of pages of the pool

  template <class Params>
  CUTE_DEVICE PageTable(Params const& params, int batch)
      : pages(params.shape.key_tokens / kPageSize) {
    ArrayView const& table = feature_array(params, Config::kPageTableArray);
    entries = static_cast<int const*>(table.data) + batch * table.sizes[1];
  }

  // Hazard: never call it for keys beyond the length of the sequence, because the table may end
  // there. Returns the row of the pool for a key, or -1 if its page is outside the pool.
  CUTE_DEVICE int row(int key) const {
    int const page = __ldg(entries + unsigned(key) / kPageSize);
    return unsigned(page) < unsigned(pages) ? page * kPageSize + int(unsigned(key) % kPageSize)
                                            : -1;
  }
};

}  // namespace memeff
