// Attention forward for few query rows and long keys: the keys are split over warps and CTAs.
//
// Such a call is bound by memory bandwidth, so the design keeps many copies in flight. There are
// few rows, so all warps share them and each consumer group takes different keys: a group covers
// every row of the tile and has its own keys, values and copies. A group of one warp needs no CTA
// barrier in the main loop. Copies run kStages - 1 tiles ahead:
//
//   wait for tile i | start the copy of tile i + kStages - 1 | S = Q K^T | softmax | O += P V
//
// At the end the groups of a CTA merge their outputs in shared memory. Each split is a CTA that
// writes partial results to global memory, and the combine kernel merges them.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/combine.cuh>
#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/collective/consumer_groups.cuh>
#include <memeff/collective/copies/load_tile.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/float8.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/function_blocks.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/key_splits.cuh>
#include <memeff/score/bias/direct.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// Operands: how tiles get to shared memory, and how products read them.

// How warps divide a score tile and an output tile. Groups that take whole segments have a KV block
// of kTileKey keys each, of different segments. Other groups divide the keys of one block.
template <class Config>
struct SplitTiles {
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  using ConsumerGroup = WarpConsumerGroups<Config::kWarps, Config::kKeyWarps>;
  static constexpr int kWarpRows = kTileQuery / ConsumerGroup::kWarps;
  static constexpr bool kGroupsTakeSegments = Config::kSegmentKeys > 0 && Config::kKeyWarps > 1;
  static constexpr int kConsumerGroupKeys =
      kGroupsTakeSegments ? kTileKey : kTileKey / Config::kKeyWarps;
  using Pages = PageWindow<Config, kConsumerGroupKeys>;
  template <int kColumns, int kWarps>
  using Grid =
      cute::conditional_t<kGroupsTakeSegments,
                          GroupGrid<kTileQuery, kColumns, ConsumerGroup::kWarps, kWarpRows>,
                          WarpGrid<kTileQuery, kColumns, kWarps, kWarpRows>>;
  using ScoreGrid = Grid<kTileKey, Config::kWarps>;
  using OutGrid = Grid<Config::kValueDim, ConsumerGroup::kWarps>;  // per group
  static_assert(ScoreGrid::kWarpColumns == kConsumerGroupKeys && OutGrid::kColumnWarps == 1);
};

// A row of queries in global memory. If it is not valid, its row of the tile becomes zero.
struct QueryRow {
  char const* first;
  bool valid;
};

// The operands of FmhaForwardSplitSm80 if keys and values have the query's dtype. Float8Operands
// has the same interface and converts them.
template <class Config>
struct SplitOperands : SplitTiles<Config> {
  using Tiles = SplitTiles<Config>;
  using OutGrid = typename Tiles::OutGrid;
  using Element = typename Config::Element;  // for both products
  using QueryTile = SharedTile<Tiles::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<Tiles::kConsumerGroupKeys, Config::kHeadDim>;
  using ValueTile = SharedTile<Tiles::kConsumerGroupKeys, Config::kValueDim>;

  static constexpr bool kCopiesQuery = true;  // by cp.async
  static constexpr int kScaleBytes = 0;       // in shared memory, after the tiles

  CUTE_DEVICE SplitOperands(ForwardParams const&, int, int, uint32_t) {}

  // Starts the copies of a tile of queries. row_at(row of the tile) returns a QueryRow.
  template <class RowAt>
  CUTE_DEVICE void load_query(RowAt row_at, int head_dim, uint32_t tile) const {
    constexpr int kRowChunks = Config::kHeadDim / 8;
    for (int i = threadIdx.x; i < Tiles::kTileQuery * kRowChunks; i += Tiles::kThreads) {
      int const tile_row = i / kRowChunks;
      int const chunk = i % kRowChunks;
      QueryRow const row = row_at(tile_row);
      copy_async(tile + QueryTile::byte_offset(tile_row, chunk), row.first + chunk * 16,
                 row.valid && chunk * 8 < head_dim);
    }
  }

