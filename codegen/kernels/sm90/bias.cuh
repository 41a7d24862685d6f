// The bias of a Q block in the Hopper backward kernels whose scores are transposed.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/bias/transposed.cuh>

namespace memeff {

// In the dkdv kernel of the two-kernel backward, whose shared memory has no room for a ring.

// Loaded by TMA, into one buffer: the next bias is loaded once this one has been read. The producer
// and the consumer of queries each have an object.
template <class Config, class Tile, class Grid, bool kTma = has_tma_bias<Config>()>
class QBlockBias {
 public:
  static constexpr int kBytes = Tile::kBytes;
  static constexpr bool kRegisterSteps = false;
  struct Control {
    Pipeline<1> bias;
  };

  CUTE_DEVICE static void init(Control& control, int warps) { control.bias.init(warps); }

  CUTE_DEVICE explicit QBlockBias(uint32_t tile) : tile_(tile) {}

  // Called by the producer.
  template <class Work, class QBlock>
  CUTE_DEVICE void produce(BackwardParams const& params, BackwardMaps const& maps, Work const& work,
                           QBlock const& q_block, Control& control) {
    BiasSlice const slice = BiasSlice::of<Config>(params.bias, work.item.batch, q_block.head);
    load_tma_tile<Tile>(maps.bias, control.bias.acquire(stage_, kBytes), tile_, 0, q_block.row(),
                        slice.head, slice.batch, CacheHint::EVICT_NORMAL, work.column);
    stage_.advance();
  }

  // Called by the consumer, while its scores are computed.
  template <class Work, class QBlock, class Mask>
  CUTE_DEVICE void load(BackwardParams const&, Work const&, QBlock const&, Mask const&) {}

  // Adds the bias to the scores. The bias of a row beyond the length may be NaN and would make P
  // NaN, so clear(tile, row) clears the rows of a tile from `row` on, with all threads.
  template <class Scores, class QBlock, class Mask, class Clear>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const& params,
                       QBlock const& q_block, Mask const& mask, Control& control,
                       Clear const& clear) {
    int const row = q_block.row();
    control.bias.wait(stage_);
    if (reads_beyond<Config>(mask.query_length, row + Tile::kRows, params.shape.query_length)) {
      clear(tile_, mask.query_length - row);
    }
    TransposedTmaBiasReader<typename Config::BiasElement, Tile> const reader(
        tile_, Grid::row(thread_index()));
    add_bias_transposed(scores, reader, bias_scale);
  }

  // Called by one lane of each warp. Hazard: everything that depends on the bias must have been
  // stored, because an arrival overtakes pending loads.
  CUTE_DEVICE void release(Control& control) { control.bias.release(stage_); }

  CUTE_DEVICE void advance() { stage_.advance(); }

 private:
  uint32_t tile_;
  PipelineStage<1> stage_;
};

// Each lane loads the bias of its own elements into registers, if there is a bias.
template <class Config, class Tile, class Grid>
class QBlockBias<Config, Tile, Grid, false> {
  using Registers = RegisterTransposedBias<Config, Grid>;

 public:
  static constexpr int kBytes = 0;
  static constexpr bool kRegisterSteps = has_bias_tile<Config>();
  struct Control {};

  CUTE_DEVICE static void init(Control&, int) {}

  CUTE_DEVICE explicit QBlockBias(uint32_t) {}

  template <class Work, class QBlock>
  CUTE_DEVICE void produce(BackwardParams const&, BackwardMaps const&, Work const&, QBlock const&,
                           Control&) {}

  template <class Work, class QBlock, class Mask>
  CUTE_DEVICE void load(BackwardParams const& params, Work const& work, QBlock const& q_block,
                        Mask const& mask) {
    registers_.load(params.bias, work.item.batch, q_block.head, q_block.row(), work.column,
                    mask.query_length - q_block.row(), mask.key_length - work.column);
  }

  template <class Scores, class QBlock, class Mask, class Clear>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const&, QBlock const&,
                       Mask const&, Control&, Clear const&) const {
    registers_.add(scores, bias_scale);
  }

  CUTE_DEVICE void release(Control&) {}

  CUTE_DEVICE void advance() {}

 private:
  Registers registers_;
};

// In the one-kernel backward: a bias arrives with dO of its Q block. One interface has three
// implementations: TMA, with a buffer for each stage; copies by each warp for its own 16 keys, if
// TMA cannot read the array; and no bias.

// No bias: does nothing.
template <class Config, class Tiles, int kStages, bool kTma = has_tma_bias<Config>(),
          bool kBias = has_bias_tile<Config>()>
class QBlockBiasRing {
 public:
  static constexpr bool kTmaBias = false;
  static constexpr int kTmaStageBytes = 0;
  static constexpr int kWarpBytes = 0;

  CUTE_DEVICE explicit QBlockBiasRing(uint32_t) {}
  CUTE_DEVICE void prefetch_map(BackwardMaps const&) const {}
  template <class Work>
  CUTE_DEVICE void produce(BackwardParams const&, BackwardMaps const&, Work const&, int, int, int,
                           uint64_t&) const {}
  template <class Work, class Mask>
  CUTE_DEVICE void load_first(BackwardParams const&, Work const&, Mask const&, int, int) const {}
  template <class Work, class Mask>
  CUTE_DEVICE void load_next(BackwardParams const&, Work const&, Mask const&, int, int) const {}
  CUTE_DEVICE void clear_rows_beyond(int, int) const {}
  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores&, float, BackwardParams const&, Work const&, int, int, int) const {}
};

