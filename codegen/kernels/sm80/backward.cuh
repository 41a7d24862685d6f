// Attention backward for GPUs with mma.sync and cp.async: keys are split over the grid.
//
// One CTA owns a KV block of one key head. It iterates over the Q blocks that attend to it, for
// every query head of the group, and recomputes the probabilities. dk and dv stay in registers, so
// they need no atomics and are the same in every run. dq is added to f32 sums in global memory:
//
//   S = Q K^T    dP = dO V^T    P = exp2(S - lse)    dS = P (dP - delta)
//   dV += P^T dO    dQ = dS K    dK += dS^T Q
//
// dV reads the modified P, and dP is modified in the same way
// (collective/probability_modifiers.cuh).
//
// The next Q block arrives while this one is computed, in a second buffer. dO has one buffer, which
// is reloaded as soon as dV has read it, so that it arrives during dQ and dK. If shared memory is
// short, queries have one buffer, too, and dK comes before dQ, which hides both loads. Gradients
// that are not asked for (Config::kQueryGradient, kKeyGradient, kValueGradient, kBiasGradient) cost
// neither products nor memory. Config::kDeterministicDq makes the order of the additions to dq
// deterministic (schedule/dq_semaphore.cuh).
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/dq_sums.cuh>
#include <kernels/common/postprocess.cuh>
#include <kernels/common/preprocess.cuh>
#include <kernels/sm80/backward_scores.cuh>
#include <kernels/sm80/delta.cuh>
#include <memeff/arch/barrier.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/collective/copies/load_tile.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// The gradient of a bias that is broadcast over the batch or heads, bitwise identical from run to
// run. Runs after the main kernel.
//
// One CTA owns a tile of the gradient. It iterates over the (batch, head) slices that read this
// tile of the bias, recomputes P and dP of each and keeps the sum of dS in registers. This needs no
// workspace and no atomics, but computes S and dP a second time.
//
// Each tile in shared memory has one buffer, which is reloaded as soon as its product is done.

// The entry point. Codegen emits it if the gradient of a bias that is broadcast over the batch or
// heads must be deterministic.
template <class Config>
struct FmhaBackwardDbias<Config, BackwardTiles<Config>> {
  using Element = typename Config::Element;
  using Scores = BackwardScoresSm80<Config>;
  using Modifiers = typename Scores::Modifiers;
  using Mask = typename Scores::Mask;
  using Tiles = BackwardTiles<Config>;
  using QueryTile = typename Tiles::QueryTile;
  using OutTile = typename Tiles::OutTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using Grid = typename Tiles::ScoreGrid;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kStatisticsBytes = Scores::kStatisticsBytes;

  // Offsets in shared memory.
  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kOutOffset = kKeyOffset + KeyTile::kBytes;
  static constexpr int kValueOffset = kOutOffset + OutTile::kBytes;
  static constexpr int kStatisticsOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kBiasOffset = kStatisticsOffset + 2 * kStatisticsBytes;
  static constexpr int kSharedBytes = kBiasOffset + Scores::Bias::kBytes;

  // The work of a CTA: a tile of the gradient, and the (batch, head) slices that it sums over.
  struct Work {
    BackwardParams const& params;
    uint32_t shared;
    BiasGradientTile<Config> tile;
    BroadcastSlices<Config> slices;

    CUTE_DEVICE Work(BackwardParams const& params, uint32_t shared)
        : params(params), shared(shared), tile(params, blockIdx.x), slices(params, tile.slice) {}

    CUTE_DEVICE Mask mask_of(int slice) const {
      return Mask(params.mask, params.shape, slices.batch(slice));
    }

    // The row of the block mask, restricted to this tile.
    CUTE_DEVICE BlockMaskRow<Config::kBlockMask> block_of(int slice) const {
      int const key = tile.column / kTileKey;
      return BlockMaskRow<Config::kBlockMask>(
          {key, key + 1}, params.block_mask, slices.batch(slice), slices.head(slice),
          tile.row / kTileQuery, ceil_div(params.shape.key_length, kTileKey));
    }

