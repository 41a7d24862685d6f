// The operands of the Hopper forward in float32, multiplied as f16 (3xFP16): see
// layout/f16x3_tiles.cuh.
//
// Scores are multiplied by the factors of their query and their key. Probabilities are multiplied
// by the factors of their values, and only then is each row scaled as the rows of the other
// operands are. So a masked key whose value is large does not cost the other probabilities of the
// row any precision.
//
// Hazard: tensor cores truncate accumulators instead of rounding them. So small products come
// first, and the products with the values of one tile are accumulated separately, then added with
// rounding.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/sm90/f16x3_split.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/f16x3_tiles.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// Probabilities as a left operand: their hi and lo parts, and the factors for the product's rows.
template <int kSteps>
struct F16x3Probabilities {
  RegisterOperand<1, kSteps, 2> high;
  RegisterOperand<1, kSteps, 2> low;
  float factors[2];  // of the rows of a lane
};

// Drops elements in both parts (collective/probability_modifiers.cuh).
template <int kSteps>
CUTE_DEVICE void drop_block(F16x3Probabilities<kSteps>& operand, int m, int block,
                            KeepBlock const& keep) {
  drop_block(operand.high, m, block, keep);
  drop_block(operand.low, m, block, keep);
}

// The operands of the float32 forward, with the interface of MappedOperands.
template <class Config, class ScoreGrid, class OutGrid>
struct F16x3Operands {
  using Half = cutlass::half_t;
  using Tiles = F16x3Tiles<Config>;
  using QueryTile = typename Tiles::Query;
  using KeyTile = typename Tiles::Key;
  using ValueTile = typename Tiles::Value;
  static constexpr int kRowWarpgroups = Config::kTileQuery / kWarpgroupRows;
  static constexpr int kQueryBufferBytes = kRowWarpgroups * QueryTile::kBufferBytes;
  static constexpr int kQueryBytes = QueryTile::kBytes;
  static constexpr int kHeadSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr bool kClearsValues = false;
  static constexpr bool kScalesRows = true;
  static constexpr bool kSequential = Config::kSequential;
  // With 24 the producers spill. With 32 the consumers of 128 columns spill.
  static constexpr int kProducerRegisters = kSequential || Config::kValueDim <= 64 ? 32 : 24;

  ForwardParams const& params;

  CUTE_DEVICE void prefetch() const {}

  // Hazard: rows beyond the length may have no tile. The last tile is loaded instead.
  CUTE_DEVICE void load_queries(WorkItem const& item, int query_length, int warpgroup,
                                uint64_t& arrived, uint32_t buffer) const {
    int const tile = min(item.tile * kRowWarpgroups + warpgroup, last<QueryTile>(query_length));
    load_tma(Tiles::query(params, item.batch, item.head, tile), arrived,
             buffer + warpgroup * QueryTile::kBufferBytes, QueryTile::kBytes);
  }

  // The hi/lo tiles of keys or values of a work tile.
  template <class Tile>
  struct Rows {
    static constexpr int kBytes = Tile::kBytes;
    static constexpr int kBufferBytes = Tile::kBufferBytes;
    char const* tiles;
    int last;

    CUTE_DEVICE void load(int tile, uint64_t& arrived, uint32_t buffer) const {
      load_tma(tiles + (long long)min(tile, last) * kBytes, arrived, buffer, kBytes);
    }
  };
  using Keys = Rows<KeyTile>;
  using Values = Rows<ValueTile>;

  CUTE_DEVICE Keys keys(WorkItem const& item, int key_length) const {
    return {Tiles::key(params, item.batch, item.head / params.shape.group, 0),
            last<KeyTile>(key_length)};
  }
  CUTE_DEVICE Values values(WorkItem const& item, int key_length) const {
    return {Tiles::value(params, item.batch, item.head / params.shape.group, 0),
            last<ValueTile>(key_length)};
  }

  static constexpr bool kModifiesEarly = false;

  // A consumer's queries, in shared memory.
  struct Queries {
    CUTE_DEVICE void take(uint32_t, int) {}
    CUTE_DEVICE uint32_t operand(uint32_t buffer, int warpgroup) const {
      return buffer + warpgroup * QueryTile::kBufferBytes;
    }
  };

  template <class Scores>
  CUTE_DEVICE static void multiply_keys(Scores& scores, uint32_t queries, uint32_t keys) {
    multiply<QueryTile, KeyTile>(scores, queries + QueryTile::kLow, keys, false);
    multiply<QueryTile, KeyTile>(scores, queries, keys + KeyTile::kLow, true);
    multiply<QueryTile, KeyTile>(scores, queries, keys, true);
  }

