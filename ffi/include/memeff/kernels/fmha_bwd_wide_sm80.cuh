// Attention backward for any head dim, in two kernels that own what they write:
//
//   FmhaBackwardWideQuery   one CTA a tile of queries: dQ += dS K for every tile of keys
//   FmhaBackwardWideKey     one CTA a tile of keys: dV += P^T dO and dK += dS^T Q for every tile of
//                           queries, and the gradient of the bias
//
// Both compute S = Q K^T and dP = dO V^T in steps of 128 bytes of rows. That is two products more
// than the five that one kernel would need, but no gradient is added to by several CTAs: f32 sums
// in global memory have one reader and writer, and every run adds in one order.
#pragma once

#include <memeff/bias/direct.cuh>
#include <memeff/collective/chunked_product.cuh>
#include <memeff/kernels/fmha_bwd_sm80.cuh>

namespace memeff {

// The statistics of the rows; the sums need no zeros.
template <class Config>
struct FmhaBackwardWidePreprocess : FmhaBackwardPreprocess<WithoutQueryGradient<Config>> {};

template <class Config>
using FmhaBackwardWideBias = FmhaBackwardBias<Config>;

// A tile of scores of one query head.
struct WideTile {
  int batch;
  int query_head;
  int key_head;
  int row;
  int column;
};

// P and dS of a tile, for both kernels.
template <class Config>
struct WideScores {
  using Element = typename Config::Element;
  using Narrow = FmhaBackwardSm80<Config>;
  using Tiles = BackwardTiles<Config>;
  using ScoreTile = typename Tiles::ScoreTile;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using Mask = ScoreMask<Config, ScoreGrid>;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kStep = kStreamStep<Element>;  // columns of Q and K, then of dO and V
  using QueryStep = typename Tiles::template Tile<kTileQuery, kStep>;
  using KeyStep = typename Tiles::template Tile<kTileKey, kStep>;
  using QueryProduct = ChunkedProduct<Config, ScoreTile, Contiguous::k>;    // dQ
  using KeyProduct = ChunkedProduct<Config, ScoreTile, Contiguous::outer>;  // dK, dV

  static constexpr int kBufferBytes =
      cute::max(QueryStep::kBytes + KeyStep::kBytes, KeyProduct::StepTile::kBytes);
  static constexpr int kStatisticsBytes = Narrow::kStatisticsBytes;
  static constexpr int kSharedBytes =
      2 * ScoreTile::kBytes + 2 * kBufferBytes + 2 * kStatisticsBytes;

  BackwardParams const& params;
  Mask const& mask;
  Origin queries;
  Origin keys;
  uint32_t probability_tile;
  uint32_t score_tile;
  uint32_t buffers;
  uint32_t statistics_buffers;

  CUTE_DEVICE WideScores(BackwardParams const& params, Mask const& mask, int batch, uint32_t shared)
      : params(params),
        mask(mask),
        queries(query_origin<Config>(params.shape, batch)),
        keys(key_origin<Config>(params.shape, batch)),
        probability_tile(shared),
        score_tile(probability_tile + ScoreTile::kBytes),
        buffers(score_tile + ScoreTile::kBytes),
        statistics_buffers(buffers + 2 * kBufferBytes) {}

  CUTE_DEVICE static int steps(int columns) { return ceil_div(columns, kStep); }

  // Step `step` of the operands, and with the first one the statistics of the rows. `parity` is
  // that of the visit: statistics arrive while those of the visit before are still read.
  CUTE_DEVICE void load(WideTile const& tile, int step, int parity, uint32_t buffer) const {
    int const head_steps = steps(params.shape.head_dim);
    if (step < head_steps) {
      load_pair(tile, params.query, params.key, params.shape.head_dim, step * kStep, buffer);
    } else {
      load_pair(tile, params.out_gradient, params.value, params.shape.value_dim,
                (step - head_steps) * kStep, buffer);
    }
    int const byte = thread_index() * 16;
    if (step == 0 && byte < kStatisticsBytes) {
      char const* const statistics = reinterpret_cast<char const*>(
          params.row_statistics +
          (Tiles::tile_index(params, tile.batch, tile.query_head, 0) * kTileQuery + tile.row) * 2);
      copy_async(statistics_buffers + parity * kStatisticsBytes + byte, statistics + byte, true);
    }
  }