// TMA: the producer copies a tile per stage.
template <class Config, class Tiles, int kStages>
class QBlockBiasRing<Config, Tiles, kStages, true, true>
    : public QBlockBiasRing<Config, Tiles, kStages, false, false> {
  using Grid = typename Tiles::ScoreGrid;
  using Tile = SharedTile<Tiles::kTileQuery, Tiles::kTileKey>;

 public:
  static constexpr bool kTmaBias = true;
  static constexpr int kTmaStageBytes = Tile::kBytes;

  CUTE_DEVICE explicit QBlockBiasRing(uint32_t tiles)
      : QBlockBiasRing<Config, Tiles, kStages, false, false>(tiles), tiles_(tiles) {}

  CUTE_DEVICE void prefetch_map(BackwardMaps const& maps) const { memeff::prefetch_map(maps.bias); }

  // Called by the producer. `arrived` also counts the bytes of dO.
  template <class Work>
  CUTE_DEVICE void produce(BackwardParams const& params, BackwardMaps const& maps, Work const& work,
                           int head, int q_block, int stage, uint64_t& arrived) const {
    BiasSlice const slice = BiasSlice::of<Config>(params.bias, work.item.batch, head);
    load_tma_tile<Tile>(maps.bias, arrived, tile(stage), 0, q_block * Tiles::kTileQuery, slice.head,
                        slice.batch, CacheHint::EVICT_NORMAL, work.column);
  }

  // The bias of a row beyond the query length may be NaN, which would make P NaN.
  CUTE_DEVICE void clear_rows_beyond(int stage, int row_bound) const {
    clear_rows<Tile, Tiles::kThreads>(tile(stage), row_bound);
  }

  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const&, Work const&, int,
                       int, int stage) const {
    TransposedTmaBiasReader<typename Config::BiasElement, Tile> const reader(
        tile(stage), Grid::row(thread_index()));
    add_bias_transposed(scores, reader, bias_scale);
  }

 private:
  CUTE_DEVICE uint32_t tile(int stage) const { return tiles_ + stage * Tile::kBytes; }

  uint32_t tiles_;
};

// Each warp copies the bias of its own 16 keys by cp.async.
template <class Config, class Tiles, int kStages>
class QBlockBiasRing<Config, Tiles, kStages, false, true>
    : public QBlockBiasRing<Config, Tiles, kStages, false, false> {
  using Grid = typename Tiles::ScoreGrid;
  using Element = typename Config::BiasElement;
  using Tile = BiasTile<Config, Tiles::kTileQuery, 16, kWarpSize>;

 public:
  static constexpr int kWarpBytes = Tiles::kWarps * Tile::kBytes;

  CUTE_DEVICE explicit QBlockBiasRing(uint32_t tiles)
      : QBlockBiasRing<Config, Tiles, kStages, false, false>(tiles), tiles_(tiles) {}

  // Called by the consumers, before the main loop.
  template <class Work, class Mask>
  CUTE_DEVICE void load_first(BackwardParams const& params, Work const& work, Mask const& mask,
                              int head, int q_block) const {
    int const thread = thread_index();
    int const row = q_block * Tiles::kTileQuery;
    Tile::copy(warp_tile(), thread % kWarpSize, source(params, work, head, row), row_bytes(params),
               mask.query_length - row, mask.key_length - work.column - Grid::row(thread));
    commit_copies();
  }

  // Starts the copy for the next Q block. Hazard: call it after the exponentials. Its branch ends
  // the basic block; without it ptxas sinks the exponentials below the wait for dP.
  template <class Work, class Mask>
  CUTE_DEVICE void load_next(BackwardParams const& params, Work const& work, Mask const& mask,
                             int head, int q_block) const {
    __syncwarp();  // all lanes have read this bias
    auto const blocks = work.row_of_blocks(params, head);
    bool const last = blocks.after(q_block) == blocks.end;
    if (last) head = work.head_with_blocks(params, head + 1);
    if (head < (work.item.head + 1) * params.shape.group) {
      load_first(params, work, mask, head,
                 last ? work.row_of_blocks(params, head).begin : blocks.after(q_block));
    }
  }

  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const& params,
                       Work const& work, int head, int row, int) const {
    wait_copies<0>();
    __syncwarp();  // the bias of all lanes has arrived
    TransposedBiasReader<Tile> const reader(warp_tile(), source(params, work, head, row),
                                            row_bytes(params));
    add_bias_transposed(scores, reader, bias_scale);
  }

 private:
  CUTE_DEVICE uint32_t warp_tile() const {
    return tiles_ + thread_index() / kWarpSize * Tile::kBytes;
  }

  // The address of the first bias of this warp's keys.
  template <class Work>
  CUTE_DEVICE static char const* source(BackwardParams const& params, Work const& work, int head,
                                        int row) {
    return bias_row<Config>(params.bias, work.item.batch, head, row) +
           (work.column + Grid::row(thread_index())) * (long long)sizeof(Element);
  }

  CUTE_DEVICE static long long row_bytes(BackwardParams const& params) {
    return params.bias.row_stride * (long long)sizeof(Element);
  }

  uint32_t tiles_;
};

}  // namespace memeff
