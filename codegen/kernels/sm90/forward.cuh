// Attention forward for Hopper: TMA, wgmma and warp specialization, with one persistent CTA per SM.
//
// The last warpgroup is the producer: one thread hands out work tiles, and three others copy
// queries, keys and values into rings of buffers. Every other warpgroup is a consumer. It owns 64
// query rows of a work tile and iterates over its KV blocks from right to left. Within a consumer
// the scores of the next KV block overlap the product of this block's probabilities with values,
// and the softmax overlaps that product:
//
//   issue S(j+1) = Q K(j+1)^T | issue O += P(j) V(j) | wait S(j+1) | softmax | wait O | P(j+1)
//
// With Config::kOutputFirst the wait for O comes between the maxima and the exponentials. The
// exponentials then overlap only the products of other consumers, which keep the tensor cores busy.
//
// The pipeline does not drain between work tiles. The first scores of a work tile overlap the last
// product of the previous one, whose output is stored from registers while the products of other
// consumers run. The softmax of one consumer overlaps the products of another. Two consumers settle
// into this order by themselves; three play ping-pong (schedule/ping_pong.cuh). With a mask each
// consumer skips the KV blocks at the end that only rows of other consumers attend to.
//
// An Operands object loads and multiplies the operands of each element type. 3xFP16 products with
// values have accumulators of their own. If these leave too few registers, S(j+1) is issued after
// O, and the products of one consumer overlap only the softmax of the other.
//
// If a score function reads along diagonals, the warp that copies queries also reads the diagonals
// of each KV block (score/shared_diagonals.cuh).
//
// If there are few work tiles, the consumers form groups that share 64 rows (intra-CTA split-KV).
// They take the KV blocks in turn, each with a softmax and an output of its own, and merge these at
// the end of a work tile.
#pragma once

#include <kernels/sm90/f16x3_forward.cuh>
#include <kernels/sm90/forward_parts.cuh>
#include <memeff/collective/consumer_groups.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/function_range.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/kv_blocks.cuh>
#include <memeff/schedule/persistent.cuh>
#include <memeff/schedule/ping_pong.cuh>
#include <memeff/score/bias/warp_rows.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/shared_diagonals.cuh>

