// Conversions, and reductions over lanes.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

// A bias below this masks its element, as -inf does.
constexpr float kMaskedBias = -1e37f;

// Floats of this size and above are whole numbers. Scores that a bias makes this large have no
// fraction left, and their logsumexp loses the logarithm of the sum.
constexpr float kWholeFloats = 0x1p24f;

// The inverse of pack(): element `index` (0 low, 1 high) of a packed pair.
template <class Element>
CUTE_DEVICE float unpack(uint32_t packed, int index) {
  uint16_t const bits = static_cast<uint16_t>(index == 0 ? packed : packed >> 16);
  return static_cast<float>(Element::bitcast(bits));
}

// Maximum or sum over the four lanes that own a row of an m16n8 accumulator.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Whether x is true in any lane. A branch on the vote is uniform for ptxas; after a branch that may
// diverge it computes addresses per lane.
CUTE_DEVICE bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }

CUTE_DEVICE float warp_max(float x) {
  CUTE_UNROLL
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  }
  return x;
}

CUTE_DEVICE float warp_sum(float x) {
  CUTE_UNROLL
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// Sum over the eight lanes that own a column of an m16n8 accumulator.
CUTE_DEVICE float row_lanes_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

}  // namespace memeff