  // Multiplies scores by the factors of query and key, one after the other, because the product of
  // the factors may underflow in f32. The buffers may be released afterwards.
  template <class Scores>
  CUTE_DEVICE static void unscale(Scores& scores, uint32_t queries, uint32_t keys, int warpgroup) {
    int const thread = thread_index();
    uint32_t const rows = queries + warpgroup * QueryTile::kBufferBytes + QueryTile::kFactors +
                          ScoreGrid::element_row(0, 0, thread) % kWarpgroupRows * 4;
    float const row_factors[2] = {__uint_as_float(load_shared(rows)),
                                  __uint_as_float(load_shared(rows + 8 * 4))};
    for_each_column_pair(
        keys + KeyTile::kFactors, thread, scores, [&](int half, int n, float2 factors) {
          scores(2 * half, 0, n) = scores(2 * half, 0, n) * factors.x * row_factors[half];
          scores(2 * half + 1, 0, n) = scores(2 * half + 1, 0, n) * factors.y * row_factors[half];
        });
    __syncwarp();
  }

  // Makes the operand of P V. `values` is the tile that it will be multiplied with, whose factors
  // it takes.
  template <class Scores>
  CUTE_DEVICE static auto probabilities(Scores& scores, uint32_t values) {
    for_each_column_pair(values + ValueTile::kFactors, thread_index(), scores,
                         [&](int half, int n, float2 factors) {
                           scores(2 * half, 0, n) *= factors.x;
                           scores(2 * half + 1, 0, n) *= factors.y;
                         });
    F16x3Probabilities<kKeySteps> result;
    float scales[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int greatest = 0;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        greatest = max_of_three(greatest, __float_as_int(scores(2 * half, 0, n)),
                                __float_as_int(scores(2 * half + 1, 0, n)));
      }
      RowScale const scale = RowScale::of(__float_as_int(quad_max(__int_as_float(greatest))));
      scales[half] = scale.scale;
      result.factors[half] = scale.inverse;
    }
    CUTE_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * step + i / 2;
        int const half = i % 2;
        split_to_f16(scores(2 * half, 0, n) * scales[half],
                     scores(2 * half + 1, 0, n) * scales[half], result.high.fragments[0][step][i],
                     result.low.fragments[0][step][i]);
      }
    }
    return result;
  }

  using Part = decltype(OutGrid::make_accumulators());
  template <class Output>
  CUTE_DEVICE static Part& sums(Output&, Part& part) {
    return part;
  }
  template <class Probabilities>
  CUTE_DEVICE static void multiply_values(Part& part, Probabilities const& probabilities,
                                          uint32_t values, bool) {
    using Value = DescriptorOperand<typename ValueTile::Part, Contiguous::outer>;
    Value const high(values);
    warpgroup_gemm<Half, kKeySteps>(part, probabilities.low, high, false);
    warpgroup_gemm<Half, kKeySteps>(part, probabilities.high, Value(values + ValueTile::kLow));
    warpgroup_gemm<Half, kKeySteps>(part, probabilities.high, high);
  }

  // Adds the sums of multiply_values() to the output, or overwrites it if it `begins`.
  template <class Output, class Probabilities>
  CUTE_DEVICE static void add(Output& output, Part const& part, Probabilities const& probabilities,
                              bool begins) {
    if (begins) cute::clear(output);
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(output); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        output(i, 0, n) = fmaf(part(i, 0, n), probabilities.factors[i / 2], output(i, 0, n));
      }
    }
  }

 private:
  template <class Tile>
  CUTE_DEVICE static int last(int length) {
    return Tiles::template count<Tile>(length) - 1;
  }

  template <class Left, class Right, class Accumulators>
  CUTE_DEVICE static void multiply(Accumulators& accumulators, uint32_t left, uint32_t right,
                                   bool accumulate) {
    warpgroup_gemm<Half, kHeadSteps>(
        accumulators, DescriptorOperand<typename Left::Part, Contiguous::k>(left),
        DescriptorOperand<typename Right::Part, Contiguous::k>(right), accumulate);
  }

  // Calls use(half, n, factors) for each pair of neighbouring elements of a lane, with the factors
  // of their columns.
  template <class Scores, class Use>
  CUTE_DEVICE static void for_each_column_pair(uint32_t factors, int thread, Scores const&,
                                               Use use) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(Scores{}); ++n) {
      float2 const pair = load_shared_pair(factors + (n * 8 + thread % 4 * 2) * 4);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) use(half, n, pair);
    }
  }
};

// The kernel that runs first: splits query, key and value.

// The entry point. Its grid covers the tiles of all heads of query, key and value.
template <class Config>
struct FmhaForwardF16x3Split : F16x3RowSplit<Config> {
  using Base = F16x3RowSplit<Config>;
  using typename Base::Tiles;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    ProblemShape const& shape = params.shape;
    int const block = int(blockIdx.x);
    int const query_blocks = Base::template blocks<typename Tiles::Query>(shape.query_length);
    int const queries = query_blocks * shape.query_heads * shape.batch;
    if (block >= queries) {
      Base::split_keys_or_values(params, block - queries);
      return;
    }
    WorkItem const item = WorkItem::of_block(block, query_blocks, shape.query_heads);
    Base::template split_rows<typename Tiles::Query>(
        params.query, query_origin<Config>(shape, item.batch), item, shape.head_dim,
        Base::lengths(params, item).query_length, Tiles::query(params, item.batch, item.head, 0));
  }
};

}  // namespace memeff
