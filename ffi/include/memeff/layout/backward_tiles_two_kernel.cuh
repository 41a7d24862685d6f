// Tiles and workspaces that the kernels of the two-kernel backward share
// (kernels/fmha_bwd_two_kernel_sm90.cuh).
#pragma once

#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/query_tiles.cuh>
#include <memeff/layout/row_statistics.cuh>

namespace memeff {

template <class Config>
struct BackwardTilesTwoKernel {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kQBlockRows = 64;  // of the dkdv kernel
  static_assert(kTileQuery == 128 && kTileKey == 64);
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kThreads = kWarpgroups * kWarpgroupSize;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;  // also dq
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;   // dO
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;      // also dk
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;   // also dv

  using ScoreGrid = WarpgroupGrid<kTileKey, kQBlockRows>;  // of the dkdv kernel, transposed

  using Statistics = QuadStatistics;

  // The sums of a bias gradient that is broadcast over rows, as in BackwardTilesSm90.
  static constexpr int kBiasSumRows = 1;
  CUTE_DEVICE static long long padded_keys(ProblemShape const& shape) {
    return (long long)ceil_div(shape.key_length, kTileKey) * kTileKey;
  }

  CUTE_DEVICE static long long tile_index(BackwardParams const& params, int batch, int head,
                                          int tile) {
    return query_tile_index<Config>(params, batch, head, tile);
  }

  // The logsumexp and delta of the rows from `row` on, a multiple of sixteen.
  CUTE_DEVICE static float const* statistics(BackwardParams const& params, int batch, int head,
                                             int row) {
    return params.row_statistics + (tile_index(params, batch, head, 0) * kTileQuery + row) * 2;
  }
};

}  // namespace memeff
