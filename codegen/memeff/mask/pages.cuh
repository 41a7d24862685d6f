// Masks keys whose page-table entry is invalid: a negative entry refers to no page of the pool.
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>

namespace memeff {

// Sets the scores of keys on missing pages to -inf. ScoreMask calls it for the tiles of a paged
// call that may have such keys; without pages it does nothing.
template <class Config, class Grid>
struct PageMask {
  // Masks the tile of kColumns columns at `at`; the interval mask has masked columns from
  // column_bound on already.
  template <int kColumns, class Accumulators, class Params>
  CUTE_DEVICE static void apply(Accumulators& scores, Params const& params,
                                ScoreTilePosition const& at, int column_bound) {
    if constexpr (PageTable<Config>::kPaged) {
      PageTable<Config> const table(params, at.batch);
      mask_from<0, kColumns>(scores, table, at, min(kColumns, column_bound));
    }
  }

 private:
  // Masks the columns from kFirst on. Each lane checks one part of a page, so a table without
  // invalid entries costs a vote, or several if pages are small.
  template <int kFirst, int kColumns, class Accumulators>
  CUTE_DEVICE static void mask_from(Accumulators& scores, PageTable<Config> const& table,
                                    ScoreTilePosition const& at, int bound) {
    constexpr int kStep = PageTable<Config>::kStep;
    constexpr int kEnd = kFirst + kWarpSize * kStep;
    if constexpr (kEnd < kColumns) mask_from<kEnd, kColumns>(scores, table, at, bound);
    int const own = thread_index() % kWarpSize * kStep + kFirst;
    bool const missing = own < bound && table.row(at.column + own) < 0;
    unsigned const parts = __ballot_sync(0xffffffffu, missing);
    if (parts == 0) return;
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const column = Grid::element_column(i, n, thread_index());
          bool const is_checked =
              kColumns <= kWarpSize * kStep || (column >= kFirst && column < kEnd);
          if (is_checked && (parts >> (column - kFirst) / kStep & 1)) scores(i, m, n) = -infinity();
        }
      }
    }
  }
};

// Whether keys may be on missing pages: a base class of what producer and consumers share. With
// kOn the producer finds out; otherwise they always may.
template <bool kOn>
struct MissingPages {
  CUTE_DEVICE void init_missing() {}
  CUTE_DEVICE bool may_miss() const { return true; }
};

template <>
struct MissingPages<true> {
  bool found;

  CUTE_DEVICE void init_missing() { found = false; }
  // The producer calls it before the KV block is complete.
  CUTE_DEVICE void mark_missing() { found = true; }
  // Hazard: the producer may set it for a later block between the reads of two lanes.
  CUTE_DEVICE bool may_miss() const { return warp_any(found); }
};

}  // namespace memeff
