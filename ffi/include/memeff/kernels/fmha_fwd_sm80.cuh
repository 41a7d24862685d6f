// Attention forward for GPUs with mma.sync and cp.async: one CTA computes a tile of query rows.
//
// Keys and values pass through shared memory from right to left. Each is loaded while the tensor
// cores work on the other, so that one buffer of each is enough:
//
//   wait K | load V | S = Q K^T | wait V | load next K | softmax | O += P V
//
// Each warp owns whole rows, so P goes from the accumulators of S to the operand of P V in
// registers.
#pragma once

#include <memeff/collective/drop.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/load_tile.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/staged_registers.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/add.cuh>
#include <memeff/score/bias/rows.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

template <class Config>
struct FmhaForwardSm80 {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  // Each warp owns whole rows of S and O.
  static constexpr int kWarpRows = kTileQuery / Config::kWarps;
  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, Config::kWarps, kWarpRows>;
  using OutGrid = WarpGrid<kTileQuery, Config::kValueDim, Config::kWarps, kWarpRows>;
  static constexpr int kRowBlocks = ScoreGrid::kRowBlocks;
  using Softmax = OnlineSoftmax<kRowBlocks, false, has_bias_tile<Config>()>;
  using SourcePointer = StagedPointer<Config::kStageRegisters>;
  // Each warp copies and reads its own rows of a bias, so that it waits for no other.
  static constexpr bool kBiasTile = has_bias_tile<Config>();
  using BiasRows = BiasTile<Config, kWarpRows, kTileKey, kWarpSize>;
  static constexpr int kBiasBytes = bias_tile_bytes<Config, BiasRows>();
  using BiasPointer = StagedPointer<Config::kStageRegisters && kBiasTile>;

  template <int kRows, int kColumns>
  using Tile = SharedTile<kRows, kColumns, sizeof(Element)>;
  using QueryTile = Tile<kTileQuery, Config::kHeadDim>;
  using KeyTile = Tile<kTileKey, Config::kHeadDim>;
  using ValueTile = Tile<kTileKey, Config::kValueDim>;
  using OutTile = Tile<kTileQuery, Config::kValueDim>;  // over the others, at the end
  // Of P V in parts (32-bit elements): all columns at a time where that leaves enough registers.
  static constexpr int kPartAccumulators = kRowBlocks * OutGrid::kColumnBlocks * 8 <= 64 ? 64 : 32;
  static constexpr int kStagedBytes =
      Config::kStageRegisters
          ? kThreads * (Softmax::kStagedBytes + 2 * SourcePointer::kBytes + BiasPointer::kBytes)
          : 0;
  static constexpr int kLoopBytes = QueryTile::kBytes + KeyTile::kBytes + ValueTile::kBytes +
                                    kStagedBytes + Config::kWarps * kBiasBytes;
  static constexpr int kSharedBytes = kLoopBytes > OutTile::kBytes ? kLoopBytes : OutTile::kBytes;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    char* const shared = dynamic_shared();
    uint32_t const query_tile = shared_address(shared);
    uint32_t const key_tile = query_tile + QueryTile::kBytes;
    uint32_t const value_tile = key_tile + KeyTile::kBytes;
    uint32_t const staged_key = value_tile + ValueTile::kBytes;
    uint32_t const staged_value = staged_key + kThreads * SourcePointer::kBytes;
    uint32_t const staged_rows = staged_value + kThreads * SourcePointer::kBytes;
    uint32_t const staged_bias = staged_rows + kThreads * Softmax::kStagedBytes;
    uint32_t const bias_tiles = value_tile + ValueTile::kBytes + kStagedBytes;

    ProblemShape const& shape = params.shape;
    WorkItem const item = work_item(params, blockIdx.x);
    int const row = item.tile * kTileQuery;
    int const key_head = item.head / shape.group;

