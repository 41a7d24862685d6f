// Attention forward for Hopper: TMA, wgmma and specialised warpgroups, one persistent CTA an SM.
//
// The last warpgroup is the producer: a thread each copies queries, keys and values into rings of
// buffers. Each of the others, a consumer, owns 64 query rows of a tile and walks its
// keys from right to left. Inside a consumer the scores of the next tile are computed together with
// the product of this tile's probabilities, and the softmax runs under both:
//
//   issue S(j-1) = Q K(j-1)^T | issue O += P(j) V(j) | wait S(j-1) | softmax | wait O | P(j-1)
//
// Consumers take turns in issuing products, so that the softmax of one runs under the products of
// another (Shah et al. 2024, FlashAttention-3, section 3.1).
#pragma once

#include <memeff/bias/add.cuh>
#include <memeff/bias/rows.cuh>
#include <memeff/collective/bulk_tile.cuh>
#include <memeff/collective/drop.cuh>
#include <memeff/collective/pipeline.cuh>
#include <memeff/collective/softmax.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/persistent.cuh>
#include <memeff/schedule/sequences.cuh>

namespace memeff {

template <class Config>
struct FmhaForwardSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = kTileQuery / kWarpgroupRows;  // consumers
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  // 64 K registers an SM; both are multiples of eight.
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 240;

  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kConsumerWarps, 16>;
  using OutGrid = WarpGrid<kTileQuery, Config::kValueDim, kConsumerWarps, 16>;
  using Softmax = OnlineSoftmax<1>;
  using Schedule = PersistentSchedule<Config::kMask, kTileQuery, sizeof(Element)>;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;
  // The output of a tile leaves from where its queries were: each warp overwrites its own rows.
  static constexpr int kQueryBytes =
      QueryTile::kBytes > OutTile::kBytes ? QueryTile::kBytes : OutTile::kBytes;
  static_assert(QueryTile::kPanelColumns == OutTile::kPanelColumns);
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;

  static constexpr bool kBiasTile = has_bias_tile<Config>();
  // Each warp copies the bias of its own rows, for itself.
  using BiasRows = BiasTile<Config, 16, kTileKey, kWarpSize>;
  static constexpr int kBiasBytes = bias_tile_bytes<Config, BiasRows>();

