// Attention backward in float32 for Hopper, multiplied as f16 (3xFP16, see layout/f16x3_tiles.cuh),
// in two kernels, each of which owns the gradients it writes:
//
//   FmhaBackwardF16x3Dq    one CTA per 128 queries: dQ += dS K for every KV block
//   FmhaBackwardF16x3Dkdv  one CTA per 64 keys: dV += P^T dO and dK += dS^T Q for every Q block
//
// dS is an operand of both dQ and dK, but is split differently: it absorbs the factors of the keys
// for dQ and those of the queries for dK. Each kernel therefore splits its own dS, from registers
// into registers. So recomputing S and dP costs no more than the exchange that it saves, and every
// run adds in the same order.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/preprocess.cuh>
#include <kernels/sm90/backward_tiles.cuh>
#include <kernels/sm90/dkdv_work.cuh>
#include <kernels/sm90/dq.cuh>
#include <kernels/sm90/f16x3_split.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/f16x3_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// The kernel that runs first: splits query, dO, key and value.

// The entry point. Its grid covers the tiles of all heads of query, dO, key and value.
template <class Config>
struct FmhaBackwardF16x3Split : F16x3RowSplit<Config> {
  using Base = F16x3RowSplit<Config>;
  using typename Base::Tiles;
  static constexpr int kBlocksPerSm = 3;  // four leave 64 registers, which spills at 128 columns

  CUTE_DEVICE static void run(BackwardParams const& params) {
    ProblemShape const& shape = params.shape;
    int const block = int(blockIdx.x);
    int const query_blocks = Base::template blocks<typename Tiles::Query>(shape.query_length);
    int const queries = query_blocks * shape.query_heads * shape.batch;
    if (block >= 2 * queries) {
      Base::split_keys_or_values(params, block - 2 * queries);
      return;
    }
    bool const is_query = block < queries;
    WorkItem const item =
        WorkItem::of_block(block - (is_query ? 0 : queries), query_blocks, shape.query_heads);
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const length = Base::lengths(params, item).query_length;
    if (is_query) {
      Base::template split_rows<typename Tiles::Query>(
          params.query, origin, item, shape.head_dim, length,
          Tiles::query(params, item.batch, item.head, 0));
    } else {
      Base::template split_rows<typename Tiles::OutGradient>(
          params.out_gradient, origin, item, shape.value_dim, length,
          Tiles::out_gradient(params, item.batch, item.head, 0));
    }
  }
};

// Products (layout/f16x3_tiles.cuh): S and dP from rows of two tiles, and the gradients from P or
// dS in registers and a tile.
//
// S and dP are multiplied by the factors of their query and their key. P and dS are multiplied by
// the factors of the rows that they are summed over, and only then is each row of them scaled.
//
// Hazard: tensor cores truncate accumulators instead of rounding them. So small products come
// first, and each gradient accumulates the products of one tile separately, then adds the result
// with rounding.

// The bytes of a tile's hi and lo parts, and those of its factors. Unlike in the workspaces, the
// two are stored apart in shared memory, because two tiles with their factors would not fit if each
// were padded.
template <class Tile>
constexpr int kF16x3PartBytes = Tile::kFactors;
constexpr int kF16x3FactorBytes = kWarpgroupRows * int(sizeof(float));

// Starts the copy of a tile; all of its bytes arrive at `barrier`.
template <class Tile>
CUTE_DEVICE void load_f16x3(char const* tile, uint64_t& barrier, uint32_t parts, uint32_t factors) {
  static_assert(Tile::kBytes == kF16x3PartBytes<Tile> + kF16x3FactorBytes);
  load_tma(tile, barrier, parts, kF16x3PartBytes<Tile>);
  load_tma(tile + Tile::kFactors, barrier, factors, kF16x3FactorBytes);
}

// The factors of the two rows in which a lane has elements.
struct RowFactors {
  float of[2];

  template <class Grid>
  CUTE_DEVICE static RowFactors load(uint32_t factors) {
    uint32_t const rows =
        factors + Grid::element_row(0, 0, thread_index()) % kWarpgroupRows * int(sizeof(float));
    return {{__uint_as_float(load_shared(rows)), __uint_as_float(load_shared(rows + 8 * 4))}};
  }
};

// A consumer's 64 rows of a tile, the left operand of S or dP in every iteration. As many k-steps
// as fit in kRegisters registers are register operands, starting with those of the hi parts, which
// two of the three products read. A product of 64 columns saturates the bandwidth of shared memory
// if its left operand is there, too.
template <class Tile, int kRegisters>
struct F16x3Rows {
  static constexpr int kHighSteps = register_steps(Tile::kColumns, kRegisters);
  static constexpr int kLowSteps = register_steps(Tile::kColumns, kRegisters - 4 * kHighSteps);
  using Part = typename Tile::Part;
  using Grid = WarpgroupGrid<Tile::kRows, 64>;
  RegisterRows<Part, Grid, kHighSteps> high;
  RegisterRows<Part, Grid, kLowSteps> low;

  CUTE_DEVICE explicit F16x3Rows(uint32_t tile) : high(tile, 0), low(tile + Tile::kLow, 0) {}
};

