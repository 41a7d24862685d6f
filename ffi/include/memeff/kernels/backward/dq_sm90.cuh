// The gradient of the query for Hopper and head dims above 128: see fmha_bwd_two_kernel_sm90.cuh.
//
// Each of two consumers owns 64 queries, and dS goes from its accumulators to the operand of dQ in
// registers. dQ of one tile of keys runs beside S and dP of the next.
#pragma once

#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles_two_kernel.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/registers.cuh>
#include <memeff/score/dropout.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

template <class Config>
struct FmhaBackwardTwoKernelDq {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesTwoKernel<Config>;
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
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

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

  // What a CTA does.
  struct Work {
    WorkItem item;
    int row;
    BlockMaskRow<Config::kBlockMask> tiles;

    CUTE_DEVICE Work(BackwardParams const& params) {
      item = work_item<Config, Heaviest::last>(params.shape, params.bias, blockIdx.x,
                                               params.query_tiles, params.shape.query_heads);
      row = item.tile * kTileQuery;
      tiles = {Mask(params.mask, params.shape, item.batch).key_tiles(row, kTileQuery, kTileKey),
               params.block_mask,
               item.batch,
               item.head,
               item.tile,
               ceil_div(params.shape.key_length, kTileKey)};
    }
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
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
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    Origin const keys = key_origin<Config>(params.shape, item.batch);
    CUTE_UNROLL
    for (int tile_row = 0; tile_row < kTileQuery; tile_row += kWarpgroupRows) {
      int const row = queries.row + work.row + tile_row;
      load_tma_tile<QueryTile>(maps.query, arrived, tiles, tile_row, row, item.head, queries.batch,
                               kOnce);
      load_tma_tile<OutTile>(maps.out_gradient, arrived, tiles + kOutOffset, tile_row, row,
                             item.head, queries.batch, kOnce);
    }
    PipelineStage<kKeyStages> key;
    PipelineStage<kValueStages> value;
    int const key_head = item.head / params.shape.group;
    int const key_element = element_of<Config>(params.key, keys.batch);
    int const value_element = element_of<Config>(params.value, keys.batch);
    CUTE_NO_UNROLL
    for (int tile = work.tiles.end - 1; tile >= work.tiles.begin; tile = work.tiles.before(tile)) {
      int const row = keys.row + tile * kTileKey;
      load_tma_tile<KeyTile>(maps.key, control.key.acquire(key, KeyTile::kBytes),
                             tiles + kKeyOffset + key.index * KeyTile::kBytes, 0, row, key_head,
                             key_element, kAgain);
      load_tma_tile<ValueTile>(maps.value, control.value.acquire(value, ValueTile::kBytes),
                               tiles + kValueOffset + value.index * ValueTile::kBytes, 0, row,
                               key_head, value_element, kAgain);
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
      for (int tile = work.tiles.end - 1; tile >= work.tiles.begin;
           tile = work.tiles.before(tile)) {
        uint32_t const key_tile = tiles + kKeyOffset + key.index * KeyTile::kBytes;
        auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        RegisterBias<Config, ScoreGrid, kTileQuery, kTileKey> const bias(
            params.bias, item.batch, item.head, work.row, tile * kTileKey,
            mask.query_length - work.row, mask.key_length - tile * kTileKey);
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
        bias.add(scores, params.scale.bias_scale);
        mask.template apply<kTileQuery, kTileKey>(scores, params.mask, shape, item.batch, item.head,
                                                  work.row, tile * kTileKey,
                                                  work.tiles.partial(tile));
        statistics.exponentiate(params.scale.softmax_scale, scores);
        fence_accumulators(scores);
        control.query.wait_again({});  // the exponentials run under the product
        wait_products<0>();
        fence_accumulators(score_gradient);
        if (leader) control.value.release(value);
        value.advance();
        differentiate(params, item, statistics, work.row, tile * kTileKey,
                      mask.query_length - work.row, scores, score_gradient, left_gradient);

        fence_accumulators(query_gradient);
        begin_products();
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, left_gradient, KeyColumns(key_tile));
        commit_products();
        key.advance();
      }
      wait_products<0>();
      fence_accumulators(query_gradient);
    }
    clear_skipped_keys(params, work);
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
        rows[half] = QuadStatistics::load(source, ScoreGrid::element_row(2 * half, 0));
      }
    }

    // P from S; with a soft cap, times its derivative.
    template <class Scores>
    CUTE_DEVICE void exponentiate(float softmax_scale, Scores& scores) const {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        float const score = scores(i);
        scores(i) = exp2_approx(fmaf(score, softmax_scale, -rows[i % 4 / 2].x));
        if constexpr (Config::kSoftCap) {
          float const x = fmaxf(score, -1.0f);  // tanh is no less; a masked score is -inf
          scores(i) *= fmaf(-x, x, 1.0f);
        }
      }
    }
  };

  // What stands beyond the key length, in the first tile that is visited, may be NaN and would
  // reach dq. Each consumer clears it for itself: they write the same zeros.
  CUTE_DEVICE static void clear_beyond(Control& control, Mask const& mask,
                                       ProblemShape const& shape, Work const& work, int warpgroup,
                                       uint32_t tiles) {
    int const column = (work.tiles.end - 1) * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) return;
    control.key.wait({});
    control.value.wait({});
    clear_rows<KeyTile, kWarpgroupSize>(tiles + kKeyOffset, mask.key_length - column);
    clear_rows<ValueTile, kWarpgroupSize>(tiles + kValueOffset, mask.key_length - column);
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // dS from P and dP, the gradient of query.key without the user's scale, packed block by block.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, WorkItem const& item,
                                        RowStatistics const& statistics, int row, int column,
                                        int query_bound, Scores const& scores,
                                        Scores const& score_gradient, ScoreOperand& left_gradient) {
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
        store_bias_gradient(params, item, row, column, query_bound, half, n, gradient);
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

  // Two neighbouring elements of a bias gradient that nothing shares. What is computed for rows
  // beyond the query length may be NaN.
  CUTE_DEVICE static void store_bias_gradient(BackwardParams const& params, WorkItem const& item,
                                              int row, int column, int query_bound, int half, int n,
                                              float const (&gradient)[2]) {
    if constexpr (Config::kBiasGradient == BiasGradient::full) {
      ScorePlane<typename Config::BiasElement> const plane(params.bias_gradient, item.batch,
                                                           item.head, row, column);
      int const tile_row = ScoreGrid::element_row(2 * half, 0);
      int const columns = params.shape.key_length - column;
      bool const beyond = tile_row >= query_bound;
      plane.store(tile_row, ScoreGrid::element_column(0, n),
                  tile_row < params.shape.query_length - row ? columns : 0,
                  beyond ? 0.0f : gradient[0], beyond ? 0.0f : gradient[1]);
    }
  }

  // Its zeros where no visit computes it.
  CUTE_DEVICE static void clear_skipped_keys(BackwardParams const& params, Work const& work) {
    if constexpr (Config::kBiasGradient == BiasGradient::full) {
      using BiasElement = typename Config::BiasElement;
      ScorePlane<BiasElement> const plane(params.bias_gradient, work.item.batch, work.item.head,
                                          work.row, 0);
      int const rows = min(kTileQuery, params.shape.query_length - work.row);
      auto clear = [&](int begin, int end) {
        for (int row = threadIdx.x / kWarpSize; row < rows; row += kConsumerWarps) {
          for (int column = begin + threadIdx.x % kWarpSize; column < end; column += kWarpSize) {
            *plane.at(row, column) = BiasElement(0.0f);
          }
        }
      };
      if constexpr (Config::kBlockMask) {
        for (int tile = work.tiles.begin; tile < work.tiles.end; tile = work.tiles.after(tile)) {
          clear((tile + 1) * kTileKey, work.tiles.after(tile) * kTileKey);
        }
      }
      clear(0, min(work.tiles.begin * kTileKey, params.shape.key_length));
      clear(work.tiles.end * kTileKey, params.shape.key_length);
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
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const origin = query_origin<Config>(params.shape, work.item.batch);
    int const row_bound = Config::kVarlen ? query_bound : params.shape.query_length - work.row;
    store_part<Config, QueryTile>(maps.query_gradient, params.query_gradient, tiles,
                                  warpgroup * kWarpgroupRows, origin.row + work.row, row_bound,
                                  work.item.head, origin.batch, params.shape.head_dim);
    wait_tma_stores();
    if constexpr (Config::kVarlen) {
      Gap::of_queries(params.shape, work.item.batch, query_bound + work.row)
          .template clear<Element, kConsumers>(params.query_gradient, work.item.head,
                                               params.shape.head_dim, work.item.tile,
                                               params.query_tiles);
    }
  }
};

}  // namespace memeff
