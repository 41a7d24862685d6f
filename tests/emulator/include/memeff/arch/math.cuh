// Arithmetic instructions.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/config.hpp>

namespace memeff {

// Subnormal arguments and results become zero.
CUTE_DEVICE float flush_to_zero(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

CUTE_DEVICE float exp2_approx(float x) { return flush_to_zero(std::exp2(flush_to_zero(x))); }
CUTE_DEVICE float reciprocal_approx(float x) { return flush_to_zero(1 / flush_to_zero(x)); }
CUTE_DEVICE float log2_approx(float x) { return std::log2(flush_to_zero(x)); }
CUTE_DEVICE float sqrt_approx(float x) { return std::sqrt(flush_to_zero(x)); }
CUTE_DEVICE float tanh_approx(float x) { return std::tanh(x); }

CUTE_DEVICE float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }
CUTE_DEVICE float min_or_nan(float a, float b) { return a < b || a != a ? a : b; }

CUTE_DEVICE int max_of_three(int a, int b, int c) { return std::max({a, b, c}); }

template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high) {
  return Element(low).raw() | uint32_t(Element(high).raw()) << 16;
}

// As before sm_89: without the instruction core/float8.cuh has more code to test.
constexpr bool kConvertsFloat8 = false;
CUTE_DEVICE void float8_to_f16(uint32_t, uint32_t&, uint32_t&) {}

CUTE_DEVICE uint32_t multiply_add_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  auto const element = [](uint32_t pair, int index) {
    return float(cutlass::half_t::bitcast(uint16_t(pair >> (16 * index))));
  };
  float results[2];
  for (int i = 0; i < 2; ++i) results[i] = element(a, i) * element(b, i) + element(c, i);
  return pack<cutlass::half_t>(results[0], results[1]);
}

CUTE_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t const bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const digit = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (digit % 8 * 8) & 255;
    if (digit >= 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

}  // namespace memeff
