// The asynchronous matrix instruction of Hopper, through CuTe's atoms.
#pragma once

#include <cute/arch/mma_sm90.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

using cute::SM90::GMMA::Major;

// m64nNk16 of one warpgroup, f32 accumulators. Lane l of warp w holds, with g = l / 4 and
// q = l % 4, of every eight columns the elements of m16n8: rows 16w + g and 16w + g + 8, columns
// 2q and 2q + 1.
template <class Element, int kColumns, Major kLeftMajor, Major kRightMajor>
using WgmmaShared =
    decltype(cute::SM90::GMMA::ss_op_selector<
             Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
             kLeftMajor, kRightMajor>());

// The same with the left operand in registers, as fragments of m16k16.
template <class Element, int kColumns, Major kRightMajor>
using WgmmaRegister =
    decltype(cute::SM90::GMMA::rs_op_selector<
             Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
             Major::K, kRightMajor>());

CUTE_DEVICE cute::SM90::GMMA::ScaleOut accumulate_if(bool accumulate) {
  return accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
}

template <class Operation, class Accumulators, int... kIndex>
CUTE_DEVICE void wgmma(Accumulators& c, uint64_t a, uint64_t b, bool accumulate,
                       cute::seq<kIndex...>) {
  Operation::fma(a, b, c(kIndex)..., accumulate_if(accumulate));
}

template <class Operation, class Accumulators, int... kIndex>
CUTE_DEVICE void wgmma(Accumulators& c, uint32_t const (&a)[4], uint64_t b, bool accumulate,
                       cute::seq<kIndex...>) {
  Operation::fma(a[0], a[1], a[2], a[3], b, c(kIndex)..., accumulate_if(accumulate));
}

// Raises or lowers the registers of every thread of this warpgroup.
template <int kRegisters>
CUTE_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
CUTE_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace memeff
