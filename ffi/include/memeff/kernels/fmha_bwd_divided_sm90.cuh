// Attention backward for Hopper and head dims above 128, in two kernels that own what they write:
//
//   FmhaBackwardDividedQuery   one CTA 128 queries: dQ += dS K for every tile of keys
//   FmhaBackwardDividedKey     one CTA 64 keys: dV += P^T dO and dK += dS^T Q for every tile of
//                              queries
//
// dK and dV of 128 keys do not fit the registers of an SM, and with 64 keys a single kernel would
// send the f32 sums of dQ to L2 at more than its bandwidth. Two kernels compute S and dP twice,
// seven products instead of five, and send no sums anywhere; every run adds in one order.
#pragma once

#include <memeff/collective/bulk_tile.cuh>
#include <memeff/collective/pipeline.cuh>
#include <memeff/collective/softmax.cuh>
#include <memeff/collective/transposed_scores.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/dropout/keep.cuh>
#include <memeff/kernels/fmha_bwd_preprocess.cuh>
#include <memeff/mask/score_mask.cuh>

namespace memeff {

// What the kernels agree on.
template <class Config>
struct BackwardTilesDivided {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kVisitQuery = 64;  // queries of a visit of the key kernel
  static_assert(kTileQuery == 128 && kTileKey == 64);
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kThreads = kWarpgroups * kWarpgroupSize;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;  // also dq
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;   // dO
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;      // also dk
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;   // also dv

  CUTE_DEVICE static long long tile_index(BackwardParams const& params, int batch, int head,
                                          int tile) {
    long long const head_batch = (long long)batch * params.shape.query_heads + head;
    return head_batch * params.query_tiles + tile;
  }

  // Logsumexp and delta of the rows from `row` on.
  CUTE_DEVICE static float const* statistics(BackwardParams const& params, int batch, int head,
                                             int row) {
    return params.row_statistics + (tile_index(params, batch, head, 0) * kTileQuery + row) * 2;
  }
};

// The statistics of the rows; nothing is summed in global memory.
template <class Config>
struct FmhaBackwardDividedPreprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesDivided<Config>> {};

template <class Config>
struct FmhaBackwardDividedQuery {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesDivided<Config>;
  using QueryTile = typename Tiles::QueryTile;
  using OutTile = typename Tiles::OutTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;  // 64 K registers an SM
  static constexpr int kConsumerRegisters = 240;

  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kConsumerWarps, 16>;
  using QueryGrid = WarpGrid<kTileQuery, Config::kHeadDim, kConsumerWarps, 16>;
  using Mask = ScoreMask<Config, ScoreGrid>;

  // Keys are read by two products, the second of which ends an iteration: they need a buffer more.
  static constexpr int kKeyStages = Config::kStages;
  static constexpr int kValueStages = kKeyStages - 1;
  static constexpr int kOutOffset = QueryTile::kBytes;
  static constexpr int kKeyOffset = kOutOffset + OutTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * KeyTile::kBytes;
  static constexpr int kControlOffset = kValueOffset + kValueStages * ValueTile::kBytes;

  struct Control {
    Pipeline<1> query;  // and dO
    Pipeline<kKeyStages> key;
    Pipeline<kValueStages> value;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // What a CTA does. Causal rows with the most keys come first.
  struct Work {
    WorkItem item;
    int row;
    TileRange tiles;

