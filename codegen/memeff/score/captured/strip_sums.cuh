// Sums over the rows of a warp's accumulators, for each column or each diagonal.
//
// A strip is 16 rows. A lane owns two rows, 8 apart, and adds them in registers first; for
// diagonals it shifts one of them by 8 columns. The remaining eight rows pass through shared
// memory, where each lane adds up the numbers of a column or a diagonal. Shuffles would take more
// instructions, because each row is shifted by a different distance.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

// The strip of one warp in shared memory: eight rows of floats, with zeros on both sides. The
// stride is an odd multiple of eight floats, so the four rows that half a warp stores lie in
// different banks.
template <class Grid>
struct StripSums {
  static constexpr int kRows = 8;
  static constexpr int kPad = 8;
  static constexpr int kColumns = Grid::kWarpColumns;
  static constexpr int kStride = kColumns + 8 + 2 * kPad;
  static constexpr int kWarpBytes = kRows * kStride * int(sizeof(float));
  static_assert(kStride % 16 == 8);

  // Diagonals are ordered by the difference of column and row, from kFirstDiagonal on.
  static constexpr int kDiagonals = kColumns + 15;
  static constexpr int kFirstDiagonal = -15;

  uint32_t memory;

  // Zeros both sides. Call it once, before the first store.
  CUTE_DEVICE void clear_pads(int lane) const {
    for (int i = lane; i < kRows * 2 * kPad; i += kWarpSize) {
      int const column = i % (2 * kPad);
      int const place = column < kPad ? column : kStride - 2 * kPad + column;
      store_shared(memory + (i / (2 * kPad) * kStride + place) * 4, 0);
    }
  }

  // Stores two adjacent numbers of a lane's row in chunk n of eight columns. Diagonals have one
  // chunk more than columns: chunk 0 contains only second rows, the last chunk only first rows.
  CUTE_DEVICE void store(int lane, int n, float x, float y) const {
    int const place = lane / 4 * kStride + kPad + lane % 4 * 2;
    store_shared_pair(memory + place * 4 + n * 32, x, y);
  }

  CUTE_DEVICE float column(int index) const { return sum<0>(kPad + index); }
  CUTE_DEVICE float diagonal(int index) const { return sum<1>(kPad - 7 + index); }

 private:
  template <int kShift>
  CUTE_DEVICE float sum(int place) const {
    float found = 0.0f;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      found += __uint_as_float(load_shared(memory + place * 4 + row * (kStride + kShift) * 4));
    }
    return found;
  }
};

}  // namespace memeff
