// The product that adds `slope * column` to the scores of a KV block: see
// collective/softmax/linear_scores.cuh.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

// The right operand is a constant. Its row for a column c of the KV block is [c, c, c, 0, 0, ...],
// 16 numbers, which 16 bits represent exactly. The left operand has the parts of the slope in each
// row. The product takes as long as 16 more columns of queries and keys would.
template <class Config, bool kOn = Config::kLinearScores>
struct ColumnProduct {
  static constexpr int kBytes = 0;

  CUTE_DEVICE static void write(uint32_t, int) {}
  template <class Scores>
  CUTE_DEVICE static void add(Scores&, LinearScores<Config> const&, uint32_t) {}
};

template <class Config>
struct ColumnProduct<Config, true> {
  using Element = typename Config::Element;
  // The narrowest tile that descriptors support has rows of 32 numbers. Nothing reads the last 16.
  using Tile = SharedTile<Config::kTileKey, 32>;
  static constexpr int kBytes = Tile::kBytes;
  static_assert(Config::kTileKey <= 256);  // bfloat16 has 8 bits

  // Writes the right operand with `threads` threads. Hazard: a barrier must follow.
  CUTE_DEVICE static void write(uint32_t tile, int threads) {
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < 2 * Config::kTileKey; i += threads) {
      int const column = i / 2;
      float const number = i % 2 == 0 ? float(column) : 0.0f;
      store_shared_vector(tile + Tile::byte_offset(column, i % 2),
                          __uint_as_float(pack<Element>(number, number)),
                          __uint_as_float(pack<Element>(number, 0.0f)), 0.0f, 0.0f);
    }
    fence_tma_store();
  }

  // Starts the product, after that of queries and keys. Hazard: tensor cores truncate sums, so the
  // term that may be the largest comes last.
  template <class Scores>
  CUTE_DEVICE static void add(Scores& scores, LinearScores<Config> const& linear, uint32_t tile) {
    uint32_t const left[4] = {linear.parts, linear.parts, 0, 0};
    wgmma<Element, Major::K>(scores, left, DescriptorOperand<Tile, Contiguous::k>(tile).at(0),
                             true);
  }
};

}  // namespace memeff