// Starts scores = left right^T, from the rows of two tiles, as a group of products.
template <class Tile, class Rows, class Scores>
CUTE_DEVICE void begin_f16x3_scores(Scores& scores, Rows const& left, uint32_t right) {
  using Columns = DescriptorOperand<typename Tile::Part, Contiguous::k>;
  constexpr int kSteps = Tile::kColumns / 16;
  using Half = cutlass::half_t;
  fence_accumulators(scores);
  begin_products();
  warpgroup_gemm<Half, kSteps>(scores, left.low, Columns(right), false);
  warpgroup_gemm<Half, kSteps>(scores, left.high, Columns(right + Tile::kLow), true);
  warpgroup_gemm<Half, kSteps>(scores, left.high, Columns(right), true);
  commit_products();
}

// Calls use(n, factors) for each column block of the accumulators, with the factors of a lane's two
// columns.
template <class Scores, class Use>
CUTE_DEVICE void for_each_column_pair(Scores const&, uint32_t factors, Use use) {
  uint32_t const own = factors + thread_index() % 4 * 2 * int(sizeof(float));
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(Scores{}); ++n) {
    use(n, load_shared_pair(own + n * 8 * int(sizeof(float))));
  }
}

// Multiplies scores by the factors of their columns.
template <class Scores>
CUTE_DEVICE void scale_columns(Scores& scores, uint32_t factors) {
  for_each_column_pair(scores, factors, [&](int n, float2 pair) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      scores(2 * half, 0, n) *= pair.x;
      scores(2 * half + 1, 0, n) *= pair.y;
    }
  });
}

// Multiplies scores by the factors of their columns and of their rows, one after the other, because
// the product of two factors may underflow in f32.
template <class Scores>
CUTE_DEVICE void unscale(Scores& scores, RowFactors const& rows, uint32_t column_factors) {
  for_each_column_pair(scores, column_factors, [&](int n, float2 pair) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      scores(2 * half, 0, n) = scores(2 * half, 0, n) * pair.x * rows.of[half];
      scores(2 * half + 1, 0, n) = scores(2 * half + 1, 0, n) * pair.y * rows.of[half];
    }
  });
}

// P or dS as a left operand: its hi and lo parts, and the factors for the product's rows.
template <int kSteps>
struct F16x3LeftOperand {
  RegisterOperand<1, kSteps, 2> high;
  RegisterOperand<1, kSteps, 2> low;
  float factors[2];

  // Scales each row of the scores and splits them.
  template <class Scores>
  CUTE_DEVICE void set(Scores const& scores) {
    static_assert(cute::size<2>(Scores{}) == 2 * kSteps);
    float scales[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float greatest[2] = {};  // two chains, for latency
      CUTE_UNROLL
      for (int n = 0; n < 2 * kSteps; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          greatest[i] = fmaxf(greatest[i], fabsf(scores(2 * half + i, 0, n)));
        }
      }
      RowScale const scale =
          RowScale::of(__float_as_int(quad_max(fmaxf(greatest[0], greatest[1]))));
      scales[half] = scale.scale;
      factors[half] = scale.inverse;
    }
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * step + i / 2;
        int const half = i % 2;
        split_to_f16(scores(2 * half, 0, n) * scales[half],
                     scores(2 * half + 1, 0, n) * scales[half], high.fragments[0][step][i],
                     low.fragments[0][step][i]);
      }
    }
  }
};

// Starts part = operand * tile as a group of products.
template <class Tile, int kSteps, class Part>
CUTE_DEVICE void begin_f16x3_gradient(Part& part, F16x3LeftOperand<kSteps> const& operand,
                                      uint32_t tile) {
  static_assert(Tile::kRows == 16 * kSteps);
  using Columns = DescriptorOperand<typename Tile::Part, Contiguous::outer>;
  using Half = cutlass::half_t;
  fence_accumulators(part);
  begin_products();
  warpgroup_gemm<Half, kSteps>(part, operand.low, Columns(tile), false);
  warpgroup_gemm<Half, kSteps>(part, operand.high, Columns(tile + Tile::kLow));
  warpgroup_gemm<Half, kSteps>(part, operand.high, Columns(tile));
  commit_products();
}

// Adds the sums of a finished product to a gradient.
template <int kSteps, class Part, class Gradient>
CUTE_DEVICE void add_part(Gradient& gradient, Part& part, F16x3LeftOperand<kSteps> const& operand) {
  fence_accumulators(part);
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(gradient); ++n) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      gradient(i, 0, n) = fmaf(part(i, 0, n), operand.factors[i / 2], gradient(i, 0, n));
    }
  }
}

// Stores this lane's rows of a gradient. The product's first row is `row` of the tensor's head, and
// rows of the product from `bound` on are not written.
template <class Config, class Grid, class Gradient>
CUTE_DEVICE void store_gradient(TensorView const& tensor, Origin const& origin, int head, int row,
                                int bound, int columns, Gradient const& gradient) {
  using Element = typename Config::Element;
  int const own = Grid::element_row(0, 0);
  char* target = row_pointer<Element>(tensor, origin.batch, origin.row + row + own, head) +
                 lane_column() * int(sizeof(Element));
  hide_value(target);  // otherwise the compiler computes each address from scratch
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    store_row<Element>(target + half * 8 * row_bytes<Element>(tensor), gradient, half, columns,
                       own + half * 8 < bound);
  }
}