    CUTE_DEVICE Work(BackwardParams const& params) {
      item = WorkItem::of_block(blockIdx.x, params.query_tiles, params.shape.query_heads);
      if constexpr (Config::kMask == MaskKind::causal) {
        item.tile = params.query_tiles - 1 - item.tile;
      }
      row = item.tile * kTileQuery;
      tiles = Mask(params.mask, params.shape, item.batch).key_tiles(row, kTileQuery, kTileKey);
    }
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    extern __shared__ __align__(1024) char shared[];
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
      if (threadIdx.x == kConsumers) produce(params, maps, work, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, maps, work, control, tiles);
    }
  }

  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    if (work.tiles.begin >= work.tiles.end) return;
    uint64_t& arrived = control.query.acquire({}, QueryTile::kBytes + OutTile::kBytes);
    CUTE_UNROLL
    for (int row = 0; row < kTileQuery; row += kWarpgroupRows) {
      load_bulk_tile<QueryTile>(maps.query, arrived, tiles, row, work.row + row, item.head,
                                item.batch, kOnce);
      load_bulk_tile<OutTile>(maps.out_gradient, arrived, tiles + kOutOffset, row, work.row + row,
                              item.head, item.batch, kOnce);
    }
    PipelineStage<kKeyStages> key;
    PipelineStage<kValueStages> value;
    int const key_head = item.head / params.shape.group;
    CUTE_NO_UNROLL
    for (int tile = work.tiles.end - 1; tile >= work.tiles.begin; --tile) {
      load_bulk_tile<KeyTile>(maps.key, control.key.acquire(key, KeyTile::kBytes),
                              tiles + kKeyOffset + key.index * KeyTile::kBytes, 0, tile * kTileKey,
                              key_head, item.batch, kAgain);
      load_bulk_tile<ValueTile>(maps.value, control.value.acquire(value, ValueTile::kBytes),
                                tiles + kValueOffset + value.index * ValueTile::kBytes, 0,
                                tile * kTileKey, key_head, item.batch, kAgain);
      key.advance();
      value.advance();
    }
  }

  using QueryRows = DescriptorOperand<QueryTile, Contiguous::k>;
  using OutRows = DescriptorOperand<OutTile, Contiguous::k>;
  using KeyRows = DescriptorOperand<KeyTile, Contiguous::k>;
  using KeyColumns = DescriptorOperand<KeyTile, Contiguous::outer>;
  using ValueRows = DescriptorOperand<ValueTile, Contiguous::k>;
  using ScoreOperand = RegisterOperand<1, kTileKey / 16, sizeof(Element)>;