    ScoreMask<Config, ScoreGrid> const mask(params.mask, shape, item.batch);
    if constexpr (Config::kVarlen) {
      clear_query_gap<Config, kThreads>(params, item, mask.query_length,
                                        ceil_div(shape.query_length, kTileQuery));
      if (row >= mask.query_length) return;
    }
    BlockMaskRow<Config::kBlockMask> const tiles(mask.key_tiles(row, kTileQuery, kTileKey),
                                                 params.block_mask, item.batch, item.head,
                                                 item.tile, ceil_div(shape.key_length, kTileKey));

    Origin const queries = query_origin<Config>(shape, item.batch);
    Origin const keys = key_origin<Config>(shape, item.batch);
    SourcePointer const key_rows(
        staged_key, key_row_pointer<Config>(params.key, keys.batch, keys.row, key_head));
    SourcePointer const value_rows(
        staged_value, key_row_pointer<Config>(params.value, keys.batch, keys.row, key_head));
    long long const key_row_bytes = params.key.row_stride * sizeof(Element);
    long long const value_row_bytes = params.value.row_stride * sizeof(Element);
    auto load_key = [&](int tile) {
      int const column = tile * kTileKey;
      TileLoader<KeyTile, kThreads, Config::kAlignment>::copy(
          key_tile, key_rows.get() + column * key_row_bytes, key_row_bytes,
          mask.key_length - column, shape.head_dim);
      commit_copies();
    };
    auto load_value = [&](int tile) {
      int const column = tile * kTileKey;
      TileLoader<ValueTile, kThreads, Config::kAlignment>::copy(
          value_tile, value_rows.get() + column * value_row_bytes, value_row_bytes,
          mask.key_length - column, shape.value_dim);
      commit_copies();
    };

    BiasPointer const bias_rows(
        staged_bias, bias_row<Config>(params.bias, item.batch, item.head, row + ScoreGrid::row()));
    auto load_bias = [&](int tile) {
      if constexpr (kBiasTile) {
        int const thread = thread_index();
        int const column = tile * kTileKey;
        BiasRows::copy(bias_tiles + thread / kWarpSize * kBiasBytes, thread % kWarpSize,
                       bias_rows.get() + column * sizeof(typename Config::BiasElement),
                       params.bias.row_stride * sizeof(typename Config::BiasElement),
                       mask.query_length - row - ScoreGrid::row(thread), mask.key_length - column);
        commit_copies();
      }
    };

    auto output = OutGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if constexpr (Config::kStageRegisters) softmax.stage_registers(staged_rows);

    if (tiles.begin < tiles.end) {
      TileLoader<QueryTile, kThreads, Config::kAlignment>::copy(
          query_tile,
          row_pointer<Element>(params.query, queries.batch, queries.row + row, item.head),
          params.query.row_stride * sizeof(Element), mask.query_length - row, shape.head_dim);
      load_key(tiles.end - 1);
      load_bias(tiles.end - 1);
    }

    LeftOperand<QueryTile, Contiguous::k, kRowBlocks> const query(query_tile, ScoreGrid::row());
    RightOperand<KeyTile, Contiguous::k, ScoreGrid::kColumnBlocks> const key(key_tile, 0);
    RightOperand<ValueTile, Contiguous::outer, OutGrid::kColumnBlocks,
                 kRegisterOrder<Element>> const value(value_tile, 0);

