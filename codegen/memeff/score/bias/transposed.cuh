// A bias for transposed scores: keys are rows of the accumulators, and queries are columns.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/layout/score_view.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Reads a lane's elements of a BiasTile whose columns are the 16 keys of its warp.
template <class Tile>
class TransposedBiasReader {
 public:
  using Element = typename Tile::Element;
  static constexpr bool kPerRow = Tile::kPerRow;

  // `source` is the address of the tile's first element in global memory.
  CUTE_DEVICE TransposedBiasReader(uint32_t tile, char const* source, long long row_bytes) {
    int const lane = thread_index() % kWarpSize;
    CUTE_UNROLL
    for (int i = 0; i < kPairRows; ++i) {
      int const row = kPerRow ? lane % 4 * 2 + i : 0;
      base_[i] = tile + row * Tile::kRowBytes + lane / 4 * int(sizeof(Element)) +
                 Tile::bit_shift(source + row * row_bytes) / 8;
    }
  }

  // pairs[chunk][half]: two adjacent queries; half is 1 for keys 8-15, chunk is 1 for the second
  // eight queries of a block of 16.
  CUTE_DEVICE void load(float2 (&pairs)[2][2], int block) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const offset =
          (kPerRow ? (2 * block + i / 2) * 8 * Tile::kRowBytes : 0) + i % 2 * 8 * sizeof(Element);
      float const first = load_element(base_[0] + offset);
      float const second = kPairRows == 1 ? first : load_element(base_[kPairRows - 1] + offset);
      pairs[i / 2][i % 2] = make_float2(first, second);
    }
  }

 private:
  static constexpr int kPairRows = kPerRow ? 2 : 1;  // of the tile, for a pair of queries

  CUTE_DEVICE static float load_element(uint32_t address) {
    if constexpr (sizeof(Element) == 4) {
      return __uint_as_float(load_shared(address));
    } else {
      return unpack<Element>(load_shared(address & ~3u) >> address % 4 * 8, 0);
    }
  }

  uint32_t base_[kPairRows];
};

// TransposedBiasReader for a SharedTile of queries and keys, in which the keys of the warp begin at
// `column`.
template <class Element, class Tile>
class TransposedTmaBiasReader {
 public:
  static constexpr bool kPerRow = true;

  CUTE_DEVICE TransposedTmaBiasReader(uint32_t tile, int column) {
    unsigned const lane = unsigned(thread_index()) % kWarpSize;
    base_ = tile + Tile::byte_offset(int(lane / 16 * 8 + lane % 8),
                                     column / Tile::kChunkColumns + int(lane / 8 % 2));
  }

  CUTE_DEVICE void load(float2 (&pairs)[2][2], int block) const {
    uint32_t fragment[4];
    load_matrix<true>(fragment, base_ + block * 16 * Tile::kRowBytes);
    unpack_matrices<Element>(pairs, fragment);
  }

 private:
  uint32_t base_;
};

// Like add_bias(), for transposed scores.
template <class Reader, class Accumulators>
CUTE_DEVICE void add_bias_transposed(Accumulators& scores, Reader const& bias, float bias_scale) {
  float2 pairs[2][2];
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(scores); ++n) {
    if (n % 2 == 0 && (Reader::kPerRow || n == 0)) bias.load(pairs, n / 2);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float2 const pair = pairs[Reader::kPerRow ? n % 2 : 0][half];
      float& first = scores(2 * half, 0, n);
      float& second = scores(2 * half + 1, 0, n);
      first = biased_score(first, pair.x, bias_scale);
      second = biased_score(second, pair.y, bias_scale);
    }
  }
}

// A bias in registers, for kernels without shared memory for it. Each lane loads its own elements
// of a tile while the tensor cores compute the scores, and adds them afterwards.
template <class Config, class Grid, bool kHolds = has_bias_tile<Config>()>
struct RegisterTransposedBias {
  CUTE_DEVICE void load(ScoreView const&, int, int, int, int, int, int) {}
  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators&, float) const {}
};

template <class Config, class Grid>
struct RegisterTransposedBias<Config, Grid, true> {
  using Element = typename Config::BiasElement;
  static constexpr int kRows = 2 * Grid::kRowBlocks;
  // The pairs that a lane holds, of adjacent queries. If the bias is broadcast over rows, one
  // element serves all queries.
  static constexpr bool kPerQuery = Config::kBiasAccess != BiasAccess::columns;
  static constexpr int kPairs = kPerQuery ? 2 * Grid::kColumnBlocks : 1;
  Pair<Element> pairs[kRows][kPairs];

  // Loads the bias of the tile at (row, column) of the scores. Elements beyond the bounds, which
  // are relative to the tile, are 0.
  CUTE_DEVICE void load(ScoreView const& bias, int batch, int head, int row, int column,
                        int row_bound, int column_bound) {
    int const thread = thread_index();
    ScoreViewSlice<Element> const slice(bias, element_of<Config>(bias, batch), head, row, column);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int const key = Grid::element_row(2 * (r % 2), r / 2, thread);
      int const bound = key < column_bound ? row_bound : 0;
      CUTE_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        int const query = kPerQuery ? Grid::element_column(0, n, thread) : 0;
        pairs[r][n] = {Element(0), Element(0)};
        if (query < bound) pairs[r][n].first = *slice.at(query, key);
        if (kPerQuery && query + 1 < bound) pairs[r][n].second = *slice.at(query + 1, key);
      }
    }
    // Packs pairs; otherwise each 16-bit element would take a whole register.
    if constexpr (sizeof(Element) == 2) {
      CUTE_UNROLL
      for (int i = 0; i < kRows * kPairs; ++i) {
        hide_value(reinterpret_cast<uint32_t&>(pairs[i / kPairs][i % kPairs]));
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators& scores, float bias_scale) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        Pair<Element> const& pair = pairs[r][kPerQuery ? n : 0];
        float& first = scores(2 * (r % 2), r / 2, n);
        float& second = scores(2 * (r % 2) + 1, r / 2, n);
        first = biased_score(first, float(pair.first), bias_scale);
        second = biased_score(second, float(kPerQuery ? pair.second : pair.first), bias_scale);
      }
    }
  }
};

}  // namespace memeff
