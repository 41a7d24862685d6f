// The KV blocks of a CTA of the Hopper backward. Each thread asks for them by itself: an item that
// another thread handed out would not be uniform for ptxas, which then keeps all addresses of the
// main loop in vector registers and spills.
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

// Every CTA has the same number of KV blocks, one in each round of the grid, for masks that give
// every KV block the same work. The CTA is persistent: keys, queries and dO of its next KV block
// arrive during the last products and the epilogue of the previous one.
template <class Config>
class KvBlocksInRounds {
 public:
  // Takes the next KV block, if there is one. The numbers of CTAs and of KV blocks are computed
  // anew in each round. Otherwise ptxas spills them, because the producer has few registers.
  CUTE_DEVICE bool take(BackwardParams const& params, WorkItem& item) {
    ProblemShape const& shape = params.shape;
    unsigned key_length = shape.key_length;
    hide_value(key_length);
    unsigned const tiles = ceil_div(int(key_length), Config::kTileKey);
    unsigned const number = round_ * grid_size() + place();
    if (number >= tiles * unsigned(shape.key_heads) * unsigned(shape.batch)) return false;
    ++round_;
    item = WorkItem::of_block(number, int(tiles), shape.key_heads);
    return true;
  }

  // The buffer of keys and values of the KV block that was taken last.
  template <int kStages>
  CUTE_DEVICE PipelineStage<kStages> key_stage() const {
    static_assert(kStages <= 2);
    unsigned const last = round_ - 1;
    return {int(last % kStages), int(last / kStages % 2)};
  }

 private:
  // The CTA's place in this round. CTAs change places within groups of 16, because lengths may
  // leave some KV blocks of each head without work, and in a grid of 132 each CTA would get the
  // same one of 4 in every round. Its place is not kept, because the producer has few registers.
  CUTE_DEVICE unsigned place() const {
    constexpr unsigned kGroup = 16;
    bool const in_group = blockIdx.x < grid_size() / kGroup * kGroup;
    return in_group ? blockIdx.x ^ round_ % kGroup : blockIdx.x;
  }

  unsigned round_ = 0;
};

}  // namespace memeff
