// Runs after the Hopper backward: the gradient of a bias that is broadcast over the batch or heads,
// bitwise identical from run to run.
//
// A tile of the gradient has one owner, which iterates over the (batch, head) slices that read this
// tile of the bias and keeps the sum of dS in registers. A tile is square, with as many queries as
// keys; each consumer owns 64 of its queries. The operands arrive in parts of 64 columns through
// one ring of buffer pairs, first those of S = Q K^T, then those of dP = dO V^T. So the copies of
// the next parts overlap the products of the current ones. The bias is the same for all slices and
// is copied once per tile.
//
// The grid is no larger than the GPU, and each CTA owns every gridDim.x-th tile, so that the
// operands of a tile arrive while the previous one is being finished.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/sm90/backward_tiles.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/split_q.cuh>
#include <memeff/score/bias/add.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The bias of a square of queries and keys, which a CTA adds to the scores of several (batch, head)
// slices.

// The bias loaded by TMA. The bias of the next square is loaded once the last slice of this square
// has read the buffer. The producer and each consumer have their own object.
template <class Config, class Tiles, bool kTma = has_tma_bias<Config>()>
class SquareBias {
 public:
  using Grid = typename Tiles::ScoreGrid;
  using Tile = SharedTile<Tiles::kTileQuery, Tiles::kTileKey>;
  static constexpr int kBytes = Tile::kBytes;
  struct Control {
    Pipeline<1> bias;
  };

  CUTE_DEVICE static void init(Control& control) { control.bias.init(Tiles::kWarps); }

  CUTE_DEVICE explicit SquareBias(uint32_t tile) : tile_(tile) {}

  // Called by the producer, in the first slice of a square.
  template <class Work>
  CUTE_DEVICE void produce(BackwardParams const& params, BackwardMaps const& maps, Work const& work,
                           Control& control) {
    BiasSlice const slice =
        BiasSlice::of<Config>(params.bias, work.slices.first_batch, work.slices.first_head);
    uint64_t& arrived = control.bias.acquire(stage_, kBytes);
    CUTE_UNROLL
    for (int row = 0; row < Tile::kRows; row += kWarpgroupRows) {  // one box at a time
      load_tma_tile<Tile>(maps.bias, arrived, tile_, row, work.tile.row + row, slice.head,
                          slice.batch, CacheHint::EVICT_FIRST, work.tile.column);
    }
    stage_.advance();
  }

  // Called by the consumers, before the first slice.
  template <class Work>
  CUTE_DEVICE void begin(BackwardParams const&, Work const&) {}

  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const&, Work const&,
                       Control& control, bool last_slice) {
    control.bias.wait(stage_);
    add_bias(
        scores,
        TmaBiasReader<typename Config::BiasElement, Tile, Grid::kColumnBlocks>(tile_, Grid::row()),
        bias_scale);
    if (last_slice) {
      __syncwarp();  // all lanes have read
      if (threadIdx.x % kWarpSize == 0) control.bias.release(stage_);
      stage_.advance();
    }
  }

 private:
  uint32_t tile_;
  PipelineStage<1> stage_;
};

// If TMA cannot read the array, each warp copies the bias of its own rows by cp.async.
template <class Config, class Tiles>
class SquareBias<Config, Tiles, false> {
 public:
  using Grid = typename Tiles::ScoreGrid;
  using Element = typename Config::BiasElement;
  using Tile = BiasTile<Config, 16, Tiles::kTileKey, kWarpSize>;
  static constexpr int kBytes = Tiles::kWarps * Tile::kBytes;
  struct Control {};

  CUTE_DEVICE static void init(Control&) {}

  CUTE_DEVICE explicit SquareBias(uint32_t tiles) : tiles_(tiles) {}

  template <class Work>
  CUTE_DEVICE void produce(BackwardParams const&, BackwardMaps const&, Work const&, Control&) {}

