// Sums that several CTAs add to, in the same order in every run.
//
// The CTAs of one key head form a queue, last key tile first. Each publishes how far it has come
// through the query tiles, and adds to one only after the CTA before it in the queue has. With
// causal masks and windows a CTA begins at a query tile that the one before it does not visit, or
// has passed, so that nobody waits for long; without a mask each starts one addition later.
//
// It is enough to wait for one CTA: along the queue the query tiles that a CTA visits begin and end
// earlier or at the same place, so what the one before has passed, those before that one have too.
//
// Work is handed out by a ticket, in the order in which CTAs start. So a CTA waits only for CTAs
// that already run or have finished, whatever the order in which the hardware starts blocks, and
// whatever else runs on the device.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// What a CTA publishes when it adds nothing any more.
constexpr int kFinished = 0x7fffffff;

// Additions in the order in which they come, for kernels whose sums may differ in their last bits.
template <class Config>
struct AnyOrder {
  CUTE_DEVICE AnyOrder(BackwardParams const&, int, int*) {}
  CUTE_DEVICE WorkItem item(BackwardParams const& params, int key_tiles) const {
    return work_item<Config>(params.shape, params.bias, blockIdx.x, key_tiles,
                             params.shape.key_heads);
  }
  CUTE_DEVICE void publish(int) const {}
  CUTE_DEVICE void wait(int) {}
};

template <class Config>
class Turn {
 public:
  // The number of words in BackwardParams::order: a ticket counter, and the progress of each CTA.
  CUTE_DEVICE static unsigned words(ProblemShape const& shape, int tile_key) {
    return 1u + ceil_div(shape.key_length, tile_key) * shape.key_heads * shape.batch;
  }

  // Draws a ticket for the CTA; `scratch` is a word of shared memory that nobody uses.
  CUTE_DEVICE Turn(BackwardParams const& params, int key_tiles, int* scratch) {
    if (threadIdx.x == 0) *scratch = atomicAdd(params.order, 1);
    __syncthreads();
    unsigned const ticket = *scratch;
    __syncthreads();
    int const heads = params.shape.key_heads;
    WorkItem const item = work_item<Config>(params.shape, params.bias, ticket, key_tiles, heads);
    place_ = (item.batch * heads + item.head) * key_tiles + item.tile;
    progress_ = params.order + 1;
    seen_ = item.tile == 0 ? kFinished : 0;
  }

  // The work of the CTA, whatever its block index.
  CUTE_DEVICE WorkItem item(BackwardParams const& params, int key_tiles) const {
    WorkItem item = WorkItem::of_block(place_, key_tiles, params.shape.key_heads);
    item.tile = key_tiles - 1 - item.tile;
    return item;
  }

  // Says that this CTA has added everything before `position`. All its threads have met at a
  // barrier since.
  CUTE_DEVICE void publish(int position) const {
    if (threadIdx.x == 0) store_release(progress_ + place_, position);
  }

  // Returns when the CTA before this one has added everything up to `position`.
  CUTE_DEVICE void wait(int position) {
    while (seen_ <= position) seen_ = load_acquire(progress_ + place_ - 1);
  }

 private:
  int* progress_;
  int place_;  // in all queues, one after the other
  int seen_;   // progress of the CTA before this one, when last asked
};

}  // namespace memeff
