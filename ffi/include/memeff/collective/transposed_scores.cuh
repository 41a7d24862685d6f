// Scores with keys as rows and queries as columns, in the accumulators of a warpgroup.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// P^T from S^T. `statistics` are logsumexp and delta of the queries, in shared memory; a thread has
// two neighbouring queries of each eight.
template <class Grid, class Scores>
CUTE_DEVICE void exponentiate_transposed(uint32_t statistics, float softmax_scale, Scores& scores) {
  int const thread = thread_index();
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(scores); ++n) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const logsumexp =
          __uint_as_float(load_shared(statistics + Grid::element_column(i, n, thread) * 8));
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& score = scores(2 * half + i, 0, n);
        score = exp2_approx(fmaf(score, softmax_scale, -logsumexp));
      }
    }
  }
}

}  // namespace memeff