// The dq kernel: one CTA owns 128 queries, 64 for each consumer, and iterates over the KV blocks
// that they attend to. P and dS stay in registers, so the consumers exchange nothing: while one
// computes P and dS, the other's products run.

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaBackwardF16x3Dq {
  using Tiles = F16x3Tiles<Config>;
  using QueryTile = typename Tiles::Query;
  using OutTile = typename Tiles::OutGradient;
  using KeyTile = typename Tiles::Key;
  using ValueTile = typename Tiles::Value;
  using TwoKernelDq = FmhaBackwardTwoKernelDq<Config>;
  using Work = typename TwoKernelDq::Work;
  using Mask = typename TwoKernelDq::Mask;
  using ScoreGrid = typename TwoKernelDq::ScoreGrid;
  using QueryGrid = typename TwoKernelDq::QueryGrid;
  using Statistics = typename TwoKernelDq::Statistics;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = kTileQuery / kWarpgroupRows;
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  // Two products read the keys, and the second one, dQ, comes last in an iteration. So keys need
  // one more buffer than values.
  static constexpr int kKeyStages = Config::kStages;
  static constexpr int kValueStages = kKeyStages - 1;
  using KeyStage = PipelineStage<kKeyStages>;
  using ValueStage = PipelineStage<kValueStages>;

  // Offsets in shared memory: hi and lo parts, then factors.
  static constexpr int kOutOffset = kWarpgroups * kF16x3PartBytes<QueryTile>;
  static constexpr int kKeyOffset = kOutOffset + kWarpgroups * kF16x3PartBytes<OutTile>;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * kF16x3PartBytes<KeyTile>;
  static constexpr int kQueryFactors = kValueOffset + kValueStages * kF16x3PartBytes<ValueTile>;
  static constexpr int kOutFactors = kQueryFactors + kWarpgroups * kF16x3FactorBytes;
  static constexpr int kKeyFactors = kOutFactors + kWarpgroups * kF16x3FactorBytes;
  static constexpr int kValueFactors = kKeyFactors + kKeyStages * kF16x3FactorBytes;
  static constexpr int kControlOffset = kValueFactors + kValueStages * kF16x3FactorBytes;

  // The barriers in shared memory.
  struct Control {
    Pipeline<1> query;  // also covers dO
    Pipeline<kKeyStages> key;
    Pipeline<kValueStages> value;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.query.init(1);
      control.key.init(kConsumerWarps);
      control.value.init(kConsumerWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, work, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, work, control, tiles);
    }
  }

  // The producer, one thread: copies queries and dO once, then keys and values of each KV block.
  CUTE_DEVICE static void produce(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    WorkItem const& item = work.item;
    if (work.kv_blocks.begin >= work.kv_blocks.end) return;
    uint64_t& arrived =
        control.query.acquire({}, kWarpgroups * (QueryTile::kBytes + OutTile::kBytes));
    // Hazard: rows beyond the length may have no tile. The last tile is copied instead.
    int const length = Mask(params.mask, params.shape, item.batch).query_length;
    int const last = Tiles::template count<QueryTile>(length) - 1;
    CUTE_UNROLL
    for (int i = 0; i < kWarpgroups; ++i) {
      int const tile = min(item.tile * kWarpgroups + i, last);
      load_f16x3<QueryTile>(Tiles::query(params, item.batch, item.head, tile), arrived,
                            tiles + i * kF16x3PartBytes<QueryTile>,
                            tiles + kQueryFactors + i * kF16x3FactorBytes);
      load_f16x3<OutTile>(Tiles::out_gradient(params, item.batch, item.head, tile), arrived,
                          tiles + kOutOffset + i * kF16x3PartBytes<OutTile>,
                          tiles + kOutFactors + i * kF16x3FactorBytes);
    }
    // Computed after the query copies have started, because finding the key head takes a division.
    int const key_head = item.head / params.shape.group;
    char const* const keys = Tiles::key(params, item.batch, key_head, 0);
    char const* const values = Tiles::value(params, item.batch, key_head, 0);
    KeyStage key;
    ValueStage value;
    CUTE_NO_UNROLL
    for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
         tile = work.kv_blocks.before(tile)) {
      load_f16x3<KeyTile>(keys + (long long)tile * KeyTile::kBytes,
                          control.key.acquire(key, KeyTile::kBytes), key_tile(tiles, key),
                          key_factors(tiles, key));
      load_f16x3<ValueTile>(values + (long long)tile * ValueTile::kBytes,
                            control.value.acquire(value, ValueTile::kBytes),
                            value_tile(tiles, value), value_factors(tiles, value));
      key.advance();
      value.advance();
    }
  }

  // The addresses of the buffers.
  CUTE_DEVICE static uint32_t key_tile(uint32_t tiles, KeyStage const& stage) {
    return tiles + kKeyOffset + stage.index * kF16x3PartBytes<KeyTile>;
  }
  CUTE_DEVICE static uint32_t key_factors(uint32_t tiles, KeyStage const& stage) {
    return tiles + kKeyFactors + stage.index * kF16x3FactorBytes;
  }
  CUTE_DEVICE static uint32_t value_tile(uint32_t tiles, ValueStage const& stage) {
    return tiles + kValueOffset + stage.index * kF16x3PartBytes<ValueTile>;
  }
  CUTE_DEVICE static uint32_t value_factors(uint32_t tiles, ValueStage const& stage) {
    return tiles + kValueFactors + stage.index * kF16x3FactorBytes;
  }

  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid>>;

  // The part of the queries and dO that stays in registers. The other registers hold dQ; S and dP
  // with the input of the derivative or, in the same registers, the operand and accumulators of a
  // product; and statistics, addresses and whatever masks and modifiers need.
  static constexpr int kSumRegisters = Config::kHeadDim / 2;
  static constexpr int kScoreRegisters = (2 + !Modifiers::kConstantDerivative) * kTileKey / 2;
  static constexpr int kProductRegisters = kTileKey / 2 + kSumRegisters;
  static constexpr int kOtherRegisters = 44 + Config::kModifierRegisters;
  static constexpr int kFreeRegisters = kConsumerRegisters - kSumRegisters - kOtherRegisters -
                                        cute::max(kScoreRegisters, kProductRegisters);
  using QueryRows = F16x3Rows<QueryTile, kFreeRegisters>;
  static constexpr int kQueryRegisters = 4 * (QueryRows::kHighSteps + QueryRows::kLowSteps);
  using OutRows = F16x3Rows<OutTile, kFreeRegisters - kQueryRegisters>;
  using KeptBlocks = ProbabilityModifiers<Config, ScoreGrid>;

  using Operand = F16x3LeftOperand<kTileKey / 16>;

  // The main loop: per KV block S and dP, P and dS, then dQ.
  CUTE_DEVICE static void consume(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    Mask const mask(params.mask, params.shape, work.item.batch);
    auto query_gradient = QueryGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(query_gradient);
    if (work.kv_blocks.begin < work.kv_blocks.end) {
      int const warpgroup = warpgroup_index();
      Statistics const statistics = TwoKernelDq::load_statistics(params, work.item, work.row);
      control.query.wait({});
      QueryRows const queries(tiles + warpgroup * kF16x3PartBytes<QueryTile>);
      OutRows const outs(tiles + kOutOffset + warpgroup * kF16x3PartBytes<OutTile>);
      Steps const steps{
          params,
          work,
          mask,
          control,
          tiles,
          threadIdx.x % kWarpSize == 0,
          statistics,
          RowFactors::load<ScoreGrid>(tiles + kQueryFactors + warpgroup * kF16x3FactorBytes),
          RowFactors::load<ScoreGrid>(tiles + kOutFactors + warpgroup * kF16x3FactorBytes)};
      KeyStage key;
      ValueStage value;
      Operand operand;
      auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      auto part = QueryGrid::make_accumulators();            // (4, 1, MMA_N)
      CUTE_NO_UNROLL
      for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
           tile = work.kv_blocks.before(tile)) {
        steps.begin_scores(queries, outs, key, value, scores, score_gradient);
        steps.differentiate_block(tile, key, value, scores, score_gradient);
        operand.set(score_gradient);
        begin_f16x3_gradient<KeyTile>(part, operand, key_tile(tiles, key));
        steps.end_gradient(operand, key, part, query_gradient);
        key.advance();
        value.advance();
      }
    }
    store(params, work, mask.query_length - work.row, query_gradient);
  }

  // The steps of the main loop.
  struct Steps {
    BackwardParams const& params;
    Work const& work;
    Mask const& mask;
    Control& control;
    uint32_t tiles;
    bool leader;  // one per warp
    Statistics const& statistics;
    RowFactors query_rows;
    RowFactors out_rows;

    // S = Q K^T and dP = dO V^T
    template <class Scores>
    CUTE_DEVICE void begin_scores(QueryRows const& queries, OutRows const& outs,
                                  KeyStage const& key, ValueStage const& value, Scores& scores,
                                  Scores& score_gradient) const {
      control.key.wait(key);
      begin_f16x3_scores<KeyTile>(scores, queries, key_tile(tiles, key));
      control.value.wait(value);
      begin_f16x3_scores<ValueTile>(score_gradient, outs, value_tile(tiles, value));
    }

    // Replaces dP of KV block `tile` with dS times the factors of its keys.
    template <class Scores>
    CUTE_DEVICE void differentiate_block(int tile, KeyStage const& key, ValueStage const& value,
                                         Scores& scores, Scores& score_gradient) const {
      ScoreTilePosition const at = {work.item.batch, work.item.head, work.row, tile * kTileKey};
      wait_products<1>();  // S
      fence_accumulators(scores);
      unscale(scores, query_rows, key_factors(tiles, key));
      exponentiate(params, mask, at, work.kv_blocks.partial(tile), statistics, scores);
      control.value.wait_again(value);  // redundant: keeps the exponentials above the next wait
      wait_products<0>();               // dP
      fence_accumulators(score_gradient);
      unscale(score_gradient, out_rows, value_factors(tiles, value));
      differentiate(params, at, statistics, scores, score_gradient);
      __syncwarp();
      if (leader) control.value.release(value);
      scale_columns(score_gradient, key_factors(tiles, key));
    }

    // dQ += dS K
    template <class Part>
    CUTE_DEVICE void end_gradient(Operand const& operand, KeyStage const& key, Part& part,
                                  Part& query_gradient) const {
      wait_products<0>();
      add_part(query_gradient, part, operand);
      if (leader) control.key.release(key);
    }
  };

  // Replaces S with P times the derivative of the modifiers.
  template <class Scores>
  CUTE_DEVICE static void exponentiate(BackwardParams const& params, Mask const& mask,
                                       ScoreTilePosition const& at, bool partial,
                                       Statistics const& statistics, Scores& scores) {
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the derivative
    modifiers.recompute(scores, scaled, at);
    mask.template apply<kTileQuery, kTileKey>(scores, params, at, partial);
    statistics.template exponentiate_and_differentiate<Modifiers>(params.scale.softmax_scale,
                                                                  scaled, scores);
    fence_accumulators(scores);
  }

  // Replaces dP with dS, the gradient of Q K^T, not yet multiplied by the user's scale.
  // `probabilities` are P times the derivative of the modifiers.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, ScoreTilePosition const& at,
                                        Statistics const& statistics, Scores const& probabilities,
                                        Scores& score_gradient) {
    auto block = [&](int, int column_block, auto const& keep) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        int const chunk = i / 4;
        int const half = i % 4 / 2;
        int const n = 2 * column_block + chunk;
        float& gradient = score_gradient(i % 4, 0, n);
        gradient =
            softmax_gradient(probabilities(i % 4, 0, n), keep.select(gradient, half, chunk, i % 2),
                             probability_scale<Config>(params), statistics.delta(half));
      }
    };
    KeptBlocks::for_each_block(params, at.batch, at.head, at.row, at.column, block);
  }

  // Stores dq. Rows from query_bound on are beyond the query length and get 0.
  template <class Accumulators>
  CUTE_DEVICE static void store(BackwardParams const& params, Work const& work, int query_bound,
                                Accumulators& query_gradient) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(query_gradient); ++i) {
      bool const beyond = QueryGrid::element_row(i % 4, 0) >= query_bound;
      query_gradient(i) = beyond ? 0.0f : query_gradient(i) * params.scale.gradient_scale;
    }
    WorkItem const& item = work.item;
    int const bound = Config::kPacked ? query_bound : params.shape.query_length - work.row;
    store_gradient<Config, QueryGrid>(params.query_gradient,
                                      query_origin<Config>(params.shape, item.batch), item.head,
                                      work.row, bound, params.shape.head_dim, query_gradient);
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::queries, kTileQuery> const grid = {params.shape};
      clear_query_gap<Config, kConsumers>(params, item, query_bound + work.row,
                                          grid.of_batch_index(item.batch));
    }
  }
};

