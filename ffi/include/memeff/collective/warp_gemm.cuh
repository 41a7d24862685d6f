// Matrix products of one warp, operands in shared memory or registers, accumulators in registers.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/arch/copy.cuh>
#include <memeff/arch/mma.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

// Can kWarps warps, each with `rows` rows, tile a [kRows, kColumns] product? Columns must stay a
// multiple of 16, the width of one ldmatrix.x4 of the right operand.
template <int kRows, int kColumns, int kWarps>
constexpr bool warps_fit(int rows) {
  return kRows % rows == 0 && kWarps % (kRows / rows) == 0 &&
         kColumns % (16 * (kWarps / (kRows / rows))) == 0;
}

// 32 rows where they fit: that reads each shared-memory operand least often.
template <int kRows, int kColumns, int kWarps>
constexpr int kPreferredWarpRows = warps_fit<kRows, kColumns, kWarps>(32) ? 32 : 16;

// How kWarps warps share a [kRows, kColumns] product: each owns kWarpRows x kWarpColumns of it.
template <int kRows, int kColumns, int kWarps,
          int kWarpRows_ = kPreferredWarpRows<kRows, kColumns, kWarps>>
struct WarpGrid {
  static constexpr int kWarpRows = kWarpRows_;
  static_assert(warps_fit<kRows, kColumns, kWarps>(kWarpRows),
                "no arrangement of the warps covers this product");
  static constexpr int kRowWarps = kRows / kWarpRows;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kWarpColumns = kColumns / kColumnWarps;
  static constexpr int kRowBlocks = kWarpRows / 16;
  static constexpr int kColumnBlocks = kWarpColumns / 16;

  // Neighbouring warps share columns: they read the same right operand at the same time.
  CUTE_DEVICE static int row(int thread = threadIdx.x) {
    return (thread / kWarpSize) % kRowWarps * kWarpRows;
  }
  CUTE_DEVICE static int column(int thread = threadIdx.x) {
    return (thread / kWarpSize) / kRowWarps * kWarpColumns;
  }

  CUTE_DEVICE static auto make_accumulators() {
    return cute::make_tensor<float>(
        cute::Shape<cute::_4, cute::Int<kRowBlocks>, cute::Int<2 * kColumnBlocks>>{});
  }  // (4, MMA_M, MMA_N)

  // Row and column, inside the whole product, of an accumulator element.
  CUTE_DEVICE static int element_row(int element, int m, int thread = threadIdx.x) {
    return row(thread) + m * 16 + (element / 2) * 8 + (thread % kWarpSize) / 4;
  }
  CUTE_DEVICE static int element_column(int element, int n, int thread = threadIdx.x) {
    return column(thread) + n * 8 + (thread % 4) * 2 + element % 2;
  }
};

// In which direction an operand lies contiguous in shared memory: along the summed dimension k, or
// along its own rows (left) or columns (right).
enum class Contiguous { k, outer };

// The left operand, [kRowBlocks*16, kSteps*16] of one warp.
template <class Tile, Contiguous kOrder, int kRowBlocks>
struct LeftOperand {
  static constexpr bool kByK = kOrder == Contiguous::k;
  FragmentPointer<Tile, kRowBlocks, kByK> pointer;

  CUTE_DEVICE LeftOperand(uint32_t tile, int row)
      : pointer(tile, kByK ? LaneOrder::rows_first : LaneOrder::columns_first, kByK ? row : 0,
                kByK ? 0 : row / 16) {}

  CUTE_DEVICE void recompute_addresses() { pointer.recompute_addresses(); }

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int row_block, int step) const {
    if constexpr (kByK) {
      load_matrix<false>(fragment, pointer.at(row_block, step));
    } else {
      load_matrix<true>(fragment, pointer.at(step, row_block));
    }
  }
};

// The right operand, [kSteps*16, kColumnBlocks*16] of one warp.
template <class Tile, Contiguous kOrder, int kColumnBlocks>
struct RightOperand {
  static constexpr bool kByK = kOrder == Contiguous::k;
  FragmentPointer<Tile, kColumnBlocks, kByK> pointer;

  CUTE_DEVICE RightOperand(uint32_t tile, int column)
      : pointer(tile, kByK ? LaneOrder::columns_first : LaneOrder::rows_first, kByK ? column : 0,
                kByK ? 0 : column / 16) {}

  CUTE_DEVICE void recompute_addresses() { pointer.recompute_addresses(); }

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int column_block, int step) const {
    if constexpr (kByK) {
      load_matrix<false>(fragment, pointer.at(column_block, step));
    } else {
      load_matrix<true>(fragment, pointer.at(step, column_block));
    }
  }
};

