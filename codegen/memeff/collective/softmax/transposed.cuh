// The softmax of transposed scores (rows are keys, columns are queries) in the accumulators of a
// warpgroup.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/layout/backward_workspaces.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// One statistic of the queries. The first kAhead_ vectors of four are read into registers when the
// object is constructed, while a product runs, and the others when they are used. kLoad reads a
// vector.
template <class Grid, int kAhead_, QuadStatistics::Values (*kLoad)(uint32_t, int, int)>
struct StatisticAhead {
  static constexpr int kVectors = Grid::kColumnBlocks;
  static constexpr int kAhead = kAhead_ < kVectors ? kAhead_ : kVectors;
  QuadStatistics::Values ahead[kVectors];  // those from kAhead on take no registers

  CUTE_DEVICE explicit StatisticAhead(uint32_t statistics) {
    if constexpr (kAhead == 0) return;
    int const thread = thread_index();
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) ahead[i] = kLoad(statistics, i, thread);
  }

  struct Reader {
    StatisticAhead const& statistic;
    uint32_t statistics;
    int thread;

    CUTE_DEVICE QuadStatistics::Values pair(int index) const {
      return index < kAhead ? statistic.ahead[index] : kLoad(statistics, index, thread);
    }
  };

  // thread_index() keeps addresses out of registers across a main loop.
  CUTE_DEVICE Reader reader(uint32_t statistics) const {
    return {*this, statistics, kAhead < kVectors ? thread_index() : 0};
  }
};

template <class Grid, int kAhead>
using Logsumexps = StatisticAhead<Grid, kAhead, &QuadStatistics::load_logsumexps<Grid>>;
template <class Grid, int kAhead>
using Deltas = StatisticAhead<Grid, kAhead, &QuadStatistics::load_deltas<Grid>>;

// For scores that contain all their modifiers. LinearExponents (linear_exponents.cuh) has a
// counterpart for scores that lack some.
struct CompleteScores {
  // The logsumexp to subtract from an element's score: that of its column, minus the terms that the
  // score lacks.
  CUTE_DEVICE static float logsumexp(float of_column, int, int) { return of_column; }
};

// Computes P^T from S^T in place.
template <class LogsumexpReader, class Scores, class Exponents = CompleteScores>
CUTE_DEVICE void exponentiate_transposed(LogsumexpReader const& logsumexps, float softmax_scale,
                                         Scores& scores, Exponents const& exponents = {}) {
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(scores); n += 2) {
    auto const pair = logsumexps.pair(n / 2);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float& score = scores(i % 4, 0, n + i / 4);
      float const logsumexp = exponents.logsumexp(pair.of[i / 4 * 2 + i % 2], i % 4, n + i / 4);
      score = probability(score, softmax_scale, logsumexp);
    }
  }
}

}  // namespace memeff