// The dkdv kernel: one CTA owns 64 keys and iterates over the Q blocks that attend to them. One
// consumer computes P^T and owns dV, the other computes dS^T and owns dK. So each computes two
// products, and only P^T passes through shared memory, in f32. Each splits its own operand into hi
// and lo parts in registers.

template <class Config>
struct F16x3DkdvWork {
  using Tiles = F16x3Tiles<Config>;
  using QueryTile = typename Tiles::Query;
  using OutTile = typename Tiles::OutGradient;
  using KeyTile = typename Tiles::Key;
  using ValueTile = typename Tiles::Value;
  using Blocks = DkdvSm90<Config>;
  using Work = typename Blocks::Work;
  using QBlockCursor = typename Blocks::QBlockCursor;
  using Mask = typename Blocks::Mask;
  using ScoreGrid = typename Blocks::ScoreGrid;
  using KeyGrid = typename Blocks::KeyGrid;
  using ValueGrid = typename Blocks::ValueGrid;
  using Statistics = typename Blocks::Tiles;
  static constexpr int kTileQuery = Blocks::kTileQuery;
  static constexpr int kTileKey = Blocks::kTileKey;
  static constexpr int kSteps = kTileQuery / 16;  // k-steps of a gradient's product
  static constexpr int kConsumers = Blocks::kConsumers;
  static constexpr int kStages = Blocks::kStages;  // for queries and for dO
  static constexpr int kProbabilityStages = Blocks::kProbabilityStages;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters =
      consumer_registers<kConsumers + kWarpgroupSize, kProducerRegisters>();

