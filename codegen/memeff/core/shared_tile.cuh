// A tile of elements in shared memory, and the addresses at which a warp reads it.
#pragma once

#include <cute/swizzle_layout.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// [kRows, kColumns] elements as a stack of panels with rows of 128 bytes (or 64 bytes if 128 does
// not divide a row). The last panel may be wider than the columns that are left. Inside a panel the
// 16-byte chunks of a row are XOR-swizzled with the row, so that the eight rows of an ldmatrix
// matrix fall into eight different bank groups.
//
// 32-bit elements are also read one by one, eight adjacent ones (two chunks) in each of four rows:
// rows 0-3, or the even rows of eight, or the odd ones. The rows of each of these sets therefore
// differ in the two highest bits of the XOR operand.
template <int kRows_, int kColumns_, int kElementBytes_ = 2>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kElementBytes = kElementBytes_;
  static constexpr int kChunkColumns = 16 / kElementBytes;
  static constexpr int kBlockColumns = 2 * kChunkColumns;  // of a block that ldmatrix.x4 reads
  static_assert(kColumns % kBlockColumns == 0 && kRows % 16 == 0);

  static constexpr int kRowBytes = kColumns * kElementBytes % 128 == 0 ? 128 : 64;
  static constexpr int kPanelColumns = kRowBytes / kElementBytes;
  static constexpr int kPanels = ceil_div(kColumns, kPanelColumns);
  static constexpr int kChunks = kRowBytes / 16;  // 16-byte chunks in a row of a panel
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;

  // The same mapping for 16-bit elements as a CuTe layout; static_asserts check byte_offset()
  // against it. 128-byte rows: Swizzle<3,3,3>; 64-byte rows: two rows share 128 bytes, so
  // Swizzle<2,3,3>.
  using Atom =
      decltype(cute::composition(cute::Swizzle<kPanelColumns == 64 ? 3 : 2, 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kPanelColumns>>,
                                              cute::Stride<cute::Int<kPanelColumns>, cute::_1>>{}));
  using Layout = decltype(cute::tile_to_shape(
      Atom{},
      cute::Shape<cute::Int<kRows>, cute::Int<kPanels * kPanelColumns>>{}));  // (kRows, columns of
                                                                              // the panels)

  CUTE_HOST_DEVICE static constexpr int byte_offset(int row, int chunk) {
    int const panel = chunk / kChunks;
    return panel * kPanelBytes + row * kRowBytes + ((chunk % kChunks) ^ swizzle(row)) * 16;
  }

  CUTE_HOST_DEVICE static constexpr int swizzle(int row) {
    if (kChunks == 4) return (row >> 1) & 3;
    if (kElementBytes <= 2) return row & 7;
    int const high = (row >> 2) & 1;
    return (row & 2) << 1 | ((row & 1) ^ high) << 1 | high;
  }
};

template <class Tile>
CUTE_HOST_DEVICE constexpr bool offsets_match_layout() {
  for (int row = 0; row < 16; ++row) {
    for (int chunk = 0; chunk < Tile::kColumns / Tile::kChunkColumns; ++chunk) {
      if (Tile::byte_offset(row, chunk) != 2 * int(typename Tile::Layout{}(row, chunk * 8))) {
        return false;
      }
    }
  }
  return true;
}
static_assert(offsets_match_layout<SharedTile<64, 128>>());
static_assert(offsets_match_layout<SharedTile<64, 96>>());
static_assert(offsets_match_layout<SharedTile<64, 80>>());
static_assert(offsets_match_layout<SharedTile<16, 32>>());

// Whether four rows from `first` on, `distance` apart, place the same pair of chunks at four
// different positions.
template <class Tile>
CUTE_HOST_DEVICE constexpr bool pairs_differ(int first, int distance) {
  int pairs = 0;
  for (int i = 0; i < 4; ++i) pairs |= 1 << (Tile::swizzle(first + i * distance) >> 1);
  return pairs == 15;
}
static_assert(pairs_differ<SharedTile<16, 32, 4>>(0, 1) &&
              pairs_differ<SharedTile<16, 32, 4>>(4, 1));
static_assert(pairs_differ<SharedTile<16, 32, 4>>(0, 2) &&
              pairs_differ<SharedTile<16, 32, 4>>(1, 2));