namespace memeff {

// Main loop of a consumer, for the work tiles in which it owns rows.
//
// Hazard: keep the state in local variables, and begin_output and end_output as lambdas. As members
// of an object, or as functions, they change how ptxas assigns registers; so does a single function
// for everything that changes with the work tile. A lambda that captures an object with all of the
// state even hides from ptxas that work tile and mask are uniform.

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct ForwardMainLoopSm90 {
  using Blocks = typename Kernel::Blocks;
  using Consumer = ForwardConsumerSm90<Config, Kernel>;
  using Control = typename Kernel::Control;
  using Diagonals = typename Kernel::Diagonals;
  using FunctionReads = typename Kernel::FunctionReads;
  using KeptBlocks = typename Kernel::KeptBlocks;
  using Linear = typename Kernel::Linear;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using Operands = typename Kernel::Operands;
  using OutGrid = typename Kernel::OutGrid;
  using ConsumerState = typename Consumer::ConsumerState;
  using Probabilities = typename Kernel::Probabilities;
  using Queries = typename Operands::Queries;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using Softmax = typename Kernel::Softmax;
  using PingPong = typename Kernel::PingPong;
  using WorkTile = typename Kernel::WorkTile;
  static constexpr int kConsumerGroups = Kernel::kConsumerGroups;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr bool kOutputFirst = Config::kOutputFirst;
  static_assert(!kOutputFirst || !Operands::kSequential);
  // Lanes release buffers under a predicate, not after a branch. The branch ends a basic
  // block, which costs 3 % at head dim 128 with kOutputFirst. But without kOutputFirst, kernels
  // without the branch are 25 % slower.
  static constexpr bool kReleasesByPredicate = kOutputFirst;

  // The results of compute_ahead() for a KV block.
  struct Ahead {
    KeptBlocks kept;
    FunctionReads reads;
    typename Mask::Reads mask;
  };

  // Computes all work tiles of one consumer.
  CUTE_DEVICE static void run(ForwardParams const& params, Control& control, uint32_t tiles) {
    ConsumerState at;
    at.warpgroup = warpgroup_index();
    at.group = kConsumerGroups > 1 ? at.warpgroup : 0;
    at.row_warpgroup = at.warpgroup - at.group;
    at.leader = threadIdx.x % kWarpSize == 0;
    at.key.index = at.value.index = at.group;
    PingPong::begin(at.warpgroup);
    while (true) {
      WorkTile const work_tile = control.take_work_tile(at.slot);
      if (work_tile.item.batch < 0) break;
      if (Consumer::has_rows(work_tile, at.row_warpgroup)) {
        compute_work_tiles(params, control, tiles, work_tile.item, at);
      } else {
        Consumer::skip_work_tile(params, control, work_tile.item, at);
      }
      at.query.advance();
    }
  }

 private:
  // Computes a work tile and the following ones, up to one without rows of this consumer. Each
  // iteration computes P of a KV block while O += P V runs for the block before it, which may be
  // the last one of the previous work tile.
  CUTE_DEVICE static void compute_work_tiles(ForwardParams const& params, Control& control,
                                             uint32_t tiles, WorkItem item, ConsumerState& at) {
    Mask mask(params.mask, params.shape, item.batch);
    Blocks range(params, mask, item, at.group);
    int tile = range.first(mask, item, at.row_warpgroup);
    Linear linear(params, item);
    Softmax softmax;
    auto output = OutGrid::make_accumulators();    // (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    typename Operands::Part part;
    auto& sums = Operands::sums(output, part);  // accumulators of P V: the output, or its last part
    bool begins = true;                         // nothing has been added to the output
    Queries queries;
    auto probabilities = first_probabilities(params, control, tiles, at, mask, item, range, tile,
                                             queries, scores, linear, softmax);
    auto begin_output = [&] {
      control.value.wait(at.value);
      begin_products();
      Operands::multiply_values(sums, probabilities, Kernel::values(tiles, at.value), begins);
      commit_products();
    };
    auto end_output = [&] {
      wait_products<0>();
      fence_accumulators(sums);
      if (at.leader) control.value.release(at.value);
      Consumer::advance(at.value);
      Operands::add(output, part, probabilities, begins);
    };
    // Hazard: keep the wait for the next keys here, because it ends the basic block. Without it
    // ptxas sinks exponentials below the wait for a product that they should overlap.
    auto wait_products_before = [&](bool has_next) {
      if (has_next) control.key.wait(at.key);
      if constexpr (!Operands::kSequential) end_output();
    };
    CUTE_NO_UNROLL
    while (true) {
      bool const last = tile == range.begin;  // P is that of the work tile's last KV block
      Softmax const done = softmax;
      Linear const done_linear = linear;
      if (last) {
        item = Consumer::next_work_tile(control, at);
        if (item.batch < 0) break;
        change_work_tile(params, at, item, mask, range, tile, linear, softmax);
        begin_tile(params, control, tiles, at, mask, item, range, range.next(tile), tile, queries);
        control.key.wait(at.key);
      }
      tile = range.next(tile);
      fence_accumulators(sums);
      if constexpr (Operands::kSequential) begin_output(), end_output();
      auto const [kept, reads, bits] = multiply_keys<Operands::kSequential ? 0 : 1>(
          params, control, tiles, at, mask, item, tile, queries, linear, scores, begin_output);
      release_operands(control, at, tile == range.begin);
      modify(params, control, mask, item, tile, range, tiles, at, linear, reads, bits, scores);
      auto const correction = softmax.exponentiate(
          scores, linear.softmax_scale(params.scale),
          [&] {
            if constexpr (kOutputFirst) wait_products_before(tile > range.begin);
          },
          linear.shift(item.tile * kTileQuery, tile * kTileKey));
      fence_accumulators(scores);
      if constexpr (!kOutputFirst) wait_products_before(tile > range.begin);
      if constexpr (!Operands::kScalesRows)
        probabilities = probabilities_of(params, control, tiles, at, item, tile, kept, scores);
      if (last) {
        Consumer::finish_work_tile(params, control, tiles, at, done_linear, done, output);
        begin_values(params, control, tiles, at, mask, range, tile);
      } else {
        Softmax::rescale(output, correction);
      }
      // Not earlier: in the ring the skipped values come before those of this KV block.
      if constexpr (Operands::kScalesRows)
        probabilities = probabilities_of(params, control, tiles, at, item, tile, kept, scores);
      Consumer::clear_unneeded_values(control, mask, item, tile, at.value, tiles, at.warpgroup);
      begins = last;
    }
    fence_accumulators(sums);
    begin_output();
    end_output();
    Consumer::finish_work_tile(params, control, tiles, at, linear, softmax, output);
  }

  // Takes the queries of a work tile, starts the copy of the bias of KV block `first`, and skips
  // the keys of the blocks from `end` on.
  CUTE_DEVICE static void begin_tile(ForwardParams const& params, Control& control, uint32_t tiles,
                                     ConsumerState& at, Mask const& mask, WorkItem const& item,
                                     Blocks const& range, int first, int end, Queries& queries) {
    take_queries(control, tiles, at, queries);
    modifiers_of(params, mask, item, tiles).load(first * kTileKey);
    Consumer::skip_keys(control, at, range.passed(end));
  }

  // Switches mask, range, tile, linear and softmax to the work tile `item`; `tile` is then one
  // above its first KV block.
  CUTE_DEVICE static void change_work_tile(ForwardParams const& params, ConsumerState& at,
                                           WorkItem const& item, Mask& mask, Blocks& range,
                                           int& tile, Linear& linear, Softmax& softmax) {
    if (!Mask::is_common(params.mask)) mask = Mask(params.mask, params.shape, item.batch);
    range = Blocks(params, mask, item, at.group);
    tile = range.first(mask, item, at.row_warpgroup) + kConsumerGroups;
    at.query.advance();
    linear = Linear(params, item);
    softmax = Softmax();
  }

  // The probabilities of the first KV block of the first work tile.
  template <class Scores>
  CUTE_DEVICE static auto first_probabilities(ForwardParams const& params, Control& control,
                                              uint32_t tiles, ConsumerState& at, Mask const& mask,
                                              WorkItem const& item, Blocks const& range, int tile,
                                              Queries& queries, Scores& scores,
                                              Linear const& linear, Softmax& softmax) {
    begin_tile(params, control, tiles, at, mask, item, range, tile, tile + 1, queries);
    Consumer::skip(control.value, at.value, range.passed(tile + 1), at.leader);
    control.key.wait(at.key);
    auto const [kept, reads, bits] = multiply_keys<0>(params, control, tiles, at, mask, item, tile,
                                                      queries, linear, scores, [] {});
    release_operands(control, at, tile == range.begin);
    modify(params, control, mask, item, tile, range, tiles, at, linear, reads, bits, scores);
    softmax.exponentiate(scores, linear.softmax_scale(params.scale), typename Softmax::Nothing{},
                         linear.shift(item.tile * kTileQuery, tile * kTileKey));
    if (tile > range.begin) control.key.wait(at.key);
    auto probabilities = probabilities_of(params, control, tiles, at, item, tile, kept, scores);
    Consumer::clear_values(control, mask, params.shape, tile, at.value, tiles, at.warpgroup);
    Consumer::clear_unneeded_values(control, mask, item, tile, at.value, tiles, at.warpgroup);
    return probabilities;
  }

  // Skips the values of the blocks above `tile`, the first KV block of a work tile, and zeros its
  // values beyond the key length.
  CUTE_DEVICE static void begin_values(ForwardParams const& params, Control& control,
                                       uint32_t tiles, ConsumerState& at, Mask const& mask,
                                       Blocks const& range, int tile) {
    Consumer::skip(control.value, at.value, range.passed(tile + 1), at.leader);
    Consumer::clear_values(control, mask, params.shape, tile, at.value, tiles, at.warpgroup);
  }

  CUTE_DEVICE static void take_queries(Control& control, uint32_t tiles, ConsumerState const& at,
                                       Queries& queries) {
    control.query[at.row_warpgroup].wait(at.query);
    queries.take(Kernel::queries(tiles, at.query), at.row_warpgroup);
  }

  // S = Q K^T of a KV block. Unless products are sequential, begin_output() begins another one
  // behind it, and kRunning products may still run afterwards.
  template <int kRunning, class Scores, class BeginOutput>
  CUTE_DEVICE static Ahead multiply_keys(ForwardParams const& params, Control& control,
                                         uint32_t tiles, ConsumerState const& at, Mask const& mask,
                                         WorkItem const& item, int tile, Queries const& queries,
                                         Linear const& linear, Scores& scores,
                                         BeginOutput const& begin_output) {
    PingPong::wait(at.warpgroup);
    begin_scores(tiles, at, queries, linear, scores);
    if constexpr (!Operands::kSequential) begin_output();
    PingPong::pass(at.warpgroup);
    Ahead const ahead = compute_ahead(params, control, tiles, at, mask, item, tile);
    wait_products<kRunning>();
    unscale(tiles, at, scores);
    return ahead;
  }

  // Releases the keys of a KV block and, after the last block of a work tile, its queries. With
  // shared diagonals modify() releases the keys.
  CUTE_DEVICE static void release_operands(Control& control, ConsumerState const& at,
                                           bool ends_work_tile) {
    if constexpr (kReleasesByPredicate) {
      if (!Diagonals::kIsOn && at.leader) control.key.release(at.key);
      if (at.leader && ends_work_tile) control.query[at.row_warpgroup].release(at.query);
    } else {
      if (!at.leader) return;
      if constexpr (!Diagonals::kIsOn) control.key.release(at.key);
      if (ends_work_tile) control.query[at.row_warpgroup].release(at.query);
    }
  }

  template <class Scores>
  CUTE_DEVICE static void begin_scores(uint32_t tiles, ConsumerState const& at,
                                       Queries const& queries, Linear const& linear,
                                       Scores& scores) {
    fence_accumulators(scores);
    begin_products();
    Operands::multiply_keys(scores,
                            queries.operand(Kernel::queries(tiles, at.query), at.row_warpgroup),
                            Kernel::keys(tiles, at.key));
    Kernel::Columns::add(scores, linear, tiles + Kernel::kColumnsOffset);
    commit_products();
  }

  // Computes the modifiers of probabilities and the reads of a score function while products run.
  // The redundant waits keep ptxas from mixing them with the wgmmas before or the code after.
  CUTE_DEVICE static Ahead compute_ahead(ForwardParams const& params, Control& control,
                                         uint32_t tiles, ConsumerState const& at, Mask const& mask,
                                         WorkItem const& item, int tile) {
    if constexpr (Probabilities::kIsEarly || FunctionReads::kAny || Config::kBoolean) {
      control.key.wait_again(at.key);
    }
    int const row = item.tile * kTileQuery;
    int const column = tile * kTileKey;
    Ahead const ahead = {{params, item.batch, item.head, row, column},
                         function_reads(params, tiles, at, {item.batch, item.head, row, column}),
                         mask.read(params, {item.batch, item.head, row, column})};
    if constexpr (Probabilities::kIsEarly) control.key.wait_again(at.key);
    return ahead;
  }

  CUTE_DEVICE static FunctionReads function_reads(ForwardParams const& params, uint32_t tiles,
                                                  ConsumerState const& consumer,
                                                  ScoreTilePosition const& at) {
    if constexpr (Diagonals::kIsOn) {
      return {Kernel::diagonals(tiles, consumer.key)};
    } else {
      return {params, at};
    }
  }

  template <class Scores>
  CUTE_DEVICE static void unscale(uint32_t tiles, ConsumerState const& at, Scores& scores) {
    fence_accumulators(scores);
    Operands::unscale(scores, Kernel::queries(tiles, at.query), Kernel::keys(tiles, at.key),
                      at.row_warpgroup);
  }

  // Applies soft cap, function, bias and masks: afterwards the scores are ready for the softmax,
  // and their operands are released.
  template <class Scores>
  CUTE_DEVICE static void modify(ForwardParams const& params, Control& control, Mask const& mask,
                                 WorkItem const& item, int tile, Blocks const& range,
                                 uint32_t tiles, ConsumerState& consumer, Linear const& linear,
                                 FunctionReads const& reads, typename Mask::Reads const& bits,
                                 Scores& scores) {
    if constexpr (!Diagonals::kIsOn) Consumer::advance(consumer.key);
    int const row = item.tile * kTileQuery;
    int const column = tile * kTileKey;
    Modifiers const modifiers = modifiers_of(params, mask, item, tiles, &reads);
    ScoreTilePosition const at = {item.batch, item.head, row, column};
    linear.modify([&] { modifiers.forward(scores, at, column); });
    if constexpr (Diagonals::kIsOn) {
      __syncwarp();  // all lanes have used the diagonals
      if (consumer.leader) control.key.release(consumer.key);
      Consumer::advance(consumer.key);
    }
    modifiers.load_next(tile > range.begin, [&] { return range.next(tile) * kTileKey; });
    int const warpgroup = consumer.row_warpgroup;
    bool const partial = range.is_partial(tile, warpgroup) &&
                         may_be_masked(params, mask, at, warpgroup * kWarpgroupRows);
    mask.template apply<kWarpgroupRows, kTileKey>(
        scores, params, at, partial, warpgroup * kWarpgroupRows, control.may_miss(), &bits);
    if (range.is_empty(tile, warpgroup)) {
      cute::fill(scores, -infinity());
      fence_accumulators(scores);  // keeps the branch; otherwise each block selects every score
    }
  }

  // False if the mask function is true for all of a KV block and a consumer's rows from `own_row`
  // on. Always true if block masks decide instead.
  CUTE_DEVICE static bool may_be_masked(ForwardParams const& params, Mask const& mask,
                                        ScoreTilePosition at, int own_row) {
    if constexpr (decides_tiles<Config>()) {
      at.row += own_row;
      int const row_end = min(at.row + kWarpgroupRows, mask.query_length);
      int const column_end = min(at.column + kTileKey, mask.key_length);
      MaskFunctionRange<Config, false> const rows(params, at, max(row_end, at.row + 1));
      return !rows.of_columns(at.column, max(column_end, at.column + 1)).low;
    }
    return true;
  }

  // The modified probabilities of a KV block as an operand. With kScalesRows they are multiplied by
  // factors of the values, so the values must have arrived.
  template <class Scores>
  CUTE_DEVICE static auto probabilities_of(ForwardParams const& params, Control& control,
                                           uint32_t tiles, ConsumerState const& at,
                                           WorkItem const& item, int tile, KeptBlocks const& kept,
                                           Scores& scores) {
    if constexpr (Operands::kScalesRows) control.value.wait(at.value);
    auto probabilities = Operands::probabilities(scores, Kernel::values(tiles, at.value));
    Probabilities::forward(params, kept, item.batch, item.head, item.tile * kTileQuery,
                           tile * kTileKey, probabilities);
    return probabilities;
  }

  // The modifiers of a work tile. They are constructed at each use, so that they occupy no
  // registers between two KV blocks.
  CUTE_DEVICE static Modifiers modifiers_of(ForwardParams const& params, Mask const& mask,
                                            WorkItem const& item, uint32_t tiles,
                                            FunctionReads const* reads = nullptr) {
    return {{params.scale},
            {params, reads},
            {params.bias,
             {params.bias, item},
             mask,
             item.tile * kTileQuery,
             tiles + Kernel::kBiasOffset}};
  }
};

// The entry point that the generated source instantiates.
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
  static constexpr bool kCapped = Config::kSoftCap && !Config::kBias && !Config::kRowMaxima &&
                                  cute::is_same_v<Element, cutlass::bfloat16_t>;
  // The bits of negative floats have the wrong order as integers, and with a bias all scores of a
  // row may be negative. Above 128 columns a KV block has too few scores for the branch to pay off.
  static constexpr bool kIntegerMaximum = !Config::kBias && Config::kValueDim <= 128;
  using Softmax =
      OnlineSoftmax<1, kIntegerMaximum, has_large_scores<Config>(), kCapped, Config::kRowMaxima>;
  using Schedule = PersistentSchedule<Config, kTileQuery, sizeof(Element)>;
  using Scheduler = TileScheduler<Schedule>;

