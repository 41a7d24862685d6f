// The gradient of a bias where a kernel computes it transposed: keys are rows of the accumulators.
// See gradient.cuh.
#pragma once

#include <memeff/bias/gradient.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// The gradient of a bias, written or summed by the kernel that computes it transposed. `Sums` are
// what a thread keeps over the visits of a head.
template <class Config, class Tiles, BiasGradient kWay = Config::kBiasGradient>
struct TransposedBiasGradient {
  static constexpr bool kNeeded = false;
  struct Sums {};

  CUTE_DEVICE TransposedBiasGradient(BackwardParams const&, ScoreTilePosition const&) {}
  CUTE_DEVICE void pair(Sums&, int, int, float const (&)[2]) const {}
  CUTE_DEVICE static void finish(BackwardParams const&, int, int, int, Sums&) {}
};

template <class Config, class Tiles>
struct TransposedBiasGradient<Config, Tiles, BiasGradient::full> {
  using Grid = typename Tiles::ScoreGrid;
  using Element = typename Config::BiasElement;
  static constexpr bool kNeeded = true;
  struct Sums {};
  ScorePlane<Element> plane;
  int row_bound;
  int column_bound;

  CUTE_DEVICE TransposedBiasGradient(BackwardParams const& params, ScoreTilePosition const& tile)
      : plane(params.bias_gradient, tile.batch, tile.head, tile.row, tile.column),
        row_bound(params.shape.query_length - tile.row),
        column_bound(params.shape.key_length - tile.column) {}

  // Two neighbouring queries of the accumulators' block n.
  CUTE_DEVICE void pair(Sums&, int n, int half, float const (&gradient)[2]) const {
    int const thread = thread_index();
    int const key = Grid::element_row(2 * half, 0, thread);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const query = Grid::element_column(i, n, thread);
      if (query < row_bound && key < column_bound) *plane.at(query, key) = Element(gradient[i]);
    }
  }

  CUTE_DEVICE static void finish(BackwardParams const&, int, int, int, Sums&) {}
};

template <class Config, class Tiles>
struct TransposedBiasGradient<Config, Tiles, BiasGradient::columns> {
  using Grid = typename Tiles::ScoreGrid;
  static constexpr bool kNeeded = true;
  struct Sums {
    float keys[2] = {0.0f, 0.0f};
  };

  CUTE_DEVICE TransposedBiasGradient(BackwardParams const&, ScoreTilePosition const&) {}

  CUTE_DEVICE void pair(Sums& sums, int, int half, float const (&gradient)[2]) const {
    sums.keys[half] += gradient[0] + gradient[1];
  }

  // After the last visit of a head, the first `column` of which is that of the tile.
  CUTE_DEVICE static void finish(BackwardParams const& params, int batch, int head, int column,
                                 Sums& sums) {
    float* const row = ColumnSums<Config, Tiles>::row_of(params, batch, head, 0) + column;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float const sum = quad_sum(sums.keys[half]);
      if (threadIdx.x % 4 == 0) atomicAdd(row + Grid::element_row(2 * half, 0), sum);
      sums.keys[half] = 0.0f;
    }
  }
};

}  // namespace memeff
