// Attention backward for any head dim, in two kernels, each of which owns the gradients it writes:
//
//   FmhaBackwardLargeDimDq    one CTA per Q block: dQ += dS K for every KV block
//   FmhaBackwardLargeDimDkdv  one CTA per KV block: dV += P^T dO and dK += dS^T Q for every
//                             Q block, and the gradient of the bias, unless it has a kernel of its
//                             own (FmhaBackwardLargeDimDbias)
//
// Both compute S = Q K^T and dP = dO V^T in steps of 128 bytes of rows. Two kernels need seven
// products instead of five, but no two CTAs add to the same gradient: the f32 sums in global memory
// have one reader and writer, and every run adds in the same order.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/postprocess.cuh>
#include <kernels/common/preprocess.cuh>
#include <kernels/sm80/delta.cuh>
#include <kernels/sm80/large_dim_scores.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>

namespace memeff {

// FmhaBackwardDbias for any head dim: one CTA owns a tile of the bias gradient. For every (batch,
// head) slice that reads this tile of the bias, it streams the operands through two buffers.

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

// Computes the statistics of the rows. It zeroes no sums, because the first addition to a sum
// overwrites it.
template <class Config>
struct FmhaBackwardLargeDimPreprocess : FmhaBackwardPreprocess<WithoutQueryGradient<Config>> {};

template <class Config>
using FmhaBackwardLargeDimDbiasPostprocess = FmhaBackwardDbiasPostprocess<Config>;

// The kernel that owns queries.
template <class Config>
struct FmhaBackwardLargeDimDq {
  using Element = typename Config::Element;
  using Scores = LargeDimScores<WithoutFunctionGradient<WithoutBiasGradient<Config>>>;
  using Product = typename Scores::QueryProduct;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;
  static constexpr int kSharedBytes = Scores::kSharedBytes;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    ProblemShape const& shape = params.shape;
    GridTiles<Config, GridRows::queries, kTileQuery> const grid = {shape};
    WorkItem const item = grid.of_block(blockIdx.x);
    int const row = item.tile * kTileQuery;
    typename Scores::Mask const mask(params.mask, shape, item.batch);
    int length = shape.query_length;
    if constexpr (Config::kPacked) {
      length = mask.query_length;
      clear_query_gap<Config, kThreads>(params, item, length, grid.of_batch_index(item.batch));
      if (row >= length) return;
    }
    BlockMaskRow<Config::kBlockMask> const tiles(mask.key_tiles(row, kTileQuery, kTileKey),
                                                 params.block_mask, item.batch, item.head,
                                                 item.tile, ceil_div(shape.key_length, kTileKey));
    Scores const scores(params, mask, item.batch, item.head / shape.group, shared_address(shared));
    auto const target = Scores::template rows<ChunkedTarget>(
        params.query_gradient, scores.queries, row, item.head, length, shape.head_dim);
    if (tiles.begin >= tiles.end) {
      Product::store_zeros(target);
      return;
    }
    float* const sums =
        params.query_gradient_sum +
        BackwardTiles<Config>::tile_index(params, item.batch, item.head, item.tile) *
            ceil_div(shape.head_dim, Product::kChunk) * Product::kChunkFloats;
    auto tile_at = [&](int tile) {
      return LargeDimTile{item.batch, item.head, row, tile * kTileKey, tiles.partial(tile)};
    };
    StepRing ring(scores.buffers, Scores::kBufferBytes);
    ring.start([&](uint32_t buffer) { scores.load(tile_at(tiles.begin), 0, 0, buffer); });
    int number = 0;
    for (int tile = tiles.begin; tile < tiles.end; tile = tiles.after(tile), ++number) {
      int const parity = (Config::kBlockMask ? number : tile - tiles.begin) % 2;
      Product const product = scores.keys(tile * kTileKey);
      scores.template compute<false, true>(ring, tile_at(tile), parity,
                                           [&](uint32_t buffer) { product.load(0, buffer); });
      product.run(
          ring, scores.score_tile, sums, tile == tiles.begin, tiles.after(tile) == tiles.end,
          target, [](int) { return 1.0f; }, [&](int) { return params.scale.gradient_scale; },
          [&](uint32_t buffer) {
            if (tiles.after(tile) < tiles.end) {
              scores.load(tile_at(tiles.after(tile)), 0, 1 - parity, buffer);
            }
          });
    }
  }
};

// The kernel that owns keys.
template <class Config>
struct FmhaBackwardLargeDimDkdv {
  using Scores = LargeDimScores<Config>;
  using Product = typename Scores::KeyProduct;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;
  static constexpr int kSharedBytes = Scores::kSharedBytes;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    ProblemShape const& shape = params.shape;
    GridTiles<Config, GridRows::keys, kTileKey> const grid = {shape};
    WorkItem const item = grid.of_block(blockIdx.x);
    int const column = item.tile * kTileKey;
    typename Scores::Mask const mask(params.mask, shape, item.batch);
    TileRange const tiles = mask.query_tiles(column, kTileKey, kTileQuery);
    QTiles const q_tiles = {item, tiles, tiles.end - tiles.begin, shape.group, column};
    int count = q_tiles.head_blocks * shape.group;
    clear_skipped<Config, kThreads>(params, item, tiles);
    int length = shape.key_length;
    if constexpr (Config::kPacked) {
      length = mask.key_length;
      clear_key_gap<Config, kThreads>(params, item, length, grid.of_batch_index(item.batch));
      if (column >= length) return;
    }

