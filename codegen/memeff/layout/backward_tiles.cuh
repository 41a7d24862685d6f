// Tiles, padding, and the order of the dq sums, as the three kernels of the sm80 backward share
// them (preprocess, main, postprocess).
#pragma once

#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/backward_workspaces.cuh>
#include <memeff/layout/query_tiles.cuh>

namespace memeff {

// For kernels of mma.sync.
template <class Config>
struct BackwardTiles {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kThreads = kWarps * kWarpSize;

  template <int kRows, int kColumns>
  using Tile = SharedTile<kRows, kColumns, sizeof(typename Config::Element)>;
  using QueryTile = Tile<kTileQuery, Config::kHeadDim>;  // also dq
  using OutTile = Tile<kTileQuery, Config::kValueDim>;   // dO
  using KeyTile = Tile<kTileKey, Config::kHeadDim>;      // also dk
  using ValueTile = Tile<kTileKey, Config::kValueDim>;   // also dv
  using ScoreTile = Tile<kTileQuery, kTileKey>;          // P, dS

  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kWarps>;
  using QueryGrid = WarpGrid<kTileQuery, Config::kHeadDim, kWarps>;
  using KeyGrid = WarpGrid<kTileKey, Config::kHeadDim, kWarps>;
  using ValueGrid = WarpGrid<kTileKey, Config::kValueDim, kWarps>;

  using Statistics = PairedStatistics;

  // dq is summed in f32 over the KV blocks, and the gradient of a bias over the batch or heads.
  using Sums = AccumulatorSums<kThreads, Config::kVectorReductions>;
  static constexpr bool kTransposedDq = false;
  static constexpr int kQueryTileFloats = kTileQuery * Config::kHeadDim;

  // The sums of a bias gradient that is broadcast over the batch or heads: tiles of scores, each in
  // accumulator order.
  CUTE_DEVICE static long long bias_tile_offset(BackwardParams const& params, long long slice,
                                                int query_tile, int key_tile) {
    int const key_tiles = ceil_div(params.shape.key_length, kTileKey);
    return ((slice * params.query_tiles + query_tile) * key_tiles + key_tile) *
           (kTileQuery * kTileKey);
  }

  // The sums of a bias gradient that is broadcast over rows: the number of rows of a (batch, head)
  // slice if their order is deterministic, and the length of a row.
  static constexpr int kBiasSumRows = ScoreGrid::kRowWarps;
  CUTE_DEVICE static long long padded_keys(ProblemShape const& shape) {
    return (long long)ceil_div(shape.key_length, kTileKey) * kTileKey;
  }

  CUTE_DEVICE static long long tile_index(BackwardParams const& params, int batch, int head,
                                          int tile) {
    return query_tile_index<Config>(params, batch, head, tile);
  }
};

}  // namespace memeff
