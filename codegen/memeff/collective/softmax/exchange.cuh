// The exchange of softmax states between two warpgroups that compute the scores of the same rows in
// turn, each for every second KV block.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// The softmax reference of a row after a KV block, and the factor of the earlier sums.
struct RowReference {
  float score;
  float correction;
};

// Both warpgroups accumulate the output over all KV blocks. So that they use the same softmax
// references, the one that computes the scores of a KV block publishes its references, and the
// other adopts them. Grid is that of the scores.
template <class Grid, class Softmax>
struct SoftmaxExchange {
  using Correction = typename Softmax::Correction;

  // Hazard: the other warpgroup must have adopted the previous references.
  CUTE_DEVICE static void publish(RowReference* references, Softmax const& softmax,
                                  Correction const& correction) {
    if (threadIdx.x % 4 != 0) return;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      references[Grid::element_row(2 * r, 0)] = {softmax.softmax_reference[r], correction.rows[r]};
    }
  }

  // Returns the factors of the output so far.
  CUTE_DEVICE static Correction adopt(RowReference const* references, Softmax& softmax) {
    Correction correction;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      auto const [score, factor] = references[Grid::element_row(2 * r, 0)];
      softmax.softmax_reference[r] = score;
      softmax.row_sum[r] *= factor;
      correction.rows[r] = factor;
    }
    return correction;
  }

  // Gives both warpgroups the row sums over all KV blocks, relative to the references of the last
  // block. `barrier` is a named barrier of both.
  template <int kRows>
  CUTE_DEVICE static void add_row_sums(float (&sums)[2][kRows], int warpgroup, int barrier,
                                       Softmax& softmax) {
    bool const first = threadIdx.x % 4 == 0;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      softmax.row_sum[r] = quad_sum(softmax.row_sum[r]);
      if (first) sums[warpgroup][Grid::element_row(2 * r, 0)] = softmax.row_sum[r];
    }
    named_barrier_sync(barrier, 2 * kWarpgroupSize);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      // Only the first lane keeps the total, because finish() adds up the four lanes of a row.
      float const other = sums[1 - warpgroup][Grid::element_row(2 * r, 0)];
      softmax.row_sum[r] = first ? softmax.row_sum[r] + other : 0.0f;
    }
  }
};

}  // namespace memeff
