// The online softmax over KV blocks (Milakov and Gimelshein 2018); a quad of lanes owns a row.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/copy.cuh>
#include <memeff/collective/softmax/reference.cuh>

namespace memeff {

// The softmax state of the rows in which a lane has elements. Forward main loops call step(), or
// exponentiate() and rescale(), for each KV block, and finish() once.
//
// kIntegerMaximum: compares the bits of scores as integers, because Hopper has a three-way maximum
// of integers, but not of floats. This is correct if some score is positive; if none is or was,
// floats are compared. It does not pay off if a bias makes whole rows negative. kLargeScores: see
// ScoreReference. kCapped: a soft cap bounds the scores, which are already multiplied by
// softmax_scale, and probabilities are bfloat16 or wider. If the cap is small enough for their
// range, the softmax reference of every row is 0 and no maxima are computed.
//
// kExactMaximum: finish() returns the exact maximum of each row.
template <int kRowBlocks, bool kIntegerMaximum = false, bool kLargeScores = false,
          bool kCapped = false, bool kExactMaximum = false>
struct OnlineSoftmax {
  static_assert(!(kCapped && kExactMaximum));  // with kCapped there are no maxima
  using Reference = ScoreReference<kLargeScores>;
  static constexpr int kRows = 2 * kRowBlocks;  // rows in which a lane has elements

  // A softmax reference follows the maximum of its row only when that is ahead by this many powers
  // of two (Zadouri et al. 2026, FlashAttention-4, section 3.1), so the output is seldom rescaled.
  static constexpr float kSlack = 8.0f;

  // With kExactMaximum softmax_reference is the running maximum, and the reference that is
  // subtracted is derived from it, because there is no register for both: it is the maximum rounded
  // down to a multiple of kSlack in powers of two, which seldom changes. Large scores subtract the
  // maximum itself.
  static constexpr bool kRoundedReference = kExactMaximum && !kLargeScores;

  // Sums of 2^kCappedScale, and their products with values, are far below the largest float32.
  static constexpr float kCappedScale = 64.0f;

  // The score whose probability is 1, or with kExactMaximum the greatest score. After finish() it
  // is the logsumexp.
  float softmax_reference[kRows];
  float row_sum[kRows];  // of this lane's columns only, until finish()

  // The part of softmax_scale that scores already include, and the remaining part.
  CUTE_DEVICE static float applied(float softmax_scale) { return kCapped ? softmax_scale : 1.0f; }
  CUTE_DEVICE static float remaining(float softmax_scale) { return kCapped ? 1.0f : softmax_scale; }

