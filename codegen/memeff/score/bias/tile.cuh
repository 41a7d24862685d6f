// A tile of the bias in shared memory, copied by cp.async while the tensor cores work.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// A bias below kMaskedBias gives a large negative score, which the softmax treats as masked.
CUTE_DEVICE float biased_score(float score, float bias, float bias_scale) {
  return fmaf(bias, bias_scale, score);
}

// Whether the main loop reads a bias. A bias that is broadcast over columns shifts whole rows. It
// only changes the logsumexp, which is corrected outside of the loop.
template <class Config>
CUTE_HOST_DEVICE constexpr bool has_bias_tile() {
  if constexpr (Config::kBias) return Config::kBiasAccess != BiasAccess::rows;
  return false;
}

// Whether scores may be so large that their sums lose precision. A bias or a function can make them
// so large; products do not.
template <class Config>
CUTE_HOST_DEVICE constexpr bool has_large_scores() {
  return has_bias_tile<Config>() || Config::kScoreFunction;
}

// Whether there is a bias that shifts whole rows, because it is broadcast over columns.
template <class Config>
CUTE_HOST_DEVICE constexpr bool shifts_rows() {
  return Config::kBias && !has_bias_tile<Config>();
}

// Whether TMA copies the tiles, through a tensor map.
template <class Config>
CUTE_HOST_DEVICE constexpr bool has_tma_bias() {
  if constexpr (Config::kBias) return Config::kTmaBias;
  return false;
}

// A tile of kRows x kColumns elements, or of one row if the bias is broadcast over rows. kThreads
// threads copy it.
template <class Config, int kRows_, int kColumns, int kThreads>
struct BiasTile {
  using Element = typename Config::BiasElement;
  static constexpr bool kPerRow = Config::kBiasAccess != BiasAccess::columns;
  static constexpr bool kVectors = Config::kBiasAccess == BiasAccess::vectors;
  static constexpr int kRows = kPerRow ? kRows_ : 1;
  // Rows are padded by eight elements. A row that begins inside a word needs one of them, and all
  // eight together put the rows that a warp reads at once into different banks.
  static constexpr int kRowBytes = (kColumns + 8) * int(sizeof(Element));
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kBytes % 16 == 0);

  // Starts the copies of rows [0, row_bound) and columns [0, column_bound) of the tile, whose first
  // element is at `source`. The rest of the tile becomes zero.
  CUTE_DEVICE static void copy(uint32_t tile, int thread, char const* source, long long row_bytes,
                               int row_bound, int column_bound) {
    if constexpr (kVectors) {
      copy_vectors(tile, thread, source, row_bytes, row_bound, column_bound);
    } else {
      copy_words(tile, thread, source, row_bytes, row_bound, column_bound);
    }
  }

  // The bit position of a row's first element in its word.
  CUTE_DEVICE static uint32_t bit_shift(char const* row) {
    return uint32_t(reinterpret_cast<unsigned long long>(row)) % 4 * 8;
  }

 private:
  CUTE_DEVICE static void copy_vectors(uint32_t tile, int thread, char const* source,
                                       long long row_bytes, int row_bound, int column_bound) {
    constexpr int kChunkElements = 16 / int(sizeof(Element));
    constexpr int kChunks = kColumns / kChunkElements;
    constexpr int kThreadRows = kThreads / kChunks;
    static_assert(kThreads % kChunks == 0);
    int const thread_row = thread / kChunks;
    int const chunk = thread % kChunks;
    bool const valid = chunk * kChunkElements < column_bound;
    source += thread_row * row_bytes + chunk * 16;
    tile += thread_row * kRowBytes + chunk * 16;
    CUTE_UNROLL
    for (int row = 0; row < kRows; row += kThreadRows) {
      if (kRows % kThreadRows == 0 || thread_row + row < kRows) {
        copy_async(tile + row * kRowBytes, source, valid && thread_row + row < row_bound);
      }
      source += kThreadRows * row_bytes;
    }
  }

  // Copies whole words, from the one in which a row begins. The part of the first word before the
  // row is never used, and the part of the last word beyond the bound is not read.
  CUTE_DEVICE static void copy_words(uint32_t tile, int thread, char const* source,
                                     long long row_bytes, int row_bound, int column_bound) {
    constexpr int kRowWords = kColumns * int(sizeof(Element)) / 4 + (sizeof(Element) < 4 ? 1 : 0);
    constexpr int kLanes = kRowWords > kWarpSize / 2 ? kWarpSize : kWarpSize / 2;  // per row
    int const lane = thread % kLanes;
    for (int row = thread / kLanes; row < kRows; row += kThreads / kLanes) {
      char const* const begin = source + row * row_bytes;
      int const before = bit_shift(begin) / 8;
      int const bytes = row < row_bound ? column_bound * int(sizeof(Element)) + before : 0;
      CUTE_UNROLL
      for (int word = lane; word < kRowWords; word += kLanes) {
        copy_word_async(tile + row * kRowBytes + word * 4, begin - before + word * 4,
                        min(max(bytes - word * 4, 0), 4));
      }
    }
  }
};

// Two adjacent elements.
template <class Element>
CUTE_DEVICE float2 unpack_pair(uint32_t pair) {
  return make_float2(unpack<Element>(pair, 0), unpack<Element>(pair, 1));
}

// Unpacks the four matrices that ldmatrix loads to pairs, in the order of the readers.
template <class Element>
CUTE_DEVICE void unpack_matrices(float2 (&pairs)[2][2], uint32_t const (&fragment)[4]) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) pairs[i / 2][i % 2] = unpack_pair<Element>(fragment[i]);
}

template <class Config, class Tile>
CUTE_HOST_DEVICE constexpr int bias_tile_bytes() {
  if constexpr (has_bias_tile<Config>()) return Tile::kBytes;
  return 0;
}

// The first element of a row; null if the main loop reads no bias.
template <class Config>
CUTE_DEVICE char const* bias_row(ScoreView const& bias, int batch, int head, int row) {
  if constexpr (has_bias_tile<Config>()) {
    using Element = typename Config::BiasElement;
    return reinterpret_cast<char const*>(static_cast<Element const*>(bias.data) +
                                         element_of<Config>(bias, batch) * bias.batch_stride +
                                         head * bias.head_stride + row * bias.row_stride);
  }
  return nullptr;
}

// The coordinates of a (batch, head) slice in the tensor map of a bias.
struct BiasSlice {
  int batch;
  int head;

  template <class Config>
  CUTE_DEVICE static BiasSlice of(ScoreView const& bias, int batch, int head) {
    return {bias.batch_stride == 0 ? 0 : element_of<Config>(bias, batch),
            bias.head_stride == 0 ? 0 : head};
  }
};

}  // namespace memeff