  template <class Work>
  CUTE_DEVICE void begin(BackwardParams const& params, Work const& work) {
    int const thread = thread_index();
    __syncwarp();  // all lanes have read the previous square
    Tile::copy(warp_tile(), thread % kWarpSize, source(params, work), row_bytes(params),
               work.tile.row_bound - Grid::row(thread), work.tile.column_bound);
    commit_copies();
  }

  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const& params,
                       Work const& work, Control&, bool) {
    wait_copies<0>();
    __syncwarp();  // the bias of all lanes has arrived
    add_bias(scores, BiasReader<Tile>(warp_tile(), 0, 0, source(params, work), row_bytes(params)),
             bias_scale);
  }

 private:
  CUTE_DEVICE uint32_t warp_tile() const {
    return tiles_ + thread_index() / kWarpSize * Tile::kBytes;
  }

  // The address of the first bias of this warp's rows, which is the same for all slices.
  template <class Work>
  CUTE_DEVICE static char const* source(BackwardParams const& params, Work const& work) {
    return bias_row<Config>(params.bias, work.slices.first_batch, work.slices.first_head,
                            work.tile.row + Grid::row(thread_index())) +
           work.tile.column * (long long)sizeof(Element);
  }

  CUTE_DEVICE static long long row_bytes(BackwardParams const& params) {
    return params.bias.row_stride * (long long)sizeof(Element);
  }

  uint32_t tiles_;
};

// The square score tile, and how the consumers divide it.
template <class Config>
struct BiasTilesSm90 {
  static constexpr int kTileQuery = cute::max(Config::kTileQuery, Config::kTileKey);
  static constexpr int kTileKey = kTileQuery;
  static constexpr int kWarps = kTileQuery / 16;
  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kWarps, 16>;
};

// The kernel. MainTiles are the tiles of the main kernels that run before it and whose tensor maps
// and statistics it shares.
template <class Config, class MainTiles>
struct DbiasSm90 {
  using Element = typename Config::Element;
  using Tiles = BiasTilesSm90<Config>;
  using Grid = typename Tiles::ScoreGrid;
  using Mask = ScoreMask<Config, Grid>;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kConsumerWarps = Tiles::kWarps;
  static constexpr int kConsumers = kConsumerWarps * kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kStages = Config::kDbiasStages;
  static constexpr int kConsumerBarrier = 1;

  static constexpr int kPartColumns = 64;
  static_assert(Config::kHeadDim % kPartColumns == 0 && Config::kValueDim % kPartColumns == 0);
  static constexpr int kHeadParts = Config::kHeadDim / kPartColumns;
  static constexpr int kValueParts = Config::kValueDim / kPartColumns;
  using Part = SharedTile<kTileQuery, kPartColumns>;  // of queries or dO, of keys or values
  static_assert(kTileQuery == kTileKey && Part::kPanels == 1);
  // If the ring is too small for both products, the first product releases its buffers early.
  static constexpr bool kHoldsBlock = kHeadParts + kValueParts <= kStages;
  static_assert(cute::max(kHeadParts, kValueParts) <= kStages);
  static constexpr int kPairBytes = 2 * Part::kBytes;
  // The rows of a TMA box. The main kernels share the tensor maps.
  static constexpr int kQueryBox = kWarpgroupRows;
  static constexpr int kKeyBox = Config::kTileKey;

  using Bias = SquareBias<Config, Tiles>;
  using Modifiers = ScoreModifiers<Config, Bias&, ScoreFunction<Config, Grid>>;
  using Statistics = RegisterStatistics<Grid>;
  static constexpr int kBiasOffset = kStages * kPairBytes;
  static constexpr int kControlOffset = kBiasOffset + Bias::kBytes;
  struct Control : Bias::Control {
    Pipeline<kStages> pairs;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // A tile, and the slices that have a valid element in it.
  struct Work {
    using Tile = BiasGradientTile<Config, Tiles>;
    Tile tile;
    BroadcastSlices<Config> slices;

    CUTE_DEVICE Work(BackwardParams const& params, int index)
        : tile(params, index), slices(params, tile.slice) {}

    CUTE_DEVICE ScoreSlice first(BackwardParams const& params) const {
      return from(params, slices.first());
    }