  CUTE_DEVICE OnlineSoftmax() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      softmax_reference[r] = -infinity();
      row_sum[r] = 0.0f;
    }
  }

  // The statistics are needed between the two products only. If the accumulators of both leave no
  // registers, they are staged in shared memory, kStagedBytes for each thread.
  static constexpr int kStagedBytes = 2 * kRows * int(sizeof(float));

  CUTE_DEVICE void stage_registers(uint32_t shared) const {
    uint32_t const slot = shared + thread_index() * kStagedBytes;
    CUTE_UNROLL
    for (int r = 0; r < kRows; r += 2) {
      store_shared_vector(slot + r * 8, softmax_reference[r], softmax_reference[r + 1], row_sum[r],
                          row_sum[r + 1]);
    }
  }

  CUTE_DEVICE void unstage(uint32_t shared) {
    uint32_t const slot = shared + thread_index() * kStagedBytes;
    CUTE_UNROLL
    for (int r = 0; r < kRows; r += 2) {
      uint4 const staged = load_shared_vector(slot + r * 8);
      softmax_reference[r] = __uint_as_float(staged.x);
      softmax_reference[r + 1] = __uint_as_float(staged.y);
      row_sum[r] = __uint_as_float(staged.z);
      row_sum[r + 1] = __uint_as_float(staged.w);
    }
  }

  // The factors that the rows of an output need.
  struct Correction {
    float rows[kRows];
  };

  struct Nothing {
    CUTE_DEVICE void operator()() const {}
    CUTE_DEVICE void combine_maxima(float (&)[kRows]) const {}
  };

  // Turns scores into probabilities, and rescales the output. `rows`: see exponentiate().
  template <class Scores, class Output, class Rows = Nothing>
  CUTE_DEVICE void step(Scores& scores, Output& output, float softmax_scale,
                        Rows const& rows = {}) {
    rescale(output, exponentiate(scores, softmax_scale, Nothing(), NoShift(), rows));
  }

  // Turns scores into probabilities and returns the factors for rescale(). Calls
  // `before_exponentials` between the maxima and the exponentials: a main loop may wait for a
  // product there. All scores lack `shift`; softmax references include it. If several warps divide
  // the columns of a row, `rows` combines their maxima (SharedRowStatistics).
  template <class Scores, class BeforeExponentials = Nothing, class Shift = NoShift,
            class Rows = Nothing>
  CUTE_DEVICE Correction exponentiate(Scores& scores, float softmax_scale,
                                      BeforeExponentials const& before_exponentials = {},
                                      Shift const& shift = {}, Rows const& rows = {}) {
    Correction correction;
    if (kCapped && softmax_scale <= kCappedScale) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        correction.rows[r] = 1.0f;
        softmax_reference[r] = 0.0f;
      }
      before_exponentials();
      add_exponentials(scores, correction, [](int, float x) { return x; });
      return correction;
    }
    float const scale = remaining(softmax_scale);
    float greatest[kRows];
    lane_maxima(scores, greatest, shift.score());
    rows.combine_maxima(greatest);
    float products[kRows];
    if constexpr (Shift::kIsOn && kLargeScores) {
      follow_shifted(scores, greatest, scale, shift, products, correction);
    } else {
      Reference references[kRows];
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        references[r] = follow<Reference>(r, greatest[r], scale, shift, correction);
        products[r] = references[r].product;
      }
      if constexpr (kLargeScores) subtract_large(scores, references);
    }
    before_exponentials();
    add_exponentials(scores, correction,
                     [&](int r, float x) { return fmaf(x, scale, shift.exponent(products[r])); });
    return correction;
  }

  // Multiplies the rows of the output by the factors of exponentiate(), if any of them is not 1.
  template <class Output>
  CUTE_DEVICE static void rescale(Output& output, Correction const& correction) {
    bool rises = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) rises |= correction.rows[r] != 1.0f;
    if (warp_any(rises)) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) rescale_row(output, r, correction.rows[r]);
    }
  }

  // The factors of two outputs in their merged output.
  struct Weights {
    float own[kRows];
    float other[kRows];
  };

  // Merges in the statistics of the same rows over other keys, for ConsumerGroupMerge.
  CUTE_DEVICE Weights merge(OnlineSoftmax const& other, float softmax_scale) {
    float const scale = remaining(softmax_scale);
    Weights weights;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const maximum = fmaxf(softmax_reference[r], other.softmax_reference[r]);
      auto const reference = reference_of<Reference>(maximum, scale);
      weights.own[r] = exp2_approx(exponent_of(reference, softmax_reference[r], scale));
      weights.other[r] = exp2_approx(exponent_of(reference, other.softmax_reference[r], scale));
      softmax_reference[r] = maximum;
      row_sum[r] = row_sum[r] * weights.own[r] + other.row_sum[r] * weights.other[r];
    }
    return weights;
  }

  // Normalizes the output, times output_scale, and leaves the natural-log logsumexp of each row in
  // softmax_reference, both after the LaneRowModifiers `modifiers`. Rows without keys enter the
  // modifiers with output 0 and logsumexp -inf.
  template <class Output, class Modifiers>
  CUTE_DEVICE void finish(Output& output, float softmax_scale, float output_scale,
                          Modifiers const& modifiers) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = quad_sum(row_sum[r]);
      bool const empty = sum == 0.0f;
      float const inverse = empty ? 0.0f : output_scale * reciprocal_approx(sum);
      float const scale = remaining(softmax_scale);
      float const greatest = softmax_reference[r] * scale;
      float const reference = kRoundedReference ? rounded(softmax_reference[r], scale) : greatest;
      float const logsumexp = (reference + log2_approx(sum)) * kLn2;
      float const maximum = !kExactMaximum || empty ? -infinity() : greatest * kLn2;
      auto const end = modifiers.finish(r, {inverse, empty ? -infinity() : logsumexp, maximum});
      softmax_reference[r] = end.logsumexp;
      rescale_row(output, r, end.factor);
    }
  }

 private:
  // Replaces scores with the powers of two that have these exponents and adds them to the sums of
  // their rows.
  template <class Scores, class Exponent>
  CUTE_DEVICE void add_exponentials(Scores& scores, Correction const& correction,
                                    Exponent exponent) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float sum = row_sum[r] * correction.rows[r];
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        float& x = scores(2 * (r % 2), r / 2, n);
        float& y = scores(2 * (r % 2) + 1, r / 2, n);
        x = exp2_approx(exponent(r, x));
        y = exp2_approx(exponent(r, y));
        sum += x + y;  // halves the chain of dependent additions
      }
      row_sum[r] = sum;
    }
  }

  template <class Output>
  CUTE_DEVICE static void rescale_row(Output& output, int r, float factor) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(output); ++n) {
      output(2 * (r % 2), r / 2, n) *= factor;
      output(2 * (r % 2) + 1, r / 2, n) *= factor;
    }
  }

  // A maximum in powers of two, rounded down to a multiple of kSlack. Equal arguments give equal
  // results, so the reference of an earlier maximum is recomputed instead of kept in a register.
  CUTE_DEVICE static float rounded(float maximum, float softmax_scale) {
    return floorf(maximum * (softmax_scale / kSlack)) * kSlack;
  }

  // The reference for softmax_reference = `score`.
  template <class Reference>
  CUTE_DEVICE static Reference reference_of(float score, float softmax_scale) {
    if constexpr (kRoundedReference) return Reference::of(rounded(score, softmax_scale), 1.0f);
    return Reference::of(score, softmax_scale);
  }

  // The exponent that converts probabilities of softmax_reference = `score` to another reference.
  template <class Reference>
  CUTE_DEVICE static float exponent_of(Reference reference, float score, float softmax_scale) {
    if constexpr (kRoundedReference) return reference.correction(rounded(score, softmax_scale), 1);
    return reference.correction(score, softmax_scale);
  }

  // Updates the reference of a row for new scores; `greatest` is this lane's maximum of them.
  template <class Reference, class Shift>
  CUTE_DEVICE Reference follow(int r, float greatest, float softmax_scale, Shift const& shift,
                               Correction& correction) {
    float const maximum = shift.add(quad_max(greatest));
    float const before = softmax_reference[r];
    bool rises;
    if constexpr (kExactMaximum) {
      softmax_reference[r] = fmaxf(before, maximum);
      rises = kRoundedReference
                  ? rounded(softmax_reference[r], softmax_scale) != rounded(before, softmax_scale)
                  : maximum > before;
    } else {
      rises = (maximum - before) * softmax_scale > kSlack;
      softmax_reference[r] = rises ? maximum : before;
    }
    auto const reference = reference_of<Reference>(softmax_reference[r], softmax_scale);
    correction.rows[r] = rises ? exp2_approx(exponent_of(reference, before, softmax_scale)) : 1.0f;
    return reference;
  }

  // follow() for all rows. Scores that lack a shift are small, so only complete scores need the
  // instructions for large references.
  template <class Scores, class Shift>
  CUTE_DEVICE void follow_shifted(Scores& scores, float const (&greatest)[kRows],
                                  float softmax_scale, Shift const& shift, float (&products)[kRows],
                                  Correction& correction) {
    float before[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      before[r] = softmax_reference[r];
      products[r] =
          follow<ScoreReference<false>>(r, greatest[r], softmax_scale, shift, correction).product;
    }
    if (!shift.is_complete) return;
    Reference references[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      references[r] = reference_of<Reference>(softmax_reference[r], softmax_scale);
      products[r] = references[r].product;
      if (before[r] != softmax_reference[r]) {
        correction.rows[r] = exp2_approx(exponent_of(references[r], before[r], softmax_scale));
      }
    }
    subtract_large(scores, references);
  }

  // Subtracts the scores of large references from their rows. In most calls few rows have one.
  template <class Scores>
  CUTE_DEVICE static void subtract_large(Scores& scores, Reference const (&references)[kRows]) {
    bool large = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) large |= references[r].score != 0.0f;
    if (!warp_any(large)) return;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        scores(2 * (r % 2), r / 2, n) -= references[r].score;
        scores(2 * (r % 2) + 1, r / 2, n) -= references[r].score;
      }
    }
  }

  // This lane's maximum of each row, for scores that lack `shift`. If the maximum is below the
  // reference, the result may be another score below the reference.
  template <class Scores>
  CUTE_DEVICE void lane_maxima(Scores const& scores, float (&greatest)[kRows], float shift) const {
    if constexpr (kIntegerMaximum) {
      bool ordered = true;
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        int maximum = 0;
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          maximum = max_of_three(maximum, __float_as_int(scores(2 * (r % 2), r / 2, n)),
                                 __float_as_int(scores(2 * (r % 2) + 1, r / 2, n)));
        }
        greatest[r] = __int_as_float(maximum);
        ordered &= maximum > 0 || softmax_reference[r] >= shift;
      }
      if (!warp_any(!ordered)) return;
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      greatest[r] = -infinity();
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        greatest[r] = fmaxf(
            greatest[r], fmaxf(scores(2 * (r % 2), r / 2, n), scores(2 * (r % 2) + 1, r / 2, n)));
      }
    }
  }
};

}  // namespace memeff
