// The operands of the split forward for pools of float8 (e4m3). Keys and values are converted to
// float16 between shared memory and the tensor cores.
//
// Both products are computed in float16, whatever the query's dtype, because float16 holds e4m3
// numbers exactly and suits probabilities. A row of queries is multiplied by a power of two that
// brings its largest element to 2^14 or more, and its scores are divided by it. Elements larger
// than 2^-31 times the largest one are converted from bfloat16 exactly.
//
// ldmatrix gives a lane four adjacent bytes of a row, but the tensor cores expect two elements of
// k. Permutations outside the main loop make up for it. Keys: the bytes are four elements of k, so
// the query's columns are permuted in shared memory. Values: the bytes are two columns of two keys,
// so the output's columns stay permuted until the end.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/float8.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/kernels/forward/split/operands.cuh>

namespace memeff {

// The right operand of a product, loaded as float16 from a tile of e4m3 numbers. If the outer
// dimension is contiguous, columns 2g and 2g + 1 of 16 become column g of two blocks of eight.
template <class Tile, Contiguous kOrder>
struct Float8Operand {
  static_assert(Tile::kElementBytes == 1);
  uint32_t base;

  CUTE_DEVICE explicit Float8Operand(uint32_t tile)
      : base(tile + Tile::byte_offset(threadIdx.x % 16, 0)) {}

  CUTE_DEVICE void recompute_addresses() { hide_value(base); }

  CUTE_DEVICE void load(uint32_t (&fragment)[4], int column_block, int step) const {
    uint32_t rows[2];  // 0-7 and 8-15
    if constexpr (kOrder == Contiguous::k) {
      load_two_matrices<false>(rows, at(column_block, step));
      unpack_float8<false>(rows[0], fragment[0], fragment[1]);
      unpack_float8<false>(rows[1], fragment[2], fragment[3]);
    } else {
      load_two_matrices<true>(rows, at(step, column_block));
      unpack_float8<true>(rows[0], fragment[0], fragment[2]);
      unpack_float8<true>(rows[1], fragment[1], fragment[3]);
    }
  }

 private:
  CUTE_DEVICE uint32_t at(int row_block, int chunk) const {
    return (base ^ (chunk % Tile::kChunks * 16)) + chunk / Tile::kChunks * Tile::kPanelBytes +
           row_block * 16 * Tile::kRowBytes;
  }
};

// The operands of FmhaForwardSplitSm80 for float8 pools; SplitOperands has the same interface.
template <class Config>
class Float8Operands : public SplitTiles<Config> {
  using Tiles = SplitTiles<Config>;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using OutGrid = typename Tiles::OutGrid;
  using ConsumerGroup = typename Tiles::ConsumerGroup;
  static constexpr int kKeys = Tiles::kConsumerGroupKeys;

 public:
  using Element = cutlass::half_t;  // for both products
  using QueryTile = SharedTile<Tiles::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<kKeys, Config::kHeadDim, 1>;
  using ValueTile = SharedTile<kKeys, Config::kValueDim, 1>;

  static constexpr bool kCopiesQuery = false;

  // Shared memory after the tiles holds the factor of each row of queries, and for each stage of
  // each consumer group the key and value scales, one for every kPageStep keys.
  static constexpr bool kByPage =
      Config::kKeyScale == PoolScale::pages || Config::kValueScale == PoolScale::pages;
  static constexpr int kParts = kKeys / kPageStep;
  static constexpr int kFactorBytes = Tiles::kTileQuery * int(sizeof(float));
  static constexpr int kStageBytes = kByPage ? 2 * kParts * int(sizeof(float)) : 0;
  static constexpr int kScaleBytes =
      kFactorBytes + ConsumerGroup::kConsumerGroups * Config::kStages * kStageBytes;

  // `length` is the number of keys of the sequence, and `shared` the address after the tiles.
  CUTE_DEVICE Float8Operands(ForwardParams const& params, int key_head, int length, uint32_t shared)
      : params_(params), key_head_(key_head), length_(length), shared_(shared) {}

