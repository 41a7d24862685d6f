// Attention forward for Hopper: TMA, wgmma and specialised warpgroups, one persistent CTA an SM.
//
// The last warpgroup is the producer: a thread each copies queries, keys and values into rings of
// buffers. Each of the others, a consumer, owns 64 query rows of a tile and walks its
// keys from right to left. Inside a consumer the scores of the next visit are computed together
// with the product of this visit's probabilities, and the softmax runs under both:
//
//   issue S(j+1) = Q K(j+1)^T | issue O += P(j) V(j) | wait S(j+1) | softmax | wait O | P(j+1)
//
// The visits of one tile of queries follow those of another without a break: the first scores of a
// tile are computed together with the last product of the one before, whose output leaves from
// registers under the products of other consumers.
//
// Without a mask consumers take turns in issuing products, so that the softmax of one runs under
// the products of another (Shah et al. 2024, FlashAttention-3, section 3.1). With a mask each
// passes over the key tiles at the end that only the rows of others attend to.
//
// Where tiles are few, consumers are teams that share 64 rows: they visit the key tiles in turn,
// each with a softmax and an output of its own, which are added up at the end of a tile.
#pragma once

#include <memeff/bias/add.cuh>
#include <memeff/bias/rows.cuh>
#include <memeff/collective/bulk_tile.cuh>
#include <memeff/collective/drop.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/pipeline.cuh>
#include <memeff/collective/softmax.cuh>
#include <memeff/collective/team.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/key_visits.cuh>
#include <memeff/schedule/persistent.cuh>
#include <memeff/schedule/sequences.cuh>

namespace memeff {

template <class Config>
struct FmhaForwardSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kTeams = Config::kTeams;  // consumers of the same rows
  static constexpr int kRowWarpgroups = kTileQuery / kWarpgroupRows;
  static constexpr int kWarpgroups = kRowWarpgroups * kTeams;  // consumers
  static_assert(kTeams == 1 || kRowWarpgroups == 1);
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  template <int kColumns>
  using Grid = cute::conditional_t<kTeams == 1, WarpGrid<kTileQuery, kColumns, kConsumerWarps, 16>,
                                   WarpgroupGrid<kTileQuery, kColumns>>;
  using ScoreGrid = Grid<kTileKey>;
  using OutGrid = Grid<Config::kValueDim>;
  using Softmax = OnlineSoftmax<1>;
  using Schedule = PersistentSchedule<Config::kMask, kTileQuery, sizeof(Element)>;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;
  static_assert(kStages % kTeams == 0);  // each team has buffers of its own

  static constexpr bool kBiasTile = has_bias_tile<Config>();
  // Each warp copies the bias of its own rows, for itself.
  using BiasRows = BiasTile<Config, 16, kTileKey, kWarpSize>;
  static constexpr int kBiasBytes = bias_tile_bytes<Config, BiasRows>();

  using Team = WarpTeam<kConsumerWarps, kTeams, 1 + 2 * kWarpgroups>;
  using Merge = TeamMerge<Team, Softmax, kTileQuery * Config::kValueDim>;

