// Runs after the backward: rounds the f32 sums of a bias gradient to its dtype. One CTA per tile of
// the sums.
#pragma once

#include <memeff/score/bias/gradient.cuh>

namespace memeff {

// The entry point of the families sm80 and sm90, which differ in Tiles.
template <class Config, class Tiles = BackwardTiles<Config>>
struct FmhaBackwardDbiasPostprocess {
  using Grid = typename Tiles::ScoreGrid;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kBlocksPerSm = 4;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    BiasGradientTile<Config, Tiles> const tile(params, blockIdx.x);

    if constexpr (Config::kBiasGradient == BiasGradient::common) {
      float const* const sums =
          params.bias_gradient_sum + Tiles::bias_tile_offset(params, tile.slice,
                                                             tile.row / Tiles::kTileQuery,
                                                             tile.column / Tiles::kTileKey);
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
          float4 const sum = Tiles::Sums::load(sums, m * 2 * Grid::kColumnBlocks + n);
          tile.store(m, n, sum.x, sum.y, sum.z, sum.w);
        }
      }
    } else {
      for (int j = threadIdx.x; j < min(Tiles::kTileKey, tile.column_bound); j += kThreads) {
        *tile.gradient.at(0, j) = typename Config::BiasElement(
            ColumnSums<Config, Tiles>::total(params, tile.slice, tile.column + j));
      }
    }
  }
};

}  // namespace memeff
