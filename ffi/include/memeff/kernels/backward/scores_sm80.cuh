// P and dS of one tile from the products S = Q K^T and dP = dO V^T, for kernels with mma.sync.
#pragma once

#include <memeff/layout/backward_tiles.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/score/bias/add.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/dropout.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

// Rows of the accumulators are queries; the statistics of these rows are in shared memory.
template <class Config>
struct BackwardScoresSm80 {
  using Element = typename Config::Element;
  using Tiles = BackwardTiles<Config>;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using BiasWriter = BiasGradientWriter<Config>;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kStep = kStepElements<Element>;
  // CTAs of four warps share an SM and hide each other's reads; eight warps alone read further
  // ahead.
  static constexpr int kReadAhead = Config::kWarps == 4 ? 1 : 2;
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr bool kBiasTile = has_bias_tile<Config>();
  using BiasRows = BiasTile<Config, kTileQuery, kTileKey, Tiles::kThreads>;

  // S = Q K^T or dP = dO V^T, from tiles in shared memory.
  template <class LeftTile, class RightTile, class Accumulators>
  CUTE_DEVICE static void multiply(uint32_t left, uint32_t right, Accumulators& scores) {
    warp_gemm<Element, LeftTile::kColumns / kStep, kReadAhead>(
        scores, LeftOperand<LeftTile, Contiguous::k, ScoreGrid::kRowBlocks>(left, ScoreGrid::row()),
        RightOperand<RightTile, Contiguous::k, ScoreGrid::kColumnBlocks>(right,
                                                                         ScoreGrid::column()));
  }

  // scores: S -> P.  score_gradient: dP -> dS, the gradient of query.key without the user's scale.
  // add_bias_to(scores) is called if the main loop reads a bias. The gradient of the bias goes to
  // the object that make_writer() returns.
  template <class Scores, class AddBias, class MakeWriter>
  CUTE_DEVICE static void compute(BackwardParams const& params, uint32_t statistics, int batch,
                                  QBlock const& q_block, Mask const& mask, int column,
                                  Scores& scores, Scores& score_gradient, AddBias add_bias_to,
                                  MakeWriter make_writer) {
    prescale_scores<Element, Config::kSoftCap>(scores, params.scale);
    Scores const capped = scores;  // read if a bias hides what the soft cap's derivative needs
    if constexpr (kBiasTile) add_bias_to(scores);
    mask.template apply<kTileQuery, kTileKey>(scores, params.mask, params.shape, batch,
                                              q_block.head, q_block.row, column, q_block.partial);
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
          float gradient = probability * fmaf(kept, kept_scale<Config>(params.dropout), -row.y);
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
      dropout.for_each_block(dropout_head(params.dropout, batch, q_block.head), q_block.row, column,
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
                                        QBlock const& q_block, int column, Scores& scores) {
    int const thread = thread_index();
    add_bias(
        scores,
        BiasReader<BiasRows>(tile, ScoreGrid::row(thread), ScoreGrid::column(thread),
                             bias_source(params, batch, q_block, column), bias_row_bytes(params)),
        params.scale.bias_scale);
  }

  // Address in global memory of the first bias of the tile of scores at (q_block.row, column).
  CUTE_DEVICE static char const* bias_source(BackwardParams const& params, int batch,
                                             QBlock const& q_block, int column) {
    return bias_row<Config>(params.bias, batch, q_block.head, q_block.row) +
           column * (long long)sizeof(typename Config::BiasElement);
  }

  CUTE_DEVICE static long long bias_row_bytes(BackwardParams const& params) {
    return params.bias.row_stride * sizeof(typename Config::BiasElement);
  }
};

}  // namespace memeff
