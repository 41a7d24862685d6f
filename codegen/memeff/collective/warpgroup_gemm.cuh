// Matrix products of one warpgroup (wgmma): right operand in shared memory, left operand in shared
// memory or registers, accumulators in registers.
//
// The products are asynchronous. begin_products() orders them after all earlier accesses to
// registers, commit_products() closes a group, and wait_products<n>() waits until
// at most the n youngest groups are in flight.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/wgmma.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// The registers of each consumer thread if a producer thread keeps kProducer; both are multiples of
// eight. Hazard: together they must not exceed the registers of the CTA at launch, when all threads
// have the same number, because setmaxnreg.inc would wait forever for the rest.
template <int kThreads, int kProducer>
constexpr int consumer_registers() {
  constexpr int kLaunch = (64 << 10) / kThreads / 8 * 8;
  return (kThreads * kLaunch - kWarpgroupSize * kProducer) / (kThreads - kWarpgroupSize) / 8 * 8;
}
static_assert(consumer_registers<384, 24>() == 240 && consumer_registers<384, 32>() == 232);

// The part of an address of shared memory that a matrix descriptor of wgmma holds. Hazard: in a
// cluster the bits above are the CTA's rank, and in a descriptor they would change the leading
// offset.
CUTE_DEVICE uint32_t descriptor_address(uint32_t address) { return address & 0x3ffff; }

// A shared tile as an operand of wgmma, given by its matrix descriptor: start address, leading and
// stride offsets in units of 16 bytes, and the swizzle (PTX ISA, "Asynchronous warpgroup level
// matrix instructions"). at(step) is the descriptor of 16 elements of the summed dimension k.
//
// Contiguous::k: eight rows of a panel are consecutive; the leading offset has no meaning.
// Contiguous::outer: eight k of a panel are consecutive; panels are at the leading offset.
template <class Tile, Contiguous kOrder>
struct DescriptorOperand {
  static constexpr Major kMajor = kOrder == Contiguous::k ? Major::K : Major::MN;
  static constexpr uint64_t kSwizzle = Tile::kPanelColumns == 64 ? 1 : 2;  // of 128 or 64 bytes
  static constexpr uint64_t kLeading = kOrder == Contiguous::k ? 1 : Tile::kPanelBytes / 16;
  static constexpr uint64_t kStride = 8 * Tile::kRowBytes / 16;
  static constexpr uint64_t kLayout = kSwizzle << 62 | kStride << 32 | kLeading << 16;
  static_assert(kLeading < 1 << 14);

  uint64_t base;

  // `row` is a multiple of eight.
  CUTE_DEVICE explicit DescriptorOperand(uint32_t tile, int row = 0)
      : base(kLayout | (tile + row * Tile::kRowBytes) / 16) {}

  CUTE_DEVICE uint64_t at(int step) const {
    if constexpr (kOrder == Contiguous::k) {
      constexpr int kPanelSteps = Tile::kPanelColumns / 16;
      return base + (step / kPanelSteps * Tile::kPanelBytes + step % kPanelSteps * 32) / 16;
    } else {
      return base + step * 16 * Tile::kRowBytes / 16;
    }
  }
};

// Hides accumulators from the optimizer between the start of a product and the wait for it, so that
// it does not move their uses across either.
template <class Accumulators>
CUTE_DEVICE void fence_accumulators(Accumulators& accumulators) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(accumulators); ++i) fence_accumulator(accumulators(i));
}

// accumulators (+)= left * right over kSteps * 16 elements of k. The first step overwrites the
// accumulators unless `accumulate`.
template <class Element, int kSteps, class Accumulators, class Left, class Right>
CUTE_DEVICE void warpgroup_gemm(Accumulators& accumulators, Left const& left, Right const& right,
                                bool accumulate) {
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    wgmma<Element, Left::kMajor, Right::kMajor>(accumulators, left.at(step), right.at(step),
                                                accumulate || step > 0);
  }
}

template <class Element, int kSteps, class Accumulators, class Right>
CUTE_DEVICE void warpgroup_gemm(Accumulators& accumulators,
                                RegisterOperand<1, kSteps, 2> const& left, Right const& right,
                                bool accumulate = true) {
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    wgmma<Element, Right::kMajor>(accumulators, left.fragments[0][step], right.at(step),
                                  accumulate || step > 0);
  }
}

// How many k-steps of a left operand with `columns` columns fit in `registers` registers of a
// thread.
constexpr int register_steps(int columns, int registers) {
  return registers < 0 ? 0 : cute::min(registers / 4, columns / 16);
}

// A warpgroup's rows of a tile, the left operand of many products. The first steps are register
// operands, which saves reads of shared memory; the others stay in shared memory.
template <class Tile, class Grid, int kRegisterSteps>
struct RegisterRows {
  RegisterOperand<1, cute::max(kRegisterSteps, 1), 2> registers;
  DescriptorOperand<Tile, Contiguous::k> tile_rows;

  // `row` is the first of the warpgroup.
  CUTE_DEVICE RegisterRows(uint32_t tile, int row) : tile_rows(tile, row) {
    if constexpr (kRegisterSteps > 0) registers = load_operand<Tile, Grid, kRegisterSteps>(tile);
  }
};

template <class Element, int kSteps, class Accumulators, class Tile, class Grid, int kRegisterSteps,
          class Right>
CUTE_DEVICE void warpgroup_gemm(Accumulators& accumulators,
                                RegisterRows<Tile, Grid, kRegisterSteps> const& left,
                                Right const& right, bool accumulate) {
  cute::for_each(cute::make_seq<kSteps>{}, [&](auto step) {
    if constexpr (step < kRegisterSteps) {
      wgmma<Element, Right::kMajor>(accumulators, left.registers.fragments[0][step], right.at(step),
                                    accumulate || step > 0);
    } else {
      wgmma<Element, Major::K, Right::kMajor>(accumulators, left.tile_rows.at(step), right.at(step),
                                              accumulate || step > 0);
    }
  });
}

}  // namespace memeff