  // Leaves P (after dropout) and dS of a tile, rounded, in the shared tiles that are asked for.
  template <bool kProbabilities, bool kScoreGradients, class LoadNext>
  CUTE_DEVICE void compute(StepRing& ring, WideTile const& tile, int parity,
                           LoadNext load_next) const {
    constexpr bool kGradients = kScoreGradients || Config::kBiasGradient != BiasGradient::none;
    int const head_steps = steps(params.shape.head_dim);
    int const value_steps = kGradients ? steps(params.shape.value_dim) : 0;
    auto scores = ScoreGrid::make_accumulators();          // (4, MMA_M, MMA_N)
    auto score_gradient = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(scores);
    cute::clear(score_gradient);
    ring.run(
        head_steps + value_steps,
        [&](int step, uint32_t buffer) { load(tile, step, parity, buffer); },
        [&](int step, uint32_t buffer) {
          LeftOperand<QueryStep, Contiguous::k, ScoreGrid::kRowBlocks> const left(buffer,
                                                                                  ScoreGrid::row());
          RightOperand<KeyStep, Contiguous::k, ScoreGrid::kColumnBlocks> const right(
              buffer + QueryStep::kBytes, ScoreGrid::column());
          if (!kGradients || step < head_steps) {
            warp_gemm<Element, kStep / kStepElements<Element>>(scores, left, right);
          } else {
            warp_gemm<Element, kStep / kStepElements<Element>>(score_gradient, left, right);
          }
        },
        load_next);
    auto add_bias_to = [&](auto& x) {
      add_bias_elements<Config, ScoreGrid>(x, params.bias, tile.batch, tile.query_head, tile.row,
                                           tile.column, mask.query_length - tile.row,
                                           mask.key_length - tile.column, params.scale.bias_scale);
    };
    Narrow::probabilities(params, statistics_buffers + parity * kStatisticsBytes, tile.batch,
                          {tile.query_head, tile.row, tile.row / kTileQuery}, mask, tile.column,
                          scores, score_gradient, add_bias_to);
    if constexpr (kProbabilities) {
      store_accumulators<Element, ScoreTile, ScoreGrid>(probability_tile, scores);
    }
    if constexpr (kScoreGradients) {
      store_accumulators<Element, ScoreTile, ScoreGrid>(score_tile, score_gradient);
    }
  }

  // The rows of one head from `row` on and below `length`: what a product reads, or it writes.
  template <class Rows>
  CUTE_DEVICE static Rows rows(TensorView const& tensor, Origin const& origin, int row, int head,
                               int length, int columns) {
    return {row_pointer<Element>(tensor, origin.batch, origin.row + row, head),
            tensor.row_stride * (long long)sizeof(Element), length - row, columns};
  }

 private:
  CUTE_DEVICE void load_pair(WideTile const& tile, TensorView const& left, TensorView const& right,
                             int columns, int first, uint32_t buffer) const {
    TileLoader<QueryStep, kThreads, Config::kAlignment>::copy(
        buffer,
        row_pointer<Element>(left, queries.batch, queries.row + tile.row, tile.query_head) +
            first * int(sizeof(Element)),
        left.row_stride * sizeof(Element), mask.query_length - tile.row, columns - first);
    TileLoader<KeyStep, kThreads, Config::kAlignment>::copy(
        buffer + QueryStep::kBytes,
        key_row_pointer<Config>(right, keys.batch, keys.row + tile.column, tile.key_head) +
            first * int(sizeof(Element)),
        right.row_stride * sizeof(Element), mask.key_length - tile.column, columns - first);
  }
};

// The gradient of the bias is the other kernel's.
template <class Config>
struct WithoutBiasGradient : Config {
  static constexpr auto kBiasGradient = BiasGradient::none;
};

template <class Config>
struct FmhaBackwardWideQuery {
  using Element = typename Config::Element;
  using Scores = WideScores<WithoutBiasGradient<Config>>;
  using Product = typename Scores::QueryProduct;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;
  static constexpr int kSharedBytes = Scores::kSharedBytes;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    ProblemShape const& shape = params.shape;
    WorkItem const item = WorkItem::of_block(blockIdx.x, params.query_tiles, shape.query_heads);
    int const row = item.tile * kTileQuery;
    int const key_head = item.head / shape.group;
    typename Scores::Mask const mask(params.mask, shape, item.batch);
    int length = shape.query_length;
    if constexpr (Config::kVarlen) {
      length = mask.query_length;
      Gap::of_queries(shape, item.batch, length)
          .template clear<Element, kThreads>(params.query_gradient, item.head, shape.head_dim,
                                             item.tile, params.query_tiles);
      if (row >= length) return;
    }
    TileRange const tiles = mask.key_tiles(row, kTileQuery, kTileKey);
    Scores const scores(params, mask, item.batch, shared_address(shared));
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
      return WideTile{item.batch, item.head, key_head, row, tile * kTileKey};
    };
    Origin const keys = {element_of<Config>(params.key, scores.keys.batch), scores.keys.row};
    StepRing ring(scores.buffers, Scores::kBufferBytes);
    ring.start([&](uint32_t buffer) { scores.load(tile_at(tiles.begin), 0, 0, buffer); });
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      int const parity = (tile - tiles.begin) % 2;
      auto const product = Scores::template rows<Product>(
          params.key, keys, tile * kTileKey, key_head, mask.key_length, shape.head_dim);
      scores.template compute<false, true>(ring, tile_at(tile), parity,
                                           [&](uint32_t buffer) { product.load(0, buffer); });
      product.run(
          ring, scores.score_tile, sums, tile == tiles.begin, tile + 1 == tiles.end, target,
          [](int) { return 1.0f; }, [&](int) { return params.scale.gradient_scale; },
          [&](uint32_t buffer) {
            if (tile + 1 < tiles.end) scores.load(tile_at(tile + 1), 0, 1 - parity, buffer);
          });
    }
  }
};

