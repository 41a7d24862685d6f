// The bias of a Q block in the dkdv kernel of the two-kernel backward. Its scores are transposed,
// and its shared memory has no room for a ring of biases: see kernels/backward/dkdv/kernel.cuh.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/bias/transposed.cuh>

namespace memeff {

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

}  // namespace memeff
