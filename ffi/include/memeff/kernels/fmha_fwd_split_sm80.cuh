// Attention forward for few query rows and long keys: the keys are split over warps and CTAs.
//
// Such a call is bound by memory bandwidth, so the design keeps many copies in flight. There are
// few rows, so all warps share them and each consumer group takes different keys: a group covers
// every row of the tile and has its own keys, values and copies. A group of one warp needs no CTA
// barrier in the main loop. Copies run kStages - 1 tiles ahead:
//
//   wait for tile i | start the copy of tile i + kStages - 1 | S = Q K^T | softmax | O += P V
//
// At the end the groups of a CTA merge their outputs in shared memory. Each split is a CTA that
// writes partial results to global memory, and the kernel of forward/combine.cuh merges them.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/collective/consumer_groups.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/kernels/forward/combine.cuh>
#include <memeff/kernels/forward/segment_sum.cuh>
#include <memeff/kernels/forward/split/float8_operands.cuh>
#include <memeff/kernels/forward/split/kv_tiles.cuh>
#include <memeff/kernels/forward/split/operands.cuh>
#include <memeff/kernels/forward/split/output.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/function_blocks.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/key_splits.cuh>
#include <memeff/score/bias/direct.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// The kernel for decode and other calls with few rows; see
// codegen/kernels/split/fmha_fwd_split_sm80.py.
template <class Config>
struct FmhaForwardSplitSm80 {
  static_assert(!Config::kRowMaxima);  // partial results have no maxima
  using Element = typename Config::Element;
  using Operands =
      cute::conditional_t<Config::kFloat8Pages, Float8Operands<Config>, SplitOperands<Config>>;
  using Tiles = SplitTiles<Config>;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kStages = Config::kStages;

  using ConsumerGroup = typename Tiles::ConsumerGroup;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using OutGrid = typename Tiles::OutGrid;
  using Softmax = OnlineSoftmax<ScoreGrid::kRowBlocks, false, has_large_scores<Config>()>;
  using Rows = PackedRows<Config::kPackHeads>;
  using TileRows = RowsOfTile<Config::kPackHeads>;
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid>;
  using Mask = ScoreMask<Config, ScoreGrid, Config::kPackHeads>;
  // A row of the block mask belongs to one head.
  static_assert(!Config::kBlockMask || !Config::kPackHeads);
  using Modifiers = ScoreModifiers<Config, DirectBias<Config, ScoreGrid, Mask>,
                                   ScoreFunction<Config, ScoreGrid, false, Config::kPackHeads>>;

  // Batch-invariant results: a split is a whole number of segments, see forward/segment_sum.cuh.
  // Each group takes whole segments, because a segment is summed in one fixed order. The combine
  // kernel adds up the segments.
  static constexpr bool kKeySegments = Config::kSegmentKeys > 0;
  static constexpr bool kGroupsTakeSegments = Tiles::kGroupsTakeSegments;
  static constexpr int kSegmentBlocks = Config::kSegmentKeys / kTileKey;
  static_assert(Config::kSegmentKeys % kTileKey == 0);

  // Segments end at their last block, so none is left out.
  using KvBlocks =
      cute::conditional_t<decides_tiles<Config>(),
                          FunctionBlocks<Config, Config::kPackHeads, kTileKey, !kKeySegments>,
                          BlockMaskRow<Config::kBlockMask>>;
  static_assert(!kGroupsTakeSegments || !decides_tiles<Config>());
  using GroupBlocks =
      cute::conditional_t<kGroupsTakeSegments,
                          SegmentsOfGroup<kSegmentBlocks, ConsumerGroup::kConsumerGroups>,
                          KvBlocks>;
  using Walk = typename GroupBlocks::template Walk<kStages - 1>;

