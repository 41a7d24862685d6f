// The bias of a square of queries and keys, which a CTA adds to the scores of several (batch, head)
// slices: see kernels/backward/dbias/sm90.cuh.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/score/bias/add.cuh>

namespace memeff {

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

}  // namespace memeff