  // The registers for keys or values, alongside a gradient, the operand and accumulators of its
  // product, and addresses.
  static constexpr int kOtherRegisters = 40;
  CUTE_DEVICE static constexpr int free_registers(int columns) {
    return kConsumerRegisters - columns - kTileQuery / 2 - kOtherRegisters;
  }
  using Stage = PipelineStage<kStages>;
  using ProbabilityStage = PipelineStage<kProbabilityStages>;

  // Offsets in shared memory: hi and lo parts, P^T, then factors and statistics.
  static constexpr int kProbabilityBytes = kTileKey * kTileQuery * int(sizeof(float));
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = kF16x3PartBytes<KeyTile>;
  static constexpr int kQueryOffset = kValueOffset + kF16x3PartBytes<ValueTile>;
  static constexpr int kOutOffset = kQueryOffset + kStages * kF16x3PartBytes<QueryTile>;
  static constexpr int kProbabilityOffset = kOutOffset + kStages * kF16x3PartBytes<OutTile>;
  static constexpr int kKeyFactors = kProbabilityOffset + kProbabilityStages * kProbabilityBytes;
  static constexpr int kValueFactors = kKeyFactors + kF16x3FactorBytes;
  static constexpr int kQueryFactors = kValueFactors + kF16x3FactorBytes;
  static constexpr int kOutFactors = kQueryFactors + kStages * kF16x3FactorBytes;
  static constexpr int kStatisticsOffset = kOutFactors + kStages * kF16x3FactorBytes;
  static constexpr int kControlOffset = kStatisticsOffset + kStages * kStatisticsBytes;

