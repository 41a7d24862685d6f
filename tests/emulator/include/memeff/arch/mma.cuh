// The matrix instruction of the sm80 family.
#pragma once

#include <memeff/arch/format.cuh>

namespace memeff {

template <class Element, class Accumulator>
CUTE_DEVICE void mma(Accumulator&& c, uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  float accumulators[4] = {c(0), c(1), c(2), c(3)};
  emulator::mma(kFormat<Element>, accumulators, a, b0, b1);
  for (int i = 0; i < 4; ++i) c(i) = accumulators[i];
}

}  // namespace memeff
