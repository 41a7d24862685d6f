// Runs after the backward: the gradient of a bias that is broadcast over the batch or heads,
// bitwise identical from run to run.
//
// One CTA owns a tile of the gradient. It iterates over the (batch, head) slices that read this
// tile of the bias, recomputes P and dP of each and keeps the sum of dS in registers. This needs no
// workspace and no atomics, but computes S and dP a second time.
//
// Each tile in shared memory has one buffer, which is reloaded as soon as its product is done.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/arch/thread.cuh>
#include <memeff/collective/copies/load_tile.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/kernels/backward/scores_sm80.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

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
      __syncthreads();  // Q, K and statistics have arrived; every thread has read the last bias
      modifiers.load(work.q_block(slice));
      commit_copies();
      Scores::template multiply<QueryTile, KeyTile>(shared, shared + kKeyOffset, scores);
      wait_copies<0>();
      __syncthreads();  // dO, V and bias have arrived; every thread has read Q and K
      if (has_next) work.load_scores(following, parity ^ 1);
      commit_copies();
      Scores::template multiply<OutTile, ValueTile>(shared + kOutOffset, shared + kValueOffset,
                                                    score_gradient);
      __syncthreads();  // every thread has read dO and V
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

}  // namespace memeff