  using Operands = cute::conditional_t<cute::is_same_v<Element, F16x3>,
                                       F16x3Operands<Config, ScoreGrid, OutGrid>,
                                       MappedOperands<Config, kThreads>>;
  static constexpr int kProducerRegisters = Operands::kProducerRegisters;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid, false, Operands::kModifiesEarly>;
  using KeptBlocks = typename Probabilities::Tile;
  using Keys = typename Operands::Keys;
  using Values = typename Operands::Values;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;
  static_assert(kStages % kConsumerGroups == 0);  // so that each group has buffers of its own

  using Mask = ScoreMask<Config, ScoreGrid>;
  using Bias = WarpRowsBias<Config, ScoreGrid, kConsumerWarps, kTileKey, true,
                            WarpBiasPointer<Config, ScoreGrid>, Mask>;
  using Scaling = cute::conditional_t<Config::kSoftCap && !kIs32Bit<Element>,
                                      PolynomialCap<Config, kCapped>, ScoreScaling<Config>>;
  using Linear = LinearScores<Config>;
  using Columns = ColumnProduct<Config>;
  using Diagonals = SharedDiagonals<Config, ScoreGrid, kTileQuery, kTileKey>;
  using Function = typename Diagonals::Function;
  using FunctionReads = typename Function::Reads;
  using Modifiers = ScoreModifiers<Config, Bias, Function, Scaling>;

