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
  // column_bound on already. Each lane checks one part of a page, so a table without invalid
  // entries costs one vote.
  template <int kColumns, class Accumulators, class Params>
  CUTE_DEVICE static void apply(Accumulators& scores, Params const& params,
                                ScoreTilePosition const& at, int column_bound) {
    if constexpr (PageTable<Config>::kPaged) {
      static_assert(kColumns <= kWarpSize * kPageStep);
      PageTable<Config> const table(params, at.batch);
      int const bound = min(kColumns, column_bound);
      int const own = thread_index() % kWarpSize * kPageStep;
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
            if (parts >> (column / kPageStep) & 1) scores(i, m, n) = -infinity();
          }
        }
      }
    }
  }
};

}  // namespace memeff
