// Float operations of users' functions, as lax defines them, and approximations for kernels of
// 16-bit inputs. docs/guide/precision.md lists the error bounds of the approximations.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/function/integers.cuh>

namespace memeff::function {

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
