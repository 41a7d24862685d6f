// The formats of the operands of matrix instructions.
#pragma once

#include <memeff/arch/tf32.cuh>

namespace memeff {

template <class Element>
constexpr emulator::Format kFormat = emulator::Format::tf32;
template <>
constexpr emulator::Format kFormat<cutlass::bfloat16_t> = emulator::Format::bf16;
template <>
constexpr emulator::Format kFormat<cutlass::half_t> = emulator::Format::f16;

}  // namespace memeff