    for (int tile = tiles.end - 1; tile >= tiles.begin; tile = tiles.before(tile)) {
      int const column = tile * kTileKey;
      wait_copies<kBiasTile ? 1 : 0>();
      __syncthreads();  // keys are here; nobody reads the previous values any more
      load_value(tile);

      auto scores = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
      cute::clear(scores);
      warp_gemm<Element, Config::kHeadDim / kStepElements<Element>>(scores, query, key);

      wait_copies<0>();
      __syncthreads();  // values are here; nobody reads these keys any more
      if (tile > tiles.begin) load_key(tiles.before(tile));

      prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
      if constexpr (kBiasTile) {
        add_bias(scores,
                 BiasReader<BiasRows>(
                     bias_tiles + thread_index() / kWarpSize * kBiasBytes, 0, 0, bias_rows.get(),
                     params.bias.row_stride * sizeof(typename Config::BiasElement)),
                 params.scale.bias_scale);
        __syncwarp();  // nobody reads this bias any more
        if (tile > tiles.begin) load_bias(tiles.before(tile));
      }
      mask.template apply<kTileQuery, kTileKey>(scores, params.mask, shape, item.batch, item.head,
                                                row, column, tiles.partial(tile));
      if constexpr (Config::kStageRegisters) softmax.unstage(staged_rows);
      softmax.step(scores, output, params.scale.softmax_scale);
      if constexpr (Config::kStageRegisters) softmax.stage_registers(staged_rows);
      auto probabilities = as_left_operand<Element>(scores);
      if constexpr (Config::kDropout) {
        drop_elements<ScoreGrid>(params, item.batch, item.head, row, column, probabilities);
      }
      warp_gemm<Element, kTileKey / kStepElements<Element>, 2, kPartAccumulators>(
          output, probabilities, value);
    }

    if constexpr (Config::kStageRegisters) softmax.unstage(staged_rows);
    float const output_scale = Config::kDropout ? params.dropout.scale : 1.0f;
    if constexpr (Config::kBias && !kBiasTile) {
      RowBias<Config, OutGrid> const bias(params.bias, item.batch, item.head, row,
                                          mask.query_length - row);
      bias.mask(softmax);
      softmax.finish(output, params.scale.softmax_scale, output_scale);
      bias.add(softmax);
    } else {
      softmax.finish(output, params.scale.softmax_scale, output_scale);
    }
    store(params, softmax, output, query_tile);
  }

  CUTE_DEVICE static WorkItem work_item(ForwardParams const& params, unsigned block) {
    ProblemShape const& shape = params.shape;
    int const query_tiles = ceil_div(shape.query_length, kTileQuery);
    return memeff::work_item<Config, Heaviest::last>(shape, params.bias, block, query_tiles,
                                                     shape.query_heads);
  }

  template <class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, Softmax const& softmax, Output& output,
                                uint32_t tile) {
    ProblemShape const& shape = params.shape;
    WorkItem const item = work_item(params, block_index());
    int const row = item.tile * kTileQuery;
    int const query_bound =
        IntervalMask<Config::kMask>(params.mask, shape, item.batch).query_length - row;
    // Past a packed sequence the next one begins.
    int const row_bound = Config::kVarlen ? query_bound : shape.query_length - row;
    Origin const origin = query_origin<Config>(shape, item.batch);
    if (threadIdx.x % 4 == 0) {
      float* const logsumexp =
          params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head) + row;
      CUTE_UNROLL
      for (int r = 0; r < 2 * kRowBlocks; ++r) {
        int const tile_row = OutGrid::element_row(2 * (r % 2), r / 2);
        if (tile_row < row_bound) {
          logsumexp[tile_row] = tile_row < query_bound ? softmax.softmax_reference[r] : -infinity();
        }
      }
    }
    if (query_bound < kTileQuery) zero_rows(output, query_bound);
    __syncthreads();  // the tiles that OutTile covers are no longer read
    store_tile<Element, OutTile, OutGrid, kThreads, Config::kAlignment>(
        tile, output, row_pointer<Element>(params.out, origin.batch, origin.row + row, item.head),
        params.out.row_stride * sizeof(Element), row_bound, shape.value_dim);
  }

  // Rows from `bound` on lie beyond the query length: their output is 0.
  template <class Output>
  CUTE_DEVICE static void zero_rows(Output& output, int bound) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int element = 0; element < 4; ++element) {
        if (OutGrid::element_row(element, m) >= bound) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<2>(output); ++n) output(element, m, n) = 0.0f;
        }
      }
    }
  }
};

}  // namespace memeff
