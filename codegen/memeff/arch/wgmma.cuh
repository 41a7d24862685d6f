// The asynchronous matrix instruction of Hopper (wgmma), through CuTe's atoms.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/tensor_impl.hpp>

namespace memeff {

using cute::SM90::GMMA::Major;

// m64nNk16 of one warpgroup, f32 accumulators. With g = l / 4 and q = l % 4, lane l of warp w has
// the m16n8 elements of every eight columns: rows 16w + g and 16w + g + 8, columns 2q and 2q + 1.
template <class Element, int kColumns, Major kLeftMajor, Major kRightMajor>
using WgmmaShared =
    decltype(cute::SM90::GMMA::ss_op_selector<
             Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
             kLeftMajor, kRightMajor>());

// The atom with the left operand in registers, as fragments of m16k16.
template <class Element, int kColumns, Major kRightMajor>
using WgmmaRegister =
    decltype(cute::SM90::GMMA::rs_op_selector<
             Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
             Major::K, kRightMajor>());

template <class Operation, class Accumulators, class... Operands, int... kIndex>
CUTE_DEVICE void issue_wgmma(Accumulators& c, bool accumulate, cute::seq<kIndex...>,
                             Operands... operands) {
  using cute::SM90::GMMA::ScaleOut;
  Operation::fma(operands..., c(kIndex)..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}

// Issues c (+)= a b for operands given by matrix descriptors. Without `accumulate` c is
// overwritten.
template <class Element, Major kLeftMajor, Major kRightMajor, class Accumulators>
CUTE_DEVICE void wgmma(Accumulators& c, uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kElements = decltype(cute::size(c))::value;
  issue_wgmma<WgmmaShared<Element, 2 * kElements, kLeftMajor, kRightMajor>>(
      c, accumulate, cute::make_seq<kElements>{}, a, b);
}

// As above with a in registers.
template <class Element, Major kRightMajor, class Accumulators>
CUTE_DEVICE void wgmma(Accumulators& c, uint32_t const (&a)[4], uint64_t b, bool accumulate) {
  constexpr int kElements = decltype(cute::size(c))::value;
  issue_wgmma<WgmmaRegister<Element, 2 * kElements, kRightMajor>>(
      c, accumulate, cute::make_seq<kElements>{}, a[0], a[1], a[2], a[3], b);
}

// Orders the following products after all earlier accesses to registers (wgmma.fence). Hazard:
// writes to shared memory need fence_tma_store(), too.
CUTE_DEVICE void begin_products() { cute::warpgroup_arrive(); }
CUTE_DEVICE void commit_products() { cute::warpgroup_commit_batch(); }

template <int kPending>
CUTE_DEVICE void wait_products() {
  cute::warpgroup_wait<kPending>();
}

// Hides an accumulator and memory from the optimizer, which does not see that a running product
// writes them.
CUTE_DEVICE void fence_accumulator(float& accumulator) {
  asm volatile("" : "+f"(accumulator)::"memory");
}

// Raises or lowers the register count of every thread of this warpgroup.
template <int kRegisters>
CUTE_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
CUTE_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace memeff
