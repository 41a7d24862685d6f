// Adds a bias tile in shared memory to scores.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/shared_tile.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Reads a lane's pairs of adjacent columns in a 16x16 block of a BiasTile, in the layout of the
// accumulators, for add_bias().
template <class Tile>
class BiasReader {
 public:
  using Element = typename Tile::Element;
  static constexpr bool kPerRow = Tile::kPerRow;

  // `row` and `column` are the warp's first element inside the tile; `source` is the address of the
  // tile's first element in global memory.
  CUTE_DEVICE BiasReader(uint32_t tile, int row, int column, char const* source,
                         long long row_bytes) {
    int const lane = thread_index() % kWarpSize;
    int const lane_row = kMatrices ? lane % 16 : lane / 4;
    int const lane_column = kMatrices ? lane / 16 * 8 : lane % 4 * 2;
    int const first_row = Tile::kPerRow ? row + lane_row : 0;
    base_ = tile + first_row * Tile::kRowBytes + (column + lane_column) * int(sizeof(Element));
    // The rows of a lane differ by multiples of eight, so they all begin at the same bit of a word.
    shift_ = kMatrices ? 0 : Tile::bit_shift(source + first_row * row_bytes);
  }

  // pairs[chunk][half]: half is 1 in rows 8-15, chunk is 1 in columns 8-15.
  CUTE_DEVICE void load(float2 (&pairs)[2][2], int row_block, int column_block) const {
    uint32_t const block = base_ + (Tile::kPerRow ? row_block * 16 * Tile::kRowBytes : 0) +
                           column_block * 16 * int(sizeof(Element));
    if constexpr (kMatrices) {
      uint32_t fragment[4];
      load_matrix<false>(fragment, block);
      unpack_matrices<Element>(pairs, fragment);
    } else {
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        uint32_t const address = block + chunk * 8 * int(sizeof(Element));
        pairs[chunk][0] = load_pair(address);
        pairs[chunk][1] =
            Tile::kPerRow ? load_pair(address + 8 * Tile::kRowBytes) : pairs[chunk][0];
      }
    }
  }

 private:
  static constexpr bool kMatrices = Tile::kVectors && sizeof(Element) == 2;

  CUTE_DEVICE float2 load_pair(uint32_t address) const {
    if constexpr (sizeof(Element) == 4) {
      return load_shared_pair(address);
    } else {
      return unpack_pair<Element>(
          __funnelshift_r(load_shared(address), load_shared(address + 4), shift_));
    }
  }

  uint32_t base_;
  uint32_t shift_;
};

// BiasReader for a SharedTile of 16-bit elements, read from its first column on.
template <class Element, class Tile, int kColumnBlocks>
class TmaBiasReader {
 public:
  static constexpr bool kPerRow = true;

  CUTE_DEVICE TmaBiasReader(uint32_t tile, int row)
      : fragments_(tile, LaneOrder::rows_first, row, 0) {}

  CUTE_DEVICE void load(float2 (&pairs)[2][2], int row_block, int column_block) const {
    uint32_t fragment[4];
    load_matrix<false>(fragment, fragments_.at(row_block, column_block));
    unpack_matrices<Element>(pairs, fragment);
  }

 private:
  FragmentPointer<Tile, kColumnBlocks, true> fragments_;
};

// Adds a bias to the scores of a warp; `bias` is a BiasReader or a TmaBiasReader.
template <class Reader, class Accumulators>
CUTE_DEVICE void add_bias(Accumulators& scores, Reader const& bias, float bias_scale) {
  auto add = [&](float& score, float x) { score = biased_score(score, x, bias_scale); };
  constexpr int kRowBlocks = cute::size<1>(Accumulators{});
  constexpr int kColumnBlocks = cute::size<2>(Accumulators{}) / 2;
  CUTE_UNROLL
  for (int block = 0; block < kColumnBlocks; ++block) {
    float2 pairs[2][2];
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      if (Reader::kPerRow || m == 0) bias.load(pairs, m, block);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const chunk = i / 2;
        int const half = i % 2;
        add(scores(2 * half, m, 2 * block + chunk), pairs[chunk][half].x);
        add(scores(2 * half + 1, m, 2 * block + chunk), pairs[chunk][half].y);
      }
    }
  }
}

}  // namespace memeff