  using QueryTile = typename Operands::QueryTile;
  using KeyTile = typename Operands::KeyTile;
  using ValueTile = typename Operands::ValueTile;
  using KvTiles = SplitKvTiles<Config, Operands>;
  static constexpr int kStageBytes = KvTiles::kStageBytes;
  static constexpr int kConsumerGroupBytes = kStages * kStageBytes;
  static constexpr int kTileBytes =
      QueryTile::kBytes + ConsumerGroup::kConsumerGroups * kConsumerGroupBytes;
  static constexpr int kLoopBytes = kTileBytes + Operands::kScaleBytes;
  // Reuses the shared memory of the tiles.
  using Merge = ConsumerGroupMerge<ConsumerGroup, Softmax, kTileQuery * Config::kValueDim>;
  static constexpr int kSharedBytes = kLoopBytes > Merge::kBytes ? kLoopBytes : Merge::kBytes;

  using Out = SplitOutput<Config, FmhaForwardSplitSm80>;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    char* const shared = dynamic_shared();
    uint32_t const query_tile = shared_address(shared);
    uint32_t const consumer_group_tiles =
        query_tile + QueryTile::kBytes + ConsumerGroup::index() * kConsumerGroupBytes;

    ProblemShape const& shape = params.shape;
    SplitWorkItem const item = Out::work_item(params);
    int const row = item.tile * kTileQuery;
    int const key_head = Config::kPackHeads ? item.head : item.head / shape.group;

    Mask const mask(params.mask, shape, item.batch);
    if constexpr (Config::kVarlen) {
      if (item.split == 0) clear_gap(params, item, mask.query_length);
      if (row >= mask.query_length) return;
    }
    // Rows of partial results do not count as valid, because row modifiers must see each row once,
    // when it is finished.
    bool const is_partial = kKeySegments || params.splits > 1;
    TileRows const rows(shape, item.batch, item.head, row, is_partial ? 0 : mask.query_length);
    KvBlocks const of_row = blocks_of_row(params, item, mask, row);
    KvBlocks const of_split = of_row.within(blocks_of_split<kTileKey, Config::kSegmentKeys>(
        of_row, mask.key_length, item.split, params.splits));
    GroupBlocks const kv_blocks = blocks_of_group(of_split);

    KeyValueSource<Config> const source(params, item.batch, key_head, mask.row_begin(row));
    Operands operands(params, key_head, mask.key_length, query_tile + kTileBytes);
    KvTiles kv_tiles(params, source, mask.key_length, kv_blocks.end, consumer_group_tiles);

    auto output = OutGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(output);
    Softmax softmax;