    // The first slice from `slice` on that has a valid element in the tile.
    CUTE_DEVICE int next(int slice) const {
      for (; slice < slices.count; ++slice) {
        TileRange const blocks = mask_of(slice).key_tiles(tile.row, kTileQuery, kTileKey);
        int const key = tile.column / kTileKey;
        if (blocks.begin <= key && key < blocks.end && !block_of(slice).empty()) break;
      }
      return slice;
    }

    CUTE_DEVICE QBlock q_block(int slice) const {
      return {slices.head(slice), tile.row, tile.row / kTileQuery,
              block_of(slice).partial(tile.column / kTileKey)};
    }

    CUTE_DEVICE uint32_t statistics(int parity) const {
      return shared + kStatisticsOffset + parity * kStatisticsBytes;
    }

    // Starts the copies of the operands of S and the statistics.
    CUTE_DEVICE void load_scores(int slice, int parity) const {
      load_rows<QueryTile>(shared, params.query, slice, params.shape.head_dim);
      load_columns<KeyTile>(shared + kKeyOffset, params.key, slice, params.shape.head_dim);
      char const* const source = reinterpret_cast<char const*>(
          params.row_statistics + Tiles::tile_index(params, slices.batch(slice), slices.head(slice),
                                                    tile.row / kTileQuery) *
                                      kTileQuery * 2);
      int const byte = thread_index() * 16;
      if (byte < kStatisticsBytes) copy_async(statistics(parity) + byte, source + byte, true);
    }

    // Starts the copies of the operands of dP.
    CUTE_DEVICE void load_gradients(int slice) const {
      load_rows<OutTile>(shared + kOutOffset, params.out_gradient, slice, params.shape.value_dim);
      load_columns<ValueTile>(shared + kValueOffset, params.value, slice, params.shape.value_dim);
    }

   private:
    template <class Tile>
    CUTE_DEVICE void load_rows(uint32_t target, TensorView const& tensor, int slice,
                               int columns) const {
      int const batch = slices.batch(slice);
      Origin const queries = query_origin<Config>(params.shape, batch);
      TileLoader<Tile, kThreads, Config::kAlignment>::copy(
          target,
          row_pointer<Element>(tensor, queries.batch, queries.row + tile.row, slices.head(slice)),
          tensor.row_stride * sizeof(Element), mask_of(slice).query_length - tile.row, columns);
    }

    template <class Tile>
    CUTE_DEVICE void load_columns(uint32_t target, TensorView const& tensor, int slice,
                                  int columns) const {
      int const batch = slices.batch(slice);
      KeyValueSource<Config> const keys(params, batch, slices.head(slice) / params.shape.group);
      TileLoader<Tile, kThreads, Config::kAlignment>::copy(
          target, keys.row(tensor, tile.column), tensor.row_stride * sizeof(Element),
          mask_of(slice).key_length - tile.column, columns);
    }
  };

  CUTE_DEVICE static void run(BackwardParams const& params) {
    uint32_t const shared = shared_address(dynamic_shared());
    Work const work(params, shared);
    auto sums = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(sums);
    int slice = work.next(0);
    if (slice < work.slices.count) {
      work.load_scores(slice, 0);
      commit_copies();
      work.load_gradients(slice);
      commit_copies();
    }
    for (int parity = 0; slice < work.slices.count; parity ^= 1) {
      int const following = work.next(slice + 1);
      bool const has_next = following < work.slices.count;
      int const batch = work.slices.batch(slice);
      Mask const mask = work.mask_of(slice);
      Modifiers const modifiers = {
          {params.scale},
          {params},
          {params.bias, mask, batch, work.tile.column, shared + kBiasOffset}};
      auto scores = Grid::make_accumulators();          // (4, MMA_M, MMA_N)
      auto score_gradient = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
      cute::clear(scores);
      cute::clear(score_gradient);

      wait_copies<1>();
      sync_threads();  // Q, K and statistics have arrived; every thread has read the last bias
      modifiers.load(work.q_block(slice));
      commit_copies();
      Scores::template multiply<QueryTile, KeyTile>(shared, shared + kKeyOffset, scores);
      wait_copies<0>();
      sync_threads();  // dO, V and bias have arrived; every thread has read Q and K
      if (has_next) work.load_scores(following, parity ^ 1);
      commit_copies();
      Scores::template multiply<OutTile, ValueTile>(shared + kOutOffset, shared + kValueOffset,
                                                    score_gradient);
      sync_threads();  // every thread has read dO and V
      if (has_next) work.load_gradients(following);
      commit_copies();

      Scores::template compute<typename Scores::NoCapturedSums>(
          params, modifiers, work.statistics(parity), batch, work.q_block(slice), mask,
          work.tile.column, 0, scores, score_gradient,
          [&] { return BiasGradientAdder<decltype(sums)>{sums}; });
      slice = following;
    }
    work.tile.store_blocks(sums);
  }
};