  // Called once all queries are in shared memory. Float8Operands reads the factors of their rows.
  CUTE_DEVICE void begin() {}

  // Float8Operands starts the copies of the scales of keys.
  CUTE_DEVICE void load_scales(int, int, typename Tiles::Pages const&) const {}

  // scores = query * keys of a stage.
  template <class Scores, class Query>
  CUTE_DEVICE void multiply_keys(Scores& scores, Query const& query, uint32_t keys, int) const {
    using Keys = RightOperand<KeyTile, Contiguous::k, Tiles::ScoreGrid::kColumnBlocks>;
    warp_gemm<Element, Config::kHeadDim / 16>(scores, query, Keys(keys, 0));
  }

  // output += probabilities * values of a stage.
  template <class Output, class Probabilities>
  CUTE_DEVICE void multiply_values(Output& output, Probabilities const& probabilities,
                                   uint32_t values, int) const {
    using Values = RightOperand<ValueTile, Contiguous::outer, OutGrid::kColumnBlocks>;
    warp_gemm<Element, Tiles::kConsumerGroupKeys / 16>(output, probabilities, Values(values, 0));
  }

  // The output is multiplied by this at the end.
  CUTE_DEVICE float output_scale() const { return 1.0f; }

  // Afterwards elements 2i and 2i + 1 of output(., m, n) are columns column(n) and column(n) + 1.
  // Here they always are.
  template <class Output>
  CUTE_DEVICE static void order_columns(Output&) {}
  CUTE_DEVICE static int column(int n) {
    return OutGrid::element_column(0, n, Tiles::ConsumerGroup::thread());
  }
};

// Copies of keys and values to shared memory.

// Keys and values of a consumer group.
template <class Config, class Operands>
struct SplitKvTiles {
  using Tiles = SplitTiles<Config>;
  using ConsumerGroup = typename Tiles::ConsumerGroup;
  using KeyTile = typename Operands::KeyTile;
  using ValueTile = typename Operands::ValueTile;
  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;

  template <class Tile>
  using Rows = CopiedRows<Tile, ConsumerGroup::kThreads, 16, RowPointer>;

  Rows<KeyTile> keys;
  Rows<ValueTile> values;
  typename Tiles::Pages pages;
  int end;
  uint32_t shared;

  // KV blocks from `end` on are not copied. The buffers begin at `shared`.
  CUTE_DEVICE SplitKvTiles(ForwardParams const& params, KeyValueSource<Config> const& source,
                           int key_length, int end, uint32_t shared)
      : keys{{source.row(params.key)},
             row_bytes<KeyValueElement<Config>>(params.key),
             key_length,
             params.shape.head_dim},
        values{{source.row(params.value)},
               row_bytes<KeyValueElement<Config>>(params.value),
               key_length,
               params.shape.value_dim},
        pages{source.pages, key_length},
        end(end),
        shared(shared) {}

  // Starts the copies of a KV block. Past the end it commits an empty group, so that the counts of
  // the waits stay correct.
  CUTE_DEVICE void load(int tile, int stage, Operands const& operands) {
    if (tile < end) {
      int const group = Tiles::kGroupsTakeSegments ? 0 : ConsumerGroup::index();
      int const column = tile * Tiles::kTileKey + group * Tiles::kConsumerGroupKeys;
      uint32_t const stage_tiles = shared + stage * kStageBytes;
      pages.seek(column);
      keys.load(column, stage_tiles, pages, ConsumerGroup::thread());
      values.load(column, stage_tiles + KeyTile::kBytes, pages, ConsumerGroup::thread());
      operands.load_scales(column, stage, pages);
    }
    commit_copies();
  }
};

