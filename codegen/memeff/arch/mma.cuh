// The matrix instruction of the sm80 family (mma.sync), through CuTe's atoms.
#pragma once

#include <cute/arch/mma_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include <memeff/arch/tf32.cuh>

namespace memeff {

// m16n8k16, 16-bit operands, f32 accumulators. Lane l holds, with g = l / 4 and q = l % 4:
//   accumulators 0..3: (row g, columns 2q, 2q+1), (row g + 8, the same columns)
//   a 0..3: rows g, g+8 of k 0-7, then of k 8-15;  b 0, 1: k 0-7, k 8-15 of column g
template <class Element>
struct MmaAtom;

template <>
struct MmaAtom<cutlass::bfloat16_t> {
  using Operation = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};

// Before sm_80 the instruction has half the k; its two fragments are concatenated.
struct TwoHalfProducts {
  using Half = cute::SM75_16x8x8_F32F16F16F32_TN;
  CUTE_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1,
                              uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0,
                              float c1, float c2, float c3) {
    Half::fma(d0, d1, d2, d3, a0, a1, b0, c0, c1, c2, c3);
    Half::fma(d0, d1, d2, d3, a2, a3, b1, d0, d1, d2, d3);
  }
};

template <>
struct MmaAtom<cutlass::half_t> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  using Operation = TwoHalfProducts;
#else
  using Operation = cute::SM80_16x8x16_F32F16F16F32_TN;
#endif
};

// m16n8k8, TF32 operands: the layout above with k 0-3 and k 4-7, one 32-bit element per register.
template <>
struct MmaAtom<Tf32> {
  using Operation = cute::SM80_16x8x8_F32TF32TF32F32_TN;
};

template <class Element, class Accumulator>
CUTE_DEVICE void mma(Accumulator&& c, uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  MmaAtom<Element>::Operation::fma(c(0), c(1), c(2), c(3), a[0], a[1], a[2], a[3], b0, b1, c(0),
                                   c(1), c(2), c(3));
}

}  // namespace memeff
