// P and dS of one tile from the products S = Q K^T and dP = dO V^T, for kernels with mma.sync.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/score/bias/add.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/function_gradient.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// The bias of a Q block in shared memory, which all threads of the CTA copy and read, with the
// interface that ScoreModifiers expects. Without a bias it does nothing.
template <class Config, class Mask, bool kBias = has_bias_tile<Config>()>
struct QBlockBiasTile {
  static constexpr int kBytes = 0;
  CUTE_DEVICE QBlockBiasTile(ScoreView const&, Mask const&, int, int, uint32_t) {}
  CUTE_DEVICE void load(QBlock const&) const {}
  template <class Next>
  CUTE_DEVICE void load_next(bool, Next) const {}
  template <class Scores>
  CUTE_DEVICE void add(Scores&, float, QBlock const&, int) const {}
};

// With a bias; the tile has the bias of one Q block and the CTA's keys.
template <class Config, class Mask>
struct QBlockBiasTile<Config, Mask, true> {
  using Tiles = BackwardTiles<Config>;
  using Grid = typename Tiles::ScoreGrid;
  using Element = typename Config::BiasElement;
  using Tile = BiasTile<Config, Tiles::kTileQuery, Tiles::kTileKey, Tiles::kThreads>;
  static constexpr int kBytes = Tile::kBytes;

  ScoreView const& bias;
  Mask const& mask;
  int batch;
  int column;
  uint32_t tile;

  CUTE_DEVICE QBlockBiasTile(ScoreView const& bias, Mask const& mask, int batch, int column,
                             uint32_t tile)
      : bias(bias), mask(mask), batch(batch), column(column), tile(tile) {}

  // Starts the copy. Hazard: all threads must have added the previous tile.
  CUTE_DEVICE void load(QBlock const& q_block) const {
    Tile::copy(tile, thread_index(), source(q_block), row_bytes(), mask.query_length - q_block.row,
               mask.key_length - column);
  }

  // As above if there is a next Q block, next().
  template <class Next>
  CUTE_DEVICE void load_next(bool exists, Next next) const {
    if (exists) load(next());
  }

  template <class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, QBlock const& q_block, int) const {
    int const thread = thread_index();
    add_bias(scores,
             BiasReader<Tile>(tile, Grid::row(thread), Grid::column(thread), source(q_block),
                              row_bytes()),
             bias_scale);
  }

 private:
  CUTE_DEVICE char const* source(QBlock const& q_block) const {
    return bias_row<Config>(bias, batch, q_block.head, q_block.row) +
           column * (long long)sizeof(Element);
  }
  CUTE_DEVICE long long row_bytes() const { return bias.row_stride * sizeof(Element); }
};