// Operands from pools of float8 (e4m3). Keys and values are converted to float16 between shared
// memory and the tensor cores.
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
  using Pages = typename Tiles::Pages;
  static constexpr int kKeys = Tiles::kConsumerGroupKeys;

 public:
  using Element = cutlass::half_t;  // for both products
  using QueryTile = SharedTile<Tiles::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<kKeys, Config::kHeadDim, 1>;
  using ValueTile = SharedTile<kKeys, Config::kValueDim, 1>;

  static constexpr bool kCopiesQuery = false;

  // Shared memory after the tiles holds the factor of each row of queries, and for each stage of
  // each consumer group the key and value scales, one for every kPartKeys keys.
  static constexpr bool kByPage =
      Config::kKeyScale == PoolScale::pages || Config::kValueScale == PoolScale::pages;
  static constexpr int kPartKeys = 16;  // of a step of the second product
  static_assert(!kByPage || !kSmallPages<Config>);
  static constexpr int kParts = kKeys / kPartKeys;
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
  CUTE_DEVICE void load_scales(int column, int stage, Pages const& pages) const {
    if constexpr (kByPage) {
      int const part = ConsumerGroup::thread();
      int const key = column + part % kParts * kPartKeys;
      int const found = pages.row(min(key, length_ - 1));
      if (part >= kParts) return;
      int row = key < length_ ? found : -1;
      if constexpr (Pages::kFirstKey) {
        row = pages.needs(key + kPartKeys - 1) ? row : -1;
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

  // The output is multiplied by this at the end.
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

// The rows of a work item, and its results in global memory.

// Coordinates are computed anew, so that no register holds them across the main loop.
template <class Config, class Kernel>
struct SplitOutput {
  using Element = typename Config::Element;
  using Mask = typename Kernel::Mask;
  using Operands = typename Kernel::Operands;
  using OutGrid = typename Kernel::OutGrid;
  using Rows = typename Kernel::Rows;
  using Softmax = typename Kernel::Softmax;
  static constexpr int kTileQuery = Config::kTileQuery;

  CUTE_DEVICE static SplitWorkItem work_item(ForwardParams const& params) {
    Rows const rows(params.shape);
    int const tiles = ceil_div(rows.count(params.shape.query_length), kTileQuery);
    return SplitWorkItem::of_block(block_index(), params.shape.query_heads / rows.heads, tiles,
                                   params.splits);
  }

  // The number of rows to write. Hazard: the rows after a packed sequence belong to the next one.
  CUTE_DEVICE static int row_bound(ForwardParams const& params, int batch) {
    return Config::kPacked ? Mask(params.mask, params.shape, batch).query_length
                           : Rows(params.shape).count(params.shape.query_length);
  }

  // Calls use(row, is within the query length, row of the accumulators) for this lane's rows.
  template <class Use>
  CUTE_DEVICE static void for_each_row(ForwardParams const& params, SplitWorkItem const& item,
                                       Use use) {
    int const bound = row_bound(params, item.batch);
    int const length = Mask(params.mask, params.shape, item.batch).query_length;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const row = item.tile * kTileQuery + OutGrid::element_row(2 * (r % 2), r / 2);
      if (row < bound) use(row, row < length, r);
    }
  }

  // Writes finished rows. Rows beyond the query length get output 0 and logsumexp -inf.
  template <class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, Softmax const& softmax,
                                Output const& output) {
    ProblemShape const& shape = params.shape;
    SplitWorkItem const item = work_item(params);
    Rows const rows(shape);
    Origin const origin = query_origin<Config>(shape, item.batch);
    for_each_row(params, item, [&](int row, bool valid, int r) {
      int const query = rows.query(row);
      int const head = rows.query_head(item.head, row);
      if (threadIdx.x % 4 == 0) {
        params.logsumexp[logsumexp_offset<Config>(shape, origin, head) + query] =
            valid ? softmax.softmax_reference[r] : -infinity();
      }
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        int const column = Operands::column(n);
        if (column < shape.value_dim) {
          uint32_t const pair =
              pack<Element>(output(2 * (r % 2), r / 2, n), output(2 * (r % 2) + 1, r / 2, n));
          *reinterpret_cast<uint32_t*>(out + column * sizeof(Element)) = valid ? pair : 0;
        }
      }
    });
  }

  // Writes unfinished rows to a part: a split or a segment. Rows without keys are written too,
  // because the combine kernel loads outputs before it has seen the logsumexps.
  template <class Output>
  CUTE_DEVICE static void store_partial(ForwardParams const& params, int part,
                                        Softmax const& softmax, Output const& output) {
    SplitWorkItem const item = work_item(params);
    long long const first =
        partial_row(params.shape, Rows(params.shape), part, item.batch, item.head);
    for_each_row(params, item, [&](int row, bool valid, int r) {
      if (threadIdx.x % 4 == 0) {
        params.partial_logsumexp[first + row] = valid ? softmax.softmax_reference[r] : -infinity();
      }
      float* const out = params.partial_out + (first + row) * Config::kValueDim;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        *reinterpret_cast<float2*>(out + Operands::column(n)) =
            make_float2(valid ? output(2 * (r % 2), r / 2, n) : 0.0f,
                        valid ? output(2 * (r % 2) + 1, r / 2, n) : 0.0f);
      }
    });
  }
};

