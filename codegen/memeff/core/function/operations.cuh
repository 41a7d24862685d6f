// Integer and float operations of users' functions, as lax defines them.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/core/common.cuh>

namespace memeff::function {

// Integers. C++ leaves overflow, division by zero and wide shifts undefined; here every input has a
// result.

CUTE_DEVICE int wrapping_add(int a, int b) { return int(unsigned(a) + unsigned(b)); }
CUTE_DEVICE int wrapping_subtract(int a, int b) { return int(unsigned(a) - unsigned(b)); }
CUTE_DEVICE int wrapping_multiply(int a, int b) { return int(unsigned(a) * unsigned(b)); }
CUTE_DEVICE int wrapping_negate(int a) { return int(0u - unsigned(a)); }
CUTE_DEVICE int absolute(int a) { return a < 0 ? wrapping_negate(a) : a; }

// Rounds towards zero. x / 0 is -1, all bits set, and the smallest int divided by -1 is itself.
CUTE_DEVICE int divide(int a, int b) {
  if (b == 0) return -1;
  return b == -1 ? wrapping_negate(a) : a / b;
}
CUTE_DEVICE unsigned divide(unsigned a, unsigned b) { return b == 0 ? ~0u : a / b; }

// The remainder has the sign of a. The remainder of a division by zero is a.
CUTE_DEVICE int remainder(int a, int b) {
  if (b == 0) return a;
  return b == -1 ? 0 : a % b;
}
CUTE_DEVICE unsigned remainder(unsigned a, unsigned b) { return b == 0 ? a : a % b; }

// Shifts by 32 or more move all bits out. So do shifts by negative amounts.
CUTE_DEVICE unsigned shift_left(unsigned a, unsigned bits) { return bits < 32 ? a << bits : 0; }
CUTE_DEVICE unsigned shift_right_logical(unsigned a, unsigned bits) {
  return bits < 32 ? a >> bits : 0;
}
CUTE_DEVICE int shift_right_arithmetic(int a, unsigned bits) {
  return a >> (bits < 32 ? bits : 31);
}

CUTE_DEVICE int sign(int a) { return (a > 0) - (a < 0); }

template <class Integer>
CUTE_DEVICE Integer maximum(Integer a, Integer b) {
  return a > b ? a : b;
}

template <class Integer>
CUTE_DEVICE Integer minimum(Integer a, Integer b) {
  return a < b ? a : b;
}

// Floats, and approximations for kernels of 16-bit inputs. docs/guide/precision.md lists the error
// bounds of the approximations.

CUTE_DEVICE float maximum(float a, float b) { return max_or_nan(a, b); }
CUTE_DEVICE float minimum(float a, float b) { return min_or_nan(a, b); }

// NaN and zeros keep their sign and value.
CUTE_DEVICE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }

CUTE_DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// The conversions of the hardware round towards zero, saturate, and turn NaN into 0, as XLA's do.
CUTE_DEVICE int to_int(float x) { return __float2int_rz(x); }
CUTE_DEVICE unsigned to_unsigned(float x) { return __float2uint_rz(x); }

// The intrinsic keeps the compiler from fusing the sum with the last product of expf.
CUTE_DEVICE float logistic(float x) { return 1.0f / __fadd_rn(1.0f, expf(-x)); }

CUTE_DEVICE float divide_approx(float a, float b) { return a * reciprocal_approx(b); }
CUTE_DEVICE float exp_approx(float x) { return exp2_approx(x * kLog2e); }
CUTE_DEVICE float log_approx(float x) { return log2_approx(x) * kLn2; }
CUTE_DEVICE float logistic_approx(float x) {
  return reciprocal_approx(1.0f + exp2_approx(x * -kLog2e));
}

}  // namespace memeff::function
