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
// Consumers take no turns in issuing products (Shah et al. 2024, FlashAttention-3, section 3.1,
// where they do): the softmax of one finds its way under the products of another. With a mask each
// passes over the key tiles at the end that only the rows of others attend to.
//
// How operands come and are multiplied is up to their elements. Where a product with values has
// accumulators of its own, and these leave no registers for what a visit needs, S(j+1) is issued
// behind it: the products of a consumer then run beside the softmax of the other.
//
// Where tiles are few, consumers are teams that share 64 rows: they visit the key tiles in turn,
// each with a softmax and an output of its own, which are added up at the end of a tile.
#pragma once

#include <memeff/collective/consumer_groups.cuh>
#include <memeff/collective/drop.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/forward/f16x3_operands_sm90.cuh>
#include <memeff/kernels/forward/operands_sm90.cuh>
#include <memeff/kernels/forward/output_sm90.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/kv_blocks.cuh>
#include <memeff/schedule/persistent.cuh>
#include <memeff/score/bias/add.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

template <class Config>
struct FmhaForwardSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kConsumerGroups = Config::kConsumerGroups;  // consumers of the same rows
  static constexpr int kRowWarpgroups = kTileQuery / kWarpgroupRows;
  static constexpr int kWarpgroups = kRowWarpgroups * kConsumerGroups;  // consumers
  static_assert(kConsumerGroups == 1 || kRowWarpgroups == 1);
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;

  template <int kColumns>
  using Grid =
      cute::conditional_t<kConsumerGroups == 1, WarpGrid<kTileQuery, kColumns, kConsumerWarps, 16>,
                          WarpgroupGrid<kTileQuery, kColumns>>;
  using ScoreGrid = Grid<kTileKey>;
  using OutGrid = Grid<Config::kValueDim>;
  static constexpr bool kCapped =
      Config::kSoftCap && !Config::kBias && cute::is_same_v<Element, cutlass::bfloat16_t>;
  // Rows with a bias may be negative for ever, which integers do not order; above 128 columns there
  // are too few scores a visit for the branch.
  using Softmax = OnlineSoftmax<1, !Config::kBias && Config::kValueDim <= 128,
                                has_bias_tile<Config>(), kCapped>;
  using Schedule = PersistentSchedule<Config::kMask, kTileQuery, sizeof(Element)>;
  using Queue = TileScheduler<Schedule>;

  using Operands = cute::conditional_t<cute::is_same_v<Element, F16x3>,
                                       F16x3Operands<Config, ScoreGrid, OutGrid>,
                                       MappedOperands<Config, kThreads>>;
  static constexpr int kProducerRegisters = Operands::kProducerRegisters;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr bool kDropsEarly = Config::kDropout && Operands::kDropsEarly;
  using Dropped = ProbabilityDropout<Config, ScoreGrid, kDropsEarly>;
  using KeptBlocks = typename Dropped::Bits;
  using Keys = typename Operands::Keys;
  using Values = typename Operands::Values;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;
  static_assert(kStages % kConsumerGroups == 0);  // each team has buffers of its own

  static constexpr bool kBiasTile = has_bias_tile<Config>();
  // Each warp copies the bias of its own rows, for itself.
  using BiasRows = BiasTile<Config, 16, kTileKey, kWarpSize>;
  static constexpr int kBiasBytes = bias_tile_bytes<Config, BiasRows>();

  using ConsumerGroup = WarpConsumerGroups<kConsumerWarps, kConsumerGroups, 1 + kWarpgroups>;
  using Merge = ConsumerGroupMerge<ConsumerGroup, Softmax, kTileQuery * Config::kValueDim>;
  using OutputWriter = ForwardOutputSm90<Config, OutGrid, Softmax>;

  static constexpr int kWorkTileStages = 4;
  struct Piece {
    WorkItem item;  // batch is -1 behind the last
    int query_length;
  };
  struct Control {
    Pipeline<kQueryStages> query[kRowWarpgroups];  // each consumer's own rows
    Pipeline<kStages> key;
    Pipeline<kStages> value;
    Pipeline<kWorkTileStages> piece;
    Piece pieces[kWorkTileStages];
  };
  static constexpr int kKeyOffset = kQueryStages * Operands::kQueryBufferBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * Keys::kBufferBytes;
  static constexpr int kBiasOffset = kValueOffset + kStages * Values::kBufferBytes;
  static constexpr int kMergeOffset = kBiasOffset + kConsumerWarps * kBiasBytes;
  static constexpr int kControlOffset = kMergeOffset + Merge::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, and one for teams.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // The operands of a kernel that the copy engine needs no maps for come without them.
  template <class... Maps>
  CUTE_DEVICE static void run(ForwardParams const& params, Maps const&... maps) {
    Operands const operands{params, maps...};
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      operands.prefetch();
      CUTE_UNROLL
      for (auto& query : control.query) query.init(kConsumerWarps / kRowWarpgroups);
      control.key.init(kConsumerWarps / kConsumerGroups);
      control.value.init(kConsumerWarps / kConsumerGroups);
      control.piece.init(kConsumerWarps + 2);
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      switch (threadIdx.x - kConsumers) {
        case 0:
          produce_queries(params, operands, control, tiles);
          break;
        case kWarpSize:
          produce_tiles(params, control, control.key, tiles + kKeyOffset,
                        [&](auto... piece) { return operands.keys(piece...); });
          break;
        case 2 * kWarpSize:
          produce_tiles(params, control, control.value, tiles + kValueOffset,
                        [&](auto... piece) { return operands.values(piece...); });
          break;
      }
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, control, tiles);
    }
  }

  // The next piece of work. It stays in its slot until the reader, a warp, releases that.
  CUTE_DEVICE static Piece take_work_tile(Control& control,
                                          PipelineStage<kWorkTileStages> const& slot) {
    control.piece.wait(slot);
    return control.pieces[slot.index];
  }

  // The thread that hands out pieces, and copies their queries.
  CUTE_DEVICE static void produce_queries(ForwardParams const& params, Operands const& operands,
                                          Control& control, uint32_t tiles) {
    PipelineStage<kQueryStages> query;
    PipelineStage<kWorkTileStages> slot;
    Queue::begin(params);
    int number = int(blockIdx.x);
    while (true) {
      Piece piece = numbered_work_tile(params, number);
      while (is_idle(params, piece)) {
        number = Queue::next(params);
        piece = numbered_work_tile(params, number);
      }
      WorkItem const& item = piece.item;
      control.piece.acquire(slot);
      control.pieces[slot.index] = piece;
      control.piece.commit(slot);
      slot.advance();
      if (item.batch < 0) break;
      CUTE_UNROLL
      for (int warpgroup = 0; warpgroup < kRowWarpgroups; ++warpgroup) {
        operands.load_queries(item, piece.query_length, warpgroup,
                              control.query[warpgroup].acquire(query, Operands::kQueryBytes),
                              tiles + query.index * Operands::kQueryBufferBytes);
      }
      query.advance();
      number = Queue::next(params);
    }
    Queue::finish(params);
  }

  CUTE_DEVICE static bool shares_bias(ForwardParams const& params) {
    return kBiasTile && params.bias.batch_stride == 0;
  }

  CUTE_DEVICE static Piece numbered_work_tile(ForwardParams const& params, int number) {
    WorkItem const item = Schedule::item(params.shape, number, shares_bias(params));
    bool const exists = item.batch >= 0;
    return {item, exists ? Mask(params.mask, params.shape, item.batch).query_length : 0};
  }

  // Is the tile beyond the end of a packed sequence, with no gap behind it to be cleared?
  CUTE_DEVICE static bool is_idle(ForwardParams const& params, Piece const& piece) {
    if constexpr (!Config::kVarlen) return false;
    if (piece.item.batch < 0) return false;
    Gap const gap = Gap::of_queries(params.shape, piece.item.batch, piece.query_length);
    return piece.item.tile * kTileQuery >= piece.query_length && gap.begin >= gap.end;
  }

  // The thread that copies keys, and the one that copies values; `rows_of` says which a piece has.
  template <class RowsOf>
  CUTE_DEVICE static void produce_tiles(ForwardParams const& params, Control& control,
                                        Pipeline<kStages>& ring, uint32_t buffers, RowsOf rows_of) {
    PipelineStage<kStages> stage;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkItem const item = take_work_tile(control, slot).item;
      control.piece.release(slot);
      slot.advance();
      if (item.batch < 0) break;
      Mask const mask(params.mask, params.shape, item.batch);
      Visits const range(params, mask, item);
      auto const rows = rows_of(item, mask.key_length);
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
        rows.load(tile, ring.acquire(stage, rows.kBytes),
                  buffers + stage.index * rows.kBufferBytes);
        stage.advance();
      }
    }
  }

  using Mask = ScoreMask<Config, ScoreGrid>;
  using Visits = KvBlocks<Config, Mask>;

  // To the buffer of the next visit of a consumer.
  CUTE_DEVICE static void advance(PipelineStage<kStages>& stage) {
    CUTE_UNROLL
    for (int team = 0; team < kConsumerGroups; ++team) stage.advance();
  }

  // Gives the buffers of `count` tiles back unread.
  template <int kBuffers>
  CUTE_DEVICE static void skip(Pipeline<kBuffers>& ring, PipelineStage<kBuffers>& stage, int count,
                               bool leader) {
    CUTE_NO_UNROLL
    for (; count > 0; --count) {
      ring.wait(stage);  // or the arrival would count for the tile before
      __syncwarp();      // or a lane might miss the phase that it waits for
      if (leader) ring.release(stage);
      stage.advance();
    }
  }

  // Where a consumer stands in each ring.
  struct Position {
    int warpgroup;
    int team;
    int row_warpgroup;
    bool leader;  // of its warp
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key;
    PipelineStage<kStages> value;
    PipelineStage<kWorkTileStages> slot;
  };

  CUTE_DEVICE static void consume(ForwardParams const& params, Control& control, uint32_t tiles) {
    Position at;
    // Uniform over the warpgroup, and known to be.
    at.warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    at.team = kConsumerGroups > 1 ? at.warpgroup : 0;
    at.row_warpgroup = at.warpgroup - at.team;
    at.leader = threadIdx.x % kWarpSize == 0;
    at.key.index = at.value.index = at.team;
    while (true) {
      Piece const piece = take_work_tile(control, at.slot);
      if (piece.item.batch < 0) break;
      if (has_rows(piece, at.row_warpgroup)) {
        compute_work_tiles(params, control, tiles, piece.item, at);
      } else {
        skip_work_tile(params, control, piece.item, at);
      }
      at.query.advance();
    }
  }

  CUTE_DEVICE static void release_work_tile(Control& control, Position& at) {
    __syncwarp();
    if (at.leader) control.piece.release(at.slot);
    at.slot.advance();
  }

  // Does a consumer own rows of the piece that the query length does not cut off?
  CUTE_DEVICE static bool has_rows(Piece const& piece, int warpgroup) {
    if constexpr (kConsumerGroups > 1) return true;
    return piece.item.tile * kTileQuery + warpgroup * kWarpgroupRows < piece.query_length;
  }

  // The piece behind the one at hand, with a batch of -1 if this consumer has no rows of it.
  CUTE_DEVICE static WorkItem next_work_tile(Control& control, Position const& at) {
    PipelineStage<kWorkTileStages> next = at.slot;
    next.advance();
    Piece const piece = take_work_tile(control, next);
    bool const has = piece.item.batch >= 0 && has_rows(piece, at.row_warpgroup);
    return {piece.item.tile, piece.item.head, has ? piece.item.batch : -1};
  }

  // A piece of which only others own rows. Keys and values in turn: those who need both would wait
  // for the one behind.
  CUTE_DEVICE static void skip_work_tile(ForwardParams const& params, Control& control,
                                         WorkItem const& item, Position& at) {
    Mask const mask(params.mask, params.shape, item.batch);
    Visits const range(params, mask, item);
    PipelineStage<kQueryStages> query = at.query;
    skip(control.query[at.row_warpgroup], query, 1, at.leader);
    CUTE_NO_UNROLL
    for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile)) {
      skip(control.key, at.key, 1, at.leader);
      skip(control.value, at.value, 1, at.leader);
    }
    int const row = item.tile * kTileQuery + at.row_warpgroup * kWarpgroupRows;
    OutputWriter::write_empty(params, item, mask.query_length, row, row + kWarpgroupRows);
    clear_gap(params, item, mask.query_length);
    release_work_tile(control, at);
  }

  // Computes a piece, and those behind it up to one without rows of this consumer.
  CUTE_DEVICE static void compute_work_tiles(ForwardParams const& params, Control& control,
                                             uint32_t tiles, WorkItem item, Position& at) {
    ProblemShape const& shape = params.shape;
    int const warpgroup = at.row_warpgroup;
    bool const leader = at.leader;
    Mask mask(params.mask, shape, item.batch);
    Visits range(params, mask, item, at.team);
    int tile = range.first(mask, item, warpgroup);
    Softmax softmax;
    auto output = OutGrid::make_accumulators();    // (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    typename Operands::Part part;
    auto& sums = Operands::sums(output, part);
    bool begins = true;  // nothing has been added to the output

    typename Operands::Queries query_operand;
    auto take_queries = [&] {
      control.query[warpgroup].wait(at.query);
      query_operand.take(queries(tiles, at.query), warpgroup);
    };
    auto begin_scores = [&] {
      fence_accumulators(scores);
      begin_products();
      Operands::multiply_keys(scores, query_operand.operand(queries(tiles, at.query), warpgroup),
                              keys(tiles, at.key));
      commit_products();
    };
    // Under the products that have begun.
    auto kept_blocks = [&](int of_tile) {
      if constexpr (kDropsEarly) control.key.wait_again(at.key);
      KeptBlocks const kept(params.dropout, params.mask, item.batch, item.head,
                            item.tile * kTileQuery, of_tile * kTileKey);
      if constexpr (kDropsEarly) control.key.wait_again(at.key);
      return kept;
    };
    auto release_operands = [&](bool ends_work_tile) {
      if (!leader) return;
      control.key.release(at.key);
      if (ends_work_tile) control.query[warpgroup].release(at.query);
    };

    take_queries();
    load_bias(params, mask, item, tile, tiles);
    skip(control.key, at.key, range.passed(tile + 1), leader);
    skip(control.value, at.value, range.passed(tile + 1), leader);
    control.key.wait(at.key);
    begin_scores();
    auto const first_kept = kept_blocks(tile);
    wait_products<0>();
    fence_accumulators(scores);
    Operands::unscale(scores, queries(tiles, at.query), keys(tiles, at.key), warpgroup);
    release_operands(tile == range.begin);
    advance(at.key);
    modify(params, mask, item, tile, range, tiles, warpgroup, scores);
    softmax.exponentiate(scores, params.scale.softmax_scale);
    if (tile > range.begin) control.key.wait(at.key);
    auto probabilities =
        probabilities_of(params, control, tiles, item, tile, at.value, first_kept, scores);
    clear_values(control, mask, shape, tile, at.value, tiles, at.warpgroup);

    auto begin_output = [&] {
      control.value.wait(at.value);
      begin_products();
      Operands::multiply_values(sums, probabilities, values(tiles, at.value), begins);
      commit_products();
    };
    auto end_output = [&] {
      wait_products<0>();
      fence_accumulators(sums);
      if (leader) control.value.release(at.value);
      advance(at.value);
      Operands::add(output, part, probabilities, begins);
    };
    CUTE_NO_UNROLL
    while (true) {
      bool const last = tile == range.begin;  // of the piece, is the visit whose P is ready
      Softmax const done = softmax;
      if (last) {
        WorkItem const following = next_work_tile(control, at);
        if (following.batch < 0) break;
        item = following;
        if (!Mask::is_shared(params.mask)) mask = Mask(params.mask, shape, item.batch);
        range = Visits(params, mask, item, at.team);
        tile = range.first(mask, item, warpgroup) + kConsumerGroups;
        softmax = Softmax();
        at.query.advance();
        take_queries();
        load_bias(params, mask, item, range.next(tile), tiles);
        skip(control.key, at.key, range.passed(tile), leader);
        control.key.wait(at.key);
      }
      tile = range.next(tile);
      fence_accumulators(sums);
      if constexpr (Operands::kSequential) {
        begin_output();
        end_output();
      }
      begin_scores();
      if constexpr (!Operands::kSequential) begin_output();
      auto const kept = kept_blocks(tile);
      wait_products<Operands::kSequential ? 0 : 1>();
      fence_accumulators(scores);
      Operands::unscale(scores, queries(tiles, at.query), keys(tiles, at.key), warpgroup);
      release_operands(tile == range.begin);
      advance(at.key);
      modify(params, mask, item, tile, range, tiles, warpgroup, scores);
      auto const correction = softmax.exponentiate(scores, params.scale.softmax_scale);
      fence_accumulators(scores);
      // The wait for the next keys stands here because the assembler, left with one basic
      // block, puts the exponentials behind the wait for the product that they should run
      // under.
      if (tile > range.begin) control.key.wait(at.key);
      if constexpr (!Operands::kSequential) end_output();
      if constexpr (!Operands::kScalesRows) {
        probabilities =
            probabilities_of(params, control, tiles, item, tile, at.value, kept, scores);
      }
      if (last) {
        finish_work_tile(params, control, tiles, at, done, output);
        skip(control.value, at.value, range.passed(tile + 1), leader);
        clear_values(control, mask, shape, tile, at.value, tiles, at.warpgroup);
      } else {
        Softmax::rescale(output, correction);
      }
      if constexpr (Operands::kScalesRows) {
        // Not before: the values of this visit come behind those that are passed over.
        probabilities =
            probabilities_of(params, control, tiles, item, tile, at.value, kept, scores);
      }
      begins = last;
    }
    fence_accumulators(sums);
    begin_output();
    end_output();
    finish_work_tile(params, control, tiles, at, softmax, output);
  }

  // Zeros the values of the first visit of a piece that lie beyond the key length. Each consumer
  // does it for itself: they write the same zeros.
  CUTE_DEVICE static void clear_values(Control& control, Mask const& mask,
                                       ProblemShape const& shape, int tile,
                                       PipelineStage<kStages> const& stage, uint32_t tiles,
                                       int warpgroup) {
    if constexpr (!Operands::kClearsValues) return;
    int const column = tile * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) return;
    control.value.wait(stage);
    clear_rows<SharedTile<kTileKey, Config::kValueDim>, kWarpgroupSize>(
        values(tiles, stage), max(mask.key_length - column, 0));
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  CUTE_DEVICE static uint32_t queries(uint32_t tiles, PipelineStage<kQueryStages> const& stage) {
    return tiles + stage.index * Operands::kQueryBufferBytes;
  }
  CUTE_DEVICE static uint32_t keys(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kKeyOffset + stage.index * Keys::kBufferBytes;
  }
  CUTE_DEVICE static uint32_t values(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kValueOffset + stage.index * Values::kBufferBytes;
  }

  // Soft cap, bias and masks: scores that are ready for the softmax.
  template <class Mask, class Scores>
  CUTE_DEVICE static void modify(ForwardParams const& params, Mask const& mask,
                                 WorkItem const& item, int tile, Visits const& range,
                                 uint32_t tiles, int warpgroup, Scores& scores) {
    int const row = item.tile * kTileQuery;
    int const column = tile * kTileKey;
    if constexpr (Config::kSoftCap && !kIs32Bit<Element>) {
      cap_scores(scores, params.scale.prescale, Softmax::applied(params.scale.softmax_scale));
    } else {
      prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
    }
    if constexpr (kBiasTile) {
      wait_copies<0>();
      __syncwarp();  // the bias of all lanes is here
      add_bias(scores,
               BiasReader<BiasRows>(bias_tile(tiles), 0, 0, bias_source(params, item, row, column),
                                    bias_row_bytes(params)),
               params.scale.bias_scale);
      __syncwarp();  // nobody reads it any more
      if (tile > range.begin) load_bias(params, mask, item, range.next(tile), tiles);
    }
    mask.template apply<kWarpgroupRows, kTileKey>(scores, params.mask, params.shape, item.batch,
                                                  item.head, row, column, range.is_partial(tile),
                                                  warpgroup * kWarpgroupRows);
  }

  // The probabilities of a visit as an operand, without those that dropout drops; `stage` is where
  // their values come to. Scaled rows need the factors of these values.
  template <class Scores>
  CUTE_DEVICE static auto probabilities_of(ForwardParams const& params, Control& control,
                                           uint32_t tiles, WorkItem const& item, int tile,
                                           PipelineStage<kStages> const& stage,
                                           KeptBlocks const& kept, Scores& scores) {
    if constexpr (Operands::kScalesRows) control.value.wait(stage);
    auto probabilities = Operands::probabilities(scores, values(tiles, stage));
    Dropped::apply(params, kept, item.batch, item.head, item.tile * kTileQuery, tile * kTileKey,
                   probabilities);
    return probabilities;
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

  // Output and logsumexp of this warpgroup's rows of the piece in its slot, or of what all teams
  // found for them.
  template <class Output>
  CUTE_DEVICE static void finish_work_tile(ForwardParams const& params, Control& control,
                                           uint32_t tiles, Position& at, Softmax softmax,
                                           Output& output) {
    auto const [item, query_length] = control.pieces[at.slot.index];
    Merge::run(tiles + kMergeOffset, softmax, output, params.scale.softmax_scale);
    if constexpr (kConsumerGroups > 1)
      ConsumerGroup::meet();  // nobody reads what was added up any more
    if (kConsumerGroups == 1 || ConsumerGroup::index() == 0) {
      int const row = item.tile * kTileQuery + at.row_warpgroup * kWarpgroupRows;
      OutputWriter::write(params, item, query_length, softmax, output);
      OutputWriter::write_empty(params, item, query_length, max(row, query_length),
                                row + kWarpgroupRows);
    }
    clear_gap(params, item, query_length);
    release_work_tile(control, at);
  }

  CUTE_DEVICE static void clear_gap(ForwardParams const& params, WorkItem const& item, int length) {
    if constexpr (Config::kVarlen) {
      clear_query_gap<Config, kConsumers>(params, item, length,
                                          Schedule::query_tiles(params.shape));
    }
  }
};

}  // namespace memeff