// The left operand already in registers: fragments[row block][step][4].
template <int kRowBlocks, int kSteps>
struct RegisterOperand {
  uint32_t fragments[kRowBlocks][kSteps][4];

  CUTE_DEVICE void recompute_addresses() {}

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int row_block, int step) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) fragment[i] = fragments[row_block][step][i];
  }
};

// accumulators += left * right over kSteps * 16 elements of k.
//
// The blocks of the right operand are read kReadAhead blocks before the tensor cores need them, and
// the left operand of the next k step with the last block of this one. Reading a whole k step ahead
// instead needs up to 64 registers, which spills beside a 128-register output.
template <class Element, int kSteps, int kReadAhead = 2, class Accumulators, class Left,
          class Right>
CUTE_DEVICE void warp_gemm(Accumulators& accumulators, Left left, Right right) {
  constexpr int kRowBlocks = cute::size<1>(Accumulators{});
  constexpr int kColumnBlocks = cute::size<2>(Accumulators{}) / 2;
  constexpr int kBlocks = kSteps * kColumnBlocks;
  constexpr int kAhead = kBlocks < kReadAhead ? kBlocks : kReadAhead;
  uint32_t a[2][kRowBlocks][4];
  uint32_t b[kAhead + 1][4];
  auto load_left = [&](int step) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) left.load(a[step % 2][m], m, step);
  };
  auto load_right = [&](int block) {
    right.load(b[block % (kAhead + 1)], block % kColumnBlocks, block / kColumnBlocks);
  };
  left.recompute_addresses();
  right.recompute_addresses();
  __syncwarp();
  load_left(0);
  CUTE_UNROLL
  for (int block = 0; block < kAhead; ++block) load_right(block);
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    int const step = block / kColumnBlocks;
    int const n = block % kColumnBlocks;
    // Keeps the compiler from reading several steps ahead, for which there are no registers.
    if (n == 0 && step > 0) __syncwarp();
    if (block + kAhead < kBlocks) load_right(block + kAhead);
    if (n == kColumnBlocks - 1 && step + 1 < kSteps) load_left(step + 1);
    uint32_t const(&right_fragment)[4] = b[block % (kAhead + 1)];
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      mma<Element>(accumulators(cute::_, m, 2 * n), a[step % 2][m], right_fragment[0],
                   right_fragment[1]);
      mma<Element>(accumulators(cute::_, m, 2 * n + 1), a[step % 2][m], right_fragment[2],
                   right_fragment[3]);
    }
  }
}

// Accumulators (m16n8 blocks) as the left operand of the next product: two neighbouring column
// blocks are exactly one m16k16 fragment of the same lane, so no lane exchanges anything.
template <class Element, class Accumulators>
CUTE_DEVICE auto as_left_operand(Accumulators const& accumulators) {
  constexpr int kRowBlocks = cute::size<1>(Accumulators{});
  constexpr int kSteps = cute::size<2>(Accumulators{}) / 2;
  RegisterOperand<kRowBlocks, kSteps> operand;
  CUTE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * step + i / 2;
        int const element = 2 * (i % 2);
        operand.fragments[m][step][i] =
            pack<Element>(accumulators(element, m, n), accumulators(element + 1, m, n));
      }
    }
  }
  return operand;
}

// Writes accumulators, rounded to Element, into a shared tile.
template <class Element, class Tile, class Grid, class Accumulators>
CUTE_DEVICE void store_accumulators(uint32_t tile, Accumulators const& accumulators) {
  int const lane_row = Grid::element_row(0, 0);
  int const lane_byte = (threadIdx.x % 4) * 4;
  CUTE_UNROLL
  for (int m = 0; m < cute::size<1>(accumulators); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(accumulators); ++n) {
      int const chunk = Grid::column() / 8 + n;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        store_shared(tile + Tile::byte_offset(lane_row + m * 16 + half * 8, chunk) + lane_byte,
                     pack<Element>(accumulators(2 * half, m, n), accumulators(2 * half + 1, m, n)));
      }
    }
  }
}

// The same of accumulators that are packed as a left operand already.
template <class Tile, class Grid, int kRowBlocks, int kSteps>
CUTE_DEVICE void store_operand(uint32_t tile, RegisterOperand<kRowBlocks, kSteps> const& operand) {
  int const thread = thread_index();  // or a loop's addresses wait in registers
  int const lane_row = Grid::element_row(0, 0, thread);
  int const lane_byte = (thread % 4) * 4;
  CUTE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const chunk = Grid::column(thread) / 8 + 2 * step + i / 2;
        store_shared(tile + Tile::byte_offset(lane_row + m * 16 + (i % 2) * 8, chunk) + lane_byte,
                     operand.fragments[m][step][i]);
      }
    }
  }
}

}  // namespace memeff
