// Attention forward for GPUs with mma.sync and cp.async: one CTA computes a tile of query rows.
//
// The CTA iterates over the KV blocks from right to left. Keys are loaded while the tensor cores
// work on values and vice versa, so one buffer of each is enough:
//
//   wait K | load V | S = Q K^T | wait V | load next K | softmax | O += P V
//
// Each warp owns whole rows, so P stays in registers from the accumulators of S to the operand of
// P V. With Config::kColumnWarps = 2 two warps share 32 rows, because one cannot hold as many rows
// of a wide output: each computes the scores of half the keys and half the columns of the output.
// They exchange the maxima of their rows and P through shared memory, but read keys and values half
// as often as warps with 16 rows.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/collective/copies/load_tile.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/math.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/warp_rows.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// Maxima and sums of rows whose columns several warps divide.

// Combines what the warps of Grid that have the same rows know of them. Each group of such warps
// has a named barrier and a number in shared memory for each warp and row, and calls all functions
// together. Alone, a warp has nothing to combine.
template <class Grid, int kTileRows, int kWarps = Grid::kColumnWarps>
class SharedRowStatistics {
 public:
  static constexpr int kBytes = kWarps * kTileRows * int(sizeof(float));
  static constexpr int kRows = 2 * Grid::kRowBlocks;  // in which a lane has elements

  CUTE_DEVICE explicit SharedRowStatistics(uint32_t shared) : shared_(shared) {}

  // Replaces the maxima that a lane knows of its rows with those of all warps.
  CUTE_DEVICE void combine_maxima(float (&maxima)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) maxima[r] = quad_max(maxima[r]);
    share(maxima);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int i = 1; i < kWarps; ++i) maxima[r] = fmaxf(maxima[r], other(i, r));
    }
  }

  // Adds up the row sums of all warps: lane 0 of each quad then has the total, the others 0.
  // Hazard: the warps must have read the maxima of the last KV block.
  CUTE_DEVICE void add_up(float (&sums)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = quad_sum(sums[r]);
    share(sums);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int i = 1; i < kWarps; ++i) sums[r] += other(i, r);
      if (threadIdx.x % 4 != 0) sums[r] = 0.0f;
    }
  }

  // Waits for the other warps of these rows.
  CUTE_DEVICE void wait() const {
    int const barrier = 1 + int(threadIdx.x) / kWarpSize % Grid::kRowWarps;
    named_barrier_sync(barrier, kWarps * kWarpSize);
  }

 private:
  // Stores a number for each row, which the lanes of a quad have in common, and waits for those of
  // the other warps.
  CUTE_DEVICE void share(float const (&numbers)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (threadIdx.x % 4 == 0) store_shared(slot(own(), r), __float_as_uint(numbers[r]));
    }
    wait();
  }
  CUTE_DEVICE static int own() { return int(threadIdx.x) / kWarpSize / Grid::kRowWarps; }
  CUTE_DEVICE uint32_t slot(int warp, int r) const {
    return shared_ + (warp * kTileRows + Grid::element_row(2 * (r % 2), r / 2)) * 4;
  }
  CUTE_DEVICE float other(int distance, int r) const {
    return __uint_as_float(load_shared(slot((own() + distance) % kWarps, r)));
  }

  uint32_t shared_;
};

template <class Grid, int kTileRows>
class SharedRowStatistics<Grid, kTileRows, 1> {
 public:
  static constexpr int kBytes = 0;
  CUTE_DEVICE explicit SharedRowStatistics(uint32_t) {}
  template <class Maxima>
  CUTE_DEVICE void combine_maxima(Maxima&) const {}
  template <class Sums>
  CUTE_DEVICE void add_up(Sums&) const {}
  CUTE_DEVICE void wait() const {}
};

// Values that are staged in shared memory while the tensor cores work.
//
// If the accumulators of both products fill the register file, the compiler spills to local memory
// at places of its choice. Kernels instead explicitly stage values that the products do not need,
// at the cost of a few shared-memory accesses per tile. Each thread has its own slots, so this
// needs no synchronization.

