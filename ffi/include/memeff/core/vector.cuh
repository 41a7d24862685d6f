// Vectors of 16 bytes in global memory, in rows that begin at any multiple of kAlignment bytes.
#pragma once

#include <cute/numeric/numeric_types.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// 16 bytes of which the first `bytes` exist; zeros for the others. The address is a multiple of
// kAlignment, and so is `bytes`.
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

// The reverse: writes the first `bytes` of 16.
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

}  // namespace memeff
