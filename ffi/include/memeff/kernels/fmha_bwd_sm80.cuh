// Attention backward for GPUs with mma.sync and cp.async: keys are split over the grid.
//
// One CTA owns a tile of keys of one key head. It visits the query tiles that attend to it, for
// every query head of the group, recomputes the probabilities, keeps dk and dv in registers (so
// they need no atomics and are the same in every run) and adds its part of dq to f32 sums in global
// memory:
//
//   S = Q K^T    dP = dO V^T    P = exp2(S - lse)    dS = P (dP - delta)
//   dV += P^T dO    dQ = dS K    dK += dS^T Q
//
// With dropout, dV reads the kept P, and dP is the kept dP; both times 256 / (256 - T).
//
// The next query tile arrives while this one is worked on (two buffers, or one where shared memory
// is short, and then it is waited for); dO has one buffer and is loaded again as soon as dV no
// longer reads it. Gradients that nobody asked for
// (Config::kQueryGradient, kKeyGradient, kValueGradient, kBiasGradient) cost neither products nor
// memory. Config::kOrdersQueries puts the additions to dq in an order (schedule/dq_semaphore.cuh).
#pragma once

#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/load_tile.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/backward/dbias_postprocess.cuh>
#include <memeff/kernels/backward/dbias_sm80.cuh>
#include <memeff/kernels/backward/postprocess.cuh>
#include <memeff/kernels/backward/preprocess.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/score/bias/add.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/dropout.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

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
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kThreads = Tiles::kThreads;
  // Blocks of four warps share an SM and hide each other's reads; eight warps alone read further
  // ahead.
  static constexpr int kReadAhead = Config::kWarps == 4 ? 1 : 2;
  static constexpr int kStep = kStepElements<Element>;
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr bool kBiasTile = has_bias_tile<Config>();
  using BiasRows = BiasTile<Config, kTileQuery, kTileKey, kThreads>;
  static constexpr int kBuffers = Config::kQueryBuffers;
  static constexpr int kSharedBytes =
      KeyTile::kBytes + ValueTile::kBytes + kBuffers * (QueryTile::kBytes + kStatisticsBytes) +
      OutTile::kBytes + 2 * ScoreTile::kBytes + bias_tile_bytes<Config, BiasRows>();

  // dS is needed by dq and dk through shared memory, and is the gradient of the bias; where all of
  // them are frozen, dv needs P alone.
  using BiasWriter = BiasGradientWriter<Config>;
  static constexpr bool kStoreScoreGradient =
      Config::kQueryGradient || Config::kKeyGradient || BiasWriter::kFromTile;
  static constexpr bool kScoreGradient =
      kStoreScoreGradient || (Config::kBiasGradient != BiasGradient::none &&
                              Config::kBiasGradient != BiasGradient::dbias_kernel);

  using QueryOrder =
      cute::conditional_t<Config::kOrdersQueries, DqSemaphore<Config>, AnyOrder<Config>>;

  using Visit = QBlock;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    uint32_t const key_tile = shared_address(shared);
    uint32_t const value_tile = key_tile + KeyTile::kBytes;
    uint32_t const query_buffers = value_tile + ValueTile::kBytes;
    uint32_t const out_tile = query_buffers + kBuffers * QueryTile::kBytes;
    uint32_t const probability_tile = out_tile + OutTile::kBytes;
    uint32_t const score_tile = probability_tile + ScoreTile::kBytes;
    uint32_t const statistics_buffers = score_tile + ScoreTile::kBytes;
    uint32_t const bias_tile = statistics_buffers + kBuffers * kStatisticsBytes;

    ProblemShape const& shape = params.shape;
    int const key_tiles = ceil_div(shape.key_length, kTileKey);
    QueryOrder order(params, key_tiles, reinterpret_cast<int*>(shared));
    WorkItem const item = order.item(params, key_tiles);
    int const column = item.tile * kTileKey;
    ScoreMask<Config, ScoreGrid> const mask(params.mask, shape, item.batch);
    TileRange const tiles = mask.query_tiles(column, kTileKey, kTileQuery);
    QBlocks<kTileQuery, Config::kBlockMask> const visits(shape, params.block_mask, item, tiles);
    Origin const queries = query_origin<Config>(shape, item.batch);
    Origin const keys = key_origin<Config>(shape, item.batch);

    // Where a visit stands among all that the CTAs of a key head may have, in the same order.
    auto position = [&](Visit const& visit) {
      return (visit.head - item.head * shape.group) * params.query_tiles + visit.tile;
    };
    auto publish = [&](int done) {
      if (threadIdx.x == 0) order.publish(done);
    };
    // Queries and the statistics of their rows, into one of the buffers.
    auto load_query = [&](Visit const& visit, int buffer) {
      TileLoader<QueryTile, kThreads, Config::kAlignment>::copy(
          query_buffers + buffer * QueryTile::kBytes,
          row_pointer<Element>(params.query, queries.batch, queries.row + visit.row, visit.head),
          params.query.row_stride * sizeof(Element), mask.query_length - visit.row, shape.head_dim);
      char const* const statistics = reinterpret_cast<char const*>(
          params.row_statistics +
          Tiles::tile_index(params, item.batch, visit.head, visit.tile) * kTileQuery * 2);
      int const byte = thread_index() * 16;
      if (byte < kStatisticsBytes) {
        copy_async(statistics_buffers + buffer * kStatisticsBytes + byte, statistics + byte, true);
      }
    };
    auto load_out_gradient = [&](Visit const& visit) {
      TileLoader<OutTile, kThreads, Config::kAlignment>::copy(
          out_tile,
          row_pointer<Element>(params.out_gradient, queries.batch, queries.row + visit.row,
                               visit.head),
          params.out_gradient.row_stride * sizeof(Element), mask.query_length - visit.row,
          shape.value_dim);
    };

    auto load_bias = [&](Visit const& visit) {
      if constexpr (kBiasTile) {
        BiasRows::copy(bias_tile, thread_index(), bias_source(params, item.batch, visit, column),
                       bias_row_bytes(params), mask.query_length - visit.row,
                       mask.key_length - column);
      }
    };

    clear_skipped<Config, kThreads>(params, item, tiles);
    if constexpr (Config::kVarlen) {
      clear_key_gap<Config, kThreads>(params, item, mask.key_length,
                                      ceil_div(shape.key_length, kTileKey));
      if (column >= mask.key_length) {
        publish(kFinished);
        return;
      }
    }

    auto key_gradient = KeyGrid::make_accumulators();      // (4, MMA_M, MMA_N)
    auto value_gradient = ValueGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(key_gradient);
    cute::clear(value_gradient);

    if (auto const first = visits.first(); visits.has(first)) {
      int const column_bound = mask.key_length - column;
      TileLoader<KeyTile, kThreads, Config::kAlignment>::copy(
          key_tile, key_row_pointer<Config>(params.key, keys.batch, keys.row + column, item.head),
          params.key.row_stride * sizeof(Element), column_bound, shape.head_dim);
      TileLoader<ValueTile, kThreads, Config::kAlignment>::copy(
          value_tile,
          key_row_pointer<Config>(params.value, keys.batch, keys.row + column, item.head),
          params.value.row_stride * sizeof(Element), column_bound, shape.value_dim);
      load_query(visits.at(first), 0);
      load_out_gradient(visits.at(first));
      load_bias(visits.at(first));
      commit_copies();
    }

    for (auto cursor = visits.first(); visits.has(cursor); cursor = visits.after(cursor)) {
      Visit const visit = visits.at(cursor);
      uint32_t const query_tile =
          query_buffers + visits.number(cursor) % kBuffers * QueryTile::kBytes;
      bool const has_next = visits.has(visits.after(cursor));

      wait_copies<0>();
      __syncthreads();  // this visit's tiles are here; nobody reads the other query buffer or dS
      publish(position(visit));
      if (kBuffers == 2 && has_next) {
        load_query(visits.at(visits.after(cursor)), (visits.number(cursor) + 1) % kBuffers);
        commit_copies();
      }

      auto scores = ScoreGrid::make_accumulators();          // (4, MMA_M, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
      cute::clear(scores);
      cute::clear(score_gradient);
      warp_gemm<Element, Config::kHeadDim / kStep, kReadAhead>(
          scores,
          LeftOperand<QueryTile, Contiguous::k, ScoreGrid::kRowBlocks>(query_tile,
                                                                       ScoreGrid::row()),
          RightOperand<KeyTile, Contiguous::k, ScoreGrid::kColumnBlocks>(key_tile,
                                                                         ScoreGrid::column()));
      if constexpr (kScoreGradient) {
        warp_gemm<Element, Config::kValueDim / kStep, kReadAhead>(
            score_gradient,
            LeftOperand<OutTile, Contiguous::k, ScoreGrid::kRowBlocks>(out_tile, ScoreGrid::row()),
            RightOperand<ValueTile, Contiguous::k, ScoreGrid::kColumnBlocks>(value_tile,
                                                                             ScoreGrid::column()));
      }

      auto add_bias_to = [&](auto& x) {
        add_bias_tile(params, bias_tile, item.batch, visit, column, x);
      };
      probabilities(params,
                    statistics_buffers + visits.number(cursor) % kBuffers * kStatisticsBytes,
                    item.batch, visit, mask, column, scores, score_gradient, add_bias_to);
      if constexpr (Config::kValueGradient) {
        store_accumulators<Element, ScoreTile, ScoreGrid>(probability_tile, scores);
      }
      if constexpr (kStoreScoreGradient) {
        store_accumulators<Element, ScoreTile, ScoreGrid>(score_tile, score_gradient);
      }
      __syncthreads();  // P and dS are complete; nobody reads this bias any more
      if (kBiasTile && has_next) load_bias(visits.at(visits.after(cursor)));
      if constexpr (BiasWriter::kFromTile) {
        BiasWriter::store(params, {item.batch, visit.head, visit.row, column}, score_tile);
      }

      if constexpr (Config::kValueGradient) {
        warp_gemm<Element, kTileQuery / kStep, kReadAhead>(
            value_gradient,
            LeftOperand<ScoreTile, Contiguous::outer, ValueGrid::kRowBlocks>(probability_tile,
                                                                             ValueGrid::row()),
            RightOperand<OutTile, Contiguous::outer, ValueGrid::kColumnBlocks>(
                out_tile, ValueGrid::column()));
        __syncthreads();  // nobody reads dO any more
      }
      if (has_next) {
        load_out_gradient(visits.at(visits.after(cursor)));
        commit_copies();
      }

      if constexpr (Config::kQueryGradient) {
        add_query_gradient(params, item.batch, visit, score_tile, key_tile,
                           [&] { order.wait(position(visit)); });
      }
      if constexpr (Config::kKeyGradient) {
        warp_gemm<Element, kTileQuery / kStep, kReadAhead>(
            key_gradient,
            LeftOperand<ScoreTile, Contiguous::outer, KeyGrid::kRowBlocks>(score_tile,
                                                                           KeyGrid::row()),
            RightOperand<QueryTile, Contiguous::outer, KeyGrid::kColumnBlocks>(query_tile,
                                                                               KeyGrid::column()));
      }
      if (kBuffers == 1 && has_next) {
        __syncthreads();  // nobody reads the queries any more
        load_query(visits.at(visits.after(cursor)), 0);
        commit_copies();
      }
    }

    __syncthreads();  // the key and value tiles, which the results go through, are no longer read
    publish(kFinished);
    // Past a packed sequence the next one begins.
    int const key_bound = (Config::kVarlen ? mask.key_length : shape.key_length) - column;
    if constexpr (Config::kKeyGradient) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(key_gradient); ++i) {
        key_gradient(i) *= params.scale.gradient_scale;
      }
      store_tile<Element, KeyTile, KeyGrid, kThreads, Config::kAlignment>(
          key_tile, key_gradient,
          row_pointer<Element>(params.key_gradient, keys.batch, keys.row + column, item.head),
          params.key_gradient.row_stride * sizeof(Element), key_bound, shape.head_dim);
    }
    if constexpr (Config::kValueGradient) {
      if constexpr (Config::kDropout) {
        CUTE_UNROLL
        for (int i = 0; i < cute::size(value_gradient); ++i) {
          value_gradient(i) *= kept_scale(params);
        }
      }
      store_tile<Element, ValueTile, ValueGrid, kThreads, Config::kAlignment>(
          value_tile, value_gradient,
          row_pointer<Element>(params.value_gradient, keys.batch, keys.row + column, item.head),
          params.value_gradient.row_stride * sizeof(Element), key_bound, shape.value_dim);
    }
  }

  // scores: S -> P.  score_gradient: dP -> dS, the gradient of query.key without the user's scale.
  // add_bias_to(scores) is called where the main loop reads a bias.
  template <class Mask, class Scores, class AddBias>
  CUTE_DEVICE static void probabilities(BackwardParams const& params, uint32_t statistics,
                                        int batch, Visit const& visit, Mask const& mask, int column,
                                        Scores& scores, Scores& score_gradient,
                                        AddBias add_bias_to) {
    probabilities(params, statistics, batch, visit, mask, column, scores, score_gradient,
                  add_bias_to,
                  [&] { return BiasWriter(params, {batch, visit.head, visit.row, column}); });
  }

  // The same with another use of the bias's gradient.
  template <class Mask, class Scores, class AddBias, class MakeWriter>
  CUTE_DEVICE static void probabilities(BackwardParams const& params, uint32_t statistics,
                                        int batch, Visit const& visit, Mask const& mask, int column,
                                        Scores& scores, Scores& score_gradient, AddBias add_bias_to,
                                        MakeWriter make_writer) {
    prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
    Scores const capped = scores;  // read where a bias changes what the soft cap's derivative needs
    if constexpr (kBiasTile) add_bias_to(scores);
    mask.template apply<kTileQuery, kTileKey>(scores, params.mask, params.shape, batch, visit.head,
                                              visit.row, column, visit.partial);
    auto bias_gradient = make_writer();
    int const thread = thread_index();
    float2 rows[2];  // (logsumexp2, delta) of this thread's rows in a row block
    // The 16x16 block (m, column_block); row blocks come one after the other.
    auto block = [&](int m, int column_block, auto const& keep) {
      if (column_block == 0) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          rows[half] =
              load_shared_pair(statistics + ScoreGrid::element_row(2 * half, m, thread) * 8);
        }
      }
      float block_gradient[2][4];  // of the bias
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float2 const row = rows[half];
        CUTE_UNROLL
        for (int pair = 0; pair < 4; ++pair) {
          int const chunk = pair / 2;
          int const i = pair % 2;
          int const element = 2 * half + i;
          int const n = 2 * column_block + chunk;
          float& score = scores(element, m, n);
          float const probability = exp2_approx(fmaf(score, params.scale.softmax_scale, -row.x));
          float const kept = keep.select(score_gradient(element, m, n), half, chunk, i);
          float gradient = probability * fmaf(kept, kept_scale(params), -row.y);
          block_gradient[chunk][element] = gradient;
          if constexpr (Config::kSoftCap) {
            // tanh is at least -1; a masked score is -inf, and its derivative 0 as it should be.
            float const x = kBiasTile ? capped(element, m, n) : fmaxf(score, -1.0f);
            gradient *= fmaf(-x, x, 1.0f);
          }
          score = keep.select(probability, half, chunk, i);
          score_gradient(element, m, n) = gradient;
        }
      }
      bias_gradient.block(m, column_block, block_gradient);
    };
    if constexpr (Config::kDropout) {
      Dropout<ScoreGrid> const dropout(params.dropout, params.mask, batch);
      dropout.for_each_block(dropout_head(params.dropout, batch, visit.head), visit.row, column,
                             block);
    } else {
      CUTE_UNROLL
      for (int m = 0; m < ScoreGrid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < ScoreGrid::kColumnBlocks; ++n) block(m, n, KeepAll{});
      }
    }
    bias_gradient.finish();
  }

  template <class Scores>
  CUTE_DEVICE static void add_bias_tile(BackwardParams const& params, uint32_t tile, int batch,
                                        Visit const& visit, int column, Scores& scores) {
    int const thread = thread_index();
    add_bias(
        scores,
        BiasReader<BiasRows>(tile, ScoreGrid::row(thread), ScoreGrid::column(thread),
                             bias_source(params, batch, visit, column), bias_row_bytes(params)),
        params.scale.bias_scale);
  }

  // Where the tile of the bias that a visit needs begins in global memory.
  CUTE_DEVICE static char const* bias_source(BackwardParams const& params, int batch,
                                             Visit const& visit, int column) {
    return bias_row<Config>(params.bias, batch, visit.head, visit.row) +
           column * (long long)sizeof(typename Config::BiasElement);
  }

  CUTE_DEVICE static long long bias_row_bytes(BackwardParams const& params) {
    return params.bias.row_stride * sizeof(typename Config::BiasElement);
  }

  // What dropout multiplies the probabilities that it keeps by.
  CUTE_DEVICE static float kept_scale(BackwardParams const& params) {
    return Config::kDropout ? params.dropout.scale : 1.0f;
  }

  // dQ of this visit, added to the sums in the order that BackwardTiles defines, after `wait`.
  template <class Wait>
  CUTE_DEVICE static void add_query_gradient(BackwardParams const& params, int batch,
                                             Visit const& visit, uint32_t score_tile,
                                             uint32_t key_tile, Wait const& wait) {
    auto query_gradient = QueryGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(query_gradient);
    warp_gemm<Element, kTileKey / kStep, kReadAhead>(
        query_gradient,
        LeftOperand<ScoreTile, Contiguous::k, QueryGrid::kRowBlocks>(score_tile, QueryGrid::row()),
        RightOperand<KeyTile, Contiguous::outer, QueryGrid::kColumnBlocks>(key_tile,
                                                                           QueryGrid::column()));
    wait();
    float* const sums =
        params.query_gradient_sum +
        Tiles::tile_index(params, batch, visit.head, visit.tile) * Tiles::kQueryTileFloats;
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
        reduce_add(query_gradient_sums<Tiles::kThreads>(sums, query_gradient, m, n),
                   query_gradient(0, m, n), query_gradient(1, m, n), query_gradient(2, m, n),
                   query_gradient(3, m, n));
      }
    }
  }
};

}  // namespace memeff
