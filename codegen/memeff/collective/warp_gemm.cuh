// Matrix products of one warp: operands in shared memory or registers, accumulators in registers.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/arch/copy.cuh>
#include <memeff/arch/mma.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// The contiguous dimension of an operand in shared memory: the summed dimension k, or the outer
// one, rows (left) or columns (right).
enum class Contiguous { k, outer };

// Elements of the summed dimension in one step of a product: 32 bytes of a row.
template <class Element>
constexpr int kStepElements = 32 / int(sizeof(Element));

// The left operand of one warp in shared memory, [kRowBlocks*16, kSteps*kStepElements]: 16-bit
// elements with either contiguous dimension, or 32-bit elements contiguous along k. The
// specialization below is for 32-bit elements contiguous along rows.
template <class Tile, Contiguous kOrder, int kRowBlocks, int kElementBytes = Tile::kElementBytes>
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

template <class Tile, int kRowBlocks>
struct LeftOperand<Tile, Contiguous::outer, kRowBlocks, 4> {
  ElementPointer<Tile, kRowBlocks, SumOrder::natural> pointer;

  CUTE_DEVICE LeftOperand(uint32_t tile, int row) : pointer(tile, row) {}

  CUTE_DEVICE void recompute_addresses() { pointer.recompute_addresses(); }

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int row_block, int step) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      fragment[i] = load_shared(pointer.at(step, row_block, i / 2, i % 2));
    }
  }
};

// The right operand, [kSteps*kStepElements, kColumnBlocks*16] of one warp. The sum order is that of
// the left operand; it only matters for 32-bit elements that are contiguous along columns.
template <class Tile, Contiguous kOrder, int kColumnBlocks, SumOrder kSumOrder = SumOrder::natural,
          int kElementBytes = Tile::kElementBytes>
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

template <class Tile, int kColumnBlocks, SumOrder kSumOrder>
struct RightOperand<Tile, Contiguous::outer, kColumnBlocks, kSumOrder, 4> {
  ElementPointer<Tile, kColumnBlocks, kSumOrder> pointer;

  CUTE_DEVICE RightOperand(uint32_t tile, int column) : pointer(tile, column) {}

  CUTE_DEVICE void recompute_addresses() { pointer.recompute_addresses(); }

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int column_block, int step) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      fragment[i] = load_shared(pointer.at(step, column_block, i % 2, i / 2));
    }
  }
};

// A part of an operand, without its first blocks and steps.
template <class Operand>
struct OperandPart {
  Operand operand;
  int first_block;
  int first_step;

  CUTE_DEVICE void recompute_addresses() { operand.recompute_addresses(); }

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int block, int step) const {
    operand.load(fragment, first_block + block, first_step + step);
  }
};

// The left operand in registers: fragments[row block][step][4].
template <int kRowBlocks, int kSteps, int kElementBytes>
struct RegisterOperand {
  uint32_t fragments[kRowBlocks][kSteps][4];

  CUTE_DEVICE void recompute_addresses() {}

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int row_block, int step) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) fragment[i] = fragments[row_block][step][i];
  }
};

// A fragment in the form that the tensor cores read, and the products of a 16-column block with it:
// accumulators of row block m, columns 16n to 16n + 15 += left[m] * right.
template <class Element>
struct ProductTerms {
  uint32_t elements[4];

  CUTE_DEVICE void set(uint32_t const (&fragment)[4]) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) elements[i] = fragment[i];
  }

  template <class Accumulators, int kRowBlocks>
  CUTE_DEVICE static void multiply(Accumulators& accumulators, int n,
                                   ProductTerms const (&left)[kRowBlocks],
                                   ProductTerms const& right) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        mma<Element>(accumulators(cute::_, m, 2 * n + half), left[m].elements,
                     right.elements[2 * half], right.elements[2 * half + 1]);
      }
    }
  }
};

template <>
CUTE_DEVICE void ProductTerms<Tf32>::set(uint32_t const (&fragment)[4]) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) elements[i] = round_to_tf32(fragment[i]);
}

template <>
struct ProductTerms<Tf32x3> {
  uint32_t high[4];
  uint32_t low[4];

