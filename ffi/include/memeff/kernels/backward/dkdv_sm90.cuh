// The gradients of key and value for Hopper and head dims above 128: see
// fmha_bwd_two_kernel_sm90.cuh.
//
// One consumer computes P^T = exp2(K Q^T - lse) and owns dK, the other computes
// dS^T = P^T (V dO^T - delta) and owns dV. P^T and dS^T go from one to the other through shared
// memory; S and dP of one tile of queries run beside dK and dV of the tile before, so that a third
// buffer of each is what the next ones arrive in meanwhile. The derivative of a soft cap is known
// to the first, which multiplies dS^T by it.
#pragma once

#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles_two_kernel.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/score/bias/gradient_transposed.cuh>
#include <memeff/score/bias/q_block_sm90.cuh>
#include <memeff/score/dropout.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

template <class Config>
struct FmhaBackwardTwoKernelDkdv {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesTwoKernel<Config>;
  static constexpr int kTileQuery = Tiles::kQBlockRows;
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
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kStages = Config::kQBlockStages;  // of queries and of dO
  static constexpr int kProbabilityStages = Config::kProbabilityStages;
  static constexpr int kGradientStages = 2;  // of dS^T

  using ScoreGrid = typename Tiles::ScoreGrid;
  using BiasTile = SharedTile<kTileQuery, kTileKey>;
  using Bias = QBlockBias<Config, BiasTile, ScoreGrid>;
  // A gradient that nothing shares is written by the kernel that owns the rows.
  static constexpr bool kSumsBias = Config::kBiasGradient == BiasGradient::columns;
  using BiasWriter =
      TransposedBiasGradient<Config, Tiles, kSumsBias ? BiasGradient::columns : BiasGradient::none>;
  using BiasSums = typename BiasWriter::Sums;
  using KeyGrid = WarpgroupGrid<kTileKey, Config::kHeadDim>;
  using ValueGrid = WarpgroupGrid<kTileKey, Config::kValueDim>;
  using Mask = ScoreMask<Config, ScoreGrid>;

  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kGradientOffset =
      kProbabilityOffset + kProbabilityStages * ScoreTile::kBytes;
  static constexpr int kBiasOffset = kGradientOffset + kGradientStages * ScoreTile::kBytes;
  static constexpr int kQueryStatisticsOffset = kBiasOffset + Bias::kBytes;
  static constexpr int kOutStatisticsOffset = kQueryStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kControlOffset = kOutStatisticsOffset + kStages * kStatisticsBytes;

  struct Control : Bias::Control {
    Pipeline<1> key;
    Pipeline<1> value;
    Pipeline<kStages> query;         // and the statistics of their rows
    Pipeline<kStages> out_gradient;  // and the statistics
    Pipeline<kProbabilityStages> probability;
    Pipeline<kGradientStages> score_gradient;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  using Line = BlockMaskRow<Config::kBlockMask>;

  // What a CTA does: the query tiles that attend to its keys, for every head of the group.
  struct Work {
    WorkItem item;
    int column;
    TileRange tiles;

    CUTE_DEVICE Work(BackwardParams const& params) {
      ProblemShape const& shape = params.shape;
      item = work_item<Config, Heaviest::first>(
          shape, params.bias, blockIdx.x, ceil_div(shape.key_length, kTileKey), shape.key_heads);
      column = item.tile * kTileKey;
      tiles = Mask(params.mask, shape, item.batch).query_tiles(column, kTileKey, kTileQuery);
    }

    CUTE_DEVICE Line line(BackwardParams const& params, int head) const {
      return query_line<Config>(params, item, tiles,
                                ceil_div(params.shape.query_length, kTileQuery), head);
    }
  };

  // One tile of queries of one head.
  struct Visit {
    int head;
    int tile;
    Line line;  // of the map, where there is one

    CUTE_DEVICE Visit(BackwardParams const& params, Work const& work)
        : head(work.item.head * params.shape.group), tile(work.tiles.begin) {
      if constexpr (Config::kBlockMask) begin_head(params, work);
    }

    CUTE_DEVICE int row() const { return tile * kTileQuery; }

