// The online softmax over KV blocks for grids in which several warps divide the columns of a row
// (kernels for large head dims).
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/collective/softmax/reference.cuh>

namespace memeff {

// Warps exchange maxima and sums through shared memory. The factors of a row's output go through
// shared memory too, because its accumulators are distributed differently from the scores.
// kLargeScores: see ScoreReference.
template <class Grid, int kTileRows, bool kLargeScores>
class BlockSoftmax {
 public:
  static constexpr int kLaneRows = 2 * Grid::kRowBlocks;  // rows in which a lane has elements
  static constexpr int kBytes = (Grid::kColumnWarps + 2) * kTileRows * int(sizeof(float));

  CUTE_DEVICE explicit BlockSoftmax(uint32_t shared) : shared_(shared) {
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      row_max_[r] = -infinity();
      row_sum_[r] = 0.0f;
    }
  }

  // Turns scores into probabilities relative to the new running maximum.
  template <class Scores>
  CUTE_DEVICE void step(Scores& scores, float softmax_scale) {
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      float maximum = row_max_[r];
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        maximum =
            fmaxf(maximum, fmaxf(scores(2 * (r % 2), r / 2, n), scores(2 * (r % 2) + 1, r / 2, n)));
      }
      share(r, quad_max(maximum));
    }
    sync_threads();
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      float maximum = shared_value(r, 0);
      CUTE_UNROLL
      for (int warp = 1; warp < Grid::kColumnWarps; ++warp) {
        maximum = fmaxf(maximum, shared_value(r, warp));
      }
      auto const reference = ScoreReference<kLargeScores>::of(maximum, softmax_scale);
      // Hazard: the factor must be exactly 1 if the maximum is unchanged. The fused multiply-add
      // would return the rounding error of the reference, which grows to 1e-5 over hundreds of
      // tiles.
      float const correction = maximum > row_max_[r]
                                   ? exp2_approx(reference.correction(row_max_[r], softmax_scale))
                                   : 1.0f;
      row_max_[r] = maximum;
      float sum = row_sum_[r] * correction;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = scores(2 * (r % 2) + i, r / 2, n);
          if constexpr (kLargeScores) x -= reference.score;
          x = exp2_approx(fmaf(x, softmax_scale, -reference.product));
          sum += x;
        }
      }
      row_sum_[r] = sum;
      if (writes_rows()) store_shared(corrections() + row(r) * 4, __float_as_uint(correction));
    }
  }

  // Finishes the rows after the last step: stores the factors that normalize the output, times
  // output_scale, and calls write(row, natural-log logsumexp) once for each row, both after the
  // LaneRowModifiers `modifiers`. Rows without keys, and rows from `bound` on, enter the modifiers
  // with 0 and -inf.
  template <class Modifiers, class Write>
  CUTE_DEVICE void finish(float softmax_scale, float output_scale, int bound,
                          Modifiers const& modifiers, Write write) {
    sync_threads();  // every thread has read the maxima of the last step
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) share(r, quad_sum(row_sum_[r]));
    sync_threads();
    if (!writes_rows()) return;
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      float sum = 0.0f;
      CUTE_UNROLL
      for (int warp = 0; warp < Grid::kColumnWarps; ++warp) sum += shared_value(r, warp);
      bool const empty = sum == 0.0f || row(r) >= bound;
      // Evaluated twice, because keeping one result for both uses spills. A row maximum is
      // therefore written twice.
      auto const end = [&] {
        float const maximum = row_max_[r] * softmax_scale * kLn2;
        return modifiers.finish(
            r, {empty ? 0.0f : output_scale / sum, empty ? -infinity() : maximum + __logf(sum),
                empty ? -infinity() : maximum});
      };
      store_shared(normalisers() + row(r) * 4, __float_as_uint(end().factor));
      write(row(r), end().logsumexp);
    }
  }

  // The factor of a row's earlier sums, after a step, and of its result, after finish(). Hazard:
  // both need a __syncthreads() before.
  CUTE_DEVICE float correction(int row) const { return shared_float(corrections() + row * 4); }
  CUTE_DEVICE float normaliser(int row) const { return shared_float(normalisers() + row * 4); }

 private:
  CUTE_DEVICE static float shared_float(uint32_t address) {
    return __uint_as_float(load_shared(address));
  }
  CUTE_DEVICE static int row(int r) { return Grid::element_row(2 * (r % 2), r / 2); }
  CUTE_DEVICE static int column_warp() { return threadIdx.x / kWarpSize / Grid::kRowWarps; }
  CUTE_DEVICE static bool writes_rows() { return column_warp() == 0 && threadIdx.x % 4 == 0; }

  CUTE_DEVICE void share(int r, float x) const {
    if (threadIdx.x % 4 == 0) {
      store_shared(shared_ + (column_warp() * kTileRows + row(r)) * 4, __float_as_uint(x));
    }
  }
  CUTE_DEVICE float shared_value(int r, int warp) const {
    return shared_float(shared_ + (warp * kTileRows + row(r)) * 4);
  }
  CUTE_DEVICE uint32_t corrections() const { return shared_ + Grid::kColumnWarps * kTileRows * 4; }
  CUTE_DEVICE uint32_t normalisers() const { return corrections() + kTileRows * 4; }

  uint32_t shared_;
  float row_max_[kLaneRows];
  float row_sum_[kLaneRows];  // of this lane's columns only, until finish()
};

}  // namespace memeff