// The kernel for decode and other calls with few rows; see
// codegen/kernels/sm80/split.py.
template <class Config>
struct FmhaForwardSplitSm80 {
  static_assert(!Config::kRowMaxima);  // partial results have no maxima
  using Element = typename Config::Element;
  using Operands =
      cute::conditional_t<Config::kFloat8Pages, Float8Operands<Config>, SplitOperands<Config>>;
  using Tiles = SplitTiles<Config>;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kStages = Config::kStages;

  using ConsumerGroup = typename Tiles::ConsumerGroup;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using OutGrid = typename Tiles::OutGrid;
  using Softmax = OnlineSoftmax<ScoreGrid::kRowBlocks, false, has_large_scores<Config>()>;
  using Rows = GqaRows<Config::kPackGqa>;
  using TileRows = RowsOfTile<Config::kPackGqa>;
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid>;
  using Mask = ScoreMask<Config, ScoreGrid, Config::kPackGqa>;
  // A row of the block mask belongs to one head.
  static_assert(!Config::kBlockMask || !Config::kPackGqa);
  using Modifiers = ScoreModifiers<Config, DirectBias<Config, ScoreGrid, Mask>,
                                   ScoreFunction<Config, ScoreGrid, false, Config::kPackGqa>>;

  // Batch-invariant results: a split is a whole number of segments (SegmentSum). A segment is
  // summed in one fixed order, so a group takes whole segments. The combine kernel adds them up.
  static constexpr bool kKeySegments = Config::kSegmentKeys > 0;
  static constexpr bool kGroupsTakeSegments = Tiles::kGroupsTakeSegments;
  static constexpr int kSegmentBlocks = Config::kSegmentKeys / kTileKey;
  static_assert(Config::kSegmentKeys % kTileKey == 0);

  // With segments no block is left out: a segment is finished at its last block.
  using KvBlocks =
      cute::conditional_t<decides_tiles<Config>(),
                          FunctionBlocks<Config, Config::kPackGqa, kTileKey, !kKeySegments>,
                          BlockMaskRow<Config::kBlockMask>>;
  static_assert(!kGroupsTakeSegments || !decides_tiles<Config>());
  using GroupBlocks =
      cute::conditional_t<kGroupsTakeSegments,
                          SegmentsOfGroup<kSegmentBlocks, ConsumerGroup::kConsumerGroups>,
                          KvBlocks>;
  using Walk = typename GroupBlocks::template Walk<kStages - 1>;

