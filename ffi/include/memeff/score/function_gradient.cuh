// The gradients of the arrays that a score function reads: the gradient of each modified score,
// times the derivative of the function by a read, is added to the element that was read.
//
// Reads that only the head changes are summed in registers, and a warp adds once a tile. Other
// reads are added one by one, in an order that differs between runs. Derivatives that depend on the
// score are left to XLA, as deterministic sums are (jax_memeff/_cuda/functions.py).
#pragma once

#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// The gradients of one tile of scores, in the accumulators of Grid. kTransposed: rows of the
// accumulators are keys. Without gradients all of it is empty.
template <class Config, class Grid, bool kTransposed = false, bool kOn = Config::kFunctionGradient>
struct FunctionGradient {
  CUTE_DEVICE FunctionGradient(BackwardParams const&, ScoreTilePosition const&) {}
  CUTE_DEVICE void add(int, int, int, float) {}
  CUTE_DEVICE void finish() {}
};

template <class Config, class Grid, bool kTransposed>
class FunctionGradient<Config, Grid, kTransposed, true> {
 public:
  CUTE_DEVICE FunctionGradient(BackwardParams const& params, ScoreTilePosition const& at)
      : params_(params),
        batch_(at.batch),
        row_bound_(params.shape.query_length - at.row),
        column_bound_(params.shape.key_length - at.column),
        of_tile_(params, at) {
    CUTE_UNROLL
    for (int i = 0; i < kReads; ++i) sums_[i] = 0.0f;
  }

  // Adds for one accumulator; `gradient` is that of the modified score.
  CUTE_DEVICE void add(int element, int m, int n, float gradient) {
    int const thread = thread_index();
    int const major = Grid::element_row(element, m, thread);
    int const minor = Grid::element_column(element, n, thread);
    int const row = kTransposed ? minor : major;
    int const column = kTransposed ? major : minor;
    // Rows beyond the lengths may hold NaN, and so may derivatives at masked elements.
    if (row >= row_bound_ || column >= column_bound_ || gradient == 0.0f) return;
    of_tile_.at(row, column, 0.0f, [&](auto const&... inputs) {
      float derivatives[kReads];
      long long offsets[kReads];
      Function::read_derivatives(inputs..., derivatives);
      Function::read_offsets(inputs..., offsets);
      CUTE_UNROLL
      for (int i = 0; i < kReads; ++i) {
        if (is_of_head(i)) {
          sums_[i] += gradient * derivatives[i];
        } else {
          scatter(i, offsets[i], gradient * derivatives[i]);
        }
      }
    });
  }

  // Ends the tile; all lanes of the warp call it.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kReads; ++i) {
      if (!is_of_head(i)) continue;
      float const sum = warp_sum(sums_[i]);
      if (thread_index() % kWarpSize != 0) continue;
      of_tile_.at(0, 0, 0.0f, [&](auto const&... inputs) {
        long long offsets[kReads];
        Function::read_offsets(inputs..., offsets);
        scatter(i, offsets[i], sum);
      });
    }
  }

 private:
  using Function = typename Config::ScoreFunction;
  using OfTile = FunctionOfTile<Config, Function, Config::kScoreCaptured, Config::kScoreLiterals>;
  using Arrays = typename Config::CapturedGradients;
  static constexpr int kReads = Function::kFloatReads;

  CUTE_DEVICE static constexpr bool is_of_head(int read) {
    return !Function::kReadsDependOnQuery[read] && !Function::kReadsDependOnKey[read];
  }

  CUTE_DEVICE void scatter(int read, long long offset, float term) const {
    int const index = Arrays::kArrays[Function::kReadArrays[read]];
    if (index < 0 || offset < 0) return;  // it needs no gradient, or nothing was read
    ArrayView const& view = feature_array(params_, index);
    long long const first = element_of<Config>(view, batch_) * view.strides[0];
    atomicAdd(static_cast<float*>(view.data) + first + offset, term);
  }

  BackwardParams const& params_;
  int batch_;
  int row_bound_;
  int column_bound_;
  OfTile of_tile_;
  float sums_[kReads];
};

}  // namespace memeff
