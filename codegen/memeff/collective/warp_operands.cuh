// The operands of the matrix products of one warp, in shared memory or registers.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/shared_tile.cuh>

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

}  // namespace memeff