  CUTE_DEVICE static void consume(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    WorkItem const& item = work.item;
    // Uniform over the warpgroup, and known to be.
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    Mask const mask(params.mask, shape, item.batch);
    QueryRows const queries(tiles, warpgroup * kWarpgroupRows);
    OutRows const out_gradients(tiles + kOutOffset, warpgroup * kWarpgroupRows);

    auto query_gradient = QueryGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(query_gradient);
    if (work.tiles.begin < work.tiles.end) {
      RowStatistics const statistics(params, item, work.row);
      PipelineStage<kKeyStages> key;
      PipelineStage<kValueStages> value;
      ScoreOperand left_gradient;
      control.query.wait({});
      clear_beyond(control, mask, shape, work, warpgroup, tiles);
      CUTE_NO_UNROLL
      for (int tile = work.tiles.end - 1; tile >= work.tiles.begin; --tile) {
        uint32_t const key_tile = tiles + kKeyOffset + key.index * KeyTile::kBytes;
        auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        control.key.wait(key);
        fence_accumulators(scores);
        begin_products();
        warpgroup_gemm<Element, Config::kHeadDim / 16>(scores, queries, KeyRows(key_tile), false);
        commit_products();
        control.value.wait(value);
        fence_accumulators(score_gradient);
        begin_products();
        warpgroup_gemm<Element, Config::kValueDim / 16>(
            score_gradient, out_gradients,
            ValueRows(tiles + kValueOffset + value.index * ValueTile::kBytes), false);
        commit_products();
        wait_products<1>();  // S, and dQ of the tile before
        fence_accumulators(scores);
        fence_accumulators(query_gradient);
        if (leader && tile < work.tiles.end - 1) control.key.release(previous(key));

        prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
        mask.template apply<kTileQuery, kTileKey>(scores, params.mask, shape, item.batch, item.head,
                                                  work.row, tile * kTileKey);
        statistics.exponentiate(params.scale.softmax_scale, scores);
        fence_accumulators(scores);
        wait_products<0>();
        fence_accumulators(score_gradient);
        if (leader) control.value.release(value);
        value.advance();
        differentiate(params, item, statistics, work.row, tile * kTileKey, scores, score_gradient,
                      left_gradient);

        fence_accumulators(query_gradient);
        begin_products();
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, left_gradient, KeyColumns(key_tile));
        commit_products();
        key.advance();
      }
      wait_products<0>();
      fence_accumulators(query_gradient);
    }
    store(params, maps, work, mask.query_length - work.row, warpgroup, tiles, query_gradient);
  }

  CUTE_DEVICE static PipelineStage<kKeyStages> previous(PipelineStage<kKeyStages> stage) {
    stage.index = (stage.index + kKeyStages - 1) % kKeyStages;
    return stage;
  }

  // Logsumexp and delta of the two rows that a thread owns elements of.
  struct RowStatistics {
    float2 rows[2];

    CUTE_DEVICE RowStatistics(BackwardParams const& params, WorkItem const& item, int row) {
      float const* const source = Tiles::statistics(params, item.batch, item.head, row);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        rows[half] = reinterpret_cast<float2 const*>(source)[ScoreGrid::element_row(2 * half, 0)];
      }
    }

    // P from S.
    template <class Scores>
    CUTE_DEVICE void exponentiate(float softmax_scale, Scores& scores) const {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        scores(i) = exp2_approx(fmaf(scores(i), softmax_scale, -rows[i % 4 / 2].x));
      }
    }
  };

  // What stands beyond the key length, in the first tile that is visited, may be NaN and would
  // reach dq. Each consumer clears it for itself: they write the same zeros.
  CUTE_DEVICE static void clear_beyond(Control& control, Mask const& mask,
                                       ProblemShape const& shape, Work const& work, int warpgroup,
                                       uint32_t tiles) {
    int const column = (work.tiles.end - 1) * kTileKey;
    if (mask.key_length >= min(column + kTileKey, shape.key_length)) return;
    control.key.wait({});
    control.value.wait({});
    clear_rows<KeyTile, kWarpgroupSize>(tiles + kKeyOffset, mask.key_length - column);
    clear_rows<ValueTile, kWarpgroupSize>(tiles + kValueOffset, mask.key_length - column);
    fence_bulk_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // dS from P and dP, the gradient of query.key without the user's scale, packed block by block.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, WorkItem const& item,
                                        RowStatistics const& statistics, int row, int column,
                                        Scores const& scores, Scores const& score_gradient,
                                        ScoreOperand& left_gradient) {
    auto block = [&](int, int column_block, auto const& keep) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const half = i % 2;
        int const chunk = i / 2;
        int const n = 2 * column_block + chunk;
        float gradient[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          int const element = 2 * half + j;
          float const kept = keep.select(score_gradient(element, 0, n), half, chunk, j);
          gradient[j] = scores(element, 0, n) *
                        fmaf(kept, kept_scale<Config>(params.dropout), -statistics.rows[half].y);
        }
        left_gradient.fragments[0][column_block][i] = pack<Element>(gradient[0], gradient[1]);
      }
    };
    if constexpr (Config::kDropout) {
      Dropout<ScoreGrid> const dropout(params.dropout, params.mask, item.batch);
      dropout.for_each_block(dropout_head(params.dropout, item.batch, item.head), row, column,
                             block);
    } else {
      CUTE_UNROLL
      for (int n = 0; n < ScoreGrid::kColumnBlocks; ++n) block(0, n, KeepAll{});
    }
  }

  // dq leaves through the tile of queries, each consumer with its own rows. Those from query_bound
  // on lie beyond the query length and get 0.
  template <class Accumulators>
  CUTE_DEVICE static void store(BackwardParams const& params, BackwardMaps const& maps,
                                Work const& work, int query_bound, int warpgroup, uint32_t tiles,
                                Accumulators& query_gradient) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(query_gradient); ++i) {
      bool const beyond = QueryGrid::element_row(i % 4, 0) >= query_bound;
      query_gradient(i) = beyond ? 0.0f : query_gradient(i) * params.scale.gradient_scale;
    }
    store_accumulators<Element, QueryTile, QueryGrid>(tiles, query_gradient);
    fence_bulk_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    int const tile_row = warpgroup * kWarpgroupRows;
    int const row = work.row + tile_row;
    if (threadIdx.x % kWarpgroupSize == 0 && row < params.shape.query_length) {
      store_bulk_tile<QueryTile>(maps.query_gradient, tiles, tile_row, row, work.item.head,
                                 work.item.batch);
      wait_bulk_stores();
    }
  }
};