// The main kernel; codegen/kernels/sm80/backward.py chooses Config.
template <class Config>
struct FmhaBackwardSm80 {
  using Element = typename Config::Element;
  using Tiles = BackwardTiles<Config>;
  using QueryTile = typename Tiles::QueryTile;
  using OutTile = typename Tiles::OutTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using ScoreTile = typename Tiles::ScoreTile;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using QueryGrid = typename Tiles::QueryGrid;
  using KeyGrid = typename Tiles::KeyGrid;
  using ValueGrid = typename Tiles::ValueGrid;
  using Scores = BackwardScoresSm80<Config>;
  using Mask = typename Scores::Mask;
  using Modifiers = typename Scores::Modifiers;
  using BiasWriter = typename Scores::BiasWriter;
  using Blocks = QBlocks<Config>;
  using Semaphore =
      cute::conditional_t<Config::kDeterministicDq, DqSemaphore<Config>, NoDqSemaphore<Config>>;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kStep = Scores::kStep;
  static constexpr int kReadAhead = Scores::kReadAhead;
  static constexpr int kStatisticsBytes = Scores::kStatisticsBytes;
  static constexpr int kBuffers = Config::kQueryBuffers;
  // Not in tiles of 32 x 32, whose registers do not suffice for it with all features.
  static constexpr bool kKeysFirst = kBuffers == 1 && kTileQuery * kTileKey > 32 * 32;

  // Offsets in shared memory.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kBuffers * QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kOutOffset + OutTile::kBytes;
  static constexpr int kScoreOffset = kProbabilityOffset + ScoreTile::kBytes;
  static constexpr int kStatisticsOffset = kScoreOffset + ScoreTile::kBytes;
  static constexpr int kBiasOffset = kStatisticsOffset + kBuffers * kStatisticsBytes;
  static constexpr int kSumsOffset = kBiasOffset + Scores::Bias::kBytes;
  static constexpr int kExchangeOffset = kSumsOffset + Scores::CapturedSums::kSharedBytes;
  static constexpr int kSharedBytes =
      kExchangeOffset + (Config::kWarpPairs ? 4 * kTileQuery * kTileKey : 0);

  // dq and dk read dS from shared memory, and it is the gradient of the bias. If none of these is
  // asked for, dv needs only P.
  static constexpr bool kStoreScoreGradient =
      Config::kQueryGradient || Config::kKeyGradient || BiasWriter::kFromTile;
  static constexpr bool kScoreGradient = kStoreScoreGradient || Config::kFunctionGradient ||
                                         (Config::kBiasGradient != BiasGradient::none &&
                                          Config::kBiasGradient != BiasGradient::dbias_kernel);

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    ProblemShape const& shape = params.shape;
    Semaphore semaphore(params, reinterpret_cast<int*>(shared));
    WorkItem const item = semaphore.item(params);
    int const column = item.tile * kTileKey;
    Mask const mask(params.mask, shape, item.batch);
    TileRange const tiles = mask.query_tiles(column, kTileKey, kTileQuery);
    Blocks const q_blocks(shape, params.block_mask, item, tiles);
    KvBlock const kv_block(params, item, mask, column, shared_address(shared));
    Modifiers const modifiers = {
        {params.scale},
        {params},
        {params.bias, mask, item.batch, column, kv_block.shared + kBiasOffset}};

