// Sums of partial results over disjoint sets of keys: weighted by exp(logsumexp), normalized last.
//
// Batch-invariant calls sum keys in segments that begin at absolute multiples of kSegmentKeys. A
// CTA that has all segments of a row adds them up in registers. If the segments are divided over
// CTAs, the combine kernel adds them up. Both add in ascending order with the functions below, so
// their bits are equal. Hazard: the multiply-adds are explicit, because the compiler may contract
// the same expression differently in two kernels.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/core/math.cuh>
#include <memeff/score/row_end.cuh>

namespace memeff {

// The factors of a sum of outputs and of an output that is added to it.
struct SumFactors {
  float own;
  float other;

  CUTE_DEVICE float add(float sum, float output) const { return fmaf(own, sum, other * output); }
};

// The sum of the weights of a row, relative to exp(maximum). Adding a part without keys, whose
// logsumexp is -inf, changes no bit.
struct WeightSum {
  float maximum;
  float weight;

  CUTE_DEVICE static WeightSum empty() { return {-infinity(), 0.0f}; }

  CUTE_DEVICE SumFactors add(float other_maximum, float other_weight) {
    float const largest = fmaxf(maximum, other_maximum);
    float const reference = largest == -infinity() ? 0.0f : largest;
    SumFactors const factors = {exp2_approx((maximum - reference) * kLog2e),
                                exp2_approx((other_maximum - reference) * kLog2e)};
    weight = factors.add(weight, other_weight);
    maximum = largest;
    return factors;
  }

  CUTE_DEVICE RowEnd end() const {
    if (weight == 0.0f) return RowEnd::empty();
    return {1.0f / weight, fmaf(log2_approx(weight), kLn2, maximum), -infinity()};
  }
};

// The sum of the outputs of a CTA's segments; FmhaForwardSplitSm80 adds each segment. `Output` is
// (4, MMA_M, MMA_N).
template <class Output>
struct SegmentSum {
  static constexpr int kRows = 2 * cute::size<1>(Output{});

  Output output;
  WeightSum rows[kRows];

  CUTE_DEVICE SegmentSum() {
    cute::clear(output);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = WeightSum::empty();
  }

  // Adds the normalized output of a segment.
  CUTE_DEVICE void add(Output const& other, float const (&logsumexps)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SumFactors const factors = rows[r].add(logsumexps[r], 1.0f);
      for_row(r, [&](int i, int m, int n) {
        output(i, m, n) = factors.add(output(i, m, n), other(i, m, n));
      });
    }
  }

  // Normalizes the output and writes the logsumexps, both after the LaneRowModifiers `modifiers`.
  template <class Modifiers>
  CUTE_DEVICE void finish(float (&logsumexps)[kRows], Modifiers const& modifiers) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      RowEnd const end = modifiers.finish(r, rows[r].end());
      logsumexps[r] = end.logsumexp;
      for_row(r, [&](int i, int m, int n) { output(i, m, n) *= end.factor; });
    }
  }

 private:
  template <class Use>
  CUTE_DEVICE static void for_row(int r, Use use) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(Output{}); ++n) {
      use(2 * (r % 2), r / 2, n);
      use(2 * (r % 2) + 1, r / 2, n);
    }
  }
};

}  // namespace memeff
