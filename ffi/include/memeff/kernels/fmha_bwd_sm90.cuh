// Attention backward for Hopper: TMA, wgmma and specialised warpgroups, keys split over the grid.
//
// As in fmha_bwd_sm80.cuh one CTA owns a tile of keys of one key head, keeps dk and dv in registers
// and adds its part of dq to f32 sums in global memory. The scores are computed transposed:
//
//   S^T = K Q^T    dP^T = V dO^T    P^T = exp2(S^T - lse)    dS^T = P^T (dP^T - delta)
//   dV += P^T dO    dQ = dS K    dK += dS^T Q
//
// Each of the two consumers owns 64 keys, so P^T and dS^T go from its accumulators to the operands
// of dV and dK in registers. Only dQ, which sums over keys, needs dS through shared memory; it has
// two buffers there, so that one barrier of the consumers a visit is enough.
//
// Config::kOrdersQueries puts the additions to dq in an order (schedule/dq_semaphore_sm90.cuh), and
// with Config::kSplitQ several CTAs may share a tile of keys (schedule/split_q.cuh).
#pragma once

#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/backward/dbias_postprocess.cuh>
#include <memeff/kernels/backward/dbias_sm90.cuh>
#include <memeff/kernels/backward/postprocess.cuh>
#include <memeff/kernels/backward/preprocess.cuh>
#include <memeff/layout/backward_tiles_sm90.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/dq_semaphore_sm90.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>
#include <memeff/score/bias/gradient_transposed.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/bias/transposed.cuh>
#include <memeff/score/dropout.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

template <class Config>
struct FmhaBackwardSm90 {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesSm90<Config>;
  using QueryTile = typename Tiles::QueryTile;
  using OutTile = typename Tiles::OutTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using ScoreTile = typename Tiles::ScoreTile;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using QueryGrid = typename Tiles::QueryGrid;
  using KeyGrid = typename Tiles::KeyGrid;
  using ValueGrid = typename Tiles::ValueGrid;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kStages = Config::kStages;

  // dS is needed by dq and dk, and is the gradient of the bias; where all of them are frozen, dv
  // needs P alone.
  using BiasWriter = TransposedBiasGradient<Config, Tiles>;
  using BiasSums = typename BiasWriter::Sums;
  static constexpr bool kScoreGradient =
      Config::kQueryGradient || Config::kKeyGradient || BiasWriter::kNeeded;

  // The bias of a visit arrives beside dO. Where the copy engine cannot bring it, each warp copies
  // that of its own keys, for itself.
  static constexpr bool kTmaBias = has_tma_bias<Config>();
  static constexpr bool kWarpBias = has_bias_tile<Config>() && !kTmaBias;
  using TmaBias = SharedTile<kTileQuery, kTileKey>;
  using WarpBias = BiasTile<Config, kTileQuery, 16, kWarpSize>;
  static constexpr int kTmaBiasBytes = kTmaBias ? TmaBias::kBytes : 0;
  static constexpr int kWarpBiasBytes = kTmaBias ? 0 : bias_tile_bytes<Config, WarpBias>();

  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kTmaBiasOffset = kScoreOffset + 2 * ScoreTile::kBytes;
  static constexpr int kStatisticsOffset = kTmaBiasOffset + kStages * kTmaBiasBytes;
  static constexpr int kWarpBiasOffset = kStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kControlOffset = kWarpBiasOffset + kConsumerWarps * kWarpBiasBytes;

  using QueryOrder =
      cute::conditional_t<Config::kOrdersQueries, DqSemaphoreSm90<Config>, AnyOrderSm90<Config>>;

  struct Control : QueryOrder::Control {
    Pipeline<kStages> query;         // and the statistics of their rows
    Pipeline<kStages> out_gradient;  // and the bias
    Pipeline<1> key;                 // and values
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: of all consumers, and of the threads of each.
  static constexpr int kConsumerBarrier = 1;
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 2 + warpgroup; }

