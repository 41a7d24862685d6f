// The softmax of transposed scores (rows are keys, columns are queries) in the accumulators of a
// warpgroup.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/layout/row_statistics.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// The logsumexps of the queries, read from the row statistics in shared memory when they are used.
// thread_index() keeps their addresses out of registers across a main loop.
template <class Grid>
struct LateLogsumexps {
  struct Reader {
    uint32_t statistics;
    int thread;

    CUTE_DEVICE QuadStatistics::Values pair(int index) const {
      return QuadStatistics::load_logsumexps<Grid>(statistics, index, thread);
    }
  };

  CUTE_DEVICE explicit LateLogsumexps(uint32_t) {}
  CUTE_DEVICE Reader reader(uint32_t statistics) const { return {statistics, thread_index()}; }
};

// The logsumexps of the queries, read ahead into registers.
template <class Grid>
struct EarlyLogsumexps {
  QuadStatistics::Values values[Grid::kColumnBlocks];

  CUTE_DEVICE explicit EarlyLogsumexps(uint32_t statistics) {
    CUTE_UNROLL
    for (int i = 0; i < Grid::kColumnBlocks; ++i) {
      values[i] = QuadStatistics::load_logsumexps<Grid>(statistics, i, int(threadIdx.x));
    }
  }
  CUTE_DEVICE EarlyLogsumexps const& reader(uint32_t) const { return *this; }
  CUTE_DEVICE QuadStatistics::Values const& pair(int index) const { return values[index]; }
};

// Computes P^T from S^T in place.
template <class Logsumexps, class Scores>
CUTE_DEVICE void exponentiate_transposed(Logsumexps const& logsumexps, float softmax_scale,
                                         Scores& scores) {
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(scores); n += 2) {
    auto const pair = logsumexps.pair(n / 2);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float& score = scores(i % 4, 0, n + i / 4);
      score = probability(score, softmax_scale, pair.of[i / 4 * 2 + i % 2]);
    }
  }
}

}  // namespace memeff
