// f32 elements on tensor cores, which read TF32: the sign, the exponent and 10 bits of mantissa.
#pragma once

#include <cute/config.hpp>

namespace memeff {

// An f32 number in memory that is multiplied in one TF32 product: about three decimal digits.
struct Tf32 {
  CUTE_DEVICE explicit Tf32(float x) : value(x) {}
  float value;
};

// An f32 number in memory that is multiplied as the sum of two TF32 numbers, in three products (the
// product of the two low parts is below the rounding of f32).
struct Tf32x3 {
  CUTE_DEVICE explicit Tf32x3(float x) : value(x) {}
  float value;
};

// The size of an element determines its layout in shared memory and in fragments.
template <class Element>
constexpr bool kIs32Bit = sizeof(Element) == 4;

// Makes the tensor cores round. They truncate the low bits, which biases every product towards
// zero. After this factor (1 + 0.7 of half a unit in the last place) the truncated value has an
// error below 0.72 units that is 0 on average. Infinities, NaN and TF32 numbers are unchanged.
CUTE_DEVICE uint32_t round_to_tf32(uint32_t x) {
  return __float_as_uint(__uint_as_float(x) * (1.0f + 1.44f * 0x1p-12f));
}

// Splits x into high + low, up to 2^-23 of x. Any NaN propagates at least to `low`.
CUTE_DEVICE void split_to_tf32(uint32_t x, uint32_t& high, uint32_t& low) {
  high = (x + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

}  // namespace memeff
