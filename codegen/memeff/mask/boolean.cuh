// A dense boolean mask: one bit per element, in words of 32 columns.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// One (batch, head) slice of a mask's bits, from the first element of a tile on. Bits beyond the
// last column are 0.
struct BitSlice {
  unsigned short const* origin;  // 16 columns each; a tile begins at a multiple of 16
  long long row_stride;

  CUTE_DEVICE BitSlice(BitView const& view, int batch, int head, int row, int column)
      : row_stride(2 * view.row_stride) {
    unsigned const* const slice =
        view.words + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
    origin = reinterpret_cast<unsigned short const*>(slice) + column / 16;
  }

  // kColumns bits of a row, 16 or 32; a multiple of them begins at `column`.
  template <int kColumns>
  CUTE_DEVICE unsigned at(int row, int column) const {
    unsigned short const* const bits = origin + row * row_stride + column / 16;
    if constexpr (kColumns == 16) return __ldg(bits);
    return __ldg(reinterpret_cast<unsigned const*>(bits));
  }
};

// The bits of a tile for one warp. They are divided over its lanes, so that a lane needs one or two
// registers and a kernel can read them ahead, while a product runs.
template <class Grid, bool kTransposed>
class BooleanMask {
  // The accumulators' columns are columns of the mask or, if transposed, its rows.
  static constexpr int kColumns = kTransposed ? Grid::kWarpRows : Grid::kWarpColumns;
  static constexpr int kPartColumns = kColumns % 32 == 0 ? 32 : 16;
  static constexpr int kParts = kColumns / kPartColumns;           // of a row
  static constexpr int kRowParts = 2 * Grid::kRowBlocks * kParts;  // of the rows of a lane
  static constexpr int kRegisters =
      kTransposed ? (Grid::kWarpColumns + 31) / 32 * kParts : (kRowParts + 3) / 4;
  unsigned parts_[kRegisters];

 public:
  // Bits from the bounds on, which are relative to the tile's first element, are 0.
  CUTE_DEVICE BooleanMask(BitSlice const& slice, int row_bound, int column_bound) {
    unsigned const thread = thread_index();
    unsigned const lane = thread % kWarpSize;
    auto const part = [&](int row, int column) {
      bool const inside = row < row_bound && column < column_bound;
      return inside ? slice.at<kPartColumns>(row, column) : 0;
    };
    CUTE_UNROLL
    for (int i = 0; i < kRegisters; ++i) {
      if constexpr (kTransposed) {
        // A lane has one row of each 32.
        int const row = i / kParts * 32 + int(lane);
        bool const exists = Grid::kWarpColumns % 32 == 0 || row < Grid::kWarpColumns;
        int const column = Grid::row(thread) + i % kParts * kPartColumns;
        parts_[i] = exists ? part(Grid::column(thread) + row, column) : 0;
      } else {
        // The four lanes of a quad share the parts of their rows.
        int const index = 4 * i + int(lane % 4);
        bool const exists = kRowParts % 4 == 0 || index < kRowParts;
        int const row = Grid::row(thread) + index / kParts * 8 + int(lane / 4);
        int const column = Grid::column(thread) + index % kParts * kPartColumns;
        parts_[i] = exists ? part(row, column) : 0;
      }
    }
  }

  // Sets scores to -inf where the mask is false. All lanes of the warp must call it together.
  template <class Accumulators>
  CUTE_DEVICE void apply(Accumulators& scores) const {
    if constexpr (kTransposed) {
      apply_transposed(scores);
    } else {
      apply_rows(scores);
    }
  }

 private:
  CUTE_DEVICE unsigned from_lane(int part, unsigned lane) const {
    return __shfl_sync(0xffffffffu, parts_[part], int(lane));
  }

  template <class Accumulators>
  CUTE_DEVICE void apply_rows(Accumulators& scores) const {
    constexpr int kBlocks = kPartColumns / 8;
    unsigned const lane = threadIdx.x % kWarpSize;
    CUTE_UNROLL
    for (int index = 0; index < kRowParts; ++index) {
      unsigned const bits = from_lane(index / 4, lane / 4 * 4 + index % 4) >> (lane % 4 * 2);
      int const m = index / kParts / 2;
      int const half = index / kParts % 2;
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          bool const valid = bits >> (8 * n + i) & 1;
          if (!valid) scores(2 * half + i, m, index % kParts * kBlocks + n) = -infinity();
        }
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void apply_transposed(Accumulators& scores) const {
    constexpr int kBlocks = kPartColumns / 16;
    unsigned const lane = threadIdx.x % kWarpSize;
    CUTE_UNROLL
    for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int part = 0; part < kParts; ++part) {
          unsigned const bits =
              from_lane(n / 4 * kParts + part, n % 4 * 8 + lane % 4 * 2 + i) >> (lane / 4);
          CUTE_UNROLL
          for (int half = 0; half < 2 * kBlocks; ++half) {
            bool const valid = bits >> (8 * half) & 1;
            if (!valid) scores(half % 2 * 2 + i, part * kBlocks + half / 2, n) = -infinity();
          }
        }
      }
    }
  }
};

}  // namespace memeff
