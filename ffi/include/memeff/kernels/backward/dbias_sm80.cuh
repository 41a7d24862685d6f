// After the backward: the gradient of a bias that is broadcast over batch elements or heads, the
// same in every run.
//
// One CTA owns a tile of the gradient. It visits the batch elements and heads that share it, one
// after the other, recomputes P and dP there and keeps the sum of dS in registers: no workspace and
// no atomics, for two products more than the other backward kernels need.
//
// Each tile in shared memory has one buffer, which is loaded again as soon as its product is done.
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/collective/load_tile.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

template <class Config>
struct FmhaBackwardSm80;

template <class Config>
struct FmhaBackwardDbias<Config, BackwardTiles<Config>> {
  using Element = typename Config::Element;
  using Main = FmhaBackwardSm80<Config>;
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
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kSharedBytes = QueryTile::kBytes + OutTile::kBytes + KeyTile::kBytes +
                                      ValueTile::kBytes + 2 * kStatisticsBytes +
                                      bias_tile_bytes<Config, typename Main::BiasRows>();

  CUTE_DEVICE static void run(BackwardParams const& params) {
    uint32_t const query_tile = shared_address(dynamic_shared());
    uint32_t const key_tile = query_tile + QueryTile::kBytes;
    uint32_t const out_tile = key_tile + KeyTile::kBytes;
    uint32_t const value_tile = out_tile + OutTile::kBytes;
    uint32_t const statistics_buffers = value_tile + ValueTile::kBytes;
    uint32_t const bias_tile = statistics_buffers + 2 * kStatisticsBytes;

    ProblemShape const& shape = params.shape;
    BiasGradientTile<Config> const tile(params, blockIdx.x);
    int const row = tile.row;
    int const column = tile.column;
    BiasMembers<Config> const members(params, tile.plane);

    auto mask_of = [&](int member) {
      return ScoreMask<Config, Grid>(params.mask, shape, members.batch(member));
    };
    // The tile of a member, alone.
    auto line_of = [&](int member) {
      int const key = column / kTileKey;
      return BlockMaskRow<Config::kBlockMask>(
          {key, key + 1}, params.block_mask, members.batch(member), members.head(member),
          row / kTileQuery, ceil_div(shape.key_length, kTileKey));
    };
    // The first member from `member` on that has a valid element in the tile.
    auto next_member = [&](int member) {
      for (; member < members.count; ++member) {
        TileRange const visited = mask_of(member).key_tiles(row, kTileQuery, kTileKey);
        int const key = column / kTileKey;
        if (visited.begin <= key && key < visited.end && !line_of(member).empty()) break;
      }
      return member;
    };
    // What S and the exponentials read, and what dP reads.
    auto load_scores = [&](int member, int parity) {
      int const batch = members.batch(member);
      int const head = members.head(member);
      auto const mask = mask_of(member);
      Origin const queries = query_origin<Config>(shape, batch);
      Origin const keys = key_origin<Config>(shape, batch);
      TileLoader<QueryTile, kThreads, Config::kAlignment>::copy(
          query_tile, row_pointer<Element>(params.query, queries.batch, queries.row + row, head),
          params.query.row_stride * sizeof(Element), mask.query_length - row, shape.head_dim);
      TileLoader<KeyTile, kThreads, Config::kAlignment>::copy(
          key_tile,
          key_row_pointer<Config>(params.key, keys.batch, keys.row + column, head / shape.group),
          params.key.row_stride * sizeof(Element), mask.key_length - column, shape.head_dim);
      char const* const statistics = reinterpret_cast<char const*>(
          params.row_statistics +
          Tiles::tile_index(params, batch, head, row / kTileQuery) * kTileQuery * 2);
      int const byte = thread_index() * 16;
      if (byte < kStatisticsBytes) {
        copy_async(statistics_buffers + parity * kStatisticsBytes + byte, statistics + byte, true);
      }
    };
    auto load_gradients = [&](int member) {
      int const batch = members.batch(member);
      int const head = members.head(member);
      auto const mask = mask_of(member);
      Origin const queries = query_origin<Config>(shape, batch);
      Origin const keys = key_origin<Config>(shape, batch);
      TileLoader<OutTile, kThreads, Config::kAlignment>::copy(
          out_tile,
          row_pointer<Element>(params.out_gradient, queries.batch, queries.row + row, head),
          params.out_gradient.row_stride * sizeof(Element), mask.query_length - row,
          shape.value_dim);
      TileLoader<ValueTile, kThreads, Config::kAlignment>::copy(
          value_tile,
          key_row_pointer<Config>(params.value, keys.batch, keys.row + column, head / shape.group),
          params.value.row_stride * sizeof(Element), mask.key_length - column, shape.value_dim);
    };

    auto load_bias = [&](int member) {
      int const batch = members.batch(member);
      auto const mask = mask_of(member);
      Main::BiasRows::copy(
          bias_tile, thread_index(),
          Main::bias_source(params, batch, {members.head(member), row, row / kTileQuery}, column),
          Main::bias_row_bytes(params), mask.query_length - row, mask.key_length - column);
    };

    auto sums = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(sums);
    int member = next_member(0);
    if (member < members.count) {
      load_scores(member, 0);
      commit_copies();
      load_gradients(member);
      commit_copies();
    }
    for (int parity = 0; member < members.count; parity ^= 1) {
      int const following = next_member(member + 1);
      bool const has_next = following < members.count;
      auto scores = Grid::make_accumulators();          // (4, MMA_M, MMA_N)
      auto score_gradient = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
      cute::clear(scores);
      cute::clear(score_gradient);

      wait_copies<1>();
      __syncthreads();  // query, key and statistics are here; nobody reads the last bias
      load_bias(member);
      commit_copies();
      warp_gemm<Element, Config::kHeadDim / Main::kStep, Main::kReadAhead>(
          scores, LeftOperand<QueryTile, Contiguous::k, Grid::kRowBlocks>(query_tile, Grid::row()),
          RightOperand<KeyTile, Contiguous::k, Grid::kColumnBlocks>(key_tile, Grid::column()));
      wait_copies<0>();
      __syncthreads();  // dO, value and bias are here; nobody reads query and key
      if (has_next) load_scores(following, parity ^ 1);
      commit_copies();
      warp_gemm<Element, Config::kValueDim / Main::kStep, Main::kReadAhead>(
          score_gradient,
          LeftOperand<OutTile, Contiguous::k, Grid::kRowBlocks>(out_tile, Grid::row()),
          RightOperand<ValueTile, Contiguous::k, Grid::kColumnBlocks>(value_tile, Grid::column()));
      __syncthreads();  // nobody reads dO and value
      if (has_next) load_gradients(following);
      commit_copies();

      int const batch = members.batch(member);
      typename Main::Visit const visit = {members.head(member), row, row / kTileQuery,
                                          line_of(member).partial(column / kTileKey)};
      Main::probabilities(
          params, statistics_buffers + parity * kStatisticsBytes, batch, visit, mask_of(member),
          column, scores, score_gradient,
          [&](auto& x) { Main::add_bias_tile(params, bias_tile, batch, visit, column, x); },
          [&] { return BiasGradientAdder<decltype(sums)>{sums}; });
      member = following;
    }

    tile.store_blocks(sums);
  }
};

}  // namespace memeff