  static constexpr int kGradientFloats = kTileKey * (Config::kKeyGradient * Config::kHeadDim +
                                                     Config::kValueGradient * Config::kValueDim);
  using Shares = SplitQ<Config, kGradientFloats, kConsumers, kConsumerBarrier>;
  static_assert(!Config::kSplitQ || !BiasWriter::kNeeded);

  using Mask = ScoreMask<Config, ScoreGrid>;

  // Keys and values, the left operands of S and dP in every visit, wait in the registers that dK,
  // dV, S, dP, their packed forms and addresses leave. Without dq or dk they must not: the
  // assembler (CUDA 13.0) then packs P or dS into these registers, and the next visit reads that.
  static constexpr int kFreeRegisters =
      Config::kQueryGradient && Config::kKeyGradient
          ? kConsumerRegisters - (Config::kHeadDim + Config::kValueDim) / 2 - 3 * kTileQuery / 2 - 8
          : 0;
  static constexpr int kRegisterKeySteps = register_steps(Config::kHeadDim, kFreeRegisters);
  static constexpr int kRegisterValueSteps =
      register_steps(Config::kValueDim, kFreeRegisters - 4 * kRegisterKeySteps);

  // What a CTA does: the query tiles that attend to its keys, for every head of the group.
  struct Work {
    WorkItem item;
    int column;
    TileRange tiles;

    CUTE_DEVICE Work(BackwardParams const& params, Control const& control) {
      ProblemShape const& shape = params.shape;
      item = QueryOrder::item(params, control);
      column = item.tile * kTileKey;
      tiles = Mask(params.mask, shape, item.batch).query_tiles(column, kTileKey, kTileQuery);
      tiles = block_range<Config>(params, item, tiles, params.query_tiles);
      static_assert(!Config::kSplitQ || !Config::kBlockMask);  // a share may have no visit
      tiles = Shares::query_tiles(params, tiles);
    }

    CUTE_DEVICE BlockMaskRow<Config::kBlockMask> line(BackwardParams const& params,
                                                      int head) const {
      return query_line<Config>(params, item, tiles, params.query_tiles, head);
    }

