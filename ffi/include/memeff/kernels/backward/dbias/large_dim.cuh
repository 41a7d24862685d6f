// FmhaBackwardDbias for any head dim: one CTA owns a tile of the bias gradient. For every (batch,
// head) slice that reads this tile of the bias, it streams the operands through two buffers.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/kernels/backward/large_dim/scores_sm80.cuh>

namespace memeff {

// The entry point that the generated source instantiates if the gradient of a broadcast bias must
// be deterministic.
template <class Config>
struct FmhaBackwardLargeDimDbias {
  using Scores = LargeDimScores<WithoutFunctionGradient<Config>>;
  using Grid = typename Scores::ScoreGrid;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;
  static constexpr int kSharedBytes = Scores::kSharedBytes;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    uint32_t const shared = shared_address(dynamic_shared());
    ProblemShape const& shape = params.shape;
    BiasGradientTile<Config> const tile(params, blockIdx.x);
    BroadcastSlices<Config> const slices(params, tile.slice);

    auto mask_of = [&](int slice) {
      return typename Scores::Mask(params.mask, shape, slices.batch(slice));
    };
    // The row of the block mask, restricted to this tile.
    auto block_of = [&](int slice) {
      int const key = tile.column / kTileKey;
      return BlockMaskRow<Config::kBlockMask>(
          {key, key + 1}, params.block_mask, slices.batch(slice), slices.head(slice),
          tile.row / kTileQuery, ceil_div(shape.key_length, kTileKey));
    };
    // The first slice from `slice` on that has a valid element in the tile.
    auto next_slice = [&](int slice) {
      int const key = tile.column / kTileKey;
      for (; slice < slices.count; ++slice) {
        TileRange const blocks = mask_of(slice).key_tiles(tile.row, kTileQuery, kTileKey);
        if (blocks.begin <= key && key < blocks.end && !block_of(slice).empty()) break;
      }
      return slice;
    };
    // Calls use(scores, tile) for a slice.
    auto with_scores = [&](int slice, auto use) {
      int const batch = slices.batch(slice);
      int const head = slices.head(slice);
      auto const mask = mask_of(slice);
      use(Scores(params, mask, batch, head / shape.group, shared),
          LargeDimTile{batch, head, tile.row, tile.column,
                       block_of(slice).partial(tile.column / kTileKey)});
    };
    auto load_first_step = [&](int slice, int parity, uint32_t buffer) {
      with_scores(slice, [&](Scores const& scores, LargeDimTile const& scores_tile) {
        scores.load(scores_tile, 0, parity, buffer);
      });
    };

    auto sums = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(sums);
    StepRing ring(Scores::buffers_in(shared), Scores::kBufferBytes);
    int slice = next_slice(0);
    if (slice < slices.count) {
      ring.start([&](uint32_t buffer) { load_first_step(slice, 0, buffer); });
    }
    for (int parity = 0; slice < slices.count; parity ^= 1) {
      int const following = next_slice(slice + 1);
      with_scores(slice, [&](Scores const& scores, LargeDimTile const& scores_tile) {
        scores.template compute<false, false, true>(
            ring, scores_tile, parity,
            [&](uint32_t buffer) {
              if (following < slices.count) load_first_step(following, parity ^ 1, buffer);
            },
            [&] { return BiasGradientAdder<decltype(sums)>{sums}; });
      });
      slice = following;
    }
    tile.store_blocks(sums);
  }
};

}  // namespace memeff