template <class Config>
struct FmhaBackwardWideKey {
  using Scores = WideScores<Config>;
  using Product = typename Scores::KeyProduct;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;
  static constexpr int kSharedBytes = Scores::kSharedBytes;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    ProblemShape const& shape = params.shape;
    int const key_tiles = ceil_div(shape.key_length, kTileKey);
    WorkItem const item = WorkItem::of_block(blockIdx.x, key_tiles, shape.key_heads);
    int const column = item.tile * kTileKey;
    typename Scores::Mask const mask(params.mask, shape, item.batch);
    TileRange const tiles = mask.query_tiles(column, kTileKey, kTileQuery);
    int const head_visits = tiles.end - tiles.begin;
    int const visits = head_visits * shape.group;
    clear_unvisited<Config, kThreads>(params, item, tiles);
    int length = shape.key_length;
    if constexpr (Config::kVarlen) {
      length = mask.key_length;
      clear_key_gap<Config, kThreads>(params, item, length, key_tiles);
      if (column >= length) return;
    }

    Scores const scores(params, mask, item.batch, shared_address(shared));
    auto const key_target = Scores::template rows<ChunkedTarget>(
        params.key_gradient, scores.keys, column, item.head, length, shape.head_dim);
    auto const value_target = Scores::template rows<ChunkedTarget>(
        params.value_gradient, scores.keys, column, item.head, length, shape.value_dim);
    if (visits <= 0) {
      if constexpr (Config::kKeyGradient) Product::store_zeros(key_target);
      if constexpr (Config::kValueGradient) Product::store_zeros(value_target);
      return;
    }

    long long const tile_index =
        key_tile_index<Config>(shape, key_tiles, item.batch, item.head, item.tile);
    auto sums_of = [&](float* sums, int columns) {
      return sums + tile_index * ceil_div(columns, Product::kChunk) * Product::kChunkFloats;
    };
    auto tile_at = [&](int index) {
      int const head_index = shape.group == 1 ? 0 : index / head_visits;
      int const tile = tiles.begin + index - head_index * head_visits;
      return WideTile{item.batch, item.head * shape.group + head_index, item.head,
                      tile * kTileQuery, column};
    };
    StepRing ring(scores.buffers, Scores::kBufferBytes);
    ring.start([&](uint32_t buffer) { scores.load(tile_at(0), 0, 0, buffer); });
    for (int index = 0; index < visits; ++index) {
      bool const first = index == 0;
      bool const last = index + 1 == visits;
      int const parity = index % 2;
      WideTile const tile = tile_at(index);
      auto const value_product =
          Scores::template rows<Product>(params.out_gradient, scores.queries, tile.row,
                                         tile.query_head, mask.query_length, shape.value_dim);
      auto const key_product =
          Scores::template rows<Product>(params.query, scores.queries, tile.row, tile.query_head,
                                         mask.query_length, shape.head_dim);
      auto load_next_tile = [&](uint32_t buffer) {
        if (!last) scores.load(tile_at(index + 1), 0, 1 - parity, buffer);
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
            first, last, value_target, keep,
            [&](int) { return Scores::Narrow::kept_scale(params); }, load_after_value);
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