  // The barriers in shared memory.
  struct Control {
    Pipeline<1> key;
    Pipeline<1> value;
    Pipeline<kStages> query;  // also covers the statistics of their rows
    Pipeline<kStages> out_gradient;
    Pipeline<kProbabilityStages> probability;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // The addresses of the buffers.
  CUTE_DEVICE static uint32_t query_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryOffset + stage.index * kF16x3PartBytes<QueryTile>;
  }
  CUTE_DEVICE static uint32_t query_factors(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryFactors + stage.index * kF16x3FactorBytes;
  }
  CUTE_DEVICE static uint32_t out_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kOutOffset + stage.index * kF16x3PartBytes<OutTile>;
  }
  CUTE_DEVICE static uint32_t out_factors(uint32_t tiles, Stage const& stage) {
    return tiles + kOutFactors + stage.index * kF16x3FactorBytes;
  }
  CUTE_DEVICE static uint32_t statistics(uint32_t tiles, Stage const& stage) {
    return tiles + kStatisticsOffset + stage.index * kStatisticsBytes;
  }

  // This lane's part of a buffer of P^T: vector n holds its four elements of eight columns. A lane
  // owns the same elements in both consumers, so no lane reads what a different lane wrote.
  CUTE_DEVICE static uint32_t probabilities(uint32_t tiles, ProbabilityStage const& stage) {
    return tiles + kProbabilityOffset + stage.index * kProbabilityBytes +
           thread_index() % kWarpgroupSize * 16;
  }
  static constexpr int kVectorDistance = kWarpgroupSize * 16;

  // Stores a gradient of this CTA's keys.
  template <class Grid, class Gradient>
  CUTE_DEVICE static void store(BackwardParams const& params, Work const& work, int key_length,
                                TensorView const& tensor, int columns, Gradient& gradient,
                                float scale) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(gradient); ++i) gradient(i) *= scale;
    Origin const origin = key_origin<Config>(params.shape, work.item.batch);
    int const bound = (Config::kPacked ? key_length : params.shape.key_length) - work.column;
    store_gradient<Config, Grid>(tensor, origin, work.item.head, work.column, bound, columns,
                                 gradient);
  }
};

// The consumer that computes P^T = exp2(K Q^T - lse) for the other one, and dV += P^T dO.

