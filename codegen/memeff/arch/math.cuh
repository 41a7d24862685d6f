// Arithmetic instructions: the special function unit, packed conversions, bytes.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/config.hpp>

namespace memeff {

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 0 for inf, and inf for 0 and for subnormal numbers.
CUTE_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns NaN if either argument is NaN, unlike fmaxf and fminf.
CUTE_DEVICE float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a > b || a != a ? a : b;
#endif
}

CUTE_DEVICE float min_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a < b || a != a ? a : b;
#endif
}

// One instruction from sm_90 on.
CUTE_DEVICE int max_of_three(int a, int b, int c) { return __vimax3_s32(a, b, c); }

// Rounds two floats to two adjacent 16-bit elements, `low` at the lower address.
template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high);

template <>
CUTE_DEVICE uint32_t pack<cutlass::bfloat16_t>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
CUTE_DEVICE uint32_t pack<cutlass::half_t>(float low, float high) {
  __half2 const packed = __floats2half2_rn(low, high);  // one instruction from sm_80 on
  return reinterpret_cast<uint32_t const&>(packed);
}

// Converts four e4m3 numbers to two pairs of float16, exactly; needs sm_89. core/float8.cuh
// converts on any GPU.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kConvertsFloat8 = false;
CUTE_DEVICE void float8_to_f16(uint32_t, uint32_t&, uint32_t&) {}
#else
constexpr bool kConvertsFloat8 = true;
CUTE_DEVICE void float8_to_f16(uint32_t packed, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 x, y;\n"
      "mov.b32 {x, y}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, x;\n"
      "cvt.rn.f16x2.e4m3x2 %1, y;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(packed));
}
#endif

// a * b + c, elementwise on pairs of float16.
CUTE_DEVICE uint32_t multiply_add_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Selects four of the eight bytes of `a` (0-3) and `b` (4-7) by the four hex digits of the
// selector. A digit of 8 or more replicates the highest bit of byte `digit - 8`.
CUTE_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

}  // namespace memeff