  static constexpr int kPieceStages = 4;
  struct Control {
    Pipeline<kQueryStages> query[kRowWarpgroups];  // each consumer's own rows
    Pipeline<kStages> key;
    Pipeline<kStages> value;
    Pipeline<kPieceStages> piece;
    WorkItem items[kPieceStages];  // batch is -1 behind the last
  };
  static constexpr int kKeyOffset = kQueryStages * QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * KeyTile::kBytes;
  static constexpr int kBiasOffset = kValueOffset + kStages * ValueTile::kBytes;
  static constexpr int kMergeOffset = kBiasOffset + kConsumerWarps * kBiasBytes;
  static constexpr int kControlOffset = kMergeOffset + Merge::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the turns of each consumer, one for its threads alone, one for teams.
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
      CUTE_UNROLL
      for (auto& query : control.query) query.init(kConsumerWarps / kRowWarpgroups);
      control.key.init(kConsumerWarps / kTeams);
      control.value.init(kConsumerWarps / kTeams);
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
          produce_tiles<KeyTile>(params, params.key, maps.key, control, control.key,
                                 tiles + kKeyOffset);
          break;
        case 2 * kWarpSize:
          produce_tiles<ValueTile>(params, params.value, maps.value, control, control.value,
                                   tiles + kValueOffset);
          break;
      }
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, control, tiles);
    }
  }

  // The next piece of work; a batch of -1 comes behind the last. It stays in its slot until the
  // reader, a warp, releases that.
  CUTE_DEVICE static WorkItem take_item(Control& control, PipelineStage<kPieceStages> const& slot) {
    control.piece.wait(slot);
    return control.items[slot.index];
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
      for (int warpgroup = 0; warpgroup < kRowWarpgroups; ++warpgroup) {
        int const tile_row = warpgroup * kWarpgroupRows;
        uint64_t& arrived =
            control.query[warpgroup].acquire(query, QueryTile::kBytes / kRowWarpgroups);
        load_bulk_tile<QueryTile>(maps.query, arrived, tiles + query.index * QueryTile::kBytes,
                                  tile_row, origin.row + item.tile * kTileQuery + tile_row,
                                  item.head, origin.batch, CacheHint::EVICT_FIRST);
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
  CUTE_DEVICE static void produce_tiles(ForwardParams const& params, TensorView const& tensor,
                                        TensorMap const& map, Control& control,
                                        Pipeline<kStages>& ring, uint32_t buffers) {
    PipelineStage<kStages> stage;
    PipelineStage<kPieceStages> slot;
    while (true) {
      WorkItem const item = take_item(control, slot);
      control.piece.release(slot);
      slot.advance();
      if (item.batch < 0) break;
      ScoreMask<Config, ScoreGrid> const mask(params.mask, params.shape, item.batch);
      Visits const range(params, mask, item);
      Origin const origin = key_origin<Config>(params.shape, item.batch);
      int const element = element_of<Config>(tensor, origin.batch);
      int const key_head = item.head / params.shape.group;
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
        load_bulk_tile<Tile>(map, ring.acquire(stage, Tile::kBytes),
                             buffers + stage.index * Tile::kBytes, 0, origin.row + tile * kTileKey,
                             key_head, element, CacheHint::EVICT_LAST);
        stage.advance();
      }
    }
  }

  using Mask = ScoreMask<Config, ScoreGrid>;
  using Visits = KeyVisits<Config, Mask>;
  static constexpr bool kTurns = kRowWarpgroups > 1 && !Visits::kPassesOver;

  // To the buffer of the next visit of a consumer.
  CUTE_DEVICE static void advance(PipelineStage<kStages>& stage) {
    CUTE_UNROLL
    for (int team = 0; team < kTeams; ++team) stage.advance();
  }

  // Gives the buffers of `count` tiles back unread.
  CUTE_DEVICE static void pass_over(Pipeline<kStages>& ring, PipelineStage<kStages>& stage,
                                    int count, bool leader) {
    if constexpr (Visits::kPassesOver) {
      CUTE_NO_UNROLL
      for (; count > 0; --count) {
        ring.wait(stage);  // or the arrival would count for the tile before
        if (leader) ring.release(stage);
        stage.advance();
      }
    }
  }

  CUTE_DEVICE static void consume(ForwardParams const& params, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    // Uniform over the warpgroup, and known to be.
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    int const team = kTeams > 1 ? warpgroup : 0;
    int const row_warpgroup = warpgroup - team;
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key_stage{team};
    PipelineStage<kStages> value_stage{team};
    PipelineStage<kPieceStages> slot;
    if (warpgroup == 0) give_turn(kWarpgroups - 1);

    WorkItem item = take_item(control, slot);
    if (item.batch < 0) return;
    Mask mask(params.mask, shape, item.batch);
    Visits range(params, mask, item, team);
    int tile = range.first(mask, item, row_warpgroup);
    Softmax softmax;
    float correction[Softmax::kRows];
    auto output = OutGrid::make_accumulators();    // (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(output);

    control.query[row_warpgroup].wait(query);
    load_bias(params, mask, item, tile, tiles);
    pass_over(control.key, key_stage, range.passed(tile + 1), leader);
    pass_over(control.value, value_stage, range.passed(tile + 1), leader);
    control.key.wait(key_stage);
    take_turn(warpgroup);
    fence_accumulators(scores);
    begin_products();
    warpgroup_gemm<Element, kHeadSteps>(scores, queries(tiles, query, row_warpgroup),
                                        keys(tiles, key_stage), false);
    commit_products();
    give_turn(warpgroup);
    wait_products<0>();
    fence_accumulators(scores);
    if (leader) {
      control.key.release(key_stage);
      if (tile == range.begin) control.query[row_warpgroup].release(query);
    }
    advance(key_stage);
    modify(params, mask, item, tile, range, tiles, scores);
    exponentiate(softmax, scores, correction, params);
    if (tile > range.begin) control.key.wait(key_stage);
    auto probabilities = as_left_operand<Element>(scores);
    drop(params, item, tile, probabilities);
    clear_values(control, mask, shape, tile, value_stage, tiles, warpgroup);

    CUTE_NO_UNROLL
    while (true) {
      bool const last = tile == range.begin;  // of the piece, is the visit whose P is ready
      Softmax const done = softmax;
      if (last) {
        PipelineStage<kPieceStages> next = slot;
        next.advance();
        WorkItem const following = take_item(control, next);
        if (following.batch < 0) break;
        item = following;
        mask = Mask(params.mask, shape, item.batch);
        range = Visits(params, mask, item, team);
        tile = range.first(mask, item, row_warpgroup) + kTeams;
        softmax = Softmax();
        query.advance();
        control.query[row_warpgroup].wait(query);
        load_bias(params, mask, item, range.next(tile), tiles);
        pass_over(control.key, key_stage, range.passed(tile), leader);
        control.key.wait(key_stage);
      }
      tile = range.next(tile);
      take_turn(warpgroup);
      fence_accumulators(scores);
      fence_accumulators(output);
      begin_products();
      warpgroup_gemm<Element, kHeadSteps>(scores, queries(tiles, query, row_warpgroup),
                                          keys(tiles, key_stage), false);
      commit_products();
      control.value.wait(value_stage);
      begin_products();
      warpgroup_gemm<Element, kKeySteps>(output, probabilities, values(tiles, value_stage));
      commit_products();
      give_turn(warpgroup);
      wait_products<1>();
      fence_accumulators(scores);
      if (leader) {
        control.key.release(key_stage);
        if (tile == range.begin) control.query[row_warpgroup].release(query);
      }
      advance(key_stage);
      modify(params, mask, item, tile, range, tiles, scores);
      exponentiate(softmax, scores, correction, params);
      fence_accumulators(scores);
      // The wait for the next keys stands here because the assembler, left with one basic
      // block, puts the exponentials behind the wait for the product that they should run
      // under.
      if (tile > range.begin) control.key.wait(key_stage);
      wait_products<0>();
      fence_accumulators(output);
      if (leader) control.value.release(value_stage);
      advance(value_stage);
      probabilities = as_left_operand<Element>(scores);
      drop(params, item, tile, probabilities);
      if (last) {
        finish_piece(params, control.items[slot.index], tiles, done, output);
        __syncwarp();
        if (leader) control.piece.release(slot);
        slot.advance();
        cute::clear(output);
        pass_over(control.value, value_stage, range.passed(tile + 1), leader);
        clear_values(control, mask, shape, tile, value_stage, tiles, warpgroup);
      } else {
        CUTE_UNROLL
        for (int r = 0; r < Softmax::kRows; ++r) Softmax::rescale_row(output, r, correction[r]);
      }
    }
    control.value.wait(value_stage);
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(output, probabilities, values(tiles, value_stage));
    commit_products();
    wait_products<0>();
    fence_accumulators(output);
    finish_piece(params, item, tiles, softmax, output);
  }

  // Zeros the values of the first visit of a piece that lie beyond the key length. Each consumer
  // does it for itself: they write the same zeros.
  CUTE_DEVICE static void clear_values(Control& control, Mask const& mask,
                                       ProblemShape const& shape, int tile,
                                       PipelineStage<kStages> const& stage, uint32_t tiles,
                                       int warpgroup) {
    int const column = tile * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) return;
    control.value.wait(stage);
    clear_rows<ValueTile, kWarpgroupSize>(tiles + kValueOffset + stage.index * ValueTile::kBytes,
                                          max(mask.key_length - column, 0));
    fence_bulk_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  CUTE_DEVICE static Query queries(uint32_t tiles, PipelineStage<kQueryStages> const& stage,
                                   int warpgroup) {
    return Query(tiles + stage.index * QueryTile::kBytes, warpgroup * kWarpgroupRows);
  }
  CUTE_DEVICE static Key keys(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return Key(tiles + kKeyOffset + stage.index * KeyTile::kBytes);
  }
  CUTE_DEVICE static Value values(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return Value(tiles + kValueOffset + stage.index * ValueTile::kBytes);
  }

  // A consumer issues its products when it is its turn; the next one's turn begins when it has.
  CUTE_DEVICE static void take_turn(int warpgroup) {
    if constexpr (kTurns) {
      named_barrier_sync(turn_barrier(warpgroup), 2 * kWarpgroupSize);
    }
  }
  CUTE_DEVICE static void give_turn(int warpgroup) {
    if constexpr (kTurns) {
      int const next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
      named_barrier_arrive(turn_barrier(next), 2 * kWarpgroupSize);
    }
  }

  // Soft cap, bias and masks: scores that are ready for the softmax.
  template <class Mask, class Scores>
  CUTE_DEVICE static void modify(ForwardParams const& params, Mask const& mask,
                                 WorkItem const& item, int tile, Visits const& range,
                                 uint32_t tiles, Scores& scores) {
    int const row = item.tile * kTileQuery;
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
      if (tile > range.begin) load_bias(params, mask, item, range.next(tile), tiles);
    }
    mask.template apply<kTileQuery, kTileKey>(scores, params.mask, params.shape, item.batch,
                                              item.head, row, column, range.is_mixed(tile));
  }

  template <class Probabilities>
  CUTE_DEVICE static void drop(ForwardParams const& params, WorkItem const& item, int tile,
                               Probabilities& probabilities) {
    if constexpr (Config::kDropout) {
      drop_elements<ScoreGrid>(params, item.batch, item.head, item.tile * kTileQuery,
                               tile * kTileKey, probabilities);
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
                                    WorkItem const& item, int tile, uint32_t tiles) {
    if constexpr (kBiasTile) {
      int const thread = thread_index();
      int const row = item.tile * kTileQuery;
      int const column = tile * kTileKey;
      BiasRows::copy(bias_tile(tiles), thread % kWarpSize, bias_source(params, item, row, column),
                     bias_row_bytes(params), mask.query_length - row - ScoreGrid::row(thread),
                     mask.key_length - column);
      commit_copies();
    }
  }

  // Output and logsumexp of this warpgroup's rows of a piece, or of what all teams found for them.
  template <class Output>
  CUTE_DEVICE static void finish_piece(ForwardParams const& params, WorkItem const item,
                                       uint32_t tiles, Softmax softmax, Output& output) {
    int const row = item.tile * kTileQuery;
    int const query_length = Mask(params.mask, params.shape, item.batch).query_length;
    Merge::run(tiles + kMergeOffset, softmax, output, exponent_scale(params));
    if constexpr (kTeams > 1) Team::meet();  // nobody reads what was added up any more
    if (kTeams == 1 || Team::index() == 0) {
      finish(params, item, row, query_length - row, softmax, output);
      store(params, item, row, query_length, softmax, output);
    }
    if constexpr (Config::kVarlen) clear_gap(params, item, query_length);
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

  // Rows beyond the query length get 0 and -inf.
  template <class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, WorkItem const& item, int row,
                                int query_length, Softmax const& softmax, Output const& output) {
    ProblemShape const& shape = params.shape;
    // Past a packed sequence the next one begins.
    int const row_bound = Config::kVarlen ? query_length : shape.query_length;
    Origin const origin = query_origin<Config>(shape, item.batch);
    float* const logsumexp = params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const query = row + OutGrid::element_row(2 * r, 0);
      bool const exists = query < row_bound;
      bool const valid = query < query_length;
      if (threadIdx.x % 4 == 0 && exists)
        logsumexp[query] = valid ? softmax.row_max[r] : -infinity();
      char* const out =
          row_pointer<Element>(params.out, origin.batch, origin.row + query, item.head);
      store_row<Element>(out, output, r, shape.value_dim, exists, valid);
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