    CUTE_DEVICE ScoreSlice after(BackwardParams const& params, ScoreSlice const& slice) const {
      return from(params, slices.after(slice));
    }

    CUTE_DEVICE bool ends(ScoreSlice const& slice) const { return slice.index >= slices.count; }

    // The row of a slice's block mask, restricted to this tile.
    CUTE_DEVICE BlockMaskRow<Config::kBlockMask> block_of(BackwardParams const& params,
                                                          ScoreSlice const& slice) const {
      int const key = tile.column / kTileKey;
      return {{key, key + 1}, params.block_mask,     slice.batch,
              slice.head,     tile.row / kTileQuery, ceil_div(params.shape.key_length, kTileKey)};
    }

   private:
    // The first slice from `slice` on that has a valid element in the tile.
    CUTE_DEVICE ScoreSlice from(BackwardParams const& params, ScoreSlice slice) const {
      int const key = tile.column / kTileKey;
      for (; !ends(slice); slice = slices.after(slice)) {
        Mask const mask(params.mask, params.shape, slice.batch);
        TileRange const blocks = mask.key_tiles(tile.row, kTileQuery, kTileKey);
        if (blocks.begin <= key && key < blocks.end && !block_of(params, slice).empty()) break;
      }
      return slice;
    }
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.pairs.init(kConsumerWarps);
      Bias::init(control);
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, maps, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, control, tiles);
    }
  }

  // The producer, one thread: copies the pairs of operand parts of every slice of every tile.
  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Control& control, uint32_t tiles) {
    PipelineStage<kStages> stage;
    Bias bias(tiles + kBiasOffset);
    int const count = Work::Tile::count(params);
    CUTE_NO_UNROLL
    for (int index = blockIdx.x; index < count; index += gridDim.x) {
      Work const work(params, index);
      bool first = true;
      CUTE_NO_UNROLL
      for (ScoreSlice slice = work.first(params); !work.ends(slice);
           slice = work.after(params, slice)) {
        load_pairs<kHeadParts>(params, maps.query, maps.key, params.key, work, slice, control,
                               stage, tiles);
        // Load the bias after the operands of S. It has one buffer, which becomes free only when
        // the last scores of the previous tile are complete; the operand buffers become free
        // earlier.
        if (first) bias.produce(params, maps, work, control);
        first = false;
        load_pairs<kValueParts>(params, maps.out_gradient, maps.value, params.value, work, slice,
                                control, stage, tiles);
      }
    }
  }

  // Copies the kParts pairs of one product: rows of queries or dO, and columns, which are keys or
  // values.
  template <int kParts>
  CUTE_DEVICE static void load_pairs(BackwardParams const& params, TensorMap const& rows,
                                     TensorMap const& columns, TensorView const& tensor,
                                     Work const& work, ScoreSlice const& slice, Control& control,
                                     PipelineStage<kStages>& stage, uint32_t tiles) {
    int const head = slice.head;
    Origin const queries = query_origin<Config>(params.shape, slice.batch);
    KeyValueSource<Config> const keys(params, slice.batch,
                                      key_head_of<Config>(params, head / params.shape.group));
    int const batch = keys.batch(tensor);
    CUTE_NO_UNROLL
    for (int part = 0; part < kParts; ++part) {
      uint64_t& arrived = control.pairs.acquire(stage, kPairBytes);
      uint32_t const pair = tiles + stage.index * kPairBytes;
      int const column = part * kPartColumns;
      load_part<kQueryBox>(rows, arrived, pair, column, queries.row + work.tile.row, head,
                           queries.batch);
      load_part<kKeyBox>(columns, arrived, pair + Part::kBytes, column,
                         keys.origin.row + work.tile.column, keys.head, batch);
      stage.advance();
    }
  }

  template <int kBox>
  CUTE_DEVICE static void load_part(TensorMap const& map, uint64_t& arrived, uint32_t part,
                                    int column, int row, int head, int batch) {
    CUTE_UNROLL
    for (int i = 0; i < Part::kRows; i += kBox) {
      load_box(map, arrived, part + i * Part::kRowBytes, column, row + i, head, batch,
               CacheHint::EVICT_LAST);
    }
  }

  // The main loop of a consumer: sums dS over the slices of each tile of this CTA and stores the
  // tile.
  CUTE_DEVICE static void consume(BackwardParams const& params, Control& control, uint32_t tiles) {
    PipelineStage<kStages> stage;
    Bias bias(tiles + kBiasOffset);
    Modifiers const modifiers = {{params.scale}, {params}, bias};
    int const count = Work::Tile::count(params);
    CUTE_NO_UNROLL
    for (int index = blockIdx.x; index < count; index += gridDim.x) {
      Work const work(params, index);
      auto sums = Grid::make_accumulators();  // (4, 1, MMA_N)
      cute::clear(sums);
      ScoreSlice slice = work.first(params);
      if (!work.ends(slice)) bias.begin(params, work);
      CUTE_NO_UNROLL
      while (!work.ends(slice)) {
        ScoreSlice const next = work.after(params, slice);
        accumulate(params, work, slice, work.ends(next), modifiers, control, stage, tiles, sums);
        slice = next;
      }
      work.tile.store(sums);
    }
  }

  // Adds the dS of one slice: sums += dS.
  template <class Accumulators>
  CUTE_DEVICE static void accumulate(BackwardParams const& params, Work const& work,
                                     ScoreSlice const& slice, bool last, Modifiers const& modifiers,
                                     Control& control, PipelineStage<kStages>& stage,
                                     uint32_t tiles, Accumulators& sums) {
    int const batch = slice.batch;
    int const head = slice.head;
    Mask const mask(params.mask, params.shape, batch);
    Statistics const statistics = load_statistics(params, mask, work, batch, head);

    // Loaded early, so that computing the bits of KeptBlocks does not wait for it.
    typename KeptBlocks::Source const source(params, batch, head);
    auto scores = Grid::make_accumulators();          // (4, 1, MMA_N)
    auto score_gradient = Grid::make_accumulators();  // (4, 1, MMA_N)
    PipelineStage<kStages> read = stage;
    auto end_scores = [&](auto pending) {
      wait_products<pending>();
      fence_accumulators(scores);
      release<kHeadParts>(control, read);
    };
    begin_product<kHeadParts>(params, mask, work, control, stage, tiles, scores);
    if constexpr (!kHoldsBlock) end_scores(cute::Int<0>{});
    begin_product<kValueParts>(params, mask, work, control, stage, tiles, score_gradient);
    KeptBlocks::end_basic_block(control.pairs, read);
    KeptBlocks const kept(source, work.tile.row, work.tile.column);
    if constexpr (kHoldsBlock) end_scores(cute::Int<1>{});
    ScoreTilePosition const at = {batch, head, work.tile.row, work.tile.column};
    modifiers.forward(scores, at, params, work, control, last);
    bool const partial = work.block_of(params, slice).partial(work.tile.column / kTileKey);
    mask.template apply<kTileQuery, kTileKey>(scores, params, at, partial);
    statistics.exponentiate(params.scale.softmax_scale, scores);
    fence_accumulators(scores);
    // Hazard: keep this after the exponentials. Its branch ends the basic block; without it ptxas
    // sinks the exponentials below the wait for dP, which they should overlap.
    clear_rows_beyond(mask.query_length - work.tile.row, scores);
    wait_products<0>();
    fence_accumulators(score_gradient);
    release<kValueParts>(control, read);
    add_gradient(params, statistics, kept, scores, score_gradient, sums);
  }

  // Starts the product of the next buffer pairs as one wgmma group.
  template <int kParts, class Accumulators>
  CUTE_DEVICE static void begin_product(BackwardParams const& params, Mask const& mask,
                                        Work const& work, Control& control,
                                        PipelineStage<kStages>& stage, uint32_t tiles,
                                        Accumulators& accumulators) {
    using Operand = DescriptorOperand<Part, Contiguous::k>;
    int const warpgroup = warpgroup_index();
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      uint32_t const pair = tiles + stage.index * kPairBytes;
      control.pairs.wait(stage);
      clear_beyond(params.shape, mask, work, pair);
      fence_accumulators(accumulators);
      begin_products();
      warpgroup_gemm<Element, kPartColumns / 16>(accumulators,
                                                 Operand(pair, warpgroup * kWarpgroupRows),
                                                 Operand(pair + Part::kBytes), part > 0);
      stage.advance();
    }
    commit_products();
  }

  // Releases the buffers of a finished product, from `stage` on.
  template <int kParts>
  CUTE_DEVICE static void release(Control& control, PipelineStage<kStages>& stage) {
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      if (threadIdx.x % kWarpSize == 0) control.pairs.release(stage);
      stage.advance();
    }
  }

  // Clears the rows of a pair beyond the lengths of a slice: memory there may hold NaN, which would
  // make P and dP NaN.
  CUTE_DEVICE static void clear_beyond(ProblemShape const& shape, Mask const& mask,
                                       Work const& work, uint32_t pair) {
    int const row = work.tile.row;
    int const column = work.tile.column;
    bool const rows = reads_beyond<Config>(mask.query_length, row + kTileQuery, shape.query_length);
    bool const columns = reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length);
    if (!rows && !columns) return;
    if (rows) clear_rows<Part, kConsumers>(pair, mask.query_length - row);
    if (columns) clear_rows<Part, kConsumers>(pair + Part::kBytes, mask.key_length - column);
    fence_tma_store();
    named_barrier_sync(kConsumerBarrier, kConsumers);
  }

  using KeptBlocks = typename ProbabilityModifiers<Config, Grid>::Tile;

  // Loads logsumexp and delta. Rows beyond the length get a logsumexp of +inf, as rows without keys
  // do, so that all their P are 0.
  CUTE_DEVICE static Statistics load_statistics(BackwardParams const& params, Mask const& mask,
                                                Work const& work, int batch, int head) {
    float const* const source =
        params.row_statistics +
        MainTiles::tile_index(params, batch, head, 0) * MainTiles::kTileQuery * 2;
    int const thread = thread_index();
    Statistics statistics;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const row = work.tile.row + Grid::element_row(2 * half, 0, thread);
      statistics.rows[half] = row < mask.query_length ? QuadStatistics::load(source, row)
                                                      : make_float2(infinity(), 0.0f);
    }
    return statistics;
  }

  // Clears the scores of rows beyond the length of a slice: their bias may be NaN, which would make
  // P NaN.
  template <class Scores>
  CUTE_DEVICE static void clear_rows_beyond(int row_bound, Scores& scores) {
    if (row_bound < kTileQuery) {
      int const thread = thread_index();
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        if (Grid::element_row(i % 4, 0, thread) >= row_bound) scores(i) = 0.0f;
      }
    }
  }

  // Adds sums += dS = P (dP - delta), with dP after the modifiers of probabilities.
  template <class Scores>
  CUTE_DEVICE static void add_gradient(BackwardParams const& params, Statistics const& statistics,
                                       KeptBlocks const& kept_blocks, Scores const& scores,
                                       Scores const& score_gradient, Scores& sums) {
    auto block = [&](int, int column_block, auto const& keep) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        int const element = i % 4;
        int const chunk = i / 4;
        int const half = element / 2;
        int const n = 2 * column_block + chunk;
        float const kept = keep.select(score_gradient(element, 0, n), half, chunk, element % 2);
        sums(element, 0, n) += softmax_gradient(
            scores(element, 0, n), kept, probability_scale<Config>(params), statistics.delta(half));
      }
    };
    CUTE_UNROLL
    for (int n = 0; n < Grid::kColumnBlocks; ++n) block(0, n, kept_blocks.block(0, n));
  }
};

// The entry point for calls whose main kernel is sm90/backward.cuh.
template <class Config>
struct FmhaBackwardDbias<Config, BackwardTilesSm90<Config>>
    : DbiasSm90<Config, BackwardTilesSm90<Config>> {};

}  // namespace memeff
