// The bias of a visit of the backward kernel that owns keys, whose scores are transposed and whose
// shared memory has no room for a ring of it: see kernels/backward/dkdv/kernel.cuh.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/bias/transposed.cuh>

namespace memeff {

// The copy engine brings it, that of the next visit when this one's has been read. Both the
// producer and the consumer of queries have an object.
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

  // By the producer.
  template <class Work, class Visit>
  CUTE_DEVICE void produce(BackwardParams const& params, BackwardMaps const& maps, Work const& work,
                           Visit const& visit, Control& control) {
    BiasPlane const plane = BiasPlane::of<Config>(params.bias, work.item.batch, visit.head);
    load_tma_tile<Tile>(maps.bias, control.bias.acquire(stage_, kBytes), tile_, 0, visit.row(),
                        plane.head, plane.batch, CacheHint::EVICT_NORMAL, work.column);
    stage_.advance();
  }

  // By the consumer, while its scores are computed.
  template <class Work, class Visit, class Mask>
  CUTE_DEVICE void load(BackwardParams const&, Work const&, Visit const&, Mask const&) {}

  // The bias of a row beyond the length may be NaN, and so would be its P: `clear` clears the rows
  // of a tile from one on, for all threads.
  template <class Visit, class Mask, class Clear, class Scores>
  CUTE_DEVICE void add(BackwardParams const& params, Visit const& visit, Mask const& mask,
                       Control& control, Clear const& clear, Scores& scores) {
    int const row = visit.row();
    control.bias.wait(stage_);
    if (reads_beyond<Config>(mask.query_length, row + Tile::kRows, params.shape.query_length)) {
      clear(tile_, mask.query_length - row);
    }
    TransposedTmaBiasReader<typename Config::BiasElement, Tile> const reader(
        tile_, Grid::row(thread_index()));
    add_bias_transposed(scores, reader, params.scale.bias_scale);
  }

  // By a lane of each warp, and not before what depends on all of it has been stored: an arrival
  // overtakes loads that nobody has waited for.
  CUTE_DEVICE void release(Control& control) { control.bias.release(stage_); }

  CUTE_DEVICE void advance() { stage_.advance(); }

 private:
  uint32_t tile_;
  PipelineStage<1> stage_;
};

// Lanes hold that of their elements, where there is one.
template <class Config, class Tile, class Grid>
class QBlockBias<Config, Tile, Grid, false> {
  using Held = RegisterTransposedBias<Config, Grid>;

 public:
  static constexpr int kBytes = 0;
  static constexpr bool kRegisterSteps = has_bias_tile<Config>();
  struct Control {};

  CUTE_DEVICE static void init(Control&, int) {}

  CUTE_DEVICE explicit QBlockBias(uint32_t) {}

  template <class Work, class Visit>
  CUTE_DEVICE void produce(BackwardParams const&, BackwardMaps const&, Work const&, Visit const&,
                           Control&) {}

  template <class Work, class Visit, class Mask>
  CUTE_DEVICE void load(BackwardParams const& params, Work const& work, Visit const& visit,
                        Mask const& mask) {
    held_.load(params.bias, work.item.batch, visit.head, visit.row(), work.column,
               mask.query_length - visit.row(), mask.key_length - work.column);
  }

  template <class Visit, class Mask, class Clear, class Scores>
  CUTE_DEVICE void add(BackwardParams const& params, Visit const&, Mask const&, Control&,
                       Clear const&, Scores& scores) const {
    held_.add(scores, params.scale.bias_scale);
  }

  CUTE_DEVICE void release(Control&) {}

  CUTE_DEVICE void advance() {}

 private:
  Held held_;
};

}  // namespace memeff
