// The division of a product's accumulators over the warps of a CTA or of a warpgroup.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

constexpr int kWarpgroupSize = 128;

constexpr int kWarpgroupRows = 64;

// The index of the calling thread's warpgroup. It is uniform over the warpgroup; the shuffle makes
// that visible to the compiler.
CUTE_DEVICE int warpgroup_index() {
  return __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
}

// Whether kWarps warps with `rows` rows each can tile a [kRows, kColumns] product. The columns of a
// warp must be a multiple of 16, the width of one ldmatrix.x4 of the right operand.
template <int kRows, int kColumns, int kWarps>
constexpr bool warps_fit(int rows) {
  return kRows % rows == 0 && kWarps % (kRows / rows) == 0 &&
         kColumns % (16 * (kWarps / (kRows / rows))) == 0;
}

// The rows of a warp: 32 if they fit, because then warps read each shared-memory operand least
// often.
template <int kRows, int kColumns, int kWarps>
constexpr int kPreferredWarpRows = warps_fit<kRows, kColumns, kWarps>(32) ? 32 : 16;

// Divides a [kRows, kColumns] product over kWarps warps; each owns kWarpRows x kWarpColumns of it.
// Maps accumulator elements to rows and columns.
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

  // Neighbouring warps have the same columns, so they read the same right operand at the same time.
  // Unsigned indices, and a column that is the constant 0, save instructions in every address.
  CUTE_DEVICE static int row(unsigned thread = threadIdx.x) {
    unsigned const warp = thread / kWarpSize;
    return (kColumnWarps == 1 ? warp : warp % kRowWarps) * kWarpRows;
  }
  CUTE_DEVICE static int column(unsigned thread = threadIdx.x) {
    return kColumnWarps == 1 ? 0 : thread / kWarpSize / kRowWarps * kWarpColumns;
  }

  CUTE_DEVICE static auto make_accumulators() {
    return cute::make_tensor<float>(
        cute::Shape<cute::_4, cute::Int<kRowBlocks>, cute::Int<2 * kColumnBlocks>>{});
  }  // (4, MMA_M, MMA_N)

  // Row and column of an accumulator element inside the whole product.
  CUTE_DEVICE static int element_row(int element, int m, unsigned thread = threadIdx.x) {
    return row(thread) + m * 16 + (element / 2) * 8 + thread % kWarpSize / 4;
  }
  CUTE_DEVICE static int element_column(int element, int n, unsigned thread = threadIdx.x) {
    return column(thread) + n * 8 + (thread % 4) * 2 + element % 2;
  }
};

// The grid of a product that one group of kWarps warps computes: rows and columns do not depend on
// which group.
template <int kRows, int kColumns, int kWarps, int kWarpRows>
struct GroupGrid : WarpGrid<kRows, kColumns, kWarps, kWarpRows> {
  using Grid = WarpGrid<kRows, kColumns, kWarps, kWarpRows>;
  static constexpr unsigned kThreads = kWarps * kWarpSize;

  CUTE_DEVICE static int row(unsigned thread = threadIdx.x) { return Grid::row(thread % kThreads); }
  CUTE_DEVICE static int column(unsigned thread = threadIdx.x) {
    return Grid::column(thread % kThreads);
  }
  CUTE_DEVICE static int element_row(int element, int m, unsigned thread = threadIdx.x) {
    return Grid::element_row(element, m, thread % kThreads);
  }
  CUTE_DEVICE static int element_column(int element, int n, unsigned thread = threadIdx.x) {
    return Grid::element_column(element, n, thread % kThreads);
  }
};

// The same for a warpgroup.
template <int kRows, int kColumns>
using WarpgroupGrid = GroupGrid<kRows, kColumns, kWarpgroupSize / kWarpSize, 16>;

}  // namespace memeff