// The order in which the lanes of a warp address the four 8x8 matrices of one ldmatrix.x4:
//   rows_first:    matrices (rows 0-7), (rows 8-15), then the same rows of the next chunk
//   columns_first: matrices (chunk 0), (chunk 1) of rows 0-7, then of rows 8-15
enum class LaneOrder { rows_first, columns_first };

// Addresses of the blocks of a tile, 16 rows by 32 bytes, as one warp reads them with ldmatrix from
// `row` and column block `column_block` on. at(i, j) is the block i*16 rows down and j blocks to
// the right; i and j must be unrolled constants, which leaves one XOR and an immediate offset for
// each ldmatrix.
template <class Tile, int kColumnBlocks, bool kFromColumnZero>
struct FragmentPointer {
  static constexpr int kBlocksPerPanel = Tile::kChunks / 2;
  // Hazard: adding a block index to the chunk bits is an XOR only if no carry can leave them.
  static constexpr bool kNoCarry =
      kFromColumnZero || (is_power_of_two(kColumnBlocks) &&
                          Tile::kColumns % (Tile::kBlockColumns * kColumnBlocks) == 0);

  uint32_t base;
  int first_row;
  int first_chunk;

  CUTE_DEVICE FragmentPointer(uint32_t tile, LaneOrder order, int row, int column_block,
                              unsigned thread = threadIdx.x) {
    int const lane = thread % kWarpSize;
    bool const rows_first = order == LaneOrder::rows_first;
    int const lane_row = rows_first ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    int const lane_chunk = rows_first ? lane >> 4 : (lane >> 3) & 1;
    first_row = row + lane_row;
    first_chunk = 2 * column_block + lane_chunk;
    base = kNoCarry ? tile + Tile::byte_offset(first_row, first_chunk) : tile;
  }

  // Hides the base from the optimizer, which would otherwise hoist the XORed addresses out of the
  // loop over tiles. They would occupy a dozen registers that the accumulators need.
  CUTE_DEVICE void recompute_addresses() { hide_value(base); }

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

// The two of eight rows that lane q of a quad reads if rows are the summed dimension (k of an
// m16n8k8 product is q and q + 4). Products may permute k if both operands agree.
//   natural: rows q and q + 4, as ldmatrix loads them for an operand that is contiguous along k
//   paired:  rows 2q and 2q + 1, the columns of the accumulators that a lane owns
enum class SumOrder { natural, paired };

// Addresses of single 32-bit elements of a tile, in blocks of 8 rows by 16 columns. A lane with
// g = l / 4 reads columns g and g + 8 in two rows; at(i, j, r, c) is the element in row r and
// column c of these (0 or 1) of the block i*8 rows down and j*16 columns to the right.
template <class Tile, int kColumnBlocks, SumOrder kOrder>
struct ElementPointer {
  static_assert(Tile::kElementBytes == 4 && Tile::kRowBytes == 128);
  static constexpr bool kNatural = kOrder == SumOrder::natural;
  static constexpr int kRowDistance = kNatural ? 4 : 1;
  static constexpr int kRowSwizzle = Tile::swizzle(kRowDistance) * 16;
  // As in FragmentPointer; a panel holds two blocks.
  static constexpr bool kNoCarry = kColumnBlocks == 1 || kColumnBlocks % 2 == 0;

  uint32_t base;
  int first_chunk;

  CUTE_DEVICE ElementPointer(uint32_t tile, int column) {
    int const lane = threadIdx.x % kWarpSize;
    int const row = kNatural ? lane % 4 : lane % 4 * 2;
    first_chunk = column / 4 + lane / 16;
    base = tile + lane / 4 % 4 * 4 +
           (kNoCarry ? Tile::byte_offset(row, first_chunk)
                     : row * Tile::kRowBytes + Tile::swizzle(row) * 16);
  }

  CUTE_DEVICE void recompute_addresses() { hide_value(base); }

  CUTE_DEVICE uint32_t at(int row_block, int column_block, int row, int column) const {
    uint32_t const flip = (row * kRowSwizzle) ^ (column * 32);
    uint32_t const offset = (row_block * 8 + row * kRowDistance) * Tile::kRowBytes;
    if constexpr (kNoCarry) {
      return (base ^ (flip ^ (column_block % 2 * 64))) + column_block / 2 * Tile::kPanelBytes +
             offset;
    } else {
      int const chunk = first_chunk + 4 * column_block;
      return (base ^ (flip ^ (chunk % 8 * 16))) + chunk / 8 * Tile::kPanelBytes + offset;
    }
  }
};

}  // namespace memeff