// One consumer computes P and owns dK, the other computes dS and owns dV; P and dS go from one to
// the other through shared memory.
template <class Config>
struct FmhaBackwardDividedKey {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesDivided<Config>;
  static constexpr int kTileQuery = Tiles::kVisitQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;  // dO
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using ScoreTile = SharedTile<kTileKey, kTileQuery>;  // P^T, dS^T
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kWarpgroupWarps = kWarpgroupSize / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;  // 64 K registers an SM
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kStages = 2;
  static constexpr int kScoreStages = 2;

  using ScoreGrid = WarpgroupGrid<kTileKey, kTileQuery>;  // transposed
  using KeyGrid = WarpgroupGrid<kTileKey, Config::kHeadDim>;
  using ValueGrid = WarpgroupGrid<kTileKey, Config::kValueDim>;
  using Mask = IntervalMask<Config::kMask>;

  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kGradientOffset = kProbabilityOffset + kScoreStages * ScoreTile::kBytes;
  static constexpr int kQueryStatisticsOffset = kGradientOffset + kScoreStages * ScoreTile::kBytes;
  static constexpr int kOutStatisticsOffset = kQueryStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kControlOffset = kOutStatisticsOffset + kStages * kStatisticsBytes;

  struct Control {
    Pipeline<1> key;
    Pipeline<1> value;
    Pipeline<kStages> query;         // and the statistics of their rows
    Pipeline<kStages> out_gradient;  // and the statistics
    Pipeline<kScoreStages> probability;
    Pipeline<kScoreStages> score_gradient;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // What a CTA does: the query tiles that attend to its keys, for every head of the group.
  struct Work {
    WorkItem item;
    int column;
    TileRange tiles;

    CUTE_DEVICE Work(BackwardParams const& params) {
      ProblemShape const& shape = params.shape;
      item = WorkItem::of_block(blockIdx.x, ceil_div(shape.key_length, kTileKey), shape.key_heads);
      column = item.tile * kTileKey;
      tiles = Mask(params.mask, shape, item.batch).query_tiles(column, kTileKey, kTileQuery);
    }
  };

  // One tile of queries of one head, and the buffers it is in.
  struct Visit {
    int head;
    int tile;
    PipelineStage<kStages> stage;

    CUTE_DEVICE Visit(Work const& work, int group)
        : head(work.item.head * group), tile(work.tiles.begin) {}

    CUTE_DEVICE int row() const { return tile * kTileQuery; }

    CUTE_DEVICE void advance(Work const& work) {
      if (++tile == work.tiles.end) {
        tile = work.tiles.begin;
        ++head;
      }
      stage.advance();
    }
  };