    Scores const scores(params, mask, item.batch, item.head, shared_address(shared));
    auto const key_target = Scores::template rows<ChunkedTarget>(
        params.key_gradient, scores.source.origin, column, item.head, length, shape.head_dim);
    auto const value_target = Scores::template rows<ChunkedTarget>(
        params.value_gradient, scores.source.origin, column, item.head, length, shape.value_dim);
    int const begin = q_tiles.after(params, -1);
    if constexpr (Config::kBlockMask) count = begin < count ? count : 0;
    if (count <= 0) {
      if constexpr (Config::kKeyGradient) Product::store_zeros(key_target);
      if constexpr (Config::kValueGradient) Product::store_zeros(value_target);
      return;
    }

    long long const tile_index =
        key_tile_index<Config>(shape, grid.of_slice(), item.batch, item.head, item.tile);
    add_q_blocks(params, scores, mask.query_length, q_tiles, begin, count, tile_index, key_target,
                 value_target);
  }

 private:
  // Enumerates the Q blocks of all query heads of a KV block, as tiles of scores. Indices also
  // count blocks that a block mask skips, so without a mask they are a plain counter.
  struct QTiles {
    WorkItem const& item;
    TileRange const& tiles;
    int head_blocks;
    int group;
    int column;

    CUTE_DEVICE LargeDimTile at(BackwardParams const& params, int index) const {
      int const head_index = group == 1 ? 0 : index / head_blocks;
      int const tile = tiles.begin + index - head_index * head_blocks;
      int const head = item.head * group + head_index;
      return {item.batch, head, tile * kTileQuery, column, row_of(params, head).partial(tile)};
    }

    // The next tile that has a valid element, or the number of all tiles.
    CUTE_DEVICE int after(BackwardParams const& params, int index) const {
      ++index;
      if constexpr (Config::kBlockMask) {
        if (head_blocks <= 0) return index;
        for (int head_index = index / head_blocks; head_index < group; ++head_index) {
          auto const blocks = row_of(params, item.head * group + head_index);
          int const first = head_index * head_blocks - tiles.begin;  // the index of tile 0
          int const tile = index - first;
          if (!blocks.empty() && tile < blocks.end) {
            return first + (tile <= blocks.begin ? blocks.begin : blocks.after(tile - 1));
          }
          index = first + tiles.end;
        }
      }
      return index;
    }

    CUTE_DEVICE BlockMaskRow<Config::kBlockMask> row_of(BackwardParams const& params,
                                                        int head) const {
      int const query_tiles = ceil_div(params.shape.query_length, kTileQuery);
      return row_of_q_blocks<Config>(params, item, tiles, query_tiles, head);
    }
  };

  // The main loop: adds to dK and dV for the Q blocks from index `begin` on. The last one scales
  // the gradients and stores them. The sums in global memory are those of tile `tile_index`.
  CUTE_DEVICE static void add_q_blocks(BackwardParams const& params, Scores const& scores,
                                       int query_length, QTiles const& q_tiles, int begin,
                                       int count, long long tile_index,
                                       ChunkedTarget const& key_target,
                                       ChunkedTarget const& value_target) {
    ProblemShape const& shape = params.shape;
    auto sums_of = [&](float* sums, int columns) {
      return sums + tile_index * ceil_div(columns, Product::kChunk) * Product::kChunkFloats;
    };
    StepRing ring(scores.buffers, Scores::kBufferBytes);
    ring.start([&](uint32_t buffer) { scores.load(q_tiles.at(params, begin), 0, 0, buffer); });
    int number = 0;
    for (int index = begin; index < count; index = q_tiles.after(params, index), ++number) {
      bool const first = index == begin;
      bool const last = q_tiles.after(params, index) == count;
      int const parity = (Config::kBlockMask ? number : index) % 2;
      LargeDimTile const tile = q_tiles.at(params, index);
      auto const value_product =
          Scores::template rows<Product>(params.out_gradient, scores.queries, tile.row,
                                         tile.query_head, query_length, shape.value_dim);
      auto const key_product = Scores::template rows<Product>(
          params.query, scores.queries, tile.row, tile.query_head, query_length, shape.head_dim);
      auto load_next_tile = [&](uint32_t buffer) {
        if (!last)
          scores.load(q_tiles.at(params, q_tiles.after(params, index)), 0, 1 - parity, buffer);
      };
      auto load_after_value = [&](uint32_t buffer) {
        if constexpr (Config::kKeyGradient) {
          key_product.load(0, buffer);
        } else {
          load_next_tile(buffer);
        }
      };
      scores.template compute<Config::kValueGradient, Config::kKeyGradient>(
          ring, tile, parity, [&](uint32_t buffer) {
            if constexpr (Config::kValueGradient) {
              value_product.load(0, buffer);
            } else {
              load_after_value(buffer);
            }
          });
      auto keep = [](int) { return 1.0f; };
      if constexpr (Config::kValueGradient) {
        value_product.run(
            ring, scores.probability_tile, sums_of(params.value_gradient_sum, shape.value_dim),
            first, last, value_target, keep, [&](int) { return probability_scale<Config>(params); },
            load_after_value);
      }
      if constexpr (Config::kKeyGradient) {
        key_product.run(
            ring, scores.score_tile, sums_of(params.key_gradient_sum, shape.head_dim), first, last,
            key_target, keep, [&](int) { return params.scale.gradient_scale; }, load_next_tile);
      }
    }
  }
};

}  // namespace memeff
