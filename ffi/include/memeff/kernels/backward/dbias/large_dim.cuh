// FmhaBackwardDbias for any head dim: one CTA owns a tile of the gradient of the bias, and
// streams the operands of every batch element and head that shares it through two buffers.
#pragma once

#include <memeff/kernels/backward/large_dim_scores.cuh>

namespace memeff {

template <class Config>
struct FmhaBackwardLargeDimDbias {
  using Scores = LargeDimScores<Config>;
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
    BroadcastSlices<Config> const members(params, tile.slice);

    auto mask_of = [&](int member) {
      return typename Scores::Mask(params.mask, shape, members.batch(member));
    };
    // The first member from `member` on that has a valid element in the tile.
    auto next_member = [&](int member) {
      int const key = tile.column / kTileKey;
      for (; member < members.count; ++member) {
        TileRange const visited = mask_of(member).key_tiles(tile.row, kTileQuery, kTileKey);
        if (visited.begin <= key && key < visited.end) break;
      }
      return member;
    };
    // use(scores, tile) of a member.
    auto visit = [&](int member, auto use) {
      int const batch = members.batch(member);
      int const head = members.head(member);
      auto const mask = mask_of(member);
      use(Scores(params, mask, batch, shared),
          LargeDimTile{batch, head, head / shape.group, tile.row, tile.column});
    };
    auto load_first_step = [&](int member, int parity, uint32_t buffer) {
      visit(member, [&](Scores const& scores, LargeDimTile const& scores_tile) {
        scores.load(scores_tile, 0, parity, buffer);
      });
    };

    auto sums = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(sums);
    StepRing ring(Scores::buffers_in(shared), Scores::kBufferBytes);
    int member = next_member(0);
    if (member < members.count) {
      ring.start([&](uint32_t buffer) { load_first_step(member, 0, buffer); });
    }
    for (int parity = 0; member < members.count; parity ^= 1) {
      int const following = next_member(member + 1);
      visit(member, [&](Scores const& scores, LargeDimTile const& scores_tile) {
        scores.template compute<false, false, true>(
            ring, scores_tile, parity,
            [&](uint32_t buffer) {
              if (following < members.count) load_first_step(following, parity ^ 1, buffer);
            },
            [&] { return BiasGradientAdder<decltype(sums)>{sums}; });
      });
      member = following;
    }
    tile.store_blocks(sums);
  }
};

}  // namespace memeff