    clear_skipped<Config, kThreads>(params, item, tiles);
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::keys, kTileKey> const grid = {shape};
      clear_key_gap<Config, kThreads>(params, item, mask.key_length,
                                      grid.of_batch_index(item.batch));
      if (kv_block.column >= mask.key_length) {
        kv_block.publish(semaphore, kFinished);
        return;
      }
    }

    auto key_gradient = KeyGrid::make_accumulators();      // (4, MMA_M, MMA_N)
    auto value_gradient = ValueGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(key_gradient);
    cute::clear(value_gradient);
    Scores::CapturedSums::begin(kv_block.shared + kSumsOffset);
    accumulate(kv_block, q_blocks, modifiers, semaphore, key_gradient, value_gradient);
    sync_threads();  // every thread has read keys and values: their tiles take the results
    kv_block.publish(semaphore, kFinished);
    kv_block.store(key_gradient, value_gradient);
  }

  // The KV block of a CTA: where its operands are in global and in shared memory.
  struct KvBlock {
    BackwardParams const& params;
    WorkItem const& item;
    Mask const& mask;
    int column;
    uint32_t shared;
    Origin queries;
    KeyValueSource<Config> keys;

    CUTE_DEVICE KvBlock(BackwardParams const& params, WorkItem const& item, Mask const& mask,
                        int column, uint32_t shared)
        : params(params),
          item(item),
          mask(mask),
          column(column),
          shared(shared),
          queries(query_origin<Config>(params.shape, item.batch)),
          keys(params, item.batch, item.head) {}

    CUTE_DEVICE uint32_t query_tile(int buffer) const {
      return shared + kQueryOffset + buffer * QueryTile::kBytes;
    }
    CUTE_DEVICE uint32_t statistics(int buffer) const {
      return shared + kStatisticsOffset + buffer * kStatisticsBytes;
    }

    // The index of a Q block among all Q blocks of the key head's group, in the order of the loop.
    CUTE_DEVICE int position(QBlock const& q_block) const {
      return (q_block.head - item.head * params.shape.group) * params.query_tiles + q_block.tile;
    }

    CUTE_DEVICE void publish(Semaphore& semaphore, int done) const {
      if (threadIdx.x == 0) semaphore.publish(done);
    }

    // Starts the copies of the KV block, before the first Q block.
    CUTE_DEVICE void load_keys_and_values() const {
      int const column_bound = mask.key_length - column;
      TileLoader<KeyTile, kThreads, Config::kAlignment>::copy(
          shared, keys.row(params.key, column), params.key.row_stride * sizeof(Element),
          column_bound, params.shape.head_dim);
      TileLoader<ValueTile, kThreads, Config::kAlignment>::copy(
          shared + kValueOffset, keys.row(params.value, column),
          params.value.row_stride * sizeof(Element), column_bound, params.shape.value_dim);
    }

    // Starts the copies of queries and the statistics of their rows.
    CUTE_DEVICE void load_query(QBlock const& q_block, int buffer) const {
      TileLoader<QueryTile, kThreads, Config::kAlignment>::copy(
          query_tile(buffer),
          row_pointer<Element>(params.query, queries.batch, queries.row + q_block.row,
                               q_block.head),
          params.query.row_stride * sizeof(Element), mask.query_length - q_block.row,
          params.shape.head_dim);
      char const* const source = reinterpret_cast<char const*>(
          params.row_statistics +
          Tiles::tile_index(params, item.batch, q_block.head, q_block.tile) * kTileQuery * 2);
      int const byte = thread_index() * 16;
      if (byte < kStatisticsBytes) copy_async(statistics(buffer) + byte, source + byte, true);
    }

    CUTE_DEVICE void load_out_gradient(QBlock const& q_block) const {
      TileLoader<OutTile, kThreads, Config::kAlignment>::copy(
          shared + kOutOffset,
          row_pointer<Element>(params.out_gradient, queries.batch, queries.row + q_block.row,
                               q_block.head),
          params.out_gradient.row_stride * sizeof(Element), mask.query_length - q_block.row,
          params.shape.value_dim);
    }

    // Computes P and dS from the products of a Q block, and the gradient of the bias.
    template <class Accumulators>
    CUTE_DEVICE void differentiate(Modifiers const& modifiers, QBlock const& q_block, int buffer,
                                   Accumulators& scores, Accumulators& score_gradient) const {
      Scores::template compute<typename Scores::CapturedSums>(
          params, modifiers, statistics(buffer), item.batch, q_block, mask, column,
          shared + kSumsOffset, scores, score_gradient,
          [&] { return BiasWriter(params, {item.batch, q_block.head, q_block.row, column}); });
    }

    // Stores dk and dv through the tiles of keys and values.
    template <class KeyGradient, class ValueGradient>
    CUTE_DEVICE void store(KeyGradient& key_gradient, ValueGradient& value_gradient) const {
      // Hazard: the rows after a packed sequence belong to the next one.
      int const bound = (Config::kPacked ? mask.key_length : params.shape.key_length) - column;
      if constexpr (Config::kKeyGradient) {
        scale_accumulators(key_gradient, params.scale.gradient_scale);
        store_tile<Element, KeyTile, KeyGrid, kThreads, Config::kAlignment>(
            shared, key_gradient,
            row_pointer<Element>(params.key_gradient, keys.origin.batch, keys.origin.row + column,
                                 item.head),
            params.key_gradient.row_stride * sizeof(Element), bound, params.shape.head_dim);
      }
      if constexpr (Config::kValueGradient) {
        scale_accumulators(value_gradient, probability_scale<Config>(params));
        store_tile<Element, ValueTile, ValueGrid, kThreads, Config::kAlignment>(
            shared + kValueOffset, value_gradient,
            row_pointer<Element>(params.value_gradient, keys.origin.batch, keys.origin.row + column,
                                 item.head),
            params.value_gradient.row_stride * sizeof(Element), bound, params.shape.value_dim);
      }
    }
  };

  // The main loop: dK and dV of the KV block, and its part of dQ, Q block by Q block.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static void accumulate(KvBlock const& kv_block, Blocks const& q_blocks,
                                     Modifiers const& modifiers, Semaphore& semaphore,
                                     KeyGradient& key_gradient, ValueGradient& value_gradient) {
    uint32_t const shared = kv_block.shared;
    if (auto const first = q_blocks.first(); q_blocks.has(first)) {
      kv_block.load_keys_and_values();
      kv_block.load_query(q_blocks.at(first), 0);
      kv_block.load_out_gradient(q_blocks.at(first));
      modifiers.load(q_blocks.at(first));
      commit_copies();
    }

    for (auto cursor = q_blocks.first(); q_blocks.has(cursor); cursor = q_blocks.after(cursor)) {
      QBlock const q_block = q_blocks.at(cursor);
      int const buffer = q_blocks.number(cursor) % kBuffers;
      uint32_t const query_tile = kv_block.query_tile(buffer);
      bool const has_next = q_blocks.has(q_blocks.after(cursor));

      wait_copies<0>();
      sync_threads();  // operands have arrived; every thread has read dS and the other buffer
      kv_block.publish(semaphore, kv_block.position(q_block));
      if (kBuffers == 2 && has_next) {
        kv_block.load_query(q_blocks.at(q_blocks.after(cursor)),
                            (q_blocks.number(cursor) + 1) % kBuffers);
        commit_copies();
      }

      auto scores = ScoreGrid::make_accumulators();          // (4, MMA_M, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
      multiply(query_tile, shared, scores, score_gradient);
      kv_block.differentiate(modifiers, q_block, buffer, scores, score_gradient);
      if constexpr (Config::kValueGradient) {
        store_accumulators<Element, ScoreTile, ScoreGrid>(shared + kProbabilityOffset, scores);
      }
      if constexpr (kStoreScoreGradient) {
        store_accumulators<Element, ScoreTile, ScoreGrid>(shared + kScoreOffset, score_gradient);
      }
      sync_threads();  // P and dS are complete; every thread has read this bias
      modifiers.load_next(has_next, [&] { return q_blocks.at(q_blocks.after(cursor)); });
      if constexpr (BiasWriter::kFromTile) {
        BiasWriter::store(kv_block.params,
                          {kv_block.item.batch, q_block.head, q_block.row, kv_block.column},
                          shared + kScoreOffset);
      }

      if constexpr (Config::kKeyGradient && kKeysFirst) {
        add_columns<QueryTile, KeyGrid>(shared + kScoreOffset, query_tile, key_gradient);
      }
      if constexpr (Config::kValueGradient) {
        add_columns<OutTile, ValueGrid>(shared + kProbabilityOffset, shared + kOutOffset,
                                        value_gradient);
      }
      if constexpr (Config::kValueGradient || (Config::kKeyGradient && kKeysFirst)) {
        sync_threads();  // every thread has read dO, and the queries if dK is first
      }
      if (has_next) {
        kv_block.load_out_gradient(q_blocks.at(q_blocks.after(cursor)));
        if (kKeysFirst) kv_block.load_query(q_blocks.at(q_blocks.after(cursor)), 0);
        commit_copies();
      }

      if constexpr (Config::kQueryGradient) add_query_gradient(kv_block, q_block, semaphore);
      if constexpr (Config::kKeyGradient && !kKeysFirst) {
        add_columns<QueryTile, KeyGrid>(shared + kScoreOffset, query_tile, key_gradient);
      }
      if (kBuffers == 1 && !kKeysFirst && has_next) {
        sync_threads();  // every thread has read the queries
        kv_block.load_query(q_blocks.at(q_blocks.after(cursor)), 0);
        commit_copies();
      }
    }
  }

  // S = Q K^T and dP = dO V^T.
  template <class Accumulators>
  CUTE_DEVICE static void multiply(uint32_t query_tile, uint32_t shared, Accumulators& scores,
                                   Accumulators& score_gradient) {
    cute::clear(scores);
    cute::clear(score_gradient);
    if constexpr (Config::kWarpPairs && kScoreGradient) {
      Scores::template multiply_in_pairs<QueryTile, KeyTile>(
          query_tile, shared, shared + kOutOffset, shared + kValueOffset, shared + kExchangeOffset,
          scores, score_gradient);
    } else {
      Scores::template multiply<QueryTile, KeyTile>(query_tile, shared, scores);
      if constexpr (kScoreGradient) {
        Scores::template multiply<OutTile, ValueTile>(shared + kOutOffset, shared + kValueOffset,
                                                      score_gradient);
      }
    }
  }

  // dV += P^T dO or dK += dS^T Q.
  template <class RightTile, class Grid, class Accumulators>
  CUTE_DEVICE static void add_columns(uint32_t score_tile, uint32_t right, Accumulators& gradient) {
    warp_gemm<Element, kTileQuery / kStep, kReadAhead>(
        gradient,
        LeftOperand<ScoreTile, Contiguous::outer, Grid::kRowBlocks>(score_tile, Grid::row()),
        RightOperand<RightTile, Contiguous::outer, Grid::kColumnBlocks>(right, Grid::column()));
  }

  // dQ = dS K of one Q block, added to the sums in global memory.
  CUTE_DEVICE static void add_query_gradient(KvBlock const& kv_block, QBlock const& q_block,
                                             Semaphore& semaphore) {
    auto query_gradient = QueryGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(query_gradient);
    warp_gemm<Element, kTileKey / kStep, kReadAhead>(
        query_gradient,
        LeftOperand<ScoreTile, Contiguous::k, QueryGrid::kRowBlocks>(kv_block.shared + kScoreOffset,
                                                                     QueryGrid::row()),
        RightOperand<KeyTile, Contiguous::outer, QueryGrid::kColumnBlocks>(kv_block.shared,
                                                                           QueryGrid::column()));
    semaphore.wait(kv_block.position(q_block));
    add_to_dq_sums<Tiles>(kv_block.params, kv_block.item.batch, q_block.head, q_block.tile,
                          query_gradient);
  }
};

}  // namespace memeff