  CUTE_DEVICE void set(uint32_t const (&fragment)[4]) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) split_to_tf32(fragment[i], high[i], low[i]);
  }

  // Adds the small terms first. The three products of an accumulator are issued far apart, so that
  // they do not wait for each other.
  template <class Accumulators, int kRowBlocks>
  CUTE_DEVICE static void multiply(Accumulators& accumulators, int n,
                                   ProductTerms const (&left)[kRowBlocks],
                                   ProductTerms const& right) {
    CUTE_UNROLL
    for (int term = 0; term < 3; ++term) {
      uint32_t const(&b)[4] = term == 1 ? right.low : right.high;
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        uint32_t const(&a)[4] = term == 0 ? left[m].low : left[m].high;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          mma<Tf32>(accumulators(cute::_, m, 2 * n + half), a, b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }
};

// accumulators += left * right, summed by the tensor cores.
//
// The right operand is read kReadAhead blocks ahead of the tensor cores, and the left operand of
// the next k-step with the last block of this one. Reading a whole k-step ahead would need up to 64
// registers, which spills next to a 128-register output.
template <class Element, int kSteps, int kReadAhead = 2, class Accumulators, class Left,
          class Right>
CUTE_DEVICE void multiply(Accumulators& accumulators, Left left, Right right) {
  constexpr int kRowBlocks = cute::size<1>(Accumulators{});
  constexpr int kColumnBlocks = cute::size<2>(Accumulators{}) / 2;
  constexpr int kBlocks = kSteps * kColumnBlocks;
  constexpr int kAhead = kBlocks < kReadAhead ? kBlocks : kReadAhead;
  uint32_t a[2][kRowBlocks][4];
  uint32_t b[kAhead + 1][4];
  ProductTerms<Element> left_terms[kRowBlocks];
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
    // Keeps the compiler from reading several steps ahead, which would spill.
    if (n == 0 && step > 0) __syncwarp();
    if (block + kAhead < kBlocks) load_right(block + kAhead);
    if (n == kColumnBlocks - 1 && step + 1 < kSteps) load_left(step + 1);
    if (n == 0) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) left_terms[m].set(a[step % 2][m]);
    }
    ProductTerms<Element> right_terms;
    right_terms.set(b[block % (kAhead + 1)]);
    ProductTerms<Element>::multiply(accumulators, n, left_terms, right_terms);
  }
}

// The largest divisor of `size` that is at most `limit`.
CUTE_HOST_DEVICE constexpr int part_size(int size, int limit) {
  while (size % limit != 0) --limit;
  return limit;
}

// Computes left * right in parts of kPartSteps steps and of as many columns as fit
// kPartAccumulators, and calls add(accumulator, part, step) for each sum; `step` is the first step
// of the part.
template <class Element, int kSteps, int kPartSteps, int kReadAhead, int kPartAccumulators,
          class Accumulators, class Left, class Right, class Add>
CUTE_DEVICE void multiply_in_parts(Accumulators& accumulators, Left const& left, Right const& right,
                                   Add add) {
  constexpr int kRowBlocks = cute::size<1>(Accumulators{});
  constexpr int kColumnBlocks = cute::size<2>(Accumulators{}) / 2;
  constexpr int kPartColumns = part_size(kColumnBlocks, kPartAccumulators / (8 * kRowBlocks));
  CUTE_UNROLL
  for (int column = 0; column < kColumnBlocks; column += kPartColumns) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; step += kPartSteps) {
      auto part = cute::make_tensor<float>(
          cute::Shape<cute::_4, cute::Int<kRowBlocks>, cute::Int<2 * kPartColumns>>{});
      cute::clear(part);
      multiply<Element, kPartSteps, kReadAhead>(part, OperandPart<Left>{left, 0, step},
                                                OperandPart<Right>{right, column, step});
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < 2 * kPartColumns; ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            add(accumulators(i, m, 2 * column + n), part(i, m, n), step);
          }
        }
      }
    }
  }
}

// accumulators += left * right over kSteps * kStepElements of k.
//
// Tensor cores truncate an accumulator instead of rounding it, so a long sum is too small by more
// than all other errors of f32. With 32-bit elements they therefore sum only four steps (twelve
// products), and the parts are added with rounding.
template <class Element, int kSteps, int kReadAhead = 2, int kPartAccumulators = 32,
          class Accumulators, class Left, class Right>
CUTE_DEVICE void warp_gemm(Accumulators& accumulators, Left const& left, Right const& right) {
  if constexpr (!kIs32Bit<Element>) {
    multiply<Element, kSteps, kReadAhead>(accumulators, left, right);
  } else {
    multiply_in_parts<Element, kSteps, part_size(kSteps, 4), kReadAhead, kPartAccumulators>(
        accumulators, left, right, [](float& sum, float part, int) { sum += part; });
  }
}

