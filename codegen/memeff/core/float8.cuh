// Pools of float8 (e4m3): conversion to float16, and the element type of keys and values.
#pragma once

#include <memeff/arch/math.cuh>

namespace memeff {

// An e4m3 number in memory.
struct Float8 {
  uint8_t bits;
};

// The element type of keys and values in global memory.
template <class Config>
using KeyValueElement = cute::conditional_t<Config::kFloat8Pages, Float8, typename Config::Element>;

// The numbers are the results of unpack_float8() times this factor.
constexpr float kFloat8Factor = kConvertsFloat8 ? 1.0f : 256.0f;

// Restores the NaNs of a pair of float16. Moving the bits of an e4m3 NaN gives 1.875, a number that
// no finite e4m3 becomes; it alone overflows in the first product here, and the second turns the
// infinity into NaN.
CUTE_DEVICE uint32_t restore_float8_nan(uint32_t pair) {
  constexpr uint32_t kOverflow = 0x784c784c;  // 35200: 1.75, of the largest e4m3, remains finite
  return multiply_add_f16x2(multiply_add_f16x2(pair, kOverflow, 0), 0, pair);
}

// Converts four e4m3 numbers to pairs of float16, exactly: bytes (0, 1) and (2, 3), or with
// kAlternate bytes (0, 2) and (1, 3).
//
// Before sm_89, which has an instruction, the code moves sign and magnitude to their places in
// float16. The three bits of the mantissa are the upper ones of float16, and the exponent's bias
// there is larger by 8. Subnormal numbers are subnormal in both.
template <bool kAlternate>
CUTE_DEVICE void unpack_float8(uint32_t packed, uint32_t& first, uint32_t& second) {
  constexpr uint32_t kExchange = 0x3120;  // swaps the inner bytes
  if constexpr (kConvertsFloat8) {
    uint32_t const adjacent = kAlternate ? permute_bytes(packed, 0, kExchange) : packed;
    float8_to_f16(adjacent, first, second);
  } else {
    constexpr uint32_t kSigns = 0x80008000;
    constexpr uint32_t kMagnitudes = 0x3f803f80;
    uint32_t const alternate = kAlternate ? packed : permute_bytes(packed, 0, kExchange);
    first = restore_float8_nan((alternate << 8 & kSigns) | (alternate << 7 & kMagnitudes));
    second = restore_float8_nan((alternate & kSigns) | (alternate >> 1 & kMagnitudes));
  }
}

}  // namespace memeff