// Called with all threads of the first consumer.
template <class Config>
struct F16x3ProbabilityConsumer : F16x3DkdvWork<Config> {
  using Base = F16x3DkdvWork<Config>;
  using Base::kTileKey;
  using Base::kTileQuery;
  using typename Base::Control;
  using typename Base::KeyTile;
  using typename Base::Mask;
  using typename Base::OutTile;
  using typename Base::ProbabilityStage;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::ScoreGrid;
  using typename Base::Stage;
  using typename Base::ValueGrid;
  using typename Base::Work;

  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid, true>>;
  using KeptBlocks = typename ProbabilityModifiers<Config, ScoreGrid, true>::Tile;
  using Operand = F16x3LeftOperand<Base::kSteps>;
  using KeyRows = F16x3Rows<KeyTile, Base::free_registers(Config::kValueDim)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    Mask const mask(params.mask, params.shape, work.item.batch);
    F16x3ProbabilityConsumer const consumer{
        {}, params, work, mask, control, tiles, threadIdx.x % kWarpSize == 0};
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(value_gradient);
    if (int const count = Base::Blocks::q_block_count(params, work); count > 0) {
      control.key.wait({});
      KeyRows const keys(tiles);
      auto const key_rows = RowFactors::load<ScoreGrid>(tiles + Base::kKeyFactors);
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage sent;
      Operand operand;
      auto part = ValueGrid::make_accumulators();    // (4, 1, MMA_N)
      auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        consumer.begin_scores(keys, stage, scores);
        KeptBlocks const kept(params, work.item.batch, q_block.head, q_block.row(), work.column);
        wait_products<0>();
        consumer.exponentiate(key_rows, q_block, stage, sent, scores);
        consumer.make_operand(kept, stage, scores, operand);
        consumer.begin_gradient(operand, stage, part);
        wait_products<0>();
        consumer.end_gradient(operand, stage, part, value_gradient);
        q_block.advance(params, work);
        stage.advance();
      }
    }
    if constexpr (Config::kValueGradient) {
      Base::template store<ValueGrid>(params, work, mask.key_length, params.value_gradient,
                                      params.shape.value_dim, value_gradient,
                                      probability_scale<Config>(params));
    }
  }

  BackwardParams const& params;
  Work const& work;
  Mask const& mask;
  Control& control;
  uint32_t tiles;
  bool leader;  // one per warp

  // S^T = K Q^T
  template <class Scores>
  CUTE_DEVICE void begin_scores(KeyRows const& keys, Stage const& stage, Scores& scores) const {
    control.query.wait(stage);
    begin_f16x3_scores<QueryTile>(scores, keys, Base::query_tile(tiles, stage));
  }

  // Replaces S^T with P^T, and sends P^T times the derivative of the modifiers to the other
  // consumer.
  template <class Scores>
  CUTE_DEVICE void exponentiate(RowFactors const& key_rows, QBlockCursor const& q_block,
                                Stage const& stage, ProbabilityStage& sent, Scores& scores) const {
    fence_accumulators(scores);
    unscale(scores, key_rows, Base::query_factors(tiles, stage));
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const at = {work.item.batch, q_block.head, q_block.row(), work.column};
    auto derivative = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    modifiers.recompute_with_derivatives(scores, derivative, at);
    mask.template apply_transposed<kTileQuery, kTileKey>(scores, params, at,
                                                         q_block.blocks.partial(q_block.tile));
    uint32_t const statistics = Base::statistics(tiles, stage);
    exponentiate_transposed(Logsumexps<ScoreGrid, 0>(statistics).reader(statistics),
                            params.scale.softmax_scale, scores);
    if constexpr (Config::kKeyGradient) {
      control.probability.acquire(sent);
      uint32_t const vectors = Base::probabilities(tiles, sent);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        auto factor = [&](int i) {
          float const p = scores(i, 0, n);
          return Modifiers::kConstantDerivative ? p : Modifiers::product(p, derivative(i, 0, n));
        };
        store_shared_vector(vectors + n * Base::kVectorDistance, factor(0), factor(1), factor(2),
                            factor(3));
      }
    }
    __syncwarp();
    if (leader) control.query.release(stage);
    if constexpr (Config::kKeyGradient) {
      if (leader) control.probability.commit(sent);
      sent.advance();
    }
  }

  // Makes the operand of dV from P^T.
  template <class Scores>
  CUTE_DEVICE void make_operand(KeptBlocks const& kept, Stage const& stage, Scores& probabilities,
                                Operand& operand) const {
    if constexpr (Config::kValueGradient) {
      control.out_gradient.wait(stage);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(probabilities); ++i) {
        int const n = i / 4;
        float& p = probabilities(i % 4, 0, n);
        p = kept.block(0, n / 2).select(p, n % 2, i % 4 / 2, i % 2);
      }
      scale_columns(probabilities, Base::out_factors(tiles, stage));
      operand.set(probabilities);
    }
  }

  // dV += P^T dO
  template <class Part>
  CUTE_DEVICE void begin_gradient(Operand const& operand, Stage const& stage, Part& part) const {
    if constexpr (Config::kValueGradient) {
      begin_f16x3_gradient<OutTile>(part, operand, Base::out_tile(tiles, stage));
    }
  }
  template <class Part>
  CUTE_DEVICE void end_gradient(Operand const& operand, Stage const& stage, Part& part,
                                Part& value_gradient) const {
    if constexpr (Config::kValueGradient) {
      add_part(value_gradient, part, operand);
      if (leader) control.out_gradient.release(stage);
    }
  }
};

// The consumer that computes dS^T = P^T (V dO^T - delta) from the other consumer's P^T, and
// dK += dS^T Q.

