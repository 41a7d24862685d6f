// P and dS of a tile for any head dim: the first half of every kernel of the large-head-dim
// backward.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/sm80/backward_scores.cuh>
#include <memeff/collective/chunked_product.cuh>
#include <memeff/collective/copies/load_tile.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/score/bias/direct.cuh>

namespace memeff {

// For the kernels that do not sum the gradients of captured arrays; FmhaBackwardLargeDimDkdv does.
template <class Config>
struct WithoutFunctionGradient : Config {
  static constexpr bool kFunctionGradient = false;
};

// For the kernels that do not sum the gradient of the bias, either.
template <class Config>
struct WithoutBiasGradient : Config {
  static constexpr auto kBiasGradient = BiasGradient::none;
};

// A tile of scores of one query head.
struct LargeDimTile {
  int batch;
  int query_head;
  int row;
  int column;
  bool partial = true;  // elements must be tested against masks that are arrays or functions
};

// The products S = Q K^T and dP = dO V^T of a tile, whose operands stream through a StepRing.
template <class Config>
struct StreamedScores {
  using Element = typename Config::Element;
  using Tiles = BackwardTiles<Config>;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using Modifiers =
      ScoreModifiers<Config, DirectBias<Config, ScoreGrid, Mask>, ScoreFunction<Config, ScoreGrid>>;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kStep = kStreamStep<Element>;  // columns of Q and K, then of dO and V
  using QueryStep = typename Tiles::template Tile<kTileQuery, kStep>;
  using KeyStep = typename Tiles::template Tile<kTileKey, kStep>;
  static constexpr int kStepBytes = QueryStep::kBytes + KeyStep::kBytes;

  BackwardParams const& params;
  Mask const& mask;
  Origin queries;
  KeyValueSource<Config> source;

  CUTE_DEVICE StreamedScores(BackwardParams const& params, Mask const& mask, int batch,
                             int key_head)
      : params(params),
        mask(mask),
        queries(query_origin<Config>(params.shape, batch)),
        source(params, batch, key_head) {}

  CUTE_DEVICE static int steps(int columns) { return ceil_div(columns, kStep); }

  // Starts the copies of step `step` of the operands.
  CUTE_DEVICE void load_step(LargeDimTile const& tile, int step, uint32_t buffer) const {
    int const head_steps = steps(params.shape.head_dim);
    if (step < head_steps) {
      load_pair(tile, params.query, params.key, params.shape.head_dim, step * kStep, buffer);
    } else {
      load_pair(tile, params.out_gradient, params.value, params.shape.value_dim,
                (step - head_steps) * kStep, buffer);
    }
  }

  // Computes S, and dP if kGradients; load(step, buffer) starts the copies of a step.
  template <bool kGradients, class Accumulators, class Load, class LoadNext>
  CUTE_DEVICE void multiply(StepRing& ring, Accumulators& scores, Accumulators& score_gradient,
                            Load load, LoadNext load_next) const {
    int const head_steps = steps(params.shape.head_dim);
    int const value_steps = kGradients ? steps(params.shape.value_dim) : 0;
    cute::clear(scores);
    cute::clear(score_gradient);
    ring.run(
        head_steps + value_steps, load,
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
  }

  CUTE_DEVICE Modifiers modifiers(int batch) const {
    return {{params.scale}, {params}, {params.bias, mask, batch}};
  }

 private:
  // Starts the copies of one step of a product: columns from `first` on of the rows of both
  // operands.
  CUTE_DEVICE void load_pair(LargeDimTile const& tile, TensorView const& left,
                             TensorView const& right, int columns, int first,
                             uint32_t buffer) const {
    TileLoader<QueryStep, kThreads, Config::kAlignment>::copy(
        buffer,
        row_pointer<Element>(left, queries.batch, queries.row + tile.row, tile.query_head) +
            first * int(sizeof(Element)),
        left.row_stride * sizeof(Element), mask.query_length - tile.row, columns - first);
    TileLoader<KeyStep, kThreads, Config::kAlignment>::copy(
        buffer + QueryStep::kBytes, source.row(right, tile.column) + first * int(sizeof(Element)),
        right.row_stride * sizeof(Element), mask.key_length - tile.column, columns - first);
  }
};

// Computes P and dS of a tile; the dq, dkdv and dbias kernels for large head dims call load() and
// compute() for each tile.
template <class Config>
struct LargeDimScores : StreamedScores<Config> {
  using Streamed = StreamedScores<Config>;
  using typename Streamed::Element;
  using typename Streamed::Mask;
  using typename Streamed::Modifiers;
  using typename Streamed::ScoreGrid;
  using typename Streamed::Tiles;
  using Whole = BackwardScoresSm80<Config>;
  using ScoreTile = typename Tiles::ScoreTile;
  using Streamed::kTileQuery;
  using Streamed::mask;
  using Streamed::params;
  using Streamed::source;
  using QueryProduct = ChunkedProduct<Config, ScoreTile, Contiguous::k>;    // dQ
  using KeyProduct = ChunkedProduct<Config, ScoreTile, Contiguous::outer>;  // dK, dV

