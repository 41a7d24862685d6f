// Conversions, and sums and maxima over lanes.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

// A bias below this masks its element, as -inf does.
constexpr float kMaskedBias = -1e37f;

// What is subtracted from the exponents of a row, from the greatest of them. A row in which all
// keys so far are masked gets 0: -inf - -inf would be NaN, and what a bias masked would be 1.
CUTE_DEVICE float finite_reference(float greatest) {
  return greatest < kMaskedBias * kLog2e ? 0.0f : greatest;
}

// The reverse of pack(): element `index` (0 low, 1 high) of a packed pair.
template <class Element>
CUTE_DEVICE float unpack(uint32_t packed, int index) {
  uint16_t const bits = static_cast<uint16_t>(index == 0 ? packed : packed >> 16);
  return static_cast<float>(Element::bitcast(bits));
}

// 2^x for x <= 0 without the special function unit, to a relative error of 3e-6; exactly 0 for
// x <= -127, NaN for NaN. The addition rounds x to an integer n in its low bits, which become the
// exponent of a factor; the coefficients have the least maximal relative error for 2^f, |f| <= 1/2,
// among polynomials of degree 4 that are exact at 0.
CUTE_DEVICE float exp2_polynomial(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  constexpr uint32_t kOne = 0x3f800000;
  float const bounded = max_or_nan(x, -127.0f);
  float const rounded = bounded + kRound;
  float const f = bounded - (rounded - kRound);
  float power = 0.0095827f;
  power = fmaf(power, f, 0.055906877f);
  power = fmaf(power, f, 0.24024104f);
  power = fmaf(power, f, 0.6931241f);
  power = fmaf(power, f, 1.0f);
  return power * __uint_as_float((__float_as_uint(rounded) << 23) + kOne);
}

// Maximum or sum over the four lanes that share a row of an m16n8 accumulator.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

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

// Sum over the eight lanes that share a column of an m16n8 accumulator.
CUTE_DEVICE float row_lanes_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

}  // namespace memeff
