// The asynchronous matrix instruction of Hopper.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/arch/format.cuh>

namespace memeff {

using cute::SM90::GMMA::Major;

template <class Element, Major kLeftMajor, Major kRightMajor, class Accumulators>
CUTE_DEVICE void wgmma(Accumulators& c, uint64_t a, uint64_t b, bool accumulate) {
  emulator::wgmma(kFormat<Element>, &c(0), cute::size(c), nullptr, {a, kLeftMajor == Major::K},
                  {b, kRightMajor == Major::K}, accumulate);
}

template <class Element, Major kRightMajor, class Accumulators>
CUTE_DEVICE void wgmma(Accumulators& c, uint32_t const (&a)[4], uint64_t b, bool accumulate) {
  emulator::wgmma(kFormat<Element>, &c(0), cute::size(c), a, {}, {b, kRightMajor == Major::K},
                  accumulate);
}

CUTE_DEVICE void begin_products() {}
CUTE_DEVICE void commit_products() { emulator::commit_products(); }

template <int kPending>
CUTE_DEVICE void wait_products() {
  emulator::wait_products(kPending);
}

CUTE_DEVICE void fence_accumulator(float&) {}

template <int kRegisters>
CUTE_DEVICE void raise_registers() {}
template <int kRegisters>
CUTE_DEVICE void lower_registers() {}

}  // namespace memeff
