// 3xFP16: f32 elements on tensor cores as the sum of two f16 numbers, hi and lo, which together
// have 22 bits.
//
// f16 overflows at 2^16 and loses bits below 2^-14. Each row is therefore scaled by a power of two
// that brings its largest number to [2^14, 2^15). A number more than 2^17 below the largest keeps
// fewer than 22 bits; its error is at most 2^-38 of the largest.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/arch/tf32.cuh>

namespace memeff {

// An f32 number in memory that is multiplied in three f16 products; the product of the two low
// parts is below the rounding of f32.
struct F16x3 {
  CUTE_DEVICE explicit F16x3(float x) : value(x) {}
  float value;
};

// The factor of a row's numbers, and the inverse for its sums of products.
struct RowScale {
  float scale;
  float inverse;

  // `greatest` has the bits of the largest magnitude; magnitudes below 2^-112 count as 2^-112.
  CUTE_DEVICE static RowScale of(int greatest) {
    constexpr int kBias = 127;
    constexpr int kTarget = 14;
    constexpr int kLeast = kTarget + 1;
    int const exponent = max(greatest >> 23, kLeast);
    return {__int_as_float((kTarget + 2 * kBias - exponent) << 23),
            __int_as_float((exponent - kTarget) << 23)};
  }
};

// Splits two adjacent scaled numbers into two packed f16 pairs. The high parts are split off like
// TF32 numbers, whose mantissa is as long as that of f16.
CUTE_DEVICE void split_to_f16(float x, float y, uint32_t& high, uint32_t& low) {
  uint32_t x_high, x_low, y_high, y_low;
  split_to_tf32(__float_as_uint(x), x_high, x_low);
  split_to_tf32(__float_as_uint(y), y_high, y_low);
  high = pack<cutlass::half_t>(__uint_as_float(x_high), __uint_as_float(y_high));
  low = pack<cutlass::half_t>(__uint_as_float(x_low), __uint_as_float(y_low));
}

}  // namespace memeff