// A pointer that is kept in a register, or staged in shared memory.
template <bool kStaged>
class StagedPointer {
 public:
  static constexpr int kBytes = 0;
  CUTE_DEVICE StagedPointer(uint32_t, char const* pointer) : pointer_(pointer) {}
  CUTE_DEVICE char const* get() const { return pointer_; }

 private:
  char const* pointer_;
};

template <>
class StagedPointer<true> {
 public:
  static constexpr int kBytes = 8;  // per thread
  CUTE_DEVICE StagedPointer(uint32_t slots, char const* pointer)
      : slot_(slots + thread_index() * kBytes) {
    store_shared_pointer(slot_, pointer);
  }
  CUTE_DEVICE char const* get() const { return load_shared_pointer(slot_); }

 private:
  uint32_t slot_;
};

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaForwardSm80 {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  // Each warp owns whole rows of S and O, or shares them with another.
  static constexpr int kColumnWarps = Config::kColumnWarps;
  static constexpr int kWarpRows = kTileQuery * kColumnWarps / Config::kWarps;
  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, Config::kWarps, kWarpRows>;
  using OutGrid = WarpGrid<kTileQuery, Config::kValueDim, Config::kWarps, kWarpRows>;
  static constexpr int kRowBlocks = ScoreGrid::kRowBlocks;
  using Softmax =
      OnlineSoftmax<kRowBlocks, false, has_large_scores<Config>(), false, Config::kRowMaxima>;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using KvBlocks = BlockMaskRow<Config::kBlockMask>;

  template <int kRows, int kColumns>
  using Tile = SharedTile<kRows, kColumns, sizeof(Element)>;
  using QueryTile = Tile<kTileQuery, Config::kHeadDim>;
  using KeyTile = Tile<kTileKey, Config::kHeadDim>;
  using ValueTile = Tile<kTileKey, Config::kValueDim>;
  using OutTile = Tile<kTileQuery, Config::kValueDim>;  // reuses their memory, at the end

  // Pointers that the main loop needs once per KV block are staged in shared memory if registers
  // are scarce.
  using StagedRow = StagedPointer<Config::kStageRegisters>;
  using StagedBiasRow = StagedPointer<Config::kStageRegisters && has_bias_tile<Config>()>;
  template <class KeyOrValueTile>
  using Rows = CopiedRows<KeyOrValueTile, kThreads, Config::kAlignment, StagedRow>;
  using Bias =
      WarpRowsBias<Config, ScoreGrid, Config::kWarps, kTileKey, false, StagedBiasRow, Mask>;
  using Modifiers = ScoreModifiers<Config, Bias, ScoreFunction<Config, ScoreGrid>>;
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid>;

  // The accumulators of a part of P V. With 32-bit elements it is computed in parts, of all columns
  // at once if that leaves enough registers.
  static constexpr int kPartAccumulators = kRowBlocks * OutGrid::kColumnBlocks * 8 <= 64 ? 64 : 32;

  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + KeyTile::kBytes;
  static constexpr int kStagedKeyOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kStagedValueOffset = kStagedKeyOffset + kThreads * StagedRow::kBytes;
  static constexpr int kStagedSoftmaxOffset = kStagedValueOffset + kThreads * StagedRow::kBytes;
  static constexpr int kStagedBiasOffset =
      kStagedSoftmaxOffset + (Config::kStageRegisters ? kThreads * Softmax::kStagedBytes : 0);
  static constexpr int kBiasOffset = kStagedBiasOffset + kThreads * StagedBiasRow::kBytes;
  static constexpr int kProbabilityOffset = kBiasOffset + Bias::kBytes;
  using SharedRows = SharedRowStatistics<ScoreGrid, kTileQuery>;
  using ProbabilityTile = Tile<kTileQuery, kTileKey>;
  static constexpr int kRowsOffset =
      kProbabilityOffset + (kColumnWarps > 1 ? ProbabilityTile::kBytes : 0);
  static constexpr int kLoopBytes = kRowsOffset + SharedRows::kBytes;
  static constexpr int kSharedBytes = kLoopBytes > OutTile::kBytes ? kLoopBytes : OutTile::kBytes;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    uint32_t const shared = shared_address(dynamic_shared());
    ProblemShape const& shape = params.shape;
    WorkItem const item = work_item(params, blockIdx.x);
    int const row = item.tile * kTileQuery;
    int const key_head = item.head / shape.group;

    Mask const mask(params.mask, shape, item.batch);
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::queries, kTileQuery> const grid = {shape};
      clear_query_gap<Config, kThreads>(params, item, mask.query_length,
                                        grid.of_batch_index(item.batch));
      if (row >= mask.query_length) return;
    }
    KvBlocks const kv_blocks(mask.key_tiles(row, kTileQuery, kTileKey), params.block_mask,
                             item.batch, item.head, item.tile,
                             ceil_div(shape.key_length, kTileKey));

    Origin const queries = query_origin<Config>(shape, item.batch);
    KeyValueSource<Config> const source(params, item.batch, key_head, mask.row_begin(row));
    Rows<KeyTile> const keys = {{shared + kStagedKeyOffset, source.row(params.key)},
                                row_bytes<Element>(params.key),
                                mask.key_length,
                                shape.head_dim};
    Rows<ValueTile> const values = {{shared + kStagedValueOffset, source.row(params.value)},
                                    row_bytes<Element>(params.value),
                                    mask.key_length,
                                    shape.value_dim};
    StagedBiasRow const bias_row(
        shared + kStagedBiasOffset,
        memeff::bias_row<Config>(params.bias, item.batch, item.head, row + ScoreGrid::row()));
    Modifiers const modifiers = {
        {params.scale}, {params}, {params.bias, bias_row, mask, row, shared + kBiasOffset}};

    auto output = OutGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if constexpr (Config::kStageRegisters) softmax.stage_registers(shared + kStagedSoftmaxOffset);

    if (kv_blocks.begin < kv_blocks.end) {
      TileLoader<QueryTile, kThreads, Config::kAlignment>::copy(
          shared, row_pointer<Element>(params.query, queries.batch, queries.row + row, item.head),
          params.query.row_stride * sizeof(Element), mask.query_length - row, shape.head_dim);
      int const column = (kv_blocks.end - 1) * kTileKey;
      keys.load(column, shared + kKeyOffset, source.pages);
      commit_copies();
      modifiers.load(column);
    }
    attend(params, item, mask, kv_blocks, source.pages, keys, values, modifiers, shared, softmax,
           output);

    if constexpr (Config::kStageRegisters) softmax.unstage(shared + kStagedSoftmaxOffset);
    SharedRows(shared + kRowsOffset).add_up(softmax.row_sum);
    RowsOfTile<> const rows(shape, item.batch, item.head, row, mask.query_length);
    softmax.finish(output, params.scale.softmax_scale, probability_scale<Config>(params),
                   LaneRowModifiers<Config, OutGrid>(params, rows));
    store(params, softmax, output, shared);
  }

  // The main loop: O += P V over the KV blocks, from the last to the first. run() has started the
  // copies of the queries, the first keys and the first bias.
  template <class Output>
  CUTE_DEVICE static void attend(ForwardParams const& params, WorkItem const& item,
                                 Mask const& mask, KvBlocks const& kv_blocks,
                                 PageTable<Config> const& pages, Rows<KeyTile> const& keys,
                                 Rows<ValueTile> const& values, Modifiers const& modifiers,
                                 uint32_t shared, Softmax& softmax, Output& output) {
    uint32_t const key_tile = shared + kKeyOffset;
    uint32_t const value_tile = shared + kValueOffset;
    int const row = item.tile * kTileQuery;
    LeftOperand<QueryTile, Contiguous::k, kRowBlocks> const query(shared, ScoreGrid::row());
    RightOperand<KeyTile, Contiguous::k, ScoreGrid::kColumnBlocks> const key(key_tile,
                                                                             ScoreGrid::column());
    RightOperand<ValueTile, Contiguous::outer, OutGrid::kColumnBlocks,
                 kRegisterOrder<Element>> const value(value_tile, OutGrid::column());
    SharedRows const shared_rows(shared + kRowsOffset);

    for (int block = kv_blocks.end - 1; block >= kv_blocks.begin; block = kv_blocks.before(block)) {
      int const column = block * kTileKey;
      bool const has_next = block > kv_blocks.begin;
      auto next_column = [&] { return kv_blocks.before(block) * kTileKey; };

      wait_copies<Bias::kCopyGroups>();
      sync_threads();  // keys have arrived; every thread has read the previous values
      values.load(column, value_tile, pages);
      commit_copies();

      auto scores = ScoreGrid::make_accumulators();  // (4, MMA_M, MMA_N)
      cute::clear(scores);
      warp_gemm<Element, Config::kHeadDim / kStepElements<Element>>(scores, query, key);

      wait_copies<0>();
      sync_threads();  // values have arrived; every thread has read these keys
      if (has_next) {
        keys.load(next_column(), key_tile, pages);
        commit_copies();
      }

      ScoreTilePosition const at = {item.batch, item.head, row, column};
      modifiers.forward(scores, at, column);
      modifiers.load_next(has_next, next_column);
      mask.template apply<kTileQuery, kTileKey>(scores, params, at, kv_blocks.partial(block));
      if constexpr (Config::kStageRegisters) softmax.unstage(shared + kStagedSoftmaxOffset);
      softmax.step(scores, output, params.scale.softmax_scale, shared_rows);
      if constexpr (Config::kStageRegisters) softmax.stage_registers(shared + kStagedSoftmaxOffset);
      if constexpr (kColumnWarps > 1) {
        Probabilities::forward(params, item.batch, item.head, row, column, scores);
        uint32_t const probability_tile = shared + kProbabilityOffset;
        store_accumulators<Element, ProbabilityTile, ScoreGrid>(probability_tile, scores);
        shared_rows.wait();
        warp_gemm<Element, kTileKey / kStepElements<Element>>(
            output,
            LeftOperand<ProbabilityTile, Contiguous::k, kRowBlocks>(probability_tile,
                                                                    OutGrid::row()),
            value);
      } else {
        auto probabilities = as_left_operand<Element>(scores);
        Probabilities::forward(params, item.batch, item.head, row, column, probabilities);
        warp_gemm<Element, kTileKey / kStepElements<Element>, 2, kPartAccumulators>(
            output, probabilities, value);
      }
    }
  }

  CUTE_DEVICE static WorkItem work_item(ForwardParams const& params, unsigned block) {
    return memeff::work_item<Config, Heaviest::last, kTileQuery>(params.shape, params.bias, block);
  }

  // Writes output and logsumexp. It recomputes the coordinates of the CTA, so that they occupy no
  // registers in the main loop.
  template <class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, Softmax const& softmax, Output& output,
                                uint32_t tile) {
    ProblemShape const& shape = params.shape;
    WorkItem const item = work_item(params, block_index());
    int const row = item.tile * kTileQuery;
    int const query_bound =
        IntervalMask<Config::kMask>(params.mask, shape, item.batch).query_length - row;
    // Hazard: the rows after a packed sequence belong to the next one.
    int const row_bound = Config::kPacked ? query_bound : shape.query_length - row;
    Origin const origin = query_origin<Config>(shape, item.batch);
    if (threadIdx.x % 4 == 0) {
      float* const logsumexp =
          params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head) + row;
      CUTE_UNROLL
      for (int r = 0; r < 2 * kRowBlocks; ++r) {
        int const tile_row = OutGrid::element_row(2 * (r % 2), r / 2);
        if (tile_row < row_bound) {
          logsumexp[tile_row] = tile_row < query_bound ? softmax.softmax_reference[r] : -infinity();
        }
      }
    }
    if (query_bound < kTileQuery) zero_rows(output, query_bound);
    sync_threads();  // OutTile overwrites the tiles: every warp must have read them
    store_tile<Element, OutTile, OutGrid, kThreads, Config::kAlignment>(
        tile, output, row_pointer<Element>(params.out, origin.batch, origin.row + row, item.head),
        params.out.row_stride * sizeof(Element), row_bound, shape.value_dim);
  }

  // Zeros the rows from `bound` on, which lie beyond the query length.
  template <class Output>
  CUTE_DEVICE static void zero_rows(Output& output, int bound) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int element = 0; element < 4; ++element) {
        if (OutGrid::element_row(element, m) >= bound) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<2>(output); ++n) output(element, m, n) = 0.0f;
        }
      }
    }
  }
};

}  // namespace memeff
