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
// Where a map of tiles says what is visited (mask/block_mask.cuh) that does not hold. Then a CTA
// never says that it has come further than the one before it, and one that has nothing more to add,
// while the one before it has, leaves the next one to ask that one.
//
// Work is handed out by a ticket, in the order in which CTAs start. So a CTA waits only for CTAs
// that already run or have finished, whatever the order in which the hardware starts blocks, and
// whatever else runs on the device.
//
// Several queues take tickets in turn. SMs become free faster than the CTAs of one queue may follow
// each other without a mask, and would wait; so each queue grows by a CTA when many have started.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// What a CTA publishes when it adds nothing any more.
constexpr int kFinished = 0x7fffffff;
// The same, where the CTA before it may still add.
constexpr int kAskBefore = -1;

// Additions in the order in which they come, for kernels whose sums may differ in their last bits.
template <class Config>
struct NoDqSemaphore {
  CUTE_DEVICE NoDqSemaphore(BackwardParams const&, int, int*) {}
  CUTE_DEVICE WorkItem item(BackwardParams const& params, int key_tiles) const {
    return work_item<Config, Heaviest::first>(params.shape, params.bias, blockIdx.x, key_tiles,
                                              params.shape.key_heads);
  }
  CUTE_DEVICE void publish(int) const {}
  CUTE_DEVICE void wait(int) {}
};

template <class Config>
class DqSemaphore {
 public:
  // 132 SMs with as many visits to make as a block has at T = 1024 take 8 queues. More cost nothing
  // while the queries, dO and sums of dq that they visit stay in L2 (50 MB or more); longer
  // queues do with fewer.
  static constexpr unsigned kQueuesInTurn = 16;
  static constexpr long long kBytesInTurn = 32 << 20;

  CUTE_DEVICE static unsigned queues_in_turn(ProblemShape const& shape) {
    long long const row_bytes =
        shape.head_dim * (sizeof(typename Config::Element) + sizeof(float)) +
        shape.value_dim * sizeof(typename Config::Element);
    long long const queue_bytes = row_bytes * shape.query_length * shape.group;
    return min(max(unsigned(kBytesInTurn / max(queue_bytes, 1ll)), 1u), kQueuesInTurn);
  }

  // The number of words in BackwardParams::order: a ticket counter, and the progress of each CTA.
  CUTE_DEVICE static unsigned words(ProblemShape const& shape, int tile_key) {
    return 1u + ceil_div(shape.key_length, tile_key) * shape.key_heads * shape.batch;
  }

  // The ticket of a CTA; one thread draws it.
  CUTE_DEVICE static int draw(BackwardParams const& params) {
    return atomicAdd(params.semaphores, 1);
  }

  CUTE_DEVICE DqSemaphore(BackwardParams const& params, int key_tiles, int ticket) {
    ProblemShape const& shape = params.shape;
    unsigned const tiles = key_tiles;
    unsigned const in_turn = queues_in_turn(shape);
    unsigned const first = ticket / (in_turn * tiles) * in_turn;
    unsigned const queues = min(in_turn, shape.batch * shape.key_heads - first);
    unsigned const rest = ticket - first * tiles;
    unsigned const queue = first + rest % queues;
    unsigned const position = rest / queues;
    item_ = work_item<Config, Heaviest::first>(shape, params.bias, queue, 1, shape.key_heads);
    item_.tile = tiles - 1 - position;
    progress_ = params.semaphores + 1 + queue * tiles + position;
    seen_ = position == 0 ? kFinished : 0;
  }

  // The same where all threads of the CTA need it; `scratch` is a word of shared memory that nobody
  // uses.
  CUTE_DEVICE DqSemaphore(BackwardParams const& params, int key_tiles, int* scratch)
      : DqSemaphore(params, key_tiles, draw(params, scratch)) {}

  // The work of the CTA, whatever its block index.
  CUTE_DEVICE WorkItem item(BackwardParams const&, int) const { return item_; }

  // Says that this CTA has added everything before `position`. One thread does, that has met those
  // which added at a barrier since: a release covers what it knows from them, too.
  CUTE_DEVICE void publish(int position) {
    if constexpr (Config::kBlockMask) {
      if (seen_ < position) look();
      position = position == kFinished && seen_ < kFinished ? kAskBefore : min(position, seen_);
    }
    store_release(progress_, position);
  }

  // Returns when the CTA before this one has added everything up to `position`.
  CUTE_DEVICE void wait(int position) {
    while (seen_ <= position) look();
  }

 private:
  CUTE_DEVICE void look() {
    if constexpr (!Config::kBlockMask) {
      seen_ = load_acquire(progress_ - 1);
    } else if (int const progress = load_acquire(progress_ - before_); progress == kAskBefore) {
      ++before_;  // what that one has said before still holds
    } else {
      seen_ = progress;
    }
  }

  CUTE_DEVICE static int draw(BackwardParams const& params, int* scratch) {
    if (threadIdx.x == 0) *scratch = draw(params);
    __syncthreads();
    int const ticket = *scratch;
    __syncthreads();
    return ticket;
  }

  WorkItem item_;
  int* progress_;
  int seen_;        // progress of the CTA before this one, when last asked
  int before_ = 1;  // how far before this one in the queue is the CTA that is asked
};

}  // namespace memeff