  using QueryTile = typename Operands::QueryTile;
  using KeyTile = typename Operands::KeyTile;
  using ValueTile = typename Operands::ValueTile;
  using KvTiles = SplitKvTiles<Config, Operands>;
  static constexpr int kStageBytes = KvTiles::kStageBytes;
  static constexpr int kConsumerGroupBytes = kStages * kStageBytes;
  static constexpr int kTileBytes =
      QueryTile::kBytes + ConsumerGroup::kConsumerGroups * kConsumerGroupBytes;
  static constexpr int kLoopBytes = kTileBytes + Operands::kScaleBytes;
  // Reuses the shared memory of the tiles.
  using Merge = ConsumerGroupMerge<ConsumerGroup, Softmax, kTileQuery * Config::kValueDim>;
  static constexpr int kSharedBytes = kLoopBytes > Merge::kBytes ? kLoopBytes : Merge::kBytes;

  using Out = SplitOutput<Config, FmhaForwardSplitSm80>;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    char* const shared = dynamic_shared();
    uint32_t const query_tile = shared_address(shared);
    uint32_t const consumer_group_tiles =
        query_tile + QueryTile::kBytes + ConsumerGroup::index() * kConsumerGroupBytes;

    ProblemShape const& shape = params.shape;
    SplitWorkItem const item = Out::work_item(params);
    int const row = item.tile * kTileQuery;
    int const key_head = Config::kPackGqa ? item.head : item.head / shape.group;

    Mask const mask(params.mask, shape, item.batch);
    if constexpr (Config::kPacked) {
      if (item.split == 0) clear_gap(params, item, mask.query_length);
      if (row >= mask.query_length) return;
    }
    // Rows of partial results do not count as valid, because row modifiers must see each row once,
    // when it is finished.
    bool const is_partial = kKeySegments || params.splits > 1;
    TileRows const rows(shape, item.batch, item.head, row, is_partial ? 0 : mask.query_length);
    KvBlocks const of_row = blocks_of_row(params, item, mask, row);
    KvBlocks const of_split = of_row.within(blocks_of_split<kTileKey, Config::kSegmentKeys>(
        of_row, mask.key_length, item.split, params.splits));
    GroupBlocks const kv_blocks = blocks_of_group(of_split);

    KeyValueSource<Config> const source(params, item.batch, key_head, mask.row_begin(row));
    Operands operands(params, key_head, mask.key_length, query_tile + kTileBytes);
    KvTiles kv_tiles(params, source, mask.key_length, kv_blocks.end, consumer_group_tiles);

    auto output = OutGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(output);
    Softmax softmax;

