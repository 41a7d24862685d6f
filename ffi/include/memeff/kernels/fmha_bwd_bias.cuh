// After the backward: the sums of a bias gradient, rounded. One CTA per tile of the sums.
#pragma once

#include <memeff/bias/gradient.cuh>

namespace memeff {

template <class Config>
struct FmhaBackwardBias {
  using Tiles = BackwardTiles<Config>;
  using Grid = typename Tiles::ScoreGrid;
  using Plane = ScorePlane<typename Config::BiasElement>;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kBlocksPerSm = 4;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    ProblemShape const& shape = params.shape;
    unsigned const key_tiles = ceil_div(shape.key_length, kTileKey);
    unsigned const query_tiles =
        Config::kBiasGradient == BiasGradient::shared ? params.query_tiles : 1;
    unsigned const heads = params.bias_gradient.head_stride == 0 ? 1 : shape.query_heads;
    unsigned const row_tile = blockIdx.x / key_tiles;
    unsigned const plane = row_tile / query_tiles;
    int const row = row_tile % query_tiles * kTileQuery;
    int const column = blockIdx.x % key_tiles * kTileKey;
    Plane const gradient(params.bias_gradient, plane / heads, plane % heads, row, column);
    int const column_bound = shape.key_length - column;

    if constexpr (Config::kBiasGradient == BiasGradient::shared) {
      float const* const sums =
          params.bias_gradient_sum +
          Tiles::bias_tile_offset(params, plane, row / kTileQuery, column / kTileKey);
      int const row_bound = shape.query_length - row;
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
          float4 const sum = *reinterpret_cast<float4 const*>(sums + Tiles::bias_offset(m, n));
          int const i = Grid::element_row(0, m);
          int const j = Grid::element_column(0, n);
          gradient.store(i, j, i < row_bound ? column_bound : 0, sum.x, sum.y);
          gradient.store(i + 8, j, i + 8 < row_bound ? column_bound : 0, sum.z, sum.w);
        }
      }
    } else {
      float const* const sums =
          params.bias_gradient_sum + plane * Tiles::padded_keys(shape) + column;
      for (int j = threadIdx.x; j < min(kTileKey, column_bound); j += kThreads) {
        *gradient.at(0, j) = typename Config::BiasElement(sums[j]);
      }
    }
  }
};

}  // namespace memeff