  CUTE_DEVICE static int visits(Work const& work, int group) {
    return max(work.tiles.end - work.tiles.begin, 0) * group;
  }

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    extern __shared__ __align__(1024) char shared[];
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.key.init(1);
      control.value.init(1);
      control.query.init(kWarpgroupWarps);
      control.out_gradient.init(kWarpgroupWarps);
      control.probability.init(kWarpgroupWarps, kWarpgroupWarps);
      control.score_gradient.init(kWarpgroupWarps, kWarpgroupWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, maps, work, control, tiles);
      return;
    }
    raise_registers<kConsumerRegisters>();
    // Uniform over the warpgroup, and known to be.
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0) == 0) {
      consume_queries(params, maps, work, control, tiles);
    } else {
      consume_gradients(params, maps, work, control, tiles);
    }
  }

  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    int const count = visits(work, params.shape.group);
    if (count == 0) return;
    load_bulk_tile<KeyTile>(maps.key, control.key.acquire({}, KeyTile::kBytes), tiles, 0,
                            work.column, item.head, item.batch, kOnce);
    load_bulk_tile<ValueTile>(maps.value, control.value.acquire({}, ValueTile::kBytes),
                              tiles + kValueOffset, 0, work.column, item.head, item.batch, kOnce);
    Visit visit(work, params.shape.group);
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      PipelineStage<kStages> const& stage = visit.stage;
      float const* const statistics =
          Tiles::statistics(params, item.batch, visit.head, visit.row());
      uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
      load_bulk_tile<QueryTile>(maps.query, query,
                                tiles + kQueryOffset + stage.index * QueryTile::kBytes, 0,
                                visit.row(), visit.head, item.batch, kAgain);
      load_bulk(statistics, query, tiles + kQueryStatisticsOffset + stage.index * kStatisticsBytes,
                kStatisticsBytes);
      uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + kStatisticsBytes);
      load_bulk_tile<OutTile>(maps.out_gradient, out,
                              tiles + kOutOffset + stage.index * OutTile::kBytes, 0, visit.row(),
                              visit.head, item.batch, kAgain);
      load_bulk(statistics, out, tiles + kOutStatisticsOffset + stage.index * kStatisticsBytes,
                kStatisticsBytes);
      visit.advance(work);
    }
  }

  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;

  // The consumer of queries: P^T = exp2(K Q^T - lse) for the other one, and dK += dS^T Q.
  CUTE_DEVICE static void consume_queries(BackwardParams const& params, BackwardMaps const& maps,
                                          Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    Mask const mask(params.mask, shape, work.item.batch);
    auto key_gradient = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);

    if (int const count = visits(work, shape.group); count > 0) {
      auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      Visit visit(work, shape.group);
      PipelineStage<kScoreStages> slot;
      auto begin_scores = [&] {
        uint32_t const query_tile = tiles + kQueryOffset + visit.stage.index * QueryTile::kBytes;
        control.query.wait(visit.stage);
        if (mask.query_length < min(visit.row() + kTileQuery, shape.query_length)) {
          clear_beyond<QueryTile>(query_tile, mask.query_length - visit.row(), 0);
        }
        fence_accumulators(scores);
        begin_products();
        warpgroup_gemm<Element, Config::kHeadDim / 16>(
            scores, DescriptorOperand<KeyTile, Contiguous::k>(tiles),
            DescriptorOperand<QueryTile, Contiguous::k>(query_tile), false);
        commit_products();
      };
      auto send_probabilities = [&] {
        fence_accumulators(scores);
        prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
        if (mask.needs_test(visit.row(), kTileQuery, work.column, kTileKey)) {
          mask.template apply_transposed<ScoreGrid>(scores, visit.row(), work.column);
        }
        exponentiate_transposed<ScoreGrid>(
            tiles + kQueryStatisticsOffset + visit.stage.index * kStatisticsBytes,
            params.scale.softmax_scale, scores);
        if constexpr (Config::kDropout) mark_dropped(params, work, visit, scores);
        control.probability.acquire(slot);
        store_operand<ScoreTile, ScoreGrid>(
            tiles + kProbabilityOffset + slot.index * ScoreTile::kBytes,
            as_left_operand<Element>(scores));
        __syncwarp();
        if (leader) control.probability.commit(slot);
      };
      auto begin_gradient = [&](PipelineStage<kStages> const& stage,
                                PipelineStage<kScoreStages> const& gradient) {
        if constexpr (Config::kKeyGradient) {
          control.score_gradient.wait(gradient);
          fence_accumulators(key_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileQuery / 16>(
              key_gradient,
              DescriptorOperand<ScoreTile, Contiguous::k>(tiles + kGradientOffset +
                                                          gradient.index * ScoreTile::kBytes),
              DescriptorOperand<QueryTile, Contiguous::outer>(tiles + kQueryOffset +
                                                              stage.index * QueryTile::kBytes),
              true);
        }
        commit_products();
      };
      // What dK of a visit, which has ended, read.
      auto release = [&](PipelineStage<kStages> const& stage,
                         PipelineStage<kScoreStages> const& gradient) {
        fence_accumulators(key_gradient);
        if (!leader) return;
        control.query.release(stage);
        if constexpr (Config::kKeyGradient) control.score_gradient.release(gradient);
      };

      control.key.wait({});
      if (mask.key_length < min(work.column + kTileKey, shape.key_length)) {
        clear_beyond<KeyTile>(tiles, mask.key_length - work.column, 0);
      }
      begin_scores();
      wait_products<0>();
      send_probabilities();
      CUTE_NO_UNROLL
      for (int i = 1; i < count; ++i) {
        Visit const before = visit;
        PipelineStage<kScoreStages> const slot_before = slot;
        visit.advance(work);
        slot.advance();
        begin_scores();
        begin_gradient(before.stage, slot_before);
        wait_products<1>();
        send_probabilities();
        wait_products<0>();
        release(before.stage, slot_before);
      }
      begin_gradient(visit.stage, slot);
      wait_products<0>();
      release(visit.stage, slot);
    }
    if constexpr (Config::kKeyGradient) {
      scale_accumulators(key_gradient, params.scale.gradient_scale);
      store<KeyTile, KeyGrid>(maps.key_gradient, params, work, tiles, 0, key_gradient);
    }
  }

  // The consumer of dO: dS^T = P^T (V dO^T - delta) for the other one, and dV += P^T dO.
  CUTE_DEVICE static void consume_gradients(BackwardParams const& params, BackwardMaps const& maps,
                                            Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    Mask const mask(params.mask, shape, work.item.batch);
    uint32_t const value_tile = tiles + kValueOffset;
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(value_gradient);

    if (int const count = visits(work, shape.group); count > 0) {
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      Visit visit(work, shape.group);
      PipelineStage<kScoreStages> slot;
      auto begin_score_gradient = [&] {
        uint32_t const out_tile = tiles + kOutOffset + visit.stage.index * OutTile::kBytes;
        control.out_gradient.wait(visit.stage);
        if (mask.query_length < min(visit.row() + kTileQuery, shape.query_length)) {
          clear_beyond<OutTile>(out_tile, mask.query_length - visit.row(), 1);
        }
        if constexpr (Config::kKeyGradient) {
          fence_accumulators(score_gradient);
          begin_products();
          warpgroup_gemm<Element, Config::kValueDim / 16>(
              score_gradient, DescriptorOperand<ValueTile, Contiguous::k>(value_tile),
              DescriptorOperand<OutTile, Contiguous::k>(out_tile), false);
        }
        commit_products();
      };
      auto load_probabilities = [&] {
        ScoreOperand operand;
        LeftOperand<ScoreTile, Contiguous::k, 1> const source(
            tiles + kProbabilityOffset + slot.index * ScoreTile::kBytes, ScoreGrid::row());
        CUTE_UNROLL
        for (int step = 0; step < kTileQuery / 16; ++step) {
          source.load(operand.fragments[0][step], 0, step);
        }
        return operand;
      };
      auto send_score_gradient = [&] {
        fence_accumulators(score_gradient);
        control.probability.wait(slot);
        if constexpr (Config::kKeyGradient) {
          ScoreOperand const gradient = differentiate(
              params, tiles + kOutStatisticsOffset + visit.stage.index * kStatisticsBytes,
              load_probabilities(), score_gradient);
          control.score_gradient.acquire(slot);
          store_operand<ScoreTile, ScoreGrid>(
              tiles + kGradientOffset + slot.index * ScoreTile::kBytes, gradient);
          fence_bulk_store();
          __syncwarp();
          if (leader) control.score_gradient.commit(slot);
        }
      };
      // Read again, and not kept from above: no register of an operand may be set while a product
      // runs (C7513).
      auto take_probabilities = [&] {
        ScoreOperand operand = load_probabilities();
        __syncwarp();
        if (leader) control.probability.release(slot);
        if constexpr (Config::kDropout) drop_marked(operand);
        return operand;
      };
      auto begin_gradient = [&](PipelineStage<kStages> const& stage,
                                ScoreOperand const& probabilities) {
        if constexpr (Config::kValueGradient) {
          fence_accumulators(value_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileQuery / 16>(
              value_gradient, probabilities,
              DescriptorOperand<OutTile, Contiguous::outer>(tiles + kOutOffset +
                                                            visit.stage.index * OutTile::kBytes));
        }
        commit_products();
      };
      auto release = [&](PipelineStage<kStages> const& stage) {
        fence_accumulators(value_gradient);
        if (leader) control.out_gradient.release(stage);
      };

      control.value.wait({});
      if (mask.key_length < min(work.column + kTileKey, shape.key_length)) {
        clear_beyond<ValueTile>(value_tile, mask.key_length - work.column, 1);
      }
      begin_score_gradient();
      wait_products<0>();
      send_score_gradient();
      ScoreOperand probabilities = take_probabilities();
      CUTE_NO_UNROLL
      for (int i = 1; i < count; ++i) {
        PipelineStage<kStages> const before = visit.stage;
        visit.advance(work);
        slot.advance();
        begin_score_gradient();
        begin_gradient(before, probabilities);
        wait_products<1>();
        send_score_gradient();
        wait_products<0>();
        release(before);
        probabilities = take_probabilities();
      }
      begin_gradient(visit.stage, probabilities);
      wait_products<0>();
      release(visit.stage);
    }
    if constexpr (Config::kValueGradient) {
      scale_accumulators(value_gradient, kept_scale<Config>(params.dropout));
      store<ValueTile, ValueGrid>(maps.value_gradient, params, work, value_tile, 1, value_gradient);
    }
  }

  // Rows beyond a length may be NaN, which would reach dk and dv. A tile has one reader, which
  // clears it.
  template <class Tile>
  CUTE_DEVICE static void clear_beyond(uint32_t tile, int first, int warpgroup) {
    clear_rows<Tile, kWarpgroupSize>(tile, max(first, 0));
    fence_bulk_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // Probabilities are not negative: the sign tells the other consumer what dropout has dropped.
  template <class Scores>
  CUTE_DEVICE static void mark_dropped(BackwardParams const& params, Work const& work,
                                       Visit const& visit, Scores& scores) {
    int const batch = work.item.batch;
    Dropout<ScoreGrid, true> const dropout(params.dropout, params.mask, batch);
    dropout.for_each_block(dropout_head(params.dropout, batch, visit.head), visit.row(),
                           work.column, [&](int, int row_block, auto const& keep) {
                             CUTE_UNROLL
                             for (int i = 0; i < 8; ++i) {
                               int const chunk = i / 4;
                               float& score = scores(i % 4, 0, 2 * row_block + chunk);
                               score = keep.select(2.0f * score, chunk, i % 4 / 2, i % 2) - score;
                             }
                           });
  }

  CUTE_DEVICE static void drop_marked(ScoreOperand& probabilities) {
    CUTE_UNROLL
    for (int i = 0; i < kTileQuery / 4; ++i) {
      uint32_t& pair = probabilities.fragments[0][i / 4][i % 4];
      pair = pack<Element>(fmaxf(unpack<Element>(pair, 0), 0.0f),
                           fmaxf(unpack<Element>(pair, 1), 0.0f));
    }
  }

  // dS^T from P^T and dP^T, the gradient of query.key without the user's scale.
  template <class Scores>
  CUTE_DEVICE static ScoreOperand differentiate(BackwardParams const& params, uint32_t statistics,
                                                ScoreOperand const& probabilities,
                                                Scores const& score_gradient) {
    int const thread = thread_index();
    ScoreOperand result;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(score_gradient); ++n) {
      float delta[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        delta[i] = __uint_as_float(
            load_shared(statistics + ScoreGrid::element_column(i, n, thread) * 8 + 4));
      }
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const fragment = 2 * (n % 2) + half;
        float gradient[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float const p = unpack<Element>(probabilities.fragments[0][n / 2][fragment], i);
          float kept = score_gradient(2 * half + i, 0, n);
          if (Config::kDropout && p < 0.0f) kept = 0.0f;
          gradient[i] = fabsf(p) * fmaf(kept, kept_scale<Config>(params.dropout), -delta[i]);
        }
        result.fragments[0][n / 2][fragment] = pack<Element>(gradient[0], gradient[1]);
      }
    }
    return result;
  }

  // A gradient leaves through the tile whose only reader is the warpgroup that owns it.
  template <class Tile, class Grid, class Accumulators>
  CUTE_DEVICE static void store(TensorMap const& map, BackwardParams const& params,
                                Work const& work, uint32_t tile, int warpgroup,
                                Accumulators const& accumulators) {
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    store_accumulators<Element, Tile, Grid>(tile, accumulators);
    fence_bulk_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    if (threadIdx.x % kWarpgroupSize == 0) {
      store_bulk_tile<Tile>(map, tile, 0, work.column, work.item.head, work.item.batch);
      wait_bulk_stores();
    }
  }
};

}  // namespace memeff