  static constexpr int kPieceStages = 2;
  struct Control {
    Pipeline<kQueryStages> query[kWarpgroups];  // each consumer's own rows
    Pipeline<kStages> key;
    Pipeline<kStages> value;
    Pipeline<kPieceStages> piece;
    WorkItem items[kPieceStages];  // batch is -1 behind the last
  };
  static constexpr int kKeyOffset = kQueryStages * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * KeyTile::kBytes;
  static constexpr int kBiasOffset = kValueOffset + kStages * ValueTile::kBytes;
  static constexpr int kControlOffset = kBiasOffset + kConsumerWarps * kBiasBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the turns of each consumer, and one for its threads alone.
  CUTE_DEVICE static int turn_barrier(int warpgroup) { return 1 + warpgroup; }
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + kWarpgroups + warpgroup; }

  static constexpr int kHeadSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = kTileKey / 16;
  using Query = DescriptorOperand<QueryTile, Contiguous::k>;
  using Key = DescriptorOperand<KeyTile, Contiguous::k>;
  using Value = DescriptorOperand<ValueTile, Contiguous::outer>;

  CUTE_DEVICE static void run(ForwardParams const& params, ForwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      prefetch_map(maps.query);
      prefetch_map(maps.key);
      prefetch_map(maps.value);
      prefetch_map(maps.out);
      CUTE_UNROLL
      for (auto& query : control.query) query.init(1);
      control.key.init(kConsumerWarps);
      control.value.init(kConsumerWarps);
      control.piece.init(kConsumerWarps + 2);
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      switch (threadIdx.x - kConsumers) {
        case 0:
          produce_queries(params, maps, control, tiles);
          break;
        case kWarpSize:
          produce_tiles<KeyTile>(params, maps.key, control, control.key, tiles + kKeyOffset);
          break;
        case 2 * kWarpSize:
          produce_tiles<ValueTile>(params, maps.value, control, control.value,
                                   tiles + kValueOffset);
          break;
      }
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, maps, control, tiles);
    }
  }

  // The next piece of work, for a warp that reads it; a batch of -1 comes behind the last.
  CUTE_DEVICE static WorkItem take_item(Control& control, PipelineStage<kPieceStages>& slot,
                                        bool leader) {
    control.piece.wait(slot);
    WorkItem const item = control.items[slot.index];
    __syncwarp(__activemask());
    if (leader) control.piece.release(slot);
    slot.advance();
    return item;
  }

  // The thread that hands out pieces, and copies their queries.
  CUTE_DEVICE static void produce_queries(ForwardParams const& params, ForwardMaps const& maps,
                                          Control& control, uint32_t tiles) {
    PipelineStage<kQueryStages> query;
    PipelineStage<kPieceStages> slot;
    int piece = int(blockIdx.x);
    while (true) {
      WorkItem item = Schedule::item(params.shape, piece, shares_bias(params));
      while (is_idle(params, item)) {
        piece = Schedule::next_piece(params.shape, params.piece_counter);
        item = Schedule::item(params.shape, piece, shares_bias(params));
      }
      control.piece.acquire(slot);
      control.items[slot.index] = item;
      control.piece.commit(slot);
      slot.advance();
      if (item.batch < 0) break;
      piece = Schedule::next_piece(params.shape, params.piece_counter);
      Origin const origin = query_origin<Config>(params.shape, item.batch);
      CUTE_UNROLL
      for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
        int const tile_row = warpgroup * kWarpgroupRows;
        uint64_t& arrived =
            control.query[warpgroup].acquire(query, QueryTile::kBytes / kWarpgroups);
        load_bulk_tile<QueryTile>(maps.query, arrived, tiles + query.index * kQueryBytes, tile_row,
                                  origin.row + item.tile * kTileQuery + tile_row, item.head,
                                  origin.batch, CacheHint::EVICT_FIRST);
      }
      query.advance();
    }
  }

  CUTE_DEVICE static bool shares_bias(ForwardParams const& params) {
    return kBiasTile && params.bias.batch_stride == 0;
  }

  // Is the tile beyond the end of a packed sequence, with no gap behind it to be cleared?
  CUTE_DEVICE static bool is_idle(ForwardParams const& params, WorkItem const& item) {
    if constexpr (!Config::kVarlen) return false;
    if (item.batch < 0) return false;
    int const length =
        ScoreMask<Config, ScoreGrid>(params.mask, params.shape, item.batch).query_length;
    Gap const gap = Gap::of_queries(params.shape, item.batch, length);
    return item.tile * kTileQuery >= length && gap.begin >= gap.end;
  }

  // The thread that copies keys, and the one that copies values.
  template <class Tile>
  CUTE_DEVICE static void produce_tiles(ForwardParams const& params, TensorMap const& map,
                                        Control& control, Pipeline<kStages>& ring,
                                        uint32_t buffers) {
    PipelineStage<kStages> stage;
    PipelineStage<kPieceStages> slot;
    while (true) {
      WorkItem const item = take_item(control, slot, true);
      if (item.batch < 0) break;
      ScoreMask<Config, ScoreGrid> const mask(params.mask, params.shape, item.batch);
      TileRange const range = mask.key_tiles(item.tile * kTileQuery, kTileQuery, kTileKey);
      Origin const origin = key_origin<Config>(params.shape, item.batch);
      int const key_head = item.head / params.shape.group;
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; --tile) {
        load_bulk_tile<Tile>(map, ring.acquire(stage, Tile::kBytes),
                             buffers + stage.index * Tile::kBytes, 0, origin.row + tile * kTileKey,
                             key_head, origin.batch, CacheHint::EVICT_LAST);
        stage.advance();
      }
    }
  }

  CUTE_DEVICE static void consume(ForwardParams const& params, ForwardMaps const& maps,
                                  Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    // Uniform over the warpgroup, and known to be.
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key_stage;
    PipelineStage<kStages> value_stage;
    PipelineStage<kPieceStages> slot;
    bool stored = false;  // an output is leaving from the previous buffer of queries
    if (warpgroup == 0) give_turn(kWarpgroups - 1);

    while (true) {
      WorkItem const item = take_item(control, slot, leader);
      if (item.batch < 0) break;
      int const row = item.tile * kTileQuery;
      ScoreMask<Config, ScoreGrid> const mask(params.mask, shape, item.batch);
      TileRange const range = mask.key_tiles(row, kTileQuery, kTileKey);
      uint32_t const query_tile = tiles + query.index * kQueryBytes;

      auto output = OutGrid::make_accumulators();  // (4, 1, MMA_N)
      cute::clear(output);
      Softmax softmax;
      Query const queries(query_tile, warpgroup * kWarpgroupRows);
      control.query[warpgroup].wait(query);

      if (range.begin < range.end) {
        auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        float correction[Softmax::kRows];
        int tile = range.end - 1;
        load_bias(params, mask, item, row, tile, tiles);
        control.key.wait(key_stage);
        take_turn(warpgroup);
        fence_accumulators(scores);
        begin_products();
        warpgroup_gemm<Element, kHeadSteps>(scores, queries, keys(tiles, key_stage), false);
        commit_products();
        give_turn(warpgroup);
        release_stored(control, query, warpgroup, stored);
        wait_products<0>();
        fence_accumulators(scores);
        if (leader) control.key.release(key_stage);
        key_stage.advance();
        modify(params, mask, item, row, tile, range, tiles, scores);
        exponentiate(softmax, scores, correction, params);
        auto probabilities = as_left_operand<Element>(scores);
        drop(params, item, row, tile, probabilities);

        if (tile > range.begin) control.key.wait(key_stage);
        int const column = tile * kTileKey;
        if (reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) {
          // Each consumer clears the rows for itself: they write the same zeros.
          control.value.wait(value_stage);
          clear_rows<ValueTile, kWarpgroupSize>(
              tiles + kValueOffset + value_stage.index * ValueTile::kBytes,
              mask.key_length - column);
          fence_bulk_store();
          named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
        }

        CUTE_NO_UNROLL
        for (--tile; tile >= range.begin; --tile) {
          take_turn(warpgroup);
          fence_accumulators(scores);
          fence_accumulators(output);
          begin_products();
          warpgroup_gemm<Element, kHeadSteps>(scores, queries, keys(tiles, key_stage), false);
          commit_products();
          control.value.wait(value_stage);
          begin_products();
          warpgroup_gemm<Element, kKeySteps>(output, probabilities, values(tiles, value_stage));
          commit_products();
          give_turn(warpgroup);
          wait_products<1>();
          fence_accumulators(scores);
          if (leader) control.key.release(key_stage);
          key_stage.advance();
          modify(params, mask, item, row, tile, range, tiles, scores);
          exponentiate(softmax, scores, correction, params);
          fence_accumulators(scores);
          // The wait for the next keys stands here because the assembler, left with one basic
          // block, puts the exponentials behind the wait for the product that they should run
          // under.
          if (tile > range.begin) control.key.wait(key_stage);
          wait_products<0>();
          fence_accumulators(output);
          if (leader) control.value.release(value_stage);
          value_stage.advance();
          probabilities = as_left_operand<Element>(scores);
          drop(params, item, row, tile, probabilities);
          CUTE_UNROLL
          for (int r = 0; r < Softmax::kRows; ++r) Softmax::rescale_row(output, r, correction[r]);
        }
        control.value.wait(value_stage);
        fence_accumulators(output);
        begin_products();
        warpgroup_gemm<Element, kKeySteps>(output, probabilities, values(tiles, value_stage));
        commit_products();
        wait_products<0>();
        fence_accumulators(output);
        if (leader) control.value.release(value_stage);
        value_stage.advance();
      }
      release_stored(control, query, warpgroup, stored);
      finish(params, item, row, mask.query_length - row, softmax, output);
      store(params, maps, item, mask.query_length - row, softmax, output, query_tile, warpgroup);
      if constexpr (Config::kVarlen) clear_gap(params, item, mask.query_length);
      stored = true;
      query.advance();
      if constexpr (kQueryStages == 1) release_stored(control, query, warpgroup, stored);
    }
    wait_bulk_stores();
  }

  // Gives the buffer before `query` back to the producer when the output in it has left. That takes
  // a microsecond, so with two buffers it is asked for when the next piece is under way.
  CUTE_DEVICE static void release_stored(Control& control, PipelineStage<kQueryStages> const& query,
                                         int warpgroup, bool& stored) {
    if (stored && threadIdx.x % kWarpgroupSize == 0) {
      wait_bulk_stores();
      PipelineStage<kQueryStages> previous = query;
      previous.index = (query.index + kQueryStages - 1) % kQueryStages;
      control.query[warpgroup].release(previous);
    }
    stored = false;
  }

  CUTE_DEVICE static Key keys(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return Key(tiles + kKeyOffset + stage.index * KeyTile::kBytes);
  }
  CUTE_DEVICE static Value values(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return Value(tiles + kValueOffset + stage.index * ValueTile::kBytes);
  }

  // A consumer issues its products when it is its turn; the next one's turn begins when it has.
  CUTE_DEVICE static void take_turn(int warpgroup) {
    if constexpr (kWarpgroups > 1) {
      named_barrier_sync(turn_barrier(warpgroup), 2 * kWarpgroupSize);
    }
  }
  CUTE_DEVICE static void give_turn(int warpgroup) {
    if constexpr (kWarpgroups > 1) {
      int const next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
      named_barrier_arrive(turn_barrier(next), 2 * kWarpgroupSize);
    }
  }

  // Soft cap, bias and masks: scores that are ready for the softmax.
  template <class Mask, class Scores>
  CUTE_DEVICE static void modify(ForwardParams const& params, Mask const& mask,
                                 WorkItem const& item, int row, int tile, TileRange const& range,
                                 uint32_t tiles, Scores& scores) {
    int const column = tile * kTileKey;
    prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
    if constexpr (kBiasTile) {
      wait_copies<0>();
      __syncwarp();  // the bias of all lanes is here
      add_bias(scores,
               BiasReader<BiasRows>(bias_tile(tiles), 0, 0, bias_source(params, item, row, column),
                                    bias_row_bytes(params)),
               params.scale.softmax_scale);
      __syncwarp();  // nobody reads it any more
      if (tile > range.begin) load_bias(params, mask, item, row, tile - 1, tiles);
    }
    mask.template apply<kTileQuery, kTileKey>(scores, params.mask, params.shape, item.batch,
                                              item.head, row, column);
  }

  template <class Probabilities>
  CUTE_DEVICE static void drop(ForwardParams const& params, WorkItem const& item, int row, int tile,
                               Probabilities& probabilities) {
    if constexpr (Config::kDropout) {
      drop_elements<ScoreGrid>(params, item.batch, item.head, row, tile * kTileKey, probabilities);
    }
  }

  template <class Scores>
  CUTE_DEVICE static void exponentiate(Softmax& softmax, Scores& scores,
                                       float (&correction)[Softmax::kRows],
                                       ForwardParams const& params) {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      correction[r] = softmax.exponentiate_row(scores, r, exponent_scale(params));
    }
  }

  // Scores that met a bias are exponents of two already.
  CUTE_DEVICE static float exponent_scale(ForwardParams const& params) {
    return kBiasTile ? 1.0f : params.scale.softmax_scale;
  }

  CUTE_DEVICE static uint32_t bias_tile(uint32_t tiles) {
    return tiles + kBiasOffset + thread_index() / kWarpSize * kBiasBytes;
  }

  // Where the bias of this warp's rows begins.
  CUTE_DEVICE static char const* bias_source(ForwardParams const& params, WorkItem const& item,
                                             int row, int column) {
    return bias_row<Config>(params.bias, item.batch, item.head,
                            row + ScoreGrid::row(thread_index())) +
           column * (long long)sizeof(typename Config::BiasElement);
  }

  CUTE_DEVICE static long long bias_row_bytes(ForwardParams const& params) {
    return params.bias.row_stride * (long long)sizeof(typename Config::BiasElement);
  }

  template <class Mask>
  CUTE_DEVICE static void load_bias(ForwardParams const& params, Mask const& mask,
                                    WorkItem const& item, int row, int tile, uint32_t tiles) {
    if constexpr (kBiasTile) {
      int const thread = thread_index();
      int const column = tile * kTileKey;
      BiasRows::copy(bias_tile(tiles), thread % kWarpSize, bias_source(params, item, row, column),
                     bias_row_bytes(params), mask.query_length - row - ScoreGrid::row(thread),
                     mask.key_length - column);
      commit_copies();
    }
  }

  // The end of the softmax. A bias that is broadcast over columns has an effect here alone.
  template <class Output>
  CUTE_DEVICE static void finish(ForwardParams const& params, WorkItem const& item, int row,
                                 int row_bound, Softmax& softmax, Output& output) {
    float const output_scale = kept_scale<Config>(params.dropout);
    if constexpr (Config::kBias && !kBiasTile) {
      RowBias<Config, OutGrid> const bias(params.bias, item.batch, item.head, row, row_bound);
      bias.mask(softmax);
      softmax.finish(output, exponent_scale(params), output_scale);
      bias.add(softmax);
    } else {
      softmax.finish(output, exponent_scale(params), output_scale);
    }
  }

  // Output and logsumexp of this warpgroup's rows. Rows from query_bound on lie beyond the query
  // length and get 0 and -inf.
  template <class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, ForwardMaps const& maps,
                                WorkItem const& item, int query_bound, Softmax const& softmax,
                                Output& output, uint32_t tile, int warpgroup) {
    ProblemShape const& shape = params.shape;
    int const row = item.tile * kTileQuery;
    // Past a packed sequence the next one begins.
    int const row_bound = Config::kVarlen ? query_bound : shape.query_length - row;
    Origin const origin = query_origin<Config>(shape, item.batch);
    float* const logsumexp =
        params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head) + row;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const tile_row = OutGrid::element_row(2 * r, 0);
      bool const beyond = tile_row >= query_bound;
      if (threadIdx.x % 4 == 0 && tile_row < row_bound) {
        logsumexp[tile_row] = beyond ? -infinity() : softmax.row_max[r];
      }
      if (beyond) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(output); ++n) {
          output(2 * r, 0, n) = 0.0f;
          output(2 * r + 1, 0, n) = 0.0f;
        }
      }
    }
    store_accumulators<Element, OutTile, OutGrid>(tile, output);
    fence_bulk_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    store_part<Config, OutTile>(maps.out, params.out, tile, warpgroup * kWarpgroupRows,
                                origin.row + row, row_bound, item.head, origin.batch,
                                shape.value_dim);
    // Where threads wrote, they have read the tile before the producer gets it back.
    if constexpr (Config::kVarlen) {
      named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    }
  }

  // Output 0 and logsumexp -inf for this piece's share of the tokens that belong to no sequence.
  CUTE_DEVICE static void clear_gap(ForwardParams const& params, WorkItem const& item, int length) {
    ProblemShape const& shape = params.shape;
    int const tiles = Schedule::query_tiles(shape);
    Gap const gap = Gap::of_queries(shape, item.batch, length);
    gap.template clear<Element, kConsumers>(params.out, item.head, shape.value_dim, item.tile,
                                            tiles);
    gap.template clear_logsumexp<kConsumers>(
        params.logsumexp + logsumexp_offset<Config>(shape, {0, 0}, item.head), item.tile, tiles);
  }
};

}  // namespace memeff