    CUTE_DEVICE void advance(BackwardParams const& params, Work const& work) {
      if constexpr (Config::kBlockMask) {
        tile = line.after(tile);
        if (tile == line.end) {
          ++head;
          begin_head(params, work);
        }
      } else if (++tile == work.tiles.end) {
        tile = work.tiles.begin;
        ++head;
      }
    }

    CUTE_DEVICE bool is_last_of_head(Work const& work) const {
      return tile + 1 == (Config::kBlockMask ? line.end : work.tiles.end);
    }

   private:
    // The first visit of this head, or of one behind it.
    CUTE_DEVICE void begin_head(BackwardParams const& params, Work const& work) {
      for (; head < (work.item.head + 1) * params.shape.group; ++head) {
        line = work.line(params, head);
        tile = line.begin;
        if (!line.empty()) break;
      }
    }
  };

  CUTE_DEVICE static int visits(BackwardParams const& params, Work const& work) {
    int const group = params.shape.group;
    if constexpr (!Config::kBlockMask) return max(work.tiles.end - work.tiles.begin, 0) * group;
    int count = 0;
    for (int head = work.item.head * group; head < (work.item.head + 1) * group; ++head) {
      Line const line = work.line(params, head);
      for (int tile = line.begin; tile < line.end; tile = line.after(tile)) ++count;
    }
    return count;
  }

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.key.init(1);
      control.value.init(1);
      control.query.init(kWarpgroupWarps);
      control.out_gradient.init(kWarpgroupWarps);
      control.probability.init(kWarpgroupWarps, kWarpgroupWarps);
      control.score_gradient.init(kWarpgroupWarps, kWarpgroupWarps);
      Bias::init(control, kWarpgroupWarps);
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
    int const count = visits(params, work);
    if (count == 0) return;
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    Origin const keys = key_origin<Config>(params.shape, item.batch);
    load_tma_tile<KeyTile>(maps.key, control.key.acquire({}, KeyTile::kBytes), tiles, 0,
                           keys.row + work.column, item.head,
                           element_of<Config>(params.key, keys.batch), kOnce);
    load_tma_tile<ValueTile>(maps.value, control.value.acquire({}, ValueTile::kBytes),
                             tiles + kValueOffset, 0, keys.row + work.column, item.head,
                             element_of<Config>(params.value, keys.batch), kOnce);
    Visit visit(params, work);
    Stage stage;
    Bias bias(tiles + kBiasOffset);
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      float const* const statistics =
          Tiles::statistics(params, item.batch, visit.head, visit.row());
      uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
      load_tma_tile<QueryTile>(maps.query, query, query_tile(tiles, stage), 0,
                               queries.row + visit.row(), visit.head, queries.batch, kAgain);
      load_tma(statistics, query, query_statistics(tiles, stage), kStatisticsBytes);
      bias.produce(params, maps, work, visit, control);
      uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + kStatisticsBytes);
      load_tma_tile<OutTile>(maps.out_gradient, out, out_tile(tiles, stage), 0,
                             queries.row + visit.row(), visit.head, queries.batch, kAgain);
      load_tma(statistics, out, out_statistics(tiles, stage), kStatisticsBytes);
      visit.advance(params, work);
      stage.advance();
    }
  }

  using Stage = PipelineStage<kStages>;
  using ProbabilityStage = PipelineStage<kProbabilityStages>;
  using GradientStage = PipelineStage<kGradientStages>;

  // Where a buffer is.
  CUTE_DEVICE static uint32_t query_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryOffset + stage.index * QueryTile::kBytes;
  }
  CUTE_DEVICE static uint32_t query_statistics(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryStatisticsOffset + stage.index * kStatisticsBytes;
  }
  CUTE_DEVICE static uint32_t out_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kOutOffset + stage.index * OutTile::kBytes;
  }
  CUTE_DEVICE static uint32_t out_statistics(uint32_t tiles, Stage const& stage) {
    return tiles + kOutStatisticsOffset + stage.index * kStatisticsBytes;
  }
  CUTE_DEVICE static uint32_t probability_tile(uint32_t tiles, ProbabilityStage const& stage) {
    return tiles + kProbabilityOffset + stage.index * ScoreTile::kBytes;
  }
  CUTE_DEVICE static uint32_t gradient_tile(uint32_t tiles, GradientStage const& stage) {
    return tiles + kGradientOffset + stage.index * ScoreTile::kBytes;
  }

  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;

  // Steps of keys and of values that wait in registers. Beside them are dK and S with what they are
  // modified by, or dV, dP and two packed operands, and addresses.
  static constexpr int kScoreRegisters = kTileQuery / 2;
  static constexpr int kKeyRegisters =
      kConsumerRegisters - Config::kHeadDim / 2 -
      (2 + Config::kSoftCap + Bias::kRegisterSteps) * kScoreRegisters - 16;
  static constexpr int kValueRegisters =
      kConsumerRegisters - Config::kValueDim / 2 - 2 * kScoreRegisters - 32;
  static constexpr int kRegisterKeySteps = register_steps(Config::kHeadDim, kKeyRegisters);
  static constexpr int kRegisterValueSteps = register_steps(Config::kValueDim, kValueRegisters);

  // The consumer of queries: P^T = exp2(K Q^T - lse) for the other one, and dK += dS^T Q.
  CUTE_DEVICE static void consume_queries(BackwardParams const& params, BackwardMaps const& maps,
                                          Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    Mask const mask(params.mask, shape, work.item.batch);
    auto key_gradient = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);

    if (int const count = visits(params, work); count > 0) {
      control.key.wait({});
      if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, shape.key_length)) {
        clear_beyond<KeyTile>(tiles, mask.key_length - work.column, 0);
      }
      RegisterRows<KeyTile, ScoreGrid, kRegisterKeySteps> const keys(tiles, 0);
      auto scores = ScoreGrid::make_accumulators();      // (4, 1, MMA_N)
      auto derivative = ScoreGrid::make_accumulators();  // of the soft cap, for dS
      Visit visit(params, work);
      Stage stage;
      ProbabilityStage sent;
      GradientStage received;
      Bias bias(tiles + kBiasOffset);
      auto begin_scores = [&] {
        uint32_t const tile = query_tile(tiles, stage);
        control.query.wait(stage);
        if (reads_beyond<Config>(mask.query_length, visit.row() + kTileQuery, shape.query_length)) {
          clear_beyond<QueryTile>(tile, mask.query_length - visit.row(), 0);
        }
        fence_accumulators(scores);
        begin_products();
        warpgroup_gemm<Element, Config::kHeadDim / 16>(
            scores, keys, DescriptorOperand<QueryTile, Contiguous::k>(tile), false);
        commit_products();
      };
      auto clear_bias = [](uint32_t tile, int first) { clear_beyond<BiasTile>(tile, first, 0); };
      auto send_probabilities = [&] {
        fence_accumulators(scores);
        prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
        if constexpr (Config::kSoftCap) {
          CUTE_UNROLL
          for (int i = 0; i < cute::size(scores); ++i) {
            derivative(i) = fmaf(-scores(i), scores(i), 1.0f);
          }
        }
        bias.add(params, visit, mask, control, clear_bias, scores);
        mask.template apply_transposed<kTileQuery, kTileKey>(
            scores, params.mask, shape, work.item.batch, visit.head, visit.row(), work.column,
            visit.line.partial(visit.tile));
        exponentiate_transposed<ScoreGrid>(query_statistics(tiles, stage),
                                           params.scale.softmax_scale, scores);
        if constexpr (Config::kDropout) mark_dropped(params, work, visit, scores);
        control.probability.acquire(sent);
        store_operand<ScoreTile, ScoreGrid>(probability_tile(tiles, sent),
                                            as_left_operand<Element>(scores));
        __syncwarp();
        if (leader) {
          control.probability.commit(sent);
          bias.release(control);
        }
        sent.advance();
        bias.advance();
      };
      auto begin_gradient = [&](Stage const& stage) {
        if constexpr (Config::kKeyGradient) {
          uint32_t const tile = gradient_tile(tiles, received);
          control.score_gradient.wait(received);
          if constexpr (Config::kSoftCap) multiply(tile, derivative);
          fence_accumulators(key_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileQuery / 16>(
              key_gradient, DescriptorOperand<ScoreTile, Contiguous::k>(tile),
              DescriptorOperand<QueryTile, Contiguous::outer>(query_tile(tiles, stage)), true);
          commit_products();
        }
      };
      // What dK of a visit, which has ended, read.
      auto release = [&](Stage const& stage) {
        fence_accumulators(key_gradient);
        if (leader) {
          control.query.release(stage);
          if constexpr (Config::kKeyGradient) control.score_gradient.release(received);
        }
        received.advance();
      };

      begin_scores();
      bias.load(params, work, visit, mask);
      wait_products<0>();
      send_probabilities();
      CUTE_NO_UNROLL
      for (int i = 1; i < count; ++i) {
        Stage const before = stage;
        visit.advance(params, work);
        stage.advance();
        begin_scores();
        begin_gradient(before);
        bias.load(params, work, visit, mask);
        wait_products<Config::kKeyGradient>();  // S
        send_probabilities();
        wait_products<0>();
        release(before);
      }
      begin_gradient(stage);
      wait_products<0>();
      release(stage);
    }
    if constexpr (Config::kKeyGradient) {
      scale_accumulators(key_gradient, params.scale.gradient_scale);
      store<KeyTile, KeyGrid>(maps.key_gradient, params.key_gradient, shape, work, mask.key_length,
                              tiles, 0, shape.head_dim, key_gradient);
    }
    if constexpr (Config::kVarlen) {
      clear_key_gap<Config, kWarpgroupSize>(params, work.item, mask.key_length,
                                            ceil_div(shape.key_length, kTileKey));
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

    if (int const count = visits(params, work); count > 0) {
      control.value.wait({});
      if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, shape.key_length)) {
        clear_beyond<ValueTile>(value_tile, mask.key_length - work.column, 1);
      }
      RegisterRows<ValueTile, ScoreGrid, kRegisterValueSteps> const values(value_tile, 0);
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      Visit visit(params, work);
      Stage stage;
      ProbabilityStage received;
      GradientStage sent;
      BiasSums bias_sums;
      auto begin_score_gradient = [&] {
        uint32_t const tile = out_tile(tiles, stage);
        control.out_gradient.wait(stage);
        if (reads_beyond<Config>(mask.query_length, visit.row() + kTileQuery, shape.query_length)) {
          clear_beyond<OutTile>(tile, mask.query_length - visit.row(), 1);
        }
        if constexpr (Config::kKeyGradient) {
          fence_accumulators(score_gradient);
          begin_products();
          warpgroup_gemm<Element, Config::kValueDim / 16>(
              score_gradient, values, DescriptorOperand<OutTile, Contiguous::k>(tile), false);
          commit_products();
        }
      };
      auto load_probabilities = [&] {
        return load_operand<ScoreTile, ScoreGrid>(probability_tile(tiles, received));
      };
      auto send_score_gradient = [&] {
        fence_accumulators(score_gradient);
        control.probability.wait(received);
        if constexpr (Config::kKeyGradient) {
          ScoreOperand const gradient =
              differentiate(params, out_statistics(tiles, stage), load_probabilities(),
                            score_gradient, bias_sums);
          if (kSumsBias && visit.is_last_of_head(work)) {
            BiasWriter::finish(params, work.item.batch, visit.head, work.column, bias_sums);
            bias_sums = {};
          }
          control.score_gradient.acquire(sent);
          store_operand<ScoreTile, ScoreGrid>(gradient_tile(tiles, sent), gradient);
          fence_tma_store();
          __syncwarp();
          if (leader) control.score_gradient.commit(sent);
          sent.advance();
        }
      };
      // Read again, and not kept from above: no register of an operand may be set while a product
      // runs (C7513).
      auto take_probabilities = [&] {
        ScoreOperand operand = load_probabilities();
        if constexpr (Config::kDropout) drop_marked(operand);
        return operand;
      };
      auto begin_gradient = [&](Stage const& stage, ScoreOperand const& probabilities) {
        if constexpr (Config::kValueGradient) {
          fence_accumulators(value_gradient);
          begin_products();
          warpgroup_gemm<Element, kTileQuery / 16>(
              value_gradient, probabilities,
              DescriptorOperand<OutTile, Contiguous::outer>(out_tile(tiles, stage)));
          commit_products();
        }
        // Not before the product has begun, or the other consumer overwrites what is still loaded.
        __syncwarp();
        if (leader) control.probability.release(received);
        received.advance();
      };
      auto release = [&](Stage const& stage) {
        fence_accumulators(value_gradient);
        if (leader) control.out_gradient.release(stage);
      };

      begin_score_gradient();
      wait_products<0>();
      send_score_gradient();
      ScoreOperand probabilities = take_probabilities();
      CUTE_NO_UNROLL
      for (int i = 1; i < count; ++i) {
        Stage const before = stage;
        visit.advance(params, work);
        stage.advance();
        begin_score_gradient();
        begin_gradient(before, probabilities);
        wait_products<Config::kValueGradient>();  // dP
        send_score_gradient();
        wait_products<0>();
        release(before);
        probabilities = take_probabilities();
      }
      begin_gradient(stage, probabilities);
      wait_products<0>();
      release(stage);
    }
    if constexpr (Config::kValueGradient) {
      scale_accumulators(value_gradient, kept_scale<Config>(params.dropout));
      store<ValueTile, ValueGrid>(maps.value_gradient, params.value_gradient, shape, work,
                                  mask.key_length, value_tile, 1, shape.value_dim, value_gradient);
    }
  }

  // dS^T of the score before the soft cap, in the place of that behind it: its consumer knows the
  // derivative, and what computed it does not.
  template <class Factors>
  CUTE_DEVICE static void multiply(uint32_t tile, Factors const& factors) {
    auto operand = load_operand<ScoreTile, ScoreGrid>(tile);
    CUTE_UNROLL
    for (int i = 0; i < kTileQuery / 4; ++i) {
      uint32_t& pair = operand.fragments[0][i / 4][i % 4];
      int const element = i % 2 * 2;
      pair = pack<Element>(unpack<Element>(pair, 0) * factors(element, 0, i / 2),
                           unpack<Element>(pair, 1) * factors(element + 1, 0, i / 2));
    }
    store_operand<ScoreTile, ScoreGrid>(tile, operand);
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(0), kWarpgroupSize);
  }

  // Rows beyond a length may be NaN, which would reach dk and dv. A tile has one reader, which
  // clears it.
  template <class Tile>
  CUTE_DEVICE static void clear_beyond(uint32_t tile, int first, int warpgroup) {
    clear_rows<Tile, kWarpgroupSize>(tile, max(first, 0));
    fence_tma_store();
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
                                                Scores const& score_gradient, BiasSums& bias_sums) {
    int const thread = thread_index();
    BiasWriter const bias_gradient(params, {});
    ScoreOperand result;
    CUTE_UNROLL
    for (int pair = 0; pair < cute::size<2>(score_gradient) / 2; ++pair) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int fragment = 0; fragment < 4; ++fragment) {
        int const chunk = fragment / 2;
        int const half = fragment % 2;
        int const n = 2 * pair + chunk;
        float gradient[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float const p = unpack<Element>(probabilities.fragments[0][pair][fragment], i);
          float kept = score_gradient(2 * half + i, 0, n);
          if (Config::kDropout && p < 0.0f) kept = 0.0f;
          gradient[i] =
              fabsf(p) * fmaf(kept, kept_scale<Config>(params.dropout), -deltas.of[2 * chunk + i]);
        }
        bias_gradient.pair(bias_sums, n, half, gradient);
        result.fragments[0][pair][fragment] = pack<Element>(gradient[0], gradient[1]);
      }
    }
    return result;
  }

  // A gradient leaves through the tile whose only reader is the warpgroup that owns it.
  template <class Tile, class Grid, class Accumulators>
  CUTE_DEVICE static void store(TensorMap const& map, TensorView const& tensor,
                                ProblemShape const& shape, Work const& work, int key_length,
                                uint32_t tile, int warpgroup, int columns,
                                Accumulators const& accumulators) {
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    store_accumulators<Element, Tile, Grid>(tile, accumulators);
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const origin = key_origin<Config>(shape, work.item.batch);
    int const bound = (Config::kVarlen ? key_length : shape.key_length) - work.column;
    store_part<Config, Tile>(map, tensor, tile, 0, origin.row + work.column, bound, work.item.head,
                             origin.batch, columns);
    wait_tma_stores();
  }
};

}  // namespace memeff