    bool const copies_query = Operands::kCopiesQuery && !of_split.empty();
    if (copies_query) load_query(params, item, row, operands, query_tile);
    commit_copies();
    Walk walk(kv_blocks);
    CUTE_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
      kv_tiles.load(walk.ahead, stage, operands);
      walk.copied_first();
    }
    // The conversion waits for the queries, so the copies of keys start before it.
    bool const converts_query = !Operands::kCopiesQuery && !of_split.empty();
    if (converts_query) load_query(params, item, row, operands, query_tile);
    walk.start();
    wait_copies<kStages - 1>();
    __syncthreads();  // the query tile is in shared memory

    operands.begin();
    if constexpr (kKeySegments) {
      attend_segments(params, item, mask, rows, of_split, walk, kv_tiles, operands, query_tile,
                      softmax, output);
      return;
    }
    attend(params, item, mask, rows, walk, kv_tiles, operands, query_tile, softmax, output,
           [](int) {});

    finish(params, item, rows, operands, query_tile, softmax, output);
  }

  // The KV blocks that the rows of a tile attend to.
  CUTE_DEVICE static KvBlocks blocks_of_row(ForwardParams const& params, SplitWorkItem const& item,
                                            Mask const& mask, int row) {
    TileRange const range = mask.key_tiles(row, kTileQuery, kTileKey);
    if constexpr (decides_tiles<Config>()) {
      return {range,
              params,
              {item.batch, item.head, row, 0},
              min(row + kTileQuery, mask.query_length),
              mask.key_length};
    } else {
      return {range,     params.block_mask, item.batch,
              item.head, item.tile,         ceil_div(params.shape.key_length, kTileKey)};
    }
  }

  CUTE_DEVICE static GroupBlocks blocks_of_group(KvBlocks const& of_split) {
    if constexpr (kGroupsTakeSegments) {
      return {of_split, ConsumerGroup::index()};
    } else {
      return of_split;
    }
  }

  // The main loop: O += P V over the KV blocks of this split and consumer group. The copies of the
  // first kStages - 1 blocks are in flight. Calls end_block(block) after each.
  template <class Output, class EndBlock>
  CUTE_DEVICE static void attend(ForwardParams const& params, SplitWorkItem const& item,
                                 Mask const& mask, TileRows const& rows, Walk walk,
                                 KvTiles& kv_tiles, Operands const& operands, uint32_t query_tile,
                                 Softmax& softmax, Output& output, EndBlock end_block) {
    LeftOperand<QueryTile, Contiguous::k, ScoreGrid::kRowBlocks> const query(query_tile,
                                                                             ScoreGrid::row());
    Modifiers const modifiers = {{params.scale}, {params}, {params.bias, mask, item.batch}};
    // A decode step fills only one warp's rows of the tile; the other warps only copy.
    bool const has_rows = rows.row + ScoreGrid::row() < mask.query_length;
    int stage = 0;
    for (; walk.more(); walk.advance()) {
      int const column = walk.tile() * kTileKey;
      wait_copies<kStages - 2>();
      ConsumerGroup::sync();  // this block has arrived; the group has read the previous one
      int const previous = stage == 0 ? kStages - 1 : stage - 1;
      walk.begin_block();
      kv_tiles.load(walk.ahead, previous, operands);
      walk.copied();

      if ((!kKeySegments || has_rows) && !walk.masked()) {
        uint32_t const stage_tiles = kv_tiles.shared + stage * kStageBytes;
        auto scores = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
        cute::clear(scores);
        operands.multiply_keys(scores, query, stage_tiles, stage);

        ScoreTilePosition const at = {item.batch, item.head, rows.row, column};
        modifiers.forward(scores, at, rows, column);
        mask.template apply<kTileQuery, kTileKey>(scores, params, at, walk.partial(), 0,
                                                  kv_tiles.pages.may_miss());
        softmax.step(scores, output, params.scale.softmax_scale);
        auto probabilities = as_left_operand<typename Operands::Element>(scores);
        Probabilities::forward(params, item.batch, item.head, rows.row, column, probabilities);
        operands.multiply_values(output, probabilities, stage_tiles + KeyTile::kBytes, stage);
        end_block(walk.tile());
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

  // Merges the outputs of the consumer groups, and stores the result of the CTA. `shared` is the
  // beginning of the tiles.
  template <class Output>
  CUTE_DEVICE static void finish(ForwardParams const& params, SplitWorkItem const& item,
                                 TileRows const& rows, Operands const& operands, uint32_t shared,
                                 Softmax& softmax, Output& output) {
    __syncthreads();  // Merge overwrites the tiles: every warp must have read them
    Merge::run(shared, softmax, output, params.scale.softmax_scale);
    if (ConsumerGroup::index() > 0) return;
    softmax.finish(output, params.scale.softmax_scale,
                   probability_scale<Config>(params) * operands.output_scale(),
                   LaneRowModifiers<Config, OutGrid>(params, rows));
    Operands::order_columns(output);
    if (params.splits == 1) {
      Out::store(params, softmax, output);
    } else {
      Out::store_partial(params, item.split, softmax, output);
    }
  }

  // The main loop of batch-invariant calls: each segment is finished and added to the sum or, with
  // several splits or groups, written as a partial result.
  template <class Output>
  CUTE_DEVICE static void attend_segments(ForwardParams const& params, SplitWorkItem const& item,
                                          Mask const& mask, TileRows const& rows,
                                          KvBlocks const& of_split, Walk const& walk,
                                          KvTiles& kv_tiles, Operands const& operands,
                                          uint32_t query_tile, Softmax& softmax, Output& output) {
    SegmentSum<Output> sum;
    bool const are_divided = kGroupsTakeSegments || params.splits > 1;
    float const scale = probability_scale<Config>(params) * operands.output_scale();
    auto const end_segment = [&](int tile) {
      if ((tile + 1) % kSegmentBlocks != 0 && tile + 1 != of_split.end) return;
      softmax.finish(output, params.scale.softmax_scale, scale,
                     LaneRowModifiers<Config, OutGrid>(params, rows));
      Operands::order_columns(output);
      if (are_divided) {
        Out::store_partial(params, tile / kSegmentBlocks, softmax, output);
      } else {
        sum.add(output, softmax.softmax_reference);
      }
      softmax = Softmax();
      cute::clear(output);
    };
    attend(params, item, mask, rows, walk, kv_tiles, operands, query_tile, softmax, output,
           end_segment);
    if (are_divided) {
      mark_masked_segments(params, item, mask, of_split);
      return;
    }
    TileRows const valid_rows(params.shape, item.batch, item.head, rows.row, mask.query_length);
    sum.finish(softmax.softmax_reference, LaneRowModifiers<Config, OutGrid>(params, valid_rows));
    Out::store(params, softmax, sum.output);
  }

  // Writes logsumexp -inf for segments that no row attends to, because the combine kernel reads all
  // segments.
  CUTE_DEVICE static void mark_masked_segments(ForwardParams const& params,
                                               SplitWorkItem const& item, Mask const& mask,
                                               KvBlocks const& kv_blocks) {
    TileRange const own =
        segments_of_split<Config::kSegmentKeys>(mask.key_length, item.split, params.splits);
    for (int segment = own.begin; segment < own.end; ++segment) {
      int const first = segment * kSegmentBlocks;
      if (first < kv_blocks.end && first + kSegmentBlocks > kv_blocks.begin) continue;
      float* const logsumexps =
          params.partial_logsumexp +
          partial_row(params.shape, Rows(params.shape), segment, item.batch, item.head);
      Out::for_each_row(params, item, [&](int row, bool, int) { logsumexps[row] = -infinity(); });
    }
  }

  // Clears this CTA's part of the query rows after the sequence, for all heads of the tile.
  CUTE_DEVICE static void clear_gap(ForwardParams const& params, SplitWorkItem const& item,
                                    int length) {
    Rows const rows(params.shape);
    // The loop over heads would read the sequence starts again for each head.
    if (Gap::of_queries<Config>(params, item.batch, rows.query(length)).empty()) return;
    int const tiles = ceil_div(rows.count(params.shape.query_length), kTileQuery);
    for (int head = 0; head < rows.heads; ++head) {
      WorkItem const part = {item.tile, rows.query_head(item.head, head), item.batch};
      clear_query_gap<Config, kThreads>(params, part, rows.query(length), tiles);
    }
  }

  // Loads the query tile into shared memory; rows and columns beyond the bounds become zero.
  CUTE_DEVICE static void load_query(ForwardParams const& params, SplitWorkItem const& item,
                                     int row, Operands const& operands, uint32_t tile) {
    ProblemShape const& shape = params.shape;
    Rows const rows(shape);
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const bound = Out::row_bound(params, item.batch);
    operands.load_query(
        [&](int tile_row) {
          int const r = min(row + tile_row, bound - 1);
          return QueryRow{
              row_pointer<Element>(params.query, origin.batch, origin.row + rows.query(r),
                                   rows.query_head(item.head, r)),
              row + tile_row < bound};
        },
        shape.head_dim, tile);
  }
};

}  // namespace memeff