  using Blocks = KvBlocks<Config, Mask>;

  using ConsumerGroup = WarpConsumerGroups<kConsumerWarps, kConsumerGroups, 1 + kWarpgroups>;
  using Merge = ConsumerGroupMerge<ConsumerGroup, Softmax, kTileQuery * Config::kValueDim>;
  // With three consumers, ping-pong gains 1 to 4 %; with two, nothing. With four they were not
  // measured.
  using PingPong =
      PingPongBarrier<Config::kOutputFirst && kWarpgroups == 3, kWarpgroups, 2 + kWarpgroups>;
  using OutputWriter = ForwardOutputSm90<Config, OutGrid, Softmax>;

  using WorkTile = QueryWorkTile;
  struct Control : QueryTileRings<kQueryStages, kStages, kRowWarpgroups>,
                   MissingPages<kSmallPages<Config>> {};
  static constexpr int kWorkTileStages = Control::kWorkTileStages;
  static constexpr int kKeyOffset = kQueryStages * Operands::kQueryBufferBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * Keys::kBufferBytes;
  static constexpr int kColumnsOffset = kValueOffset + kStages * Values::kBufferBytes;
  static constexpr int kDiagonalsOffset = kColumnsOffset + Columns::kBytes;
  static constexpr int kBiasOffset = kDiagonalsOffset + kStages * Diagonals::kBytes;
  static constexpr int kMergeOffset = kBiasOffset + Bias::kBytes;
  static constexpr int kControlOffset = kMergeOffset + Merge::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, one for consumer groups, and one for the
  // ping-pong of each consumer.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // The addresses of the buffers in shared memory.
  CUTE_DEVICE static uint32_t queries(uint32_t tiles, PipelineStage<kQueryStages> const& stage) {
    return tiles + stage.index * Operands::kQueryBufferBytes;
  }
  CUTE_DEVICE static uint32_t keys(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kKeyOffset + stage.index * Keys::kBufferBytes;
  }
  CUTE_DEVICE static uint32_t values(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kValueOffset + stage.index * Values::kBufferBytes;
  }
  CUTE_DEVICE static uint32_t diagonals(uint32_t tiles, PipelineStage<kStages> const& key) {
    return tiles + kDiagonalsOffset + key.index * Diagonals::kBytes;
  }

  // `maps` is empty for operands that need no tensor maps.
  template <class... Maps>
  CUTE_DEVICE static void run(ForwardParams const& params, Maps const&... maps) {
    Operands const operands{params, maps...};
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      operands.prefetch();
      control.init_missing();
      control.init(kConsumerWarps, kConsumerGroups, Diagonals::kIsOn ? 2 : 1);
    }
    Columns::write(tiles + kColumnsOffset, kThreads);
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      ForwardProducerSm90<Config, FmhaForwardSm90>::run(params, operands, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      ForwardMainLoopSm90<Config, FmhaForwardSm90>::run(params, control, tiles);
    }
  }
};

}  // namespace memeff