// The scores of the sm80 kernels: rows of the accumulators are queries, whose statistics are in
// shared memory.
template <class Config>
struct BackwardScoresSm80 {
  using Element = typename Config::Element;
  using Tiles = BackwardTiles<Config>;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using Bias = QBlockBiasTile<Config, Mask>;
  using Modifiers = ScoreModifiers<Config, Bias, ScoreFunction<Config, ScoreGrid>>;
  using BiasWriter = BiasGradientWriter<Config>;
  using CapturedSums = FunctionGradient<Config, ScoreGrid>;
  using NoCapturedSums = FunctionGradient<Config, ScoreGrid, false, false>;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kStep = kStepElements<Element>;
  // How far products read ahead. CTAs of four warps share an SM and hide each other's latencies; a
  // CTA of eight warps has the SM to itself and reads further ahead.
  static constexpr int kReadAhead = Config::kWarps == 4 ? 1 : 2;
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));

  // S = Q K^T or dP = dO V^T, from tiles in shared memory.
  template <class LeftTile, class RightTile, class Accumulators>
  CUTE_DEVICE static void multiply(uint32_t left, uint32_t right, Accumulators& scores) {
    warp_gemm<Element, LeftTile::kColumns / kStep, kReadAhead>(
        scores, LeftOperand<LeftTile, Contiguous::k, ScoreGrid::kRowBlocks>(left, ScoreGrid::row()),
        RightOperand<RightTile, Contiguous::k, ScoreGrid::kColumnBlocks>(right,
                                                                         ScoreGrid::column()));
  }

  // S and dP, whose operands have the same sizes. Of two warps with neighbouring columns one
  // computes S of both and the other dP; then they exchange halves through `exchange`, 4 bytes for
  // each element of the tile. With twice the columns, left operands are read half as often.
  template <class LeftTile, class RightTile, class Accumulators>
  CUTE_DEVICE static void multiply_in_pairs(uint32_t query, uint32_t key, uint32_t out,
                                            uint32_t value, uint32_t exchange, Accumulators& scores,
                                            Accumulators& score_gradient) {
    constexpr int kRowWarps = ScoreGrid::kRowWarps;
    constexpr int kRowBlocks = ScoreGrid::kRowBlocks;
    constexpr int kHalf = 2 * ScoreGrid::kColumnBlocks;  // MMA_N
    constexpr int kPairColumns = 2 * ScoreGrid::kWarpColumns;
    int const warp = thread_index() / kWarpSize;
    int const lane = thread_index() % kWarpSize;
    bool const second = warp / kRowWarps % 2;  // computes dP and keeps the second half
    auto product = cute::make_tensor<float>(
        cute::Shape<cute::_4, cute::Int<kRowBlocks>, cute::Int<2 * kHalf>>{});
    cute::clear(product);
    warp_gemm<Element, LeftTile::kColumns / kStep, kReadAhead>(
        product,
        LeftOperand<LeftTile, Contiguous::k, kRowBlocks>(second ? out : query, ScoreGrid::row()),
        RightOperand<RightTile, Contiguous::k, kHalf>(
            second ? value : key, ScoreGrid::column() / kPairColumns * kPairColumns));

    auto slot = [&](int of_warp, int m, int n) {
      return exchange + (((of_warp * kRowBlocks + m) * kHalf + n) * kWarpSize + lane) * 16;
    };
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < kHalf; ++n) {
        float sent[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float const halves[2] = {product(i, m, n), product(i, m, n + kHalf)};
          sent[i] = second ? halves[0] : halves[1];
          scores(i, m, n) = second ? halves[1] : halves[0];
        }
        store_shared_vector(slot(warp, m, n), sent[0], sent[1], sent[2], sent[3]);
      }
    }
    int const pair = warp / (2 * kRowWarps) * kRowWarps + warp % kRowWarps;
    named_barrier_sync(1 + pair, 2 * kWarpSize);
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < kHalf; ++n) {
        uint4 const vector = load_shared_vector(slot(warp ^ kRowWarps, m, n));
        float const received[4] = {__uint_as_float(vector.x), __uint_as_float(vector.y),
                                   __uint_as_float(vector.z), __uint_as_float(vector.w)};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float const kept = scores(i, m, n);
          scores(i, m, n) = second ? received[i] : kept;
          score_gradient(i, m, n) = second ? kept : received[i];
        }
      }
    }
  }

  // Replaces `scores`, S, with the modified P, and `score_gradient`, dP, with dS, the gradient of Q
  // K^T, not yet multiplied by the user's scale. The gradient of the bias goes to the object that
  // make_writer() returns. Gradients of arrays that a score function reads go to CapturedSums;
  // `sums` is its shared memory.
  template <class CapturedSums, class Modifiers, class Scores, class MakeWriter>
  CUTE_DEVICE static void compute(BackwardParams const& params, Modifiers const& modifiers,
                                  uint32_t statistics, int batch, QBlock const& q_block,
                                  Mask const& mask, int column, uint32_t sums, Scores& scores,
                                  Scores& score_gradient, MakeWriter make_writer) {
    Scores scaled;
    ScoreTilePosition const at = {batch, q_block.head, q_block.row, column};
    modifiers.recompute(scores, scaled, at, q_block, column);
    mask.template apply<kTileQuery, kTileKey>(scores, params, at, q_block.partial);
    auto bias_gradient = make_writer();
    CapturedSums function_gradient(params, at, sums);
    typename CapturedSums::Sums function_sums;
    int const thread = thread_index();
    float2 rows[2];  // (logsumexp2, delta) of this thread's rows in a row block
    // Handles the 16x16 block (m, column_block). Row blocks come one after the other.
    auto block = [&](int m, int column_block, auto const& keep) {
      if (column_block == 0) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          rows[half] =
              load_shared_pair(statistics + ScoreGrid::element_row(2 * half, m, thread) * 8);
        }
      }
      float block_gradient[2][4];  // of the modified scores
      float block_scaled[2][4];
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
          float const p = probability(score, params.scale.softmax_scale, row.x);
          float const gradient =
              softmax_gradient(p, keep.select(score_gradient(element, m, n), half, chunk, i),
                               probability_scale<Config>(params), row.y);
          block_gradient[chunk][element] = gradient;
          block_scaled[chunk][element] =
              Modifiers::input_of_derivative(score, scaled(element, m, n));
          if constexpr (!Modifiers::kKeepsScores) {
            score_gradient(element, m, n) =
                Modifiers::backward(gradient, block_scaled[chunk][element]);
          }
          score = keep.select(p, half, chunk, i);
        }
      }
      bias_gradient.block(m, column_block, block_gradient);
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        int const n = 2 * column_block + chunk;
        function_gradient.chunk(function_sums, m, n, block_gradient[chunk], block_scaled[chunk]);
        if constexpr (Modifiers::kKeepsScores) {
          CUTE_UNROLL
          for (int element = 0; element < 4; ++element) {
            score_gradient(element, m, n) =
                Modifiers::backward(block_gradient[chunk][element], block_scaled[chunk][element]);
          }
        }
      }
      if (column_block == ScoreGrid::kColumnBlocks - 1) function_gradient.add_strip(m);
    };
    ProbabilityModifiers<Config, ScoreGrid>::for_each_block(params, batch, q_block.head,
                                                            q_block.row, column, block);
    bias_gradient.finish();
    function_gradient.add_sums(function_sums);
  }
};

}  // namespace memeff
