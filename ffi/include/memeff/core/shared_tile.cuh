// A tile of 16-bit elements in shared memory, and how a warp walks it with ldmatrix.
#pragma once

#include <cute/swizzle_layout.hpp>
#include <cute/tensor.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// [kRows, kColumns] elements as a stack of panels, each [kRows, 64] (or 32 where 64 does not divide
// the columns). Inside a panel the 16-byte chunks of a row are XOR-swizzled with the row, so that
// the eight rows of an ldmatrix matrix fall into eight different bank groups.
template <int kRows_, int kColumns_>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static_assert(kColumns % 32 == 0 && kRows % 16 == 0);

  static constexpr int kPanelColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr int kChunks = kPanelColumns / 8;  // 16-byte chunks in a row of a panel
  static constexpr int kRowBytes = kPanelColumns * 2;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;

  // The same map as a CuTe layout, kept as the definition that byte_offset() is checked against.
  // 128-byte rows: Swizzle<3,3,3>; 64-byte rows: two rows share 128 bytes, so Swizzle<2,3,3>.
  using Atom =
      decltype(cute::composition(cute::Swizzle<kPanelColumns == 64 ? 3 : 2, 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kPanelColumns>>,
                                              cute::Stride<cute::Int<kPanelColumns>, cute::_1>>{}));
  using Layout = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));  // (kRows, kColumns)

  CUTE_HOST_DEVICE static constexpr int byte_offset(int row, int chunk) {
    int const panel = chunk / kChunks;
    int const swizzle = kChunks == 8 ? row & 7 : (row >> 1) & 3;
    return panel * kPanelBytes + row * kRowBytes + ((chunk % kChunks) ^ swizzle) * 16;
  }
};

template <class Tile>
CUTE_HOST_DEVICE constexpr bool offsets_match_layout() {
  for (int row = 0; row < 16; ++row) {
    for (int chunk = 0; chunk < Tile::kColumns / 8; ++chunk) {
      if (Tile::byte_offset(row, chunk) != 2 * int(typename Tile::Layout{}(row, chunk * 8))) {
        return false;
      }
    }
  }
  return true;
}
static_assert(offsets_match_layout<SharedTile<64, 128>>());
static_assert(offsets_match_layout<SharedTile<64, 96>>());
static_assert(offsets_match_layout<SharedTile<16, 32>>());

// The two ways in which the lanes of a warp address the four 8x8 matrices of one ldmatrix.x4:
//   rows_first:    matrices (rows 0-7), (rows 8-15), then the same rows of the next chunk
//   columns_first: matrices (chunk 0), (chunk 1) of rows 0-7, then of rows 8-15
enum class LaneOrder { rows_first, columns_first };

// Addresses of the 16x16 blocks of a tile, as one warp reads them from `row`, `column` on.
// at(i, j) is the block i*16 rows down and j*16 columns to the right; i and j must be unrolled
// constants, which leaves one XOR and an immediate offset for each ldmatrix.
template <class Tile, int kColumnBlocks, bool kFromColumnZero>
struct FragmentPointer {
  static constexpr int kBlocksPerPanel = Tile::kPanelColumns / 16;
  // Adding a block index to the chunk bits is an XOR only where no carry can leave them.
  static constexpr bool kNoCarry = kFromColumnZero || (is_power_of_two(kColumnBlocks) &&
                                                       Tile::kColumns % (16 * kColumnBlocks) == 0);

  uint32_t base;
  int first_row;
  int first_chunk;

  CUTE_DEVICE FragmentPointer(uint32_t tile, LaneOrder order, int row, int column_block) {
    int const lane = threadIdx.x % kWarpSize;
    bool const rows_first = order == LaneOrder::rows_first;
    int const lane_row = rows_first ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    int const lane_chunk = rows_first ? lane >> 4 : (lane >> 3) & 1;
    first_row = row + lane_row;
    first_chunk = 2 * column_block + lane_chunk;
    base = kNoCarry ? tile + Tile::byte_offset(first_row, first_chunk) : tile;
  }

  // Hides the value of the base from the optimiser. Otherwise it hoists the XORed addresses out of
  // the loop over tiles, where they occupy a dozen registers that the accumulators need.
  CUTE_DEVICE void recompute_addresses() { asm volatile("" : "+r"(base)); }

  CUTE_DEVICE uint32_t at(int row_block, int column_block) const {
    if constexpr (kNoCarry) {
      return (base ^ ((column_block % kBlocksPerPanel) * 32)) +
             (column_block / kBlocksPerPanel) * Tile::kPanelBytes +
             row_block * 16 * Tile::kRowBytes;
    } else {
      return base + Tile::byte_offset(first_row + row_block * 16, first_chunk + 2 * column_block);
    }
  }
};

}  // namespace memeff