    // This head, or the next one with a visit, if there is any.
    CUTE_DEVICE int head_of_block(BackwardParams const& params, int head) const {
      if constexpr (Config::kBlockMask) {
        while (head < (item.head + 1) * params.shape.group && line(params, head).empty()) ++head;
      }
      return head;
    }
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      prefetch_map(maps.query);
      prefetch_map(maps.key);
      prefetch_map(maps.value);
      prefetch_map(maps.out_gradient);
      if constexpr (kTmaBias) prefetch_map(maps.bias);
      control.query.init(kConsumerWarps);
      control.out_gradient.init(kConsumerWarps);
      control.key.init(1);
      QueryOrder::init(params, control, kConsumerWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params, control);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, maps, work, control, tiles);
      QueryOrder::keep(params, control, work.item, work.tiles, int(threadIdx.x) - kConsumers);
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
    int const group = params.shape.group;
    if (work.tiles.begin >= work.tiles.end) return;
    uint64_t& arrived = control.key.acquire({}, KeyTile::kBytes + ValueTile::kBytes);
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    Origin const keys = key_origin<Config>(params.shape, item.batch);
    load_tma_tile<KeyTile>(maps.key, arrived, tiles, 0, keys.row + work.column, item.head,
                           element_of<Config>(params.key, keys.batch), kOnce);
    load_tma_tile<ValueTile>(maps.value, arrived, tiles + kValueOffset, 0, keys.row + work.column,
                             item.head, element_of<Config>(params.value, keys.batch), kOnce);
    PipelineStage<kStages> stage;
    CUTE_NO_UNROLL
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      auto const line = work.line(params, head);
      CUTE_NO_UNROLL
      for (int tile = line.begin; tile < line.end; tile = line.after(tile)) {
        int const row = queries.row + tile * kTileQuery;
        uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
        load_tma_tile<QueryTile>(maps.query, query,
                                 tiles + kQueryOffset + stage.index * QueryTile::kBytes, 0, row,
                                 head, queries.batch, kAgain);
        load_tma(params.row_statistics +
                     Tiles::tile_index(params, item.batch, head, tile) * kTileQuery * 2,
                 query, tiles + kStatisticsOffset + stage.index * kStatisticsBytes,
                 kStatisticsBytes);
        uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + kTmaBiasBytes);
        load_tma_tile<OutTile>(maps.out_gradient, out,
                               tiles + kOutOffset + stage.index * OutTile::kBytes, 0, row, head,
                               queries.batch, kAgain);
        if constexpr (kTmaBias) {
          BiasPlane const plane = BiasPlane::of<Config>(params.bias, item.batch, head);
          load_tma_tile<TmaBias>(maps.bias, out, tma_bias_tile(tiles, stage), 0, tile * kTileQuery,
                                 plane.head, plane.batch, CacheHint::EVICT_NORMAL, work.column);
        }
        stage.advance();
      }
    }
  }

  using QueryRows = DescriptorOperand<QueryTile, Contiguous::k>;
  using OutRows = DescriptorOperand<OutTile, Contiguous::k>;
  using QueryColumns = DescriptorOperand<QueryTile, Contiguous::outer>;
  using OutColumns = DescriptorOperand<OutTile, Contiguous::outer>;
  using KeyColumns = DescriptorOperand<KeyTile, Contiguous::outer>;
  using ScoreColumns = DescriptorOperand<ScoreTile, Contiguous::outer>;

  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;
  using KeptBlocks = KeptTile<Config::kDropout, ScoreGrid, true>;

  CUTE_DEVICE static void consume(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    WorkItem const& item = work.item;
    // Uniform over the warpgroup, and known to be.
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    Mask const mask(params.mask, shape, item.batch);

    auto key_gradient = KeyGrid::make_accumulators();      // (4, 1, MMA_N)
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);
    cute::clear(value_gradient);
    clear_skipped<Config, kConsumers>(params, item, work.tiles);

    if (work.tiles.begin < work.tiles.end) {
      int const first_head = work.head_of_block(params, item.head * shape.group);
      load_bias(params, mask, work, first_head, work.line(params, first_head).begin, tiles);
      control.key.wait({});
      if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, shape.key_length)) {
        clear_rows<KeyTile, kConsumers>(tiles, mask.key_length - work.column);
        clear_rows<ValueTile, kConsumers>(tiles + kValueOffset, mask.key_length - work.column);
        fence_tma_store();
        named_barrier_sync(kConsumerBarrier, kConsumers);
      }
    }
    RegisterRows<KeyTile, ScoreGrid, kRegisterKeySteps> const keys(tiles,
                                                                   warpgroup * kWarpgroupRows);
    RegisterRows<ValueTile, ScoreGrid, kRegisterValueSteps> const values(
        tiles + kValueOffset, warpgroup * kWarpgroupRows);

    PipelineStage<kStages> stage;
    int score_buffer = 0;
    int const group = shape.group;
    CUTE_NO_UNROLL
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      BiasSums bias_sums;
      auto const line = work.line(params, head);
      CUTE_NO_UNROLL
      for (int tile = line.begin; tile < line.end; tile = line.after(tile)) {
        int const row = tile * kTileQuery;
        uint32_t const query_tile = tiles + kQueryOffset + stage.index * QueryTile::kBytes;
        uint32_t const out_tile = tiles + kOutOffset + stage.index * OutTile::kBytes;
        uint32_t const score_tile = tiles + kScoreOffset + score_buffer * ScoreTile::kBytes;

        control.query.wait(stage);
        if (reads_beyond<Config>(mask.query_length, row + kTileQuery, shape.query_length)) {
          // What stands beyond the query length may be NaN, and 0 * NaN would reach dk and dv, as
          // would a P of NaN.
          control.out_gradient.wait(stage);
          clear_rows<QueryTile, kConsumers>(query_tile, mask.query_length - row);
          clear_rows<OutTile, kConsumers>(out_tile, mask.query_length - row);
          if constexpr (kTmaBias) {
            clear_rows<TmaBias, kConsumers>(tma_bias_tile(tiles, stage), mask.query_length - row);
          }
          fence_tma_store();
          named_barrier_sync(kConsumerBarrier, kConsumers);
        }

        auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        fence_accumulators(scores);
        begin_products();
        warpgroup_gemm<Element, Config::kHeadDim / 16>(scores, keys, QueryRows(query_tile), false);
        commit_products();
        control.out_gradient.wait(stage);
        if constexpr (kScoreGradient) {
          fence_accumulators(score_gradient);
          begin_products();
          warpgroup_gemm<Element, Config::kValueDim / 16>(score_gradient, values, OutRows(out_tile),
                                                          false);
          commit_products();
        }
        if constexpr (Config::kDropout) control.out_gradient.wait_again(stage);
        KeptBlocks const kept(params.dropout, params.mask, item.batch, head, row, work.column);
        wait_products<kScoreGradient>();  // S
        fence_accumulators(scores);

        uint32_t const statistics = tiles + kStatisticsOffset + stage.index * kStatisticsBytes;
        prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
        auto const capped = scores;  // read by the derivative of the soft cap
        add_bias(params, work, head, row, tiles, stage, scores);
        mask.template apply_transposed<kTileQuery, kTileKey>(
            scores, params.mask, shape, item.batch, head, row, work.column, line.partial(tile));
        exponentiate_transposed<ScoreGrid>(statistics, params.scale.softmax_scale, scores);
        fence_accumulators(scores);
        load_next_bias(params, mask, work, head, tile, tiles);
        wait_products<0>();
        fence_accumulators(score_gradient);
        ScoreOperand probabilities;
        ScoreOperand left_gradient;
        differentiate(params, statistics, item.batch, head, row, work.column, kept, capped, scores,
                      score_gradient, probabilities, left_gradient, bias_sums);
        if constexpr (Config::kQueryGradient) {
          store_operand<ScoreTile, ScoreGrid>(score_tile, left_gradient);
        }
        if constexpr (BiasWriter::kFromTile) {
          BiasWriter::store(params, {item.batch, head, row, work.column}, score_tile);
        }

        if constexpr (Config::kValueGradient) {
          fence_accumulators(value_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileQuery / 16>(value_gradient, probabilities,
                                                   OutColumns(out_tile));
          commit_products();
        }
        auto query_gradient = QueryGrid::make_accumulators();  // (4, 1, MMA_N)
        if constexpr (Config::kQueryGradient) {
          fence_tma_store();
          named_barrier_sync(kConsumerBarrier, kConsumers);  // dS is complete
          fence_accumulators(query_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileKey / 16>(
              query_gradient, ScoreColumns(score_tile + Tiles::query_rows_offset(warpgroup)),
              KeyColumns(tiles + Tiles::query_columns_offset(warpgroup)), false);
          commit_products();
        }
        wait_products<Config::kQueryGradient>();  // dV
        fence_accumulators(value_gradient);
        if (leader) control.out_gradient.release(stage);
        if constexpr (Config::kKeyGradient) {
          fence_accumulators(key_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileQuery / 16>(key_gradient, left_gradient,
                                                   QueryColumns(query_tile));
          commit_products();
        }
        wait_products<Config::kKeyGradient>();  // dQ
        fence_accumulators(query_gradient);
        if constexpr (Config::kQueryGradient) {
          QueryOrder::begin_additions(control, score_buffer);  // which alternates by visits, too
          add_query_gradient(params, item.batch, head, tile, query_gradient);
          QueryOrder::end_additions(control);
        }
        wait_products<0>();
        fence_accumulators(key_gradient);
        if (leader) control.query.release(stage);
        stage.advance();
        score_buffer ^= 1;
      }
      BiasWriter::finish(params, item.batch, head, work.column, bias_sums);
    }

    if (!Shares::add_up(params, tiles + kStatisticsOffset, key_gradient, value_gradient)) return;
    if constexpr (Config::kKeyGradient)
      scale_accumulators(key_gradient, params.scale.gradient_scale);
    if constexpr (Config::kValueGradient)
      scale_accumulators(value_gradient, kept_scale<Config>(params.dropout));
    store(params, maps, work, mask.key_length, warpgroup, tiles, key_gradient, value_gradient);
  }

  CUTE_DEVICE static uint32_t tma_bias_tile(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kTmaBiasOffset + stage.index * TmaBias::kBytes;
  }

  CUTE_DEVICE static uint32_t warp_bias_tile(uint32_t tiles) {
    return tiles + kWarpBiasOffset + thread_index() / kWarpSize * kWarpBiasBytes;
  }

  // Where the bias of this warp's keys begins.
  CUTE_DEVICE static char const* bias_source(BackwardParams const& params, Work const& work,
                                             int head, int row) {
    return bias_row<Config>(params.bias, work.item.batch, head, row) +
           (work.column + ScoreGrid::row(thread_index())) *
               (long long)sizeof(typename Config::BiasElement);
  }

  CUTE_DEVICE static long long bias_row_bytes(BackwardParams const& params) {
    return params.bias.row_stride * (long long)sizeof(typename Config::BiasElement);
  }

  CUTE_DEVICE static void load_bias(BackwardParams const& params, Mask const& mask,
                                    Work const& work, int head, int tile, uint32_t tiles) {
    if constexpr (kWarpBias) {
      int const thread = thread_index();
      int const row = tile * kTileQuery;
      WarpBias::copy(warp_bias_tile(tiles), thread % kWarpSize,
                     bias_source(params, work, head, row), bias_row_bytes(params),
                     mask.query_length - row,
                     mask.key_length - work.column - ScoreGrid::row(thread));
      commit_copies();
    }
  }

  // Adds the bias of a visit, which began to arrive during the one before.
  template <class Scores>
  CUTE_DEVICE static void add_bias(BackwardParams const& params, Work const& work, int head,
                                   int row, uint32_t tiles, PipelineStage<kStages> const& stage,
                                   Scores& scores) {
    if constexpr (kTmaBias) {
      TransposedTmaBiasReader<typename Config::BiasElement, TmaBias> const bias(
          tma_bias_tile(tiles, stage), ScoreGrid::row(thread_index()));
      add_bias_transposed(scores, bias, params.scale.bias_scale);
    }
    if constexpr (kWarpBias) {
      wait_copies<0>();
      __syncwarp();  // the bias of all lanes is here
      TransposedBiasReader<WarpBias> const bias(
          warp_bias_tile(tiles), bias_source(params, work, head, row), bias_row_bytes(params));
      add_bias_transposed(scores, bias, params.scale.bias_scale);
    }
  }

  // Lets the bias of the next visit arrive. It stands behind the exponentials because its branch
  // keeps them before the wait for dP, which the assembler puts them behind in one basic block.
  CUTE_DEVICE static void load_next_bias(BackwardParams const& params, Mask const& mask,
                                         Work const& work, int head, int tile, uint32_t tiles) {
    if constexpr (kWarpBias) {
      __syncwarp();  // nobody reads this one any more
      auto const line = work.line(params, head);
      bool const last = line.after(tile) == line.end;
      if (last) head = work.head_of_block(params, head + 1);
      if (head < (work.item.head + 1) * params.shape.group) {
        load_bias(params, mask, work, head, last ? work.line(params, head).begin : line.after(tile),
                  tiles);
      }
    }
  }

  // dS^T from P^T and dP^T, the gradient of query.key without the user's scale, and the kept P^T.
  // Both are packed block by block, which frees the accumulators.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, uint32_t statistics,
                                        int batch, int head, int row, int column,
                                        KeptBlocks const& kept_blocks, Scores const& capped,
                                        Scores const& scores, Scores const& score_gradient,
                                        ScoreOperand& probabilities, ScoreOperand& left_gradient,
                                        BiasSums& bias_sums) {
    int const thread = thread_index();
    BiasWriter const bias_gradient(params, {batch, head, row, column});
    // Sixteen rows and the sixteen keys of this warp.
    auto block = [&](int, int row_block, auto const& keep) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, row_block, thread);
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        int const n = 2 * row_block + chunk;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          float kept[2];
          float gradient[2];
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const element = 2 * half + i;
            float const score = scores(element, 0, n);
            float const kept_gradient = keep.select(score_gradient(element, 0, n), chunk, half, i);
            gradient[i] = score * fmaf(kept_gradient, kept_scale<Config>(params.dropout),
                                       -deltas.of[2 * chunk + i]);
            kept[i] = keep.select(score, chunk, half, i);
          }
          bias_gradient.pair(bias_sums, n, half, gradient);
          if constexpr (Config::kSoftCap) {
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
              float const x = capped(2 * half + i, 0, n);
              gradient[i] *= fmaf(-x, x, 1.0f);
            }
          }
          probabilities.fragments[0][row_block][2 * chunk + half] = pack<Element>(kept[0], kept[1]);
          left_gradient.fragments[0][row_block][2 * chunk + half] =
              pack<Element>(gradient[0], gradient[1]);
        }
      }
    };
    CUTE_UNROLL
    for (int n = 0; n < ScoreGrid::kColumnBlocks; ++n) block(0, n, kept_blocks.block(0, n));
  }

  // dQ of one visit, added to the sums in the order that BackwardTilesSm90 defines.
  template <class Accumulators>
  CUTE_DEVICE static void add_query_gradient(BackwardParams const& params, int batch, int head,
                                             int tile, Accumulators const& query_gradient) {
    float* const sums = params.query_gradient_sum +
                        Tiles::tile_index(params, batch, head, tile) * Tiles::kQueryTileFloats;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
      reduce_add(query_gradient_sums<Tiles::kThreads>(sums, query_gradient, 0, n),
                 query_gradient(0, 0, n), query_gradient(1, 0, n), query_gradient(2, 0, n),
                 query_gradient(3, 0, n));
    }
  }

  // dk and dv leave through the tiles of keys and values, each consumer with its own rows.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static void store(BackwardParams const& params, BackwardMaps const& maps,
                                Work const& work, int key_length, int warpgroup, uint32_t tiles,
                                KeyGradient const& key_gradient,
                                ValueGradient const& value_gradient) {
    ProblemShape const& shape = params.shape;
    named_barrier_sync(kConsumerBarrier, kConsumers);  // nobody reads keys any more
    if constexpr (Config::kKeyGradient) {
      store_accumulators<Element, KeyTile, KeyGrid>(tiles, key_gradient);
    }
    if constexpr (Config::kValueGradient) {
      store_accumulators<Element, ValueTile, ValueGrid>(tiles + kValueOffset, value_gradient);
    }
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const keys = key_origin<Config>(shape, work.item.batch);
    int const row = keys.row + work.column;
    int const tile_row = warpgroup * kWarpgroupRows;
    int const bound = (Config::kVarlen ? key_length : shape.key_length) - work.column;
    if constexpr (Config::kKeyGradient) {
      store_part<Config, KeyTile>(maps.key_gradient, params.key_gradient, tiles, tile_row, row,
                                  bound, work.item.head, keys.batch, shape.head_dim);
    }
    if constexpr (Config::kValueGradient) {
      store_part<Config, ValueTile>(maps.value_gradient, params.value_gradient,
                                    tiles + kValueOffset, tile_row, row, bound, work.item.head,
                                    keys.batch, shape.value_dim);
    }
    wait_tma_stores();
    if constexpr (Config::kVarlen) {
      clear_key_gap<Config, kConsumers>(params, work.item, key_length,
                                        ceil_div(shape.key_length, kTileKey));
    }
  }
};

}  // namespace memeff