// Called with all threads of the second consumer, if there is a gradient of the key.
template <class Config>
struct F16x3GradientConsumer : F16x3DkdvWork<Config> {
  using Base = F16x3DkdvWork<Config>;
  using typename Base::Control;
  using typename Base::KeyGrid;
  using typename Base::OutTile;
  using typename Base::ProbabilityStage;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::ScoreGrid;
  using typename Base::Stage;
  using typename Base::ValueTile;
  using typename Base::Work;
  using KeptBlocks = typename ProbabilityModifiers<Config, ScoreGrid, true>::Tile;
  using Operand = F16x3LeftOperand<Base::kSteps>;
  using ValueRows = F16x3Rows<ValueTile, Base::free_registers(Config::kHeadDim)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    F16x3GradientConsumer const consumer{{},      params, work,
                                         control, tiles,  threadIdx.x % kWarpSize == 0};
    auto key_gradient = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);
    if (int const count = Base::Blocks::q_block_count(params, work); count > 0) {
      control.value.wait({});
      ValueRows const values(tiles + Base::kValueOffset);
      auto const value_rows = RowFactors::load<ScoreGrid>(tiles + Base::kValueFactors);
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage received;
      Operand operand;
      auto part = KeyGrid::make_accumulators();              // (4, 1, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        consumer.begin_score_gradient(values, stage, score_gradient);
        KeptBlocks const kept(params, work.item.batch, q_block.head, q_block.row(), work.column);
        wait_products<0>();
        consumer.differentiate(value_rows, kept, stage, received, score_gradient);
        operand.set(score_gradient);
        consumer.begin_gradient(operand, stage, part);
        wait_products<0>();
        consumer.end_gradient(operand, stage, part, key_gradient);
        q_block.advance(params, work);
        stage.advance();
      }
    }
    int const key_length =
        typename Base::Mask(params.mask, params.shape, work.item.batch).key_length;
    Base::template store<KeyGrid>(params, work, key_length, params.key_gradient,
                                  params.shape.head_dim, key_gradient, params.scale.gradient_scale);
  }

  BackwardParams const& params;
  Work const& work;
  Control& control;
  uint32_t tiles;
  bool leader;  // one per warp

  // dP^T = V dO^T
  template <class Scores>
  CUTE_DEVICE void begin_score_gradient(ValueRows const& values, Stage const& stage,
                                        Scores& score_gradient) const {
    control.out_gradient.wait(stage);
    begin_f16x3_scores<OutTile>(score_gradient, values, Base::out_tile(tiles, stage));
  }

  // Replaces dP^T with dS^T times the factors of the queries. dS^T is the gradient of Q K^T, not
  // yet multiplied by the user's scale.
  template <class Scores>
  CUTE_DEVICE void differentiate(RowFactors const& value_rows, KeptBlocks const& kept,
                                 Stage const& stage, ProbabilityStage& received,
                                 Scores& score_gradient) const {
    fence_accumulators(score_gradient);
    unscale(score_gradient, value_rows, Base::out_factors(tiles, stage));
    __syncwarp();
    if (leader) control.out_gradient.release(stage);
    control.query.wait(stage);
    control.probability.wait(received);
    int const thread = thread_index();
    uint32_t const statistics = Base::statistics(tiles, stage);
    uint32_t const vectors = Base::probabilities(tiles, received);
    CUTE_UNROLL
    for (int pair = 0; pair < ScoreGrid::kColumnBlocks; ++pair) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        int const n = 2 * pair + chunk;
        uint4 const words = load_shared_vector(vectors + n * Base::kVectorDistance);
        uint32_t const p[4] = {words.x, words.y, words.z, words.w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& gradient = score_gradient(i, 0, n);
          float const own = kept.block(0, pair).select(gradient, chunk, i / 2, i % 2);
          gradient = softmax_gradient(__uint_as_float(p[i]), own, probability_scale<Config>(params),
                                      deltas.of[2 * chunk + i % 2]);
        }
      }
    }
    __syncwarp();
    if (leader) control.probability.release(received);
    received.advance();
    scale_columns(score_gradient, Base::query_factors(tiles, stage));
  }

  // dK += dS^T Q
  template <class Part>
  CUTE_DEVICE void begin_gradient(Operand const& operand, Stage const& stage, Part& part) const {
    begin_f16x3_gradient<QueryTile>(part, operand, Base::query_tile(tiles, stage));
  }
  template <class Part>
  CUTE_DEVICE void end_gradient(Operand const& operand, Stage const& stage, Part& part,
                                Part& key_gradient) const {
    add_part(key_gradient, part, operand);
    if (leader) control.query.release(stage);
  }
};

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaBackwardF16x3Dkdv : F16x3DkdvWork<Config> {
  using Base = F16x3DkdvWork<Config>;
  using Base::kConsumerRegisters;
  using Base::kConsumers;
  using Base::kControlOffset;
  using Base::kProducerRegisters;
  using typename Base::Control;
  using typename Base::KeyTile;
  using typename Base::OutTile;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::Stage;
  using typename Base::Tiles;
  using typename Base::ValueTile;
  using typename Base::Work;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
      control.key.init(1);
      control.value.init(1);
      control.query.init(kWarps * (1 + Config::kKeyGradient));
      control.out_gradient.init(kWarps * (Config::kValueGradient + Config::kKeyGradient));
      control.probability.init(kWarps, kWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, work, control, tiles);
      return;
    }
    raise_registers<kConsumerRegisters>();
    if (warpgroup_index() == 0) {
      F16x3ProbabilityConsumer<Config>::run(params, work, control, tiles);
    } else if constexpr (Config::kKeyGradient) {
      F16x3GradientConsumer<Config>::run(params, work, control, tiles);
    }
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::keys, Base::kTileKey> const grid = {params.shape};
      clear_key_gap<Config, kConsumers>(
          params, work.item,
          typename Base::Mask(params.mask, params.shape, work.item.batch).key_length,
          grid.of_batch_index(work.item.batch));
    }
  }

  // The producer, one thread: copies keys and values once, then queries, statistics and dO of each
  // Q block.
  CUTE_DEVICE static void produce(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    WorkItem const& item = work.item;
    int const count = Base::Blocks::q_block_count(params, work);
    if (count == 0) return;
    load_f16x3<KeyTile>(Tiles::key(params, item.batch, item.head, item.tile),
                        control.key.acquire({}, KeyTile::kBytes), tiles, tiles + Base::kKeyFactors);
    load_f16x3<ValueTile>(Tiles::value(params, item.batch, item.head, item.tile),
                          control.value.acquire({}, ValueTile::kBytes), tiles + Base::kValueOffset,
                          tiles + Base::kValueFactors);
    QBlockCursor q_block(params, work);
    Stage stage;
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + Base::kStatisticsBytes);
      load_f16x3<QueryTile>(Tiles::query(params, item.batch, q_block.head, q_block.tile), query,
                            Base::query_tile(tiles, stage), Base::query_factors(tiles, stage));
      load_tma(Base::Statistics::statistics(params, item.batch, q_block.head, q_block.row()), query,
               Base::statistics(tiles, stage), Base::kStatisticsBytes);
      load_f16x3<OutTile>(Tiles::out_gradient(params, item.batch, q_block.head, q_block.tile),
                          control.out_gradient.acquire(stage, OutTile::kBytes),
                          Base::out_tile(tiles, stage), Base::out_factors(tiles, stage));
      q_block.advance(params, work);
      stage.advance();
    }
  }
};

// Computes the statistics of the rows; there are no sums to zero.
template <class Config>
struct FmhaBackwardF16x3Preprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

}  // namespace memeff
