// Sums over more columns than tensor cores add up precisely.
//
// Tensor cores truncate an accumulator instead of rounding it, so a long sum is too small: by 1e-4
// of the scores over 65536 columns, more than the error that an f32 logsumexp may have. The
// accumulators therefore sum runs of columns, and the runs are added with rounding, in global
// memory.
#pragma once

#include <memeff/collective/chunked_product.cuh>

namespace memeff {

// Called by the forward for large head dims after every run of kRunSteps steps of S.
template <int kThreads, int kStep>
struct LongSum {
  static constexpr int kRunSteps = kLongSumColumns / kStep;  // of kStep columns each

  // Adds the sums of a run to those of the previous runs. After the last run the accumulators hold
  // the total; after earlier runs `totals` holds it and the accumulators are zero.
  template <class Accumulators>
  CUTE_DEVICE static void add_run(Accumulators& accumulators, float* totals, bool first,
                                  bool last) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(accumulators); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(accumulators); ++n) {
        float4* const total = waiting_sum<kThreads>(accumulators, totals, m, n);
        float4 sum = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *total;
        sum = make_float4(sum.x + accumulators(0, m, n), sum.y + accumulators(1, m, n),
                          sum.z + accumulators(2, m, n), sum.w + accumulators(3, m, n));
        if (!last) *total = sum;
        accumulators(0, m, n) = last ? sum.x : 0.0f;
        accumulators(1, m, n) = last ? sum.y : 0.0f;
        accumulators(2, m, n) = last ? sum.z : 0.0f;
        accumulators(3, m, n) = last ? sum.w : 0.0f;
      }
    }
  }
};

}  // namespace memeff
