// Attention forward for any head dim: one CTA computes a tile of query rows.
//
// A whole row of the output does not fit in the accumulators, nor does a whole row of queries or
// keys fit in shared memory. So all operands stream through two buffers, in two phases for each KV
// block:
//
//   S = Q K^T       steps of 128 bytes of rows of Q and K
//   O += P V        chunks of columns of V; P waits in shared memory, O in f32 in global memory
//
// The scores are computed once. The traffic of O is inversely proportional to the number of keys in
// a KV block.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/collective/chunked_product.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/query_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/direct.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// The online softmax over KV blocks for grids in which several warps divide the columns of a row
// (kernels for large head dims).

// Warps exchange maxima and sums through shared memory. The factors of a row's output go through
// shared memory too, because its accumulators are distributed differently from the scores.
// kLargeScores: see ScoreReference.
template <class Grid, int kTileRows, bool kLargeScores>
class BlockSoftmax {
 public:
  static constexpr int kLaneRows = 2 * Grid::kRowBlocks;  // rows in which a lane has elements
  static constexpr int kBytes = (Grid::kColumnWarps + 2) * kTileRows * int(sizeof(float));

  CUTE_DEVICE explicit BlockSoftmax(uint32_t shared) : shared_(shared) {
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      row_max_[r] = -infinity();
      row_sum_[r] = 0.0f;
    }
  }

  // Turns scores into probabilities relative to the new running maximum.
  template <class Scores>
  CUTE_DEVICE void step(Scores& scores, float softmax_scale) {
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      float maximum = row_max_[r];
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        maximum =
            fmaxf(maximum, fmaxf(scores(2 * (r % 2), r / 2, n), scores(2 * (r % 2) + 1, r / 2, n)));
      }
      share(r, quad_max(maximum));
    }
    sync_threads();
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      float maximum = shared_value(r, 0);
      CUTE_UNROLL
      for (int warp = 1; warp < Grid::kColumnWarps; ++warp) {
        maximum = fmaxf(maximum, shared_value(r, warp));
      }
      auto const reference = ScoreReference<kLargeScores>::of(maximum, softmax_scale);
      // Hazard: the factor must be exactly 1 if the maximum is unchanged. The fused multiply-add
      // would return the rounding error of the reference, which grows to 1e-5 over hundreds of
      // tiles.
      float const correction = maximum > row_max_[r]
                                   ? exp2_approx(reference.correction(row_max_[r], softmax_scale))
                                   : 1.0f;
      row_max_[r] = maximum;
      float sum = row_sum_[r] * correction;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = scores(2 * (r % 2) + i, r / 2, n);
          if constexpr (kLargeScores) x -= reference.score;
          x = exp2_approx(fmaf(x, softmax_scale, -reference.product));
          sum += x;
        }
      }
      row_sum_[r] = sum;
      if (writes_rows()) store_shared(corrections() + row(r) * 4, __float_as_uint(correction));
    }
  }

  // Finishes the rows after the last step: stores the factors that normalize the output, times
  // output_scale, and calls write(row, natural-log logsumexp) once for each row, both after the
  // LaneRowModifiers `modifiers`. Rows without keys, and rows from `bound` on, enter the modifiers
  // with 0 and -inf.
  template <class Modifiers, class Write>
  CUTE_DEVICE void finish(float softmax_scale, float output_scale, int bound,
                          Modifiers const& modifiers, Write write) {
    sync_threads();  // every thread has read the maxima of the last step
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) share(r, quad_sum(row_sum_[r]));
    sync_threads();
    if (!writes_rows()) return;
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      float sum = 0.0f;
      CUTE_UNROLL
      for (int warp = 0; warp < Grid::kColumnWarps; ++warp) sum += shared_value(r, warp);
      bool const empty = sum == 0.0f || row(r) >= bound;
      // Evaluated twice, because keeping one result for both uses spills. A row maximum is
      // therefore written twice.
      auto const end = [&] {
        float const maximum = row_max_[r] * softmax_scale * kLn2;
        return modifiers.finish(
            r, {empty ? 0.0f : output_scale / sum, empty ? -infinity() : maximum + __logf(sum),
                empty ? -infinity() : maximum});
      };
      store_shared(normalisers() + row(r) * 4, __float_as_uint(end().factor));
      write(row(r), end().logsumexp);
    }
  }

  // The factor of a row's earlier sums, after a step, and of its result, after finish(). Hazard:
  // both need a __syncthreads() before.
  CUTE_DEVICE float correction(int row) const { return shared_float(corrections() + row * 4); }
  CUTE_DEVICE float normaliser(int row) const { return shared_float(normalisers() + row * 4); }

 private:
  CUTE_DEVICE static float shared_float(uint32_t address) {
    return __uint_as_float(load_shared(address));
  }
  CUTE_DEVICE static int row(int r) { return Grid::element_row(2 * (r % 2), r / 2); }
  CUTE_DEVICE static int column_warp() { return threadIdx.x / kWarpSize / Grid::kRowWarps; }
  CUTE_DEVICE static bool writes_rows() { return column_warp() == 0 && threadIdx.x % 4 == 0; }

  CUTE_DEVICE void share(int r, float x) const {
    if (threadIdx.x % 4 == 0) {
      store_shared(shared_ + (column_warp() * kTileRows + row(r)) * 4, __float_as_uint(x));
    }
  }
  CUTE_DEVICE float shared_value(int r, int warp) const {
    return shared_float(shared_ + (warp * kTileRows + row(r)) * 4);
  }
  CUTE_DEVICE uint32_t corrections() const { return shared_ + Grid::kColumnWarps * kTileRows * 4; }
  CUTE_DEVICE uint32_t normalisers() const { return corrections() + kTileRows * 4; }

  uint32_t shared_;
  float row_max_[kLaneRows];
  float row_sum_[kLaneRows];  // of this lane's columns only, until finish()
};