// The sum order with which accumulators (m16n8 blocks) become the left operand of the next product
// without exchange between lanes. 16 bits: two neighbouring column blocks are exactly one m16k16
// fragment of the same lane. 32 bits: a column block is an m16k8 fragment if the right operand has
// the paired order.
template <class Element>
constexpr SumOrder kRegisterOrder = kIs32Bit<Element> ? SumOrder::paired : SumOrder::natural;

template <class Element, class Accumulators>
CUTE_DEVICE auto as_left_operand(Accumulators const& accumulators) {
  constexpr int kRowBlocks = cute::size<1>(Accumulators{});
  constexpr int kSteps = cute::size<2>(Accumulators{}) * 8 / kStepElements<Element>;
  RegisterOperand<kRowBlocks, kSteps, sizeof(Element)> operand;
  CUTE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if constexpr (kIs32Bit<Element>) {
          int const element = 2 * (i % 2) + i / 2;
          operand.fragments[m][step][i] = __float_as_uint(accumulators(element, m, step));
        } else {
          int const n = 2 * step + i / 2;
          int const element = 2 * (i % 2);
          operand.fragments[m][step][i] =
              pack<Element>(accumulators(element, m, n), accumulators(element + 1, m, n));
        }
      }
    }
  }
  return operand;
}

// Stores two elements, rounded to Element, to shared memory.
template <class Element>
CUTE_DEVICE void store_pair(uint32_t address, float first, float second) {
  if constexpr (kIs32Bit<Element>) {
    store_shared_pair(address, first, second);
  } else {
    store_shared(address, pack<Element>(first, second));
  }
}

template <class Accumulators>
CUTE_DEVICE void scale_accumulators(Accumulators& accumulators, float factor) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(accumulators); ++i) accumulators(i) *= factor;
}

// Writes accumulators, rounded to Element, into a shared tile.
template <class Element, class Tile, class Grid, class Accumulators>
CUTE_DEVICE void store_accumulators(uint32_t tile, Accumulators const& accumulators) {
  constexpr int kBlockChunks = 8 / Tile::kChunkColumns;
  int const lane_row = Grid::element_row(0, 0);
  int const lane_byte = (threadIdx.x % 4) * (2 * sizeof(Element));
  CUTE_UNROLL
  for (int m = 0; m < cute::size<1>(accumulators); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(accumulators); ++n) {
      int const chunk = (Grid::column() / 8 + n) * kBlockChunks + lane_byte / 16;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        store_pair<Element>(
            tile + Tile::byte_offset(lane_row + m * 16 + half * 8, chunk) + lane_byte % 16,
            accumulators(2 * half, m, n), accumulators(2 * half + 1, m, n));
      }
    }
  }
}

// Loads this warp's rows of a tile under `Grid` as a left operand, its first kSteps steps.
template <class Tile, class Grid, int kSteps = Tile::kColumns / 16>
CUTE_DEVICE auto load_operand(uint32_t tile) {
  RegisterOperand<1, kSteps, 2> operand;
  LeftOperand<Tile, Contiguous::k, 1> const source(tile, Grid::row());
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) source.load(operand.fragments[0][step], 0, step);
  return operand;
}

// Stores a left operand back to a tile; needs sm_90.
template <class Tile, class Grid, int kRowBlocks, int kSteps>
CUTE_DEVICE void store_operand(uint32_t tile,
                               RegisterOperand<kRowBlocks, kSteps, 2> const& operand) {
  int const thread = thread_index();  // keeps addresses out of registers across a loop
  FragmentPointer<Tile, kSteps, false> const target(tile, LaneOrder::rows_first, Grid::row(thread),
                                                    Grid::column(thread) / 16, thread);
  CUTE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      store_matrix(target.at(m, step), operand.fragments[m][step]);
    }
  }
}

// As above to the transposed tile: rows of the operand become columns.
template <class Tile, class Grid, int kSteps>
CUTE_DEVICE void store_operand_transposed(uint32_t tile,
                                          RegisterOperand<1, kSteps, 2> const& operand) {
  int const thread = thread_index();  // keeps addresses out of registers across a loop
  FragmentPointer<Tile, 1, false> const target(tile, LaneOrder::columns_first, Grid::column(thread),
                                               Grid::row(thread) / 16, thread);
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    store_matrix_transposed(target.at(step, 0), operand.fragments[0][step]);
  }
}

}  // namespace memeff