    bool const copies_query = Operands::kCopiesQuery && !of_split.empty();
    if (copies_query) load_query(params, item, row, operands, query_tile);
    commit_copies();
    Walk walk(kv_blocks);
    CUTE_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
      kv_tiles.load(walk.ahead, stage, operands);
      walk.copied_first();
    }
    // The conversion waits for the queries, so the copies of keys start before it.
    bool const converts_query = !Operands::kCopiesQuery && !of_split.empty();
    if (converts_query) load_query(params, item, row, operands, query_tile);
    walk.start();
    wait_copies<kStages - 1>();
    sync_threads();  // the query tile is in shared memory

    operands.begin();
    if constexpr (kKeySegments) {
      attend_segments(params, item, mask, rows, of_split, walk, kv_tiles, operands, query_tile,
                      softmax, output);
      return;
    }
    attend(params, item, mask, rows, walk, kv_tiles, operands, query_tile, softmax, output,
           [](int) {});

    finish(params, item, rows, operands, query_tile, softmax, output);
  }

  // The KV blocks that the rows of a tile attend to.
  CUTE_DEVICE static KvBlocks blocks_of_row(ForwardParams const& params, SplitWorkItem const& item,
                                            Mask const& mask, int row) {
    TileRange const range = mask.key_tiles(row, kTileQuery, kTileKey);
    if constexpr (decides_tiles<Config>()) {
      return {range,
              params,
              {item.batch, item.head, row, 0},
              min(row + kTileQuery, mask.query_length),
              mask.key_length};
    } else {
      return {range,     params.block_mask, item.batch,
              item.head, item.tile,         ceil_div(params.shape.key_length, kTileKey)};
    }
  }

  CUTE_DEVICE static GroupBlocks blocks_of_group(KvBlocks const& of_split) {
    if constexpr (kGroupsTakeSegments) {
      return {of_split, ConsumerGroup::index()};
    } else {
      return of_split;
    }
  }

  // The main loop: O += P V over the KV blocks of this split and consumer group. The copies of the
  // first kStages - 1 blocks are in flight. Calls end_block(block) after each.
  template <class Output, class EndBlock>
  CUTE_DEVICE static void attend(ForwardParams const& params, SplitWorkItem const& item,
                                 Mask const& mask, TileRows const& rows, Walk walk,
                                 KvTiles& kv_tiles, Operands const& operands, uint32_t query_tile,
                                 Softmax& softmax, Output& output, EndBlock end_block) {
    LeftOperand<QueryTile, Contiguous::k, ScoreGrid::kRowBlocks> const query(query_tile,
                                                                             ScoreGrid::row());
    Modifiers const modifiers = {{params.scale}, {params}, {params.bias, mask, item.batch}};
    // A decode step fills only one warp's rows of the tile; the other warps only copy.
    bool const has_rows = rows.row + ScoreGrid::row() < mask.query_length;
    int stage = 0;
    for (; walk.more(); walk.advance()) {
      int const column = walk.tile() * kTileKey;
      wait_copies<kStages - 2>();
      ConsumerGroup::sync();  // this block has arrived; the group has read the previous one
      int const previous = stage == 0 ? kStages - 1 : stage - 1;
      walk.begin_block();
      kv_tiles.load(walk.ahead, previous, operands);
      walk.copied();

      if ((!kKeySegments || has_rows) && !walk.masked()) {
        uint32_t const stage_tiles = kv_tiles.shared + stage * kStageBytes;
        auto scores = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
        cute::clear(scores);
        operands.multiply_keys(scores, query, stage_tiles, stage);

        ScoreTilePosition const at = {item.batch, item.head, rows.row, column};
        modifiers.forward(scores, at, rows, column);
        mask.template apply<kTileQuery, kTileKey>(scores, params, at, walk.partial(), 0,
                                                  kv_tiles.pages.may_miss());
        softmax.step(scores, output, params.scale.softmax_scale);
        auto probabilities = as_left_operand<typename Operands::Element>(scores);
        Probabilities::forward(params, item.batch, item.head, rows.row, column, probabilities);
        operands.multiply_values(output, probabilities, stage_tiles + KeyTile::kBytes, stage);
        end_block(walk.tile());
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

  // Merges the outputs of the consumer groups, and stores the result of the CTA. `shared` is the
  // beginning of the tiles.
  template <class Output>
  CUTE_DEVICE static void finish(ForwardParams const& params, SplitWorkItem const& item,
                                 TileRows const& rows, Operands const& operands, uint32_t shared,
                                 Softmax& softmax, Output& output) {
    sync_threads();  // Merge overwrites the tiles: every warp must have read them
    Merge::run(shared, softmax, output, params.scale.softmax_scale);
    if (ConsumerGroup::index() > 0) return;
    softmax.finish(output, params.scale.softmax_scale,
                   probability_scale<Config>(params) * operands.output_scale(),
                   LaneRowModifiers<Config, OutGrid>(params, rows));
    Operands::order_columns(output);
    if (params.splits == 1) {
      Out::store(params, softmax, output);
    } else {
      Out::store_partial(params, item.split, softmax, output);
    }
  }

  // The main loop of batch-invariant calls: each segment is finished and added to the sum or, with
  // several splits or groups, written as a partial result.
  template <class Output>
  CUTE_DEVICE static void attend_segments(ForwardParams const& params, SplitWorkItem const& item,
                                          Mask const& mask, TileRows const& rows,
                                          KvBlocks const& of_split, Walk const& walk,
                                          KvTiles& kv_tiles, Operands const& operands,
                                          uint32_t query_tile, Softmax& softmax, Output& output) {
    SegmentSum<Output> sum;
    bool const are_divided = kGroupsTakeSegments || params.splits > 1;
    float const scale = probability_scale<Config>(params) * operands.output_scale();
    auto const end_segment = [&](int tile) {
      if ((tile + 1) % kSegmentBlocks != 0 && tile + 1 != of_split.end) return;
      softmax.finish(output, params.scale.softmax_scale, scale,
                     LaneRowModifiers<Config, OutGrid>(params, rows));
      Operands::order_columns(output);
      if (are_divided) {
        Out::store_partial(params, tile / kSegmentBlocks, softmax, output);
      } else {
        sum.add(output, softmax.softmax_reference);
      }
      softmax = Softmax();
      cute::clear(output);
    };
    attend(params, item, mask, rows, walk, kv_tiles, operands, query_tile, softmax, output,
           end_segment);
    if (are_divided) {
      mark_masked_segments(params, item, mask, of_split);
      return;
    }
    TileRows const valid_rows(params.shape, item.batch, item.head, rows.row, mask.query_length);
    sum.finish(softmax.softmax_reference, LaneRowModifiers<Config, OutGrid>(params, valid_rows));
    Out::store(params, softmax, sum.output);
  }

  // Writes logsumexp -inf for segments that no row attends to, because the combine kernel reads all
  // segments.
  CUTE_DEVICE static void mark_masked_segments(ForwardParams const& params,
                                               SplitWorkItem const& item, Mask const& mask,
                                               KvBlocks const& kv_blocks) {
    TileRange const own =
        segments_of_split<Config::kSegmentKeys>(mask.key_length, item.split, params.splits);
    for (int segment = own.begin; segment < own.end; ++segment) {
      int const first = segment * kSegmentBlocks;
      if (first < kv_blocks.end && first + kSegmentBlocks > kv_blocks.begin) continue;
      float* const logsumexps =
          params.partial_logsumexp +
          partial_row(params.shape, Rows(params.shape), segment, item.batch, item.head);
      Out::for_each_row(params, item, [&](int row, bool, int) { logsumexps[row] = -infinity(); });
    }
  }

  // Clears this CTA's part of the query rows after the sequence, for all heads of the tile.
  CUTE_DEVICE static void clear_gap(ForwardParams const& params, SplitWorkItem const& item,
                                    int length) {
    Rows const rows(params.shape);
    // The loop over heads would read the sequence starts again for each head.
    if (Gap::of_queries<Config>(params, item.batch, rows.query(length)).empty()) return;
    int const tiles = ceil_div(rows.count(params.shape.query_length), kTileQuery);
    for (int head = 0; head < rows.heads; ++head) {
      WorkItem const part = {item.tile, rows.query_head(item.head, head), item.batch};
      clear_query_gap<Config, kThreads>(params, part, rows.query(length), tiles);
    }
  }

  // Loads the query tile into shared memory; rows and columns beyond the bounds become zero.
  CUTE_DEVICE static void load_query(ForwardParams const& params, SplitWorkItem const& item,
                                     int row, Operands const& operands, uint32_t tile) {
    ProblemShape const& shape = params.shape;
    Rows const rows(shape);
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const bound = Out::row_bound(params, item.batch);
    operands.load_query(
        [&](int tile_row) {
          int const r = min(row + tile_row, bound - 1);
          return QueryRow{
              row_pointer<Element>(params.query, origin.batch, origin.row + rows.query(r),
                                   rows.query_head(item.head, r)),
              row + tile_row < bound};
        },
        shape.head_dim, tile);
  }
};

}  // namespace memeff
