// The hi/lo tiles of query, key, value and dO that the 3xFP16 kernels read. Split kernels write
// them to workspaces in their shared-memory layout.
#pragma once

#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/query_tiles.cuh>

namespace memeff {

// One tile: the hi parts of kRows rows, their lo parts, and a factor for each row (RowScale).
template <int kRows_, int kColumns_>
struct F16x3Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  using Part = SharedTile<kRows, kColumns>;
  static constexpr int kLow = Part::kBytes;
  static constexpr int kFactors = 2 * Part::kBytes;
  static constexpr int kBytes = kFactors + kRows * int(sizeof(float));
  static constexpr int kBufferBytes = ceil_div(kBytes, 1024) * 1024;  // swizzles need the alignment
  static_assert(kBytes % 16 == 0);
};

// The places of the tiles of a call in the workspaces. Each consumer has its own tile of queries. A
// length of 0 still has one tile, which is zero or never read.
template <class Config>
struct F16x3Tiles {
  using Query = F16x3Tile<kWarpgroupRows, Config::kHeadDim>;
  using Key = F16x3Tile<Config::kTileKey, Config::kHeadDim>;
  using Value = F16x3Tile<Config::kTileKey, Config::kValueDim>;
  using OutGradient = F16x3Tile<kWarpgroupRows, Config::kValueDim>;  // only in a backward
  using Params = typename Config::Params;

  template <class Tile>
  CUTE_HOST_DEVICE static int count(int length) {
    return ceil_div(max(length, 1), Tile::kRows);
  }

  CUTE_DEVICE static char* query(Params const& params, int batch, int head, int tile) {
    return query_rows<Query>(params, params.query_hi_lo, batch, head, tile);
  }
  CUTE_DEVICE static char* key(Params const& params, int batch, int head, int tile) {
    return key_rows<Key>(params, params.key_hi_lo, batch, head, tile);
  }
  CUTE_DEVICE static char* value(Params const& params, int batch, int head, int tile) {
    return key_rows<Value>(params, params.value_hi_lo, batch, head, tile);
  }
  CUTE_DEVICE static char* out_gradient(Params const& params, int batch, int head, int tile) {
    return query_rows<OutGradient>(params, params.out_gradient_hi_lo, batch, head, tile);
  }

 private:
  struct QueryRows : Config {
    static constexpr int kTileQuery = kWarpgroupRows;
  };

  template <class Tile>
  CUTE_DEVICE static char* query_rows(Params const& params, char* tiles, int batch, int head,
                                      int tile) {
    int const count_of_head = count<Tile>(params.shape.query_length);
    return tiles + query_tile_index<QueryRows>(params.shape, count_of_head, batch, head, tile) *
                       Tile::kBytes;
  }

  template <class Tile>
  CUTE_DEVICE static char* key_rows(Params const& params, char* tiles, int batch, int head,
                                    int tile) {
    int const count_of_head = count<Tile>(params.shape.key_length);
    return tiles +
           key_tile_index<Config>(params.shape, count_of_head, batch, head, tile) * Tile::kBytes;
  }
};

}  // namespace memeff
