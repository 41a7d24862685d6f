// 3xFP16: f32 elements as two f16 numbers, and the hi/lo tiles of query, key, value and dO that the
// kernels read. Split kernels write them to workspaces in their shared-memory layout.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/arch/tf32.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/query_tiles.cuh>

namespace memeff {

// f32 elements on tensor cores are the sum of two f16 numbers, hi and lo, which together have 22
// bits.
//
// f16 overflows at 2^16 and loses bits below 2^-14. Each row is therefore scaled by a power of two
// that brings its largest number to [2^14, 2^15). A number more than 2^17 below the largest keeps
// fewer than 22 bits; its error is at most 2^-38 of the largest.

// An f32 number in memory that is multiplied in three f16 products; the product of the two low
// parts is below the rounding of f32.
struct F16x3 {
  CUTE_DEVICE explicit F16x3(float x) : value(x) {}
  float value;
};

// The factor of a row's numbers, and the inverse for its sums of products.
struct RowScale {
  float scale;
  float inverse;

  // `greatest` has the bits of the largest magnitude; magnitudes below 2^-112 count as 2^-112.
  CUTE_DEVICE static RowScale of(int greatest) {
    constexpr int kBias = 127;
    constexpr int kTarget = 14;
    constexpr int kLeast = kTarget + 1;
    int const exponent = max(greatest >> 23, kLeast);
    return {__int_as_float((kTarget + 2 * kBias - exponent) << 23),
            __int_as_float((exponent - kTarget) << 23)};
  }
};

// Splits two adjacent scaled numbers into two packed f16 pairs. The high parts are split off like
// TF32 numbers, whose mantissa is as long as that of f16.
CUTE_DEVICE void split_to_f16(float x, float y, uint32_t& high, uint32_t& low) {
  uint32_t x_high, x_low, y_high, y_low;
  split_to_tf32(__float_as_uint(x), x_high, x_low);
  split_to_tf32(__float_as_uint(y), y_high, y_low);
  high = pack<cutlass::half_t>(__uint_as_float(x_high), __uint_as_float(y_high));
  low = pack<cutlass::half_t>(__uint_as_float(x_low), __uint_as_float(y_low));
}

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
