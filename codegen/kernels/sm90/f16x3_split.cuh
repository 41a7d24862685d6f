// Splits rows of f32 numbers into two rows of f16, hi and lo, and a factor, and writes them as
// F16x3Tile, which TMA copies without a tensor map. The split kernels of forward and backward
// derive from F16x3RowSplit.
#pragma once

#include <memeff/core/vector.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/f16x3_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// A CTA splits 64 rows of one head of one array.
template <class Config>
struct F16x3RowSplit {
  using Tiles = F16x3Tiles<Config>;
  using Params = typename Config::Params;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 4;
  static constexpr int kLaneColumns = 8;  // 16 bytes of each part

  // Splits the rows of CTA `block`: the first CTAs take the keys, those after them the values.
  CUTE_DEVICE static void split_keys_or_values(Params const& params, int block) {
    ProblemShape const& shape = params.shape;
    int const key_blocks = blocks<typename Tiles::Key>(shape.key_length);
    int const keys = key_blocks * shape.key_heads * shape.batch;
    bool const is_key = block < keys;
    WorkItem const item =
        WorkItem::of_block(block - (is_key ? 0 : keys), key_blocks, shape.key_heads);
    Origin const origin = key_origin<Config>(shape, item.batch);
    int const length = lengths(params, item).key_length;
    if (is_key) {
      split_rows<typename Tiles::Key>(params.key, origin, item, shape.head_dim, length,
                                      Tiles::key(params, item.batch, item.head, 0));
    } else {
      split_rows<typename Tiles::Value>(params.value, origin, item, shape.value_dim, length,
                                        Tiles::value(params, item.batch, item.head, 0));
    }
  }

  CUTE_DEVICE static IntervalMask<MaskKind::none> lengths(Params const& params,
                                                          WorkItem const& item) {
    return {params.mask, params.shape, item.batch};
  }

  // The number of CTAs for one head. The grids in codegen/kernels must use the same count.
  template <class Tile>
  CUTE_DEVICE static int blocks(int length) {
    return Tiles::template count<Tile>(length) * (Tile::kRows / kF16x3Rows);
  }

  // Hazard: products read whole tiles, and the workspace is uninitialized. So rows beyond the
  // length become zeros if their tile has valid rows or is the first. Other tiles are never read.
  template <class Tile>
  CUTE_DEVICE static void split_rows(TensorView const& tensor, Origin const& origin,
                                     WorkItem const& item, int columns, int length, char* tiles) {
    using Part = typename Tile::Part;
    constexpr int kRowLanes = Tile::kColumns > 64 ? 16 : 8;
    constexpr int kPassRows = kThreads / kRowLanes;
    constexpr int kPasses = kF16x3Rows / kPassRows;
    int const tile = item.tile * kF16x3Rows / Tile::kRows;
    if (tile > 0 && tile * Tile::kRows >= length) return;
    tiles += (long long)tile * Tile::kBytes;
    int const lane = threadIdx.x % kRowLanes;
    int const column = lane * kLaneColumns;
    int const first = item.tile * kF16x3Rows + threadIdx.x / kRowLanes;
    char const* const source =
        row_pointer<float>(tensor, origin.batch, origin.row + first, item.head) +
        column * int(sizeof(float));
    uint4 loaded[kPasses][2];
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        bool const exists = first + pass * kPassRows < length && column + 4 * i < columns;
        char const* const vector =
            source + pass * kPassRows * tensor.row_stride * int(sizeof(float)) + i * 16;
        loaded[pass][i] = exists ? load_vector<16>(vector, 16) : make_uint4(0, 0, 0, 0);
      }
    }
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int const row = (first + pass * kPassRows) % Tile::kRows;
      RowScale const scale = scale_of<kRowLanes>(loaded[pass]);
      uint4 high, low;
      split(loaded[pass][0], scale.scale, high.x, low.x, high.y, low.y);
      split(loaded[pass][1], scale.scale, high.z, low.z, high.w, low.w);
      if (column < Tile::kColumns) {
        uint4* const target = reinterpret_cast<uint4*>(tiles + Part::byte_offset(row, lane));
        *target = high;
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(target) + Tile::kLow) = low;
      }
      if (lane == 0) reinterpret_cast<float*>(tiles + Tile::kFactors)[row] = scale.inverse;
    }
  }

 private:
  // The scale of a row, of which each lane has eight numbers. Infinities and NaN are ignored: no
  // scale makes them finite, and the other numbers of the row keep their precision this way.
  template <int kRowLanes>
  CUTE_DEVICE static RowScale scale_of(uint4 const (&x)[2]) {
    int greatest = 0;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      for (uint32_t bits : {x[i].x, x[i].y, x[i].z, x[i].w}) {
        int const magnitude = int(bits & 0x7fffffffu);
        greatest = max(greatest, magnitude < 0x7f800000 ? magnitude : 0);
      }
    }
    CUTE_UNROLL
    for (int distance = 1; distance < kRowLanes; distance *= 2) {
      greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
    }
    return RowScale::of(greatest);
  }

  CUTE_DEVICE static void split(uint4 const& x, float scale, uint32_t& high0, uint32_t& low0,
                                uint32_t& high1, uint32_t& low1) {
    split_to_f16(__uint_as_float(x.x) * scale, __uint_as_float(x.y) * scale, high0, low0);
    split_to_f16(__uint_as_float(x.z) * scale, __uint_as_float(x.w) * scale, high1, low1);
  }
};

}  // namespace memeff
