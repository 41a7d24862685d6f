// Writes a tile of accumulators to global memory, through shared memory or directly, in vectors of
// 16 bytes.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/vector.cuh>

namespace memeff {

// Stores accumulators through a shared tile. Hazard: every thread of the CTA must have read the
// tile's previous content.
template <class Element, class Tile, class Grid, int kThreads, int kAlignment, class Accumulators>
CUTE_DEVICE void store_tile(uint32_t tile, Accumulators const& accumulators, char* rows,
                            long long row_bytes, int row_bound, int column_bound) {
  store_accumulators<Element, Tile, Grid>(tile, accumulators);
  sync_threads();
  store_rows<Tile, kThreads, kAlignment>(tile, rows, row_bytes, row_bound, column_bound);
}

// The first of the eight adjacent columns (of every 32) that a lane of a quad stores.
CUTE_DEVICE int lane_column() { return int(threadIdx.x) % 4 * 8; }

// Transposes the 4 x 4 words of a quad: word i of lane j becomes word j of lane i.
CUTE_DEVICE void transpose_quad(uint32_t (&words)[4]) {
  CUTE_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) {
    bool const upper = threadIdx.x & distance;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      low = upper ? received : low;
      high = upper ? high : received;
    }
  }
}

// Writes row r of the accumulators (a lane has elements of two) to global memory without shared
// memory, if it is `valid`. A lane of a quad has two of each eight columns; the quad exchanges
// them, so that a lane has eight adjacent columns of each 32, and `row` points to its first. All
// lanes of a warp call it. Rows begin and end at multiples of 16 bytes.
//
// Stores are predicated on purpose. With a branch around each vector the compiler recomputes every
// address after it and splits vectors into words.
template <class Element, class Accumulators>
CUTE_DEVICE void store_row(char* row, Accumulators const& accumulators, int r, int columns,
                           bool valid) {
  constexpr int kQuad = 4;
  constexpr int kBlocks = decltype(cute::size<2>(accumulators))::value;
  int const lane_columns = columns - lane_column();
  // The last quad of blocks may have columns that do not exist. No lane stores them.
  auto element = [&](int i, int n) { return n < kBlocks ? accumulators(i, 0, n) : 0.0f; };
  CUTE_UNROLL
  for (int n = 0; n < kBlocks; n += kQuad) {
    if constexpr (kIs32Bit<Element>) {
      uint32_t words[2][kQuad];  // of even and of odd columns
      CUTE_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        CUTE_UNROLL
        for (int i = 0; i < kQuad; ++i) {
          words[odd][i] = __float_as_uint(element(2 * r + odd, n + i));
        }
        transpose_quad(words[odd]);
      }
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint32_t const vector[4] = {words[0][2 * i], words[1][2 * i], words[0][2 * i + 1],
                                    words[1][2 * i + 1]};
        store_global_vector_if(valid && n * 8 + i * 4 < lane_columns, row + n * 32 + i * 16,
                               vector);
      }
    } else {
      uint32_t pairs[kQuad];
      CUTE_UNROLL
      for (int i = 0; i < kQuad; ++i) {
        pairs[i] = pack<Element>(element(2 * r, n + i), element(2 * r + 1, n + i));
      }
      transpose_quad(pairs);
      store_global_vector_if(valid && n * 8 < lane_columns, row + n * 16, pairs);
    }
  }
}

// A lane's part of a row of 16-bit elements, in the vectors that store_row() writes.
template <int kBlocks>
struct RowVectors {
  static constexpr int kQuad = 4;
  static_assert(kBlocks % kQuad == 0);

  uint32_t words[kBlocks / kQuad][kQuad];

  // Starts the loads; the arguments are those of store_row().
  CUTE_DEVICE void load(char const* row, int columns, bool valid) {
    int const lane_columns = columns - lane_column();
    CUTE_UNROLL
    for (int i = 0; i < kBlocks / kQuad; ++i) {
      bool const exists = valid && i * 8 * kQuad < lane_columns;
      load_global_vector_if(exists, row + i * 16 * kQuad, words[i]);
    }
  }

  // From vectors to pairs in the layout of accumulators. All lanes of a warp call it.
  CUTE_DEVICE void transpose() {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks / kQuad; ++i) transpose_quad(words[i]);
  }
  // The two elements of column block n, after transpose().
  CUTE_DEVICE uint32_t pair(int n) const { return words[n / kQuad][n % kQuad]; }
};

}  // namespace memeff
