// 16-byte vectors in global memory, in rows that begin at any multiple of kAlignment bytes.
#pragma once

#include <cute/numeric/numeric_types.hpp>

#include <memeff/arch/copy.cuh>
#include <memeff/arch/tf32.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

// Loads the first `bytes` of 16 bytes; the others become zero. The address and `bytes` are
// multiples of kAlignment.
template <int kAlignment>
CUTE_DEVICE uint4 load_vector(char const* address, int bytes) {
  if constexpr (kAlignment == 16) {
    return *reinterpret_cast<uint4 const*>(address);
  } else {
    using Piece = typename cute::uint_bit<8 * kAlignment>::type;
    union {
      uint4 vector;
      Piece pieces[16 / kAlignment];
    } value;
    CUTE_UNROLL
    for (int i = 0; i < 16 / kAlignment; ++i) {
      bool const exists = i * kAlignment < bytes;
      value.pieces[i] = exists ? reinterpret_cast<Piece const*>(address)[i] : Piece(0);
    }
    return value.vector;
  }
}

// Writes the first `bytes` of 16.
template <int kAlignment>
CUTE_DEVICE void store_vector(char* address, uint4 const& vector, int bytes) {
  if constexpr (kAlignment == 16) {
    *reinterpret_cast<uint4*>(address) = vector;
  } else {
    using Piece = typename cute::uint_bit<8 * kAlignment>::type;
    union {
      uint4 vector;
      Piece pieces[16 / kAlignment];
    } const value = {vector};
    CUTE_UNROLL
    for (int i = 0; i < 16 / kAlignment; ++i) {
      if (i * kAlignment < bytes) reinterpret_cast<Piece*>(address)[i] = value.pieces[i];
    }
  }
}

template <class Element>
CUTE_DEVICE float word_dot(uint32_t x, uint32_t y) {
  if constexpr (kIs32Bit<Element>) {
    return __uint_as_float(x) * __uint_as_float(y);
  } else {
    return unpack<Element>(x, 0) * unpack<Element>(y, 0) +
           unpack<Element>(x, 1) * unpack<Element>(y, 1);
  }
}

// The dot product of two vectors of elements.
template <class Element>
CUTE_DEVICE float vector_dot(uint4 const& x, uint4 const& y) {
  return word_dot<Element>(x.x, y.x) + word_dot<Element>(x.y, y.y) + word_dot<Element>(x.z, y.z) +
         word_dot<Element>(x.w, y.w);
}

// Stores a shared tile. `rows` points to element (0, 0) of the tile in global memory; only rows
// below row_bound and columns below column_bound are written.
template <class Tile, int kThreads, int kAlignment = 16>
CUTE_DEVICE void store_rows(uint32_t tile, char* rows, long long row_bytes, int row_bound,
                            int column_bound) {
  constexpr int kRowChunks = Tile::kColumns / Tile::kChunkColumns;
  CUTE_UNROLL
  for (int i = threadIdx.x; i < Tile::kRows * kRowChunks; i += kThreads) {
    int const row = i / kRowChunks;
    int const chunk = i % kRowChunks;
    if (row < row_bound && chunk * Tile::kChunkColumns < column_bound) {
      store_vector<kAlignment>(rows + row * row_bytes + chunk * 16,
                               load_shared_vector(tile + Tile::byte_offset(row, chunk)),
                               column_bound * Tile::kElementBytes - chunk * 16);
    }
  }
}

}  // namespace memeff