  // Converts a tile of queries, a row per warp at a time. row_at(row of the tile) returns a
  // QueryRow. In each 16 columns pair p moves to place p / 2, or p / 2 + 4 if p is odd: the pairs
  // that the tensor cores multiply with the four bytes of a lane.
  template <class RowAt>
  CUTE_DEVICE void load_query(RowAt row_at, int head_dim, uint32_t tile) const {
    constexpr int kPairs = Config::kHeadDim / (2 * kWarpSize);  // per lane
    int const lane = threadIdx.x % kWarpSize;
#pragma unroll 4
    for (int tile_row = threadIdx.x / kWarpSize; tile_row < Tiles::kTileQuery;
         tile_row += Config::kWarps) {
      QueryRow const row = row_at(tile_row);
      float elements[2 * kPairs];
      float largest = 0.0f;
      CUTE_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        int const pair = lane + i * kWarpSize;
        bool const valid = row.valid && 2 * pair < head_dim;
        uint32_t const packed =
            valid ? __ldg(reinterpret_cast<uint32_t const*>(row.first) + pair) : 0;
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          elements[2 * i + j] = unpack<typename Config::Element>(packed, j);
          largest = fmaxf(largest, fabsf(elements[2 * i + j]));
        }
      }
      // Exponents have the bias 127 of IEEE 754. The largest element becomes 2^14 or more. Rows
      // below 2^-112, and rows with infinities, get factors within the range of float32.
      int const exponent = max(__float_as_int(warp_max(largest)) >> 23, 15);
      float const factor = __int_as_float((268 - exponent) << 23);
      if (lane == 0) store_shared(shared_ + tile_row * 4, uint32_t(exponent - 14) << 23);
      CUTE_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        int const pair = lane + i * kWarpSize;
        int const place = pair / 8 * 8 + pair % 8 / 2 + pair % 2 * 4;
        store_shared(tile + QueryTile::byte_offset(tile_row, place / 4) + place % 4 * 4,
                     pack<Element>(elements[2 * i] * factor, elements[2 * i + 1] * factor));
      }
    }
  }

  // Reads the factors of the rows of queries, after all queries are in shared memory.
  CUTE_DEVICE void begin() {
    float scale = kFloat8Factor;
    if constexpr (Config::kKeyScale == PoolScale::heads) {
      scale *= __ldg(PoolScales(params_, Config::kKeyScaleArray, key_head_).first);
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      uint32_t const factor = shared_ + ScoreGrid::element_row(2 * (r % 2), r / 2) * 4;
      row_scale_[r] = __uint_as_float(load_shared(factor)) * scale;
    }
  }

  // Starts the copies of the scales of the keys from `column` on. Scales of pages that the sequence
  // does not have or need become zero, because 0 * NaN would be NaN.
  CUTE_DEVICE void load_scales(int column, int stage, PageWindow<Config> const& pages) const {
    if constexpr (kByPage) {
      int const part = ConsumerGroup::thread();
      int const key = column + part % kParts * kPageStep;
      int const found = pages.row(min(key, length_ - 1));
      if (part >= kParts) return;
      int row = key < length_ ? found : -1;
      if constexpr (PageWindow<Config>::kFirstKey) {
        row = pages.needs(key + kPageStep - 1) ? row : -1;
      }
      int const page = max(row, 0) / Config::kPageSize;
      uint32_t const target = stage_scales(stage) + part * 4;
      if constexpr (Config::kKeyScale == PoolScale::pages) {
        PoolScales const scales(params_, Config::kKeyScaleArray, key_head_);
        copy_piece_async<4>(target, scales.first + page * scales.page_stride, row >= 0);
      }
      if constexpr (Config::kValueScale == PoolScale::pages) {
        PoolScales const scales(params_, Config::kValueScaleArray, key_head_);
        copy_piece_async<4>(target + kParts * 4, scales.first + page * scales.page_stride,
                            row >= 0);
      }
    }
  }

  // scores = query * keys of a stage.
  template <class Scores, class Query>
  CUTE_DEVICE void multiply_keys(Scores& scores, Query const& query, uint32_t keys,
                                 int stage) const {
    using Keys = Float8Operand<KeyTile, Contiguous::k>;
    warp_gemm<Element, Config::kHeadDim / 16>(scores, query, Keys(keys));
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      float scale = 1.0f;
      if constexpr (Config::kKeyScale == PoolScale::pages) scale = page_scale(stage, part);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float const factor = row_scale_[r] * scale;
        CUTE_UNROLL
        for (int n = 2 * part; n < 2 * part + 2; ++n) {
          scores(2 * (r % 2), r / 2, n) *= factor;
          scores(2 * (r % 2) + 1, r / 2, n) *= factor;
        }
      }
    }
  }

  // output += probabilities * values of a stage. With scales per page the products of each page are
  // added in float32, because probabilities times scales may leave the range of float16.
  template <class Output, class Probabilities>
  CUTE_DEVICE void multiply_values(Output& output, Probabilities const& probabilities,
                                   uint32_t values, int stage) const {
    Float8Operand<ValueTile, Contiguous::outer> const operand(values);
    if constexpr (Config::kValueScale == PoolScale::pages) {
      float scales[kParts];
      CUTE_UNROLL
      for (int part = 0; part < kParts; ++part) scales[part] = page_scale(stage, kParts + part);
      multiply_in_parts<Element, kParts, 1, 2, 32>(
          output, probabilities, operand,
          [&](float& sum, float part, int step) { sum = fmaf(part, scales[step], sum); });
    } else {
      warp_gemm<Element, kKeys / 16>(output, probabilities, operand);
    }
  }

  // The factor of the output at the end.
  CUTE_DEVICE float output_scale() const {
    float scale = kFloat8Factor;
    if constexpr (Config::kValueScale == PoolScale::heads) {
      scale *= __ldg(PoolScales(params_, Config::kValueScaleArray, key_head_).first);
    }
    return scale;
  }

  // Undoes the permutation of the output. Afterwards elements 2i and 2i + 1 of output(., m, n) are
  // columns column(n) and column(n) + 1. Before, they are columns 4q + h and 4q + 2 + h of 16, for
  // h = n % 2 and q = lane % 4.
  template <class Output>
  CUTE_DEVICE static void order_columns(Output& output) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(output); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); n += 2) {
        CUTE_UNROLL
        for (int i = 0; i < 4; i += 2) {
          float const inner = output(i + 1, m, n);
          output(i + 1, m, n) = output(i, m, n + 1);
          output(i, m, n + 1) = inner;
        }
      }
    }
  }
  CUTE_DEVICE static int column(int n) { return n / 2 * 16 + threadIdx.x % 4 * 4 + n % 2 * 2; }

 private:
  static_assert(kPageStep == 16);  // a step of the second product
  static constexpr int kRows = 2 * ScoreGrid::kRowBlocks;

  CUTE_DEVICE uint32_t stage_scales(int stage) const {
    return shared_ + kFactorBytes +
           (ConsumerGroup::index() * Config::kStages + stage) * kStageBytes;
  }
  CUTE_DEVICE float page_scale(int stage, int index) const {
    return __uint_as_float(load_shared(stage_scales(stage) + index * 4));
  }

  ForwardParams const& params_;
  int key_head_;
  int length_;
  uint32_t shared_;
  float row_scale_[kRows];
};

}  // namespace memeff
