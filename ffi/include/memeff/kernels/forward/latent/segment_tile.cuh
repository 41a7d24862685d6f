// The memory for the outputs of a row tile in a batch-invariant call: a running sum or the result
// of one segment. LatentSegmentOutputSm90 writes it, and FmhaForwardLatentCombine reads it.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/layout/packed_rows.cuh>

namespace memeff {

// An access of a consumer's warp is 512 adjacent bytes: each lane has four columns of a row, as two
// pairs, of neighbouring blocks of eight columns. Rows are in blocks of 16, one for each warp. With
// few rows in the whole call there is memory for their blocks only.
template <class Config>
struct SegmentTile {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kWarpRows = 16;
  static constexpr int kPairs = Config::kValueDim / 16;  // of blocks of eight columns
  // The output, and for each consumer and lane the WeightSums of its two rows.
  static constexpr int kVectors = (2 * kPairs + 2) * kWarpSize;  // of a block of rows

  float4* first;  // of a block of rows

  CUTE_DEVICE SegmentTile(ForwardParams const& params, int slot, int block) {
    ProblemShape const& shape = params.shape;
    int const rows = min(PackedRows<true>(shape).count(shape.query_length), kTileQuery);
    int const blocks = ceil_div(rows, kWarpRows);
    first = reinterpret_cast<float4*>(params.partial_out) +
            ((long long)slot * blocks + block) * kVectors;
  }

  // The columns of a pair of blocks in row r of the two rows of a lane.
  CUTE_DEVICE float4& columns(int r, int pair, int lane) const {
    return first[(r * kPairs + pair) * kWarpSize + lane];
  }

  // The WeightSums of both rows of a lane. Each consumer has its own, so neither waits for the
  // other one.
  CUTE_DEVICE float4& weights(int consumer, int lane) const {
    return first[(2 * kPairs + consumer) * kWarpSize + lane];
  }
};

}  // namespace memeff