// Sums over more columns than tensor cores add up precisely.
//
// Tensor cores truncate an accumulator instead of rounding it, so a long sum is too small: by 1e-4
// of the scores over 65536 columns, more than the error that an f32 logsumexp may have. The
// accumulators therefore sum runs of columns, and the runs are added with rounding, in global
// memory.

// Called by the forward for large head dims after every run of kRunSteps steps of S.
template <int kThreads, int kStep>
struct LongSum {
  static constexpr int kRunSteps = kLongSumColumns / kStep;  // of kStep columns each

  // Adds the sums of a run to those of the previous runs. After the last run the accumulators hold
  // the total; after earlier runs `totals` holds it and the accumulators are zero.
  template <class Accumulators>
  CUTE_DEVICE static void add_run(Accumulators& accumulators, float* totals, bool first,
                                  bool last) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(accumulators); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(accumulators); ++n) {
        float4* const total = waiting_sum<kThreads>(accumulators, totals, m, n);
        float4 sum = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *total;
        sum = make_float4(sum.x + accumulators(0, m, n), sum.y + accumulators(1, m, n),
                          sum.z + accumulators(2, m, n), sum.w + accumulators(3, m, n));
        if (!last) *total = sum;
        accumulators(0, m, n) = last ? sum.x : 0.0f;
        accumulators(1, m, n) = last ? sum.y : 0.0f;
        accumulators(2, m, n) = last ? sum.z : 0.0f;
        accumulators(3, m, n) = last ? sum.w : 0.0f;
      }
    }
  }
};

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaForwardLargeDimSm80 {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kStep = kStreamStep<Element>;  // columns of query and key
  using Sum = LongSum<kThreads, kStep>;

  template <int kRows, int kColumns>
  using Tile = SharedTile<kRows, kColumns, sizeof(Element)>;
  using ScoreTile = Tile<kTileQuery, kTileKey>;  // P
  using QueryStep = Tile<kTileQuery, kStep>;
  using KeyStep = Tile<kTileKey, kStep>;
  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, Config::kWarps>;
  using Softmax = BlockSoftmax<ScoreGrid, kTileQuery, has_large_scores<Config>()>;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using KvBlocks = BlockMaskRow<Config::kBlockMask>;
  using Modifiers =
      ScoreModifiers<Config, DirectBias<Config, ScoreGrid, Mask>, ScoreFunction<Config, ScoreGrid>>;
  using OutProduct = ChunkedProduct<Config, ScoreTile, Contiguous::k>;
  static constexpr int kBufferBytes =
      cute::max(QueryStep::kBytes + KeyStep::kBytes, OutProduct::StepTile::kBytes);
  static constexpr int kSharedBytes = ScoreTile::kBytes + 2 * kBufferBytes + Softmax::kBytes;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    ProblemShape const& shape = params.shape;
    Grid const grid = {shape};
    WorkItem const item = work_item(grid, blockIdx.x);
    int const row = item.tile * kTileQuery;
    int const key_head = item.head / shape.group;

    Mask const mask(params.mask, shape, item.batch);
    if constexpr (Config::kPacked) {
      clear_query_gap<Config, kThreads>(params, item, mask.query_length,
                                        grid.of_batch_index(item.batch));
      if (row >= mask.query_length) return;
    }
    KvBlocks const tiles(mask.key_tiles(row, kTileQuery, kTileKey), params.block_mask, item.batch,
                         item.head, item.tile, ceil_div(shape.key_length, kTileKey));
    Origin const queries = query_origin<Config>(shape, item.batch);
    KeyValueSource<Config> const source(params, item.batch, key_head, mask.row_begin(row));
    char const* const query_rows =
        row_pointer<Element>(params.query, queries.batch, queries.row + row, item.head);
    // Hazard: the rows after a packed sequence belong to the next one.
    int const row_bound = (Config::kPacked ? mask.query_length : shape.query_length) - row;
    ChunkedTarget const target = {
        row_pointer<Element>(params.out, queries.batch, queries.row + row, item.head),
        params.out.row_stride * (long long)sizeof(Element), row_bound, shape.value_dim};
    auto write_logsumexp = [&](int tile_row, float logsumexp) {
      if (tile_row < row_bound) {
        params.logsumexp[logsumexp_offset<Config>(shape, queries, item.head) + row + tile_row] =
            logsumexp;
      }
    };
    RowsOfTile<> const rows(shape, item.batch, item.head, row, mask.query_length);
    if (tiles.begin >= tiles.end) {
      end_empty_rows(params, rows, write_logsumexp);
      OutProduct::store_zeros(target);
      return;
    }

    float* const sums = out_sums(params, item, grid.of_slice());
    ScoreOperands const operands = {params, mask, source, query_rows, row};
    attend(params, item, mask, tiles, rows, operands, target, sums, write_logsumexp);
  }

  // The row of key `column` if keys are contiguous. In a paged call the loader looks up the rows.
  CUTE_DEVICE static int first_row(int column) { return PageTable<Config>::kPaged ? 0 : column; }

  // Writes the logsumexps of rows without a KV block.
  template <class Write>
  CUTE_DEVICE static void end_empty_rows(ForwardParams const& params, RowsOfTile<> const& rows,
                                         Write write) {
    for (int i = threadIdx.x; i < kTileQuery; i += kThreads) {
      RowModifiers<Config> const modifiers(params, rows.at(i));
      write(i, modifiers.finish(RowEnd::empty()).logsumexp);
    }
  }

  // The queries and keys of the CTA, loaded in steps of columns.
  struct ScoreOperands {
    ForwardParams const& params;
    Mask const& mask;
    KeyValueSource<Config> const& source;
    char const* query_rows;
    int row;

    // Starts the copies of step `step` of the queries and of KV block `tile`.
    CUTE_DEVICE void load(int tile, int step, uint32_t buffer) const {
      int const first = step * kStep;
      int const column = tile * kTileKey;
      TileLoader<QueryStep, kThreads, Config::kAlignment>::copy(
          buffer, query_rows + first * int(sizeof(Element)),
          params.query.row_stride * sizeof(Element), mask.query_length - row,
          params.shape.head_dim - first);
      using Loader = TileLoader<KeyStep, kThreads, Config::kAlignment>;
      char const* const keys =
          source.row(params.key, first_row(column)) + first * int(sizeof(Element));
      long long const row_bytes = params.key.row_stride * sizeof(Element);
      int const columns = params.shape.head_dim - first;
      if constexpr (PageTable<Config>::kPaged) {
        Loader::copy_pages(buffer + QueryStep::kBytes, keys, row_bytes, source.pages, column,
                           mask.key_length, columns);
      } else {
        Loader::copy(buffer + QueryStep::kBytes, keys, row_bytes, mask.key_length - column,
                     columns);
      }
    }
  };

  // The main loop: O += P V over the KV blocks. The last one scales the output and stores it.
  template <class Write>
  CUTE_DEVICE static void attend(ForwardParams const& params, WorkItem const& item,
                                 Mask const& mask, KvBlocks const& tiles, RowsOfTile<> const& rows,
                                 ScoreOperands const& operands, ChunkedTarget const& target,
                                 float* sums, Write const& write_logsumexp) {
    uint32_t const probability_tile = shared_address(dynamic_shared());
    uint32_t const buffers = probability_tile + ScoreTile::kBytes;
    KeyValueSource<Config> const& source = operands.source;
    ProblemShape const& shape = params.shape;
    int const row = operands.row;
    Softmax softmax(buffers + 2 * kBufferBytes);
    StepRing ring(buffers, kBufferBytes);
    ring.start([&](uint32_t buffer) { operands.load(tiles.end - 1, 0, buffer); });

    Modifiers const modifiers = {{params.scale}, {params}, {params.bias, mask, item.batch}};
    for (int tile = tiles.end - 1; tile >= tiles.begin; tile = tiles.before(tile)) {
      int const column = tile * kTileKey;
      bool const last = tile == tiles.begin;
      OutProduct const product = {source.row(params.value, first_row(column)),
                                  params.value.row_stride * (long long)sizeof(Element),
                                  mask.key_length - column,
                                  shape.value_dim,
                                  &source.pages,
                                  column};

      auto scores = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
      multiply_keys(params, operands, product, ring, tile, scores);

      ScoreTilePosition const at = {item.batch, item.head, row, column};
      modifiers.forward(scores, at, rows, column);
      mask.template apply<kTileQuery, kTileKey>(scores, params, at, tiles.partial(tile));
      if constexpr (Config::kScoreFunction) {
        // Hazard: rows beyond the query length are multiplied by 0 at the end, so they must not be
        // NaN.
        if (mask.query_length - row < kTileQuery) {
          Mask::template mask_rows_from<false>(scores, mask.query_length - row);
        }
      }
      softmax.step(scores, params.scale.softmax_scale);
      if (last) {
        softmax.finish(params.scale.softmax_scale, probability_scale<Config>(params),
                       mask.query_length - row, LaneRowModifiers<Config, ScoreGrid>(params, rows),
                       write_logsumexp);
      }
      ProbabilityModifiers<Config, ScoreGrid>::forward(params, item.batch, item.head, row, column,
                                                       scores);
      store_accumulators<Element, ScoreTile, ScoreGrid>(probability_tile, scores);

      product.run(
          ring, probability_tile, sums, tile == tiles.end - 1, last, target,
          [&](int tile_row) { return softmax.correction(tile_row); },
          [&](int tile_row) { return softmax.normaliser(tile_row); },
          [&](uint32_t buffer) {
            // Without a block mask the lambda must not capture `tiles`, which would change the
            // machine code.
            int next = tile - 1;
            if constexpr (Config::kBlockMask) next = tiles.before(tile);
            if (!last) operands.load(next, 0, buffer);
          });
    }
  }

  // Computes S = Q K^T of a KV block. During its last step the first step of `next` is loaded.
  template <class Scores>
  CUTE_DEVICE static void multiply_keys(ForwardParams const& params, ScoreOperands const& operands,
                                        OutProduct const& next, StepRing& ring, int tile,
                                        Scores& scores) {
    int const steps = ceil_div(params.shape.head_dim, kStep);
    cute::clear(scores);
    CUTE_NO_UNROLL
    for (int first = 0; first < steps; first += Sum::kRunSteps) {
      int const end = min(first + Sum::kRunSteps, steps);
      ring.run(
          end - first,
          [&](int step, uint32_t buffer) { operands.load(tile, first + step, buffer); },
          [&](int, uint32_t buffer) {
            warp_gemm<Element, kStep / kStepElements<Element>>(
                scores,
                LeftOperand<QueryStep, Contiguous::k, ScoreGrid::kRowBlocks>(buffer,
                                                                             ScoreGrid::row()),
                RightOperand<KeyStep, Contiguous::k, ScoreGrid::kColumnBlocks>(
                    buffer + QueryStep::kBytes, ScoreGrid::column()));
          },
          [&](uint32_t buffer) {
            if (end < steps) {
              operands.load(tile, end, buffer);
            } else {
              next.load(0, buffer);
            }
          });
      if (params.shape.head_dim > kLongSumColumns) {
        Sum::add_run(scores, score_sum(params), first == 0, end == steps);
      }
    }
  }

  using Grid = GridTiles<Config, GridRows::queries, kTileQuery>;

  CUTE_DEVICE static WorkItem work_item(Grid const& grid, unsigned block) {
    WorkItem const item = grid.of_block(block);
    return Config::kMask == MaskKind::causal ? grid.from_the_last(item) : item;
  }

  // The address of the tile's output in the workspace, chunk by chunk.
  CUTE_DEVICE static float* out_sums(ForwardParams const& params, WorkItem const& item, int tiles) {
    return params.out_sum +
           query_tile_index<Config>(params.shape, tiles, item.batch, item.head, item.tile) *
               ceil_div(params.shape.value_dim, OutProduct::kChunk) * OutProduct::kChunkFloats;
  }

  // The address of the sums of this CTA's tile of scores. It is recomputed at each use, so that it
  // occupies no register.
  CUTE_DEVICE static float* score_sum(ForwardParams const& params) {
    Grid const grid = {params.shape};
    WorkItem const item = work_item(grid, block_index());
    return params.score_sum + query_tile_index<Config>(params.shape, grid.of_slice(), item.batch,
                                                       item.head, item.tile) *
                                  (kTileQuery * kTileKey);
  }
};

}  // namespace memeff
