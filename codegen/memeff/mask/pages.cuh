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
  // column_bound on already. Each lane checks a part of a page, or several small ones, so a table
  // without invalid entries costs a few votes.
  template <int kColumns, class Accumulators, class Params>
  CUTE_DEVICE static void apply(Accumulators& scores, Params const& params,
                                ScoreTilePosition const& at, int column_bound) {
    if constexpr (PageTable<Config>::kPaged) {
      constexpr int kStep = PageTable<Config>::kStep;
      constexpr int kWords = ceil_div(kColumns, kWarpSize * kStep);
      PageTable<Config> const table(params, at.batch);
      int const bound = min(kColumns, column_bound);
      unsigned parts[kWords];
      unsigned any = 0;
      CUTE_UNROLL
      for (int word = 0; word < kWords; ++word) {
        int const own = (word * kWarpSize + thread_index() % kWarpSize) * kStep;
        bool const missing = own < bound && table.row(at.column + own) < 0;
        parts[word] = __ballot_sync(0xffffffffu, missing);
        any |= parts[word];
      }
      if (any == 0) return;
      CUTE_UNROLL
      for (int m = 0; m < cute::size<1>(scores); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            int const part = Grid::element_column(i, n, thread_index()) / kStep;
            CUTE_UNROLL
            for (int word = 0; word < kWords; ++word) {
              int const bit = part - word * kWarpSize;
              bool const has_bit = kWords == 1 || unsigned(bit) < kWarpSize;
              if (has_bit && (parts[word] >> bit & 1)) scores(i, m, n) = -infinity();
            }
          }
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
  CUTE_DEVICE bool may_miss() const { return found; }
};

}  // namespace memeff