  static constexpr int kBufferBytes = cute::max(Streamed::kStepBytes, KeyProduct::StepTile::kBytes);
  static constexpr int kStatisticsBytes = Whole::kStatisticsBytes;
  static constexpr int kSumsOffset =
      2 * ScoreTile::kBytes + 2 * kBufferBytes + 2 * kStatisticsBytes;
  static constexpr int kSharedBytes = kSumsOffset + Whole::CapturedSums::kSharedBytes;

  uint32_t probability_tile;
  uint32_t score_tile;
  uint32_t buffers;
  uint32_t statistics_buffers;
  uint32_t sums;

  CUTE_DEVICE LargeDimScores(BackwardParams const& params, Mask const& mask, int batch,
                             int key_head, uint32_t shared)
      : Streamed(params, mask, batch, key_head),
        probability_tile(shared),
        score_tile(probability_tile + ScoreTile::kBytes),
        buffers(buffers_in(shared)),
        statistics_buffers(buffers + 2 * kBufferBytes),
        sums(shared + kSumsOffset) {
    Whole::CapturedSums::begin(sums);
  }

  CUTE_DEVICE static uint32_t buffers_in(uint32_t shared) { return shared + 2 * ScoreTile::kBytes; }

  // Starts the copies of step `step` of the operands, and with the first step the statistics of the
  // rows. `parity` alternates by tiles, because statistics arrive while those of the previous tile
  // are still read.
  CUTE_DEVICE void load(LargeDimTile const& tile, int step, int parity, uint32_t buffer) const {
    this->load_step(tile, step, buffer);
    int const byte = thread_index() * 16;
    if (step == 0 && byte < kStatisticsBytes) {
      char const* const statistics = reinterpret_cast<char const*>(
          params.row_statistics +
          (Tiles::tile_index(params, tile.batch, tile.query_head, 0) * kTileQuery + tile.row) * 2);
      copy_async(statistics_buffers + parity * kStatisticsBytes + byte, statistics + byte, true);
    }
  }

  // Leaves the modified P and dS of a tile, rounded, in shared memory, each only if its template
  // argument asks for it.
  template <bool kProbabilities, bool kScoreGradients, class LoadNext>
  CUTE_DEVICE void compute(StepRing& ring, LargeDimTile const& tile, int parity,
                           LoadNext load_next) const {
    using BiasWriter = typename Whole::BiasWriter;
    constexpr bool kBiasGradient = Config::kBiasGradient != BiasGradient::none &&
                                   Config::kBiasGradient != BiasGradient::dbias_kernel;
    compute<kProbabilities, kScoreGradients, kBiasGradient>(ring, tile, parity, load_next, [&] {
      return BiasWriter(params, {tile.batch, tile.query_head, tile.row, tile.column});
    });
  }

  // As above; the bias gradient goes to the object that make_writer() returns.
  template <bool kProbabilities, bool kScoreGradients, bool kBiasGradient, class LoadNext,
            class MakeWriter>
  CUTE_DEVICE void compute(StepRing& ring, LargeDimTile const& tile, int parity, LoadNext load_next,
                           MakeWriter make_writer) const {
    constexpr bool kGradients = kScoreGradients || kBiasGradient || Config::kFunctionGradient;
    auto scores = ScoreGrid::make_accumulators();          // (4, MMA_M, MMA_N)
    auto score_gradient = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    this->template multiply<kGradients>(
        ring, scores, score_gradient,
        [&](int step, uint32_t buffer) { load(tile, step, parity, buffer); }, load_next);
    Modifiers const modifiers = this->modifiers(tile.batch);
    Whole::template compute<typename Whole::CapturedSums>(
        params, modifiers, statistics_buffers + parity * kStatisticsBytes, tile.batch,
        {tile.query_head, tile.row, tile.row / kTileQuery, tile.partial}, mask, tile.column, sums,
        scores, score_gradient, make_writer);
    if constexpr (kProbabilities) {
      store_accumulators<Element, ScoreTile, ScoreGrid>(probability_tile, scores);
    }
    if constexpr (kScoreGradients) {
      store_accumulators<Element, ScoreTile, ScoreGrid>(score_tile, score_gradient);
    }
  }

  // The rows [column, key length) of the keys, which a product reads.
  CUTE_DEVICE QueryProduct keys(int column) const {
    return {source.row(params.key, column), params.key.row_stride * (long long)sizeof(Element),
            mask.key_length - column, params.shape.head_dim};
  }

  // The rows [row, length) of one head, which a product reads or writes.
  template <class Rows>
  CUTE_DEVICE static Rows rows(TensorView const& tensor, Origin const& origin, int row, int head,
                               int length, int columns) {
    return {row_pointer<Element>(tensor, origin.batch, origin.row + row, head),
            tensor.row_stride * (long long)sizeof(Element), length - row, columns};
  }
};

}  // namespace memeff
