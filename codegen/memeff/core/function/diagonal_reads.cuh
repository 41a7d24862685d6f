// Reads of a function that are constant along diagonals, such as `table[head, query - key]`: a warp
// reads each diagonal of its accumulators once and distributes the values by shuffles.
#pragma once

#include <memeff/core/function/arrays.cuh>

namespace memeff::function {

// The arrays of a function for one element whose diagonal reads are already in registers.
template <class Arrays, class Function>
struct ArraysWithReads : Arrays {
  float values[Function::kFloatReads];

  template <int kRead>
  CUTE_DEVICE float read(float value) const {
    return Function::kDiagonalReads[kRead] ? values[kRead] : value;
  }
};

// The values that a warp reads for 16 rows and kColumns columns of accumulators. Diagonals are
// ordered by the difference of column and row, from kFirst on; consecutive lanes hold consecutive
// diagonals, in kSlots slots.
template <class Function, int kColumns>
struct DiagonalReads {
  static constexpr int kReads = Function::kFloatReads;
  static constexpr int kFirst = -15;
  static constexpr int kSlots = (kColumns + 15 + kWarpSize - 1) / kWarpSize;

  float values[kReads][kSlots];

  // read(difference, values) performs the reads of elements with this difference of column and row.
  template <class Read>
  CUTE_DEVICE DiagonalReads(int lane, Read read) {
    CUTE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      float found[kReads];
      read(kFirst + slot * kWarpSize + lane, found);
      CUTE_UNROLL
      for (int i = 0; i < kReads; ++i) values[i][slot] = found[i];
    }
  }

  // The values at columns 2q and 2q + 1 of row g in an m16n8 block (lane 4g + q) that lies
  // 8 * (chunk - 1) columns to the right of the first one. All lanes of the warp must call it.
  CUTE_DEVICE void at(int lane, int chunk, float (&pair)[2][kReads]) const {
    // The position in a slot, 0 to 14 after the start of the chunk. In the last of every four
    // chunks it can reach into the next slot.
    int const slot = chunk / 4;
    int const first = chunk % 4 * 8 + 7 + lane % 4 * 2 - lane / 4;
    bool const crosses = chunk % 4 == 3;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int read = 0; read < kReads; ++read) {
        if (!Function::kDiagonalReads[read]) continue;
        float& value = pair[i][read];
        int const place = first + i;
        int const source = crosses ? place & (kWarpSize - 1) : place;
        value = __shfl_sync(0xffffffffu, values[read][slot], source);
        if (!crosses) continue;
        float const next = __shfl_sync(0xffffffffu, values[read][slot + 1], source);
        if (place >= kWarpSize) value = next;
      }
    }
  }
};

}  // namespace memeff::function
