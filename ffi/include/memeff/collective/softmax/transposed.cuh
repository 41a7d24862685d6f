// The softmax of transposed scores (rows are keys, columns are queries) in the accumulators of a
// warpgroup.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/layout/row_statistics.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// P^T from S^T. `statistics` are the row statistics of the queries, in shared memory.
template <class Grid, class Scores>
CUTE_DEVICE void exponentiate_transposed(uint32_t statistics, float softmax_scale, Scores& scores) {
  int const thread = thread_index();
  CUTE_UNROLL
  for (int pair = 0; pair < cute::size<2>(scores) / 2; ++pair) {
    auto const logsumexps = QuadStatistics::load_logsumexps<Grid>(statistics, pair, thread);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float& score = scores(i % 4, 0, 2 * pair + i / 4);
      score = probability(score, softmax_scale, logsumexps.of[i / 4 * 2 + i % 2]);
    }
  }
}

}  // namespace memeff
