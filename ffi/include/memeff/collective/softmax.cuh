// The online softmax over key tiles (Milakov and Gimelshein 2018), rows owned by quads of lanes.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/arch/copy.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/tf32.cuh>

namespace memeff {

// x = prescale * score, or tanh of it: see ScoreScale. Leaves the accumulators alone when there is
// nothing to do.
template <class Element, bool kSoftCap, class Accumulators>
CUTE_DEVICE void prescale_scores(Accumulators& scores, ScoreScale const& scale) {
  if constexpr (kSoftCap) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      float const x = scores(i) * scale.prescale;
      scores(i) = kIs32Bit<Element> ? tanhf(x) : tanh_approx(x);
    }
  } else if (scale.prescale != 1.0f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) scores(i) *= scale.prescale;
  }
}

// kExactCorrection is that of scaled_maximum().
template <int kRowBlocks, bool kExactCorrection = false>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kRowBlocks;  // rows of which a lane holds elements

  float row_max[kRows];
  float row_sum[kRows];  // of this lane's columns only, until finish()

  CUTE_DEVICE OnlineSoftmax() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.0f;
    }
  }

  // The statistics are needed between the two products only. Where the accumulators of both leave
  // no registers, they wait in shared memory: kParkedBytes of it for each thread.
  static constexpr int kParkedBytes = 2 * kRows * int(sizeof(float));

  CUTE_DEVICE void park(uint32_t shared) const {
    uint32_t const slot = shared + thread_index() * kParkedBytes;
    CUTE_UNROLL
    for (int r = 0; r < kRows; r += 2) {
      store_shared_vector(slot + r * 8, row_max[r], row_max[r + 1], row_sum[r], row_sum[r + 1]);
    }
  }

  CUTE_DEVICE void unpark(uint32_t shared) {
    uint32_t const slot = shared + thread_index() * kParkedBytes;
    CUTE_UNROLL
    for (int r = 0; r < kRows; r += 2) {
      uint4 const parked = load_shared_vector(slot + r * 8);
      row_max[r] = __uint_as_float(parked.x);
      row_max[r + 1] = __uint_as_float(parked.y);
      row_sum[r] = __uint_as_float(parked.z);
      row_sum[r + 1] = __uint_as_float(parked.w);
    }
  }

  // Turns scores into probabilities relative to the new running maximum, and rescales the output.
  template <class Scores, class Output>
  CUTE_DEVICE void step(Scores& scores, Output& output, float softmax_scale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      rescale_row(output, r, exponentiate_row(scores, r, softmax_scale));
    }
  }

  // The probabilities of one row; returns the factor that the row of the output needs.
  template <class Scores>
  CUTE_DEVICE float exponentiate_row(Scores& scores, int r, float softmax_scale) {
    int const m = r / 2;
    int const half = r % 2;
    float maximum = row_max[r];
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      maximum = fmaxf(maximum, fmaxf(scores(2 * half, m, n), scores(2 * half + 1, m, n)));
    }
    maximum = quad_max(maximum);
    float const reference =
        finite_reference(scaled_maximum<kExactCorrection>(maximum, softmax_scale));
    float const correction =
        exp2_approx(scaled_maximum<kExactCorrection>(row_max[r], softmax_scale) - reference);
    row_max[r] = maximum;
    float sum = row_sum[r] * correction;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = scores(2 * half + i, m, n);
        x = exp2_approx(fmaf(x, softmax_scale, -reference));
        sum += x;
      }
    }
    row_sum[r] = sum;
    return correction;
  }

  template <class Output>
  CUTE_DEVICE static void rescale_row(Output& output, int r, float correction) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(output); ++n) {
      output(2 * (r % 2), r / 2, n) *= correction;
      output(2 * (r % 2) + 1, r / 2, n) *= correction;
    }
  }

  // What two outputs are multiplied by before they are added.
  struct Weights {
    float own[kRows];
    float other[kRows];
  };

  // Takes in the statistics of the same rows over other keys.
  CUTE_DEVICE Weights merge(OnlineSoftmax const& other, float softmax_scale) {
    Weights weights;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const maximum = fmaxf(row_max[r], other.row_max[r]);
      float const reference = maximum == -infinity() ? 0.0f : maximum * softmax_scale;
      weights.own[r] = exp2_approx(row_max[r] * softmax_scale - reference);
      weights.other[r] = exp2_approx(other.row_max[r] * softmax_scale - reference);
      row_max[r] = maximum;
      row_sum[r] = row_sum[r] * weights.own[r] + other.row_sum[r] * weights.other[r];
    }
    return weights;
  }

  // Normalises the output, times output_scale, and leaves the natural-log logsumexp of each row in
  // row_max. Rows without keys: output 0, logsumexp -inf.
  template <class Output>
  CUTE_DEVICE void finish(Output& output, float softmax_scale, float output_scale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = quad_sum(row_sum[r]);
      bool const empty = sum == 0.0f;
      float const inverse = empty ? 0.0f : output_scale / sum;
      row_max[r] = empty ? -infinity() : row_max[r] * softmax_scale * kLn2 + __logf(sum);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        output(2 * (r % 2), r / 2, n) *= inverse;
        output(2 * (r % 2) + 1, r / 2, n) *= inverse;
      }
    }
  }
};

}  // namespace memeff
