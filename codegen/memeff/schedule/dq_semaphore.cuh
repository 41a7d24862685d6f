// Deterministic dq sums: semaphores in global memory give the additions of several CTAs the same
// order in every run.
//
// The CTAs of one key head form a sequence, last KV block first. Each publishes its progress
// through the Q blocks in a semaphore of its own, and adds to a Q block only after its predecessor
// has. With causal masks and windows a CTA begins at a Q block that its predecessor skips or has
// passed, so waits are short. Without a mask each CTA starts one addition after its predecessor.
//
// It is enough to wait for the predecessor: along the sequence the Q blocks of a CTA begin and end
// earlier or at the same place, so all CTAs before the predecessor have passed what it has passed.
// In the opposite sequence they begin and end later or at the same place, and the same holds.
//
// Hazard: with a block mask (mask/block_mask.cuh) that does not hold. Then a CTA never publishes
// more progress than its predecessor. A CTA that has finished, while its predecessor has not,
// publishes kAskPredecessor, and its successor waits for the predecessor instead.
//
// A CTA draws a ticket when it starts, and the ticket selects its work. So a CTA waits only for
// CTAs that already run or have finished. It cannot deadlock, whatever the order in which the
// hardware starts CTAs, and whatever else runs on the device.
//
// Consecutive tickets go to several key heads in turn. Without a mask SMs become free faster than
// the CTAs of one head may follow each other, so CTAs would wait. With several heads a sequence
// grows by a CTA only after many have started.
//
// Under a causal mask the first KV block has the most Q blocks. If it comes last, it ends long
// after the others, which costs 6 % of the time at the end of a grid, and more of a small one. So
// the last section of heads begins with it. Each of its CTAs waits until its predecessor has passed
// the Q blocks between their keys. That takes little time there, because SMs become free one by
// one; in every section it would take more than it saves.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// Published by a CTA that has made its last addition.
constexpr int kFinished = 0x7fffffff;
// Published by a CTA that has made its last addition while its predecessor may still add.
constexpr int kAskPredecessor = -1;

// The same interface without an order, for kernels whose sums may differ in their last bits from
// run to run.
template <class Config>
struct NoDqSemaphore {
  CUTE_DEVICE NoDqSemaphore(BackwardParams const&, int*) {}
  CUTE_DEVICE WorkItem item(BackwardParams const& params) const {
    return work_item<Config, Heaviest::first, Config::kTileKey>(params.shape, params.bias,
                                                                blockIdx.x);
  }
  CUTE_DEVICE void publish(int) const {}
  CUTE_DEVICE void wait(int) {}
};

// The semaphore of a CTA. The main loop calls wait() before it adds to a Q block and publish()
// after.
template <class Config>
class DqSemaphore {
 public:
  using Grid = GridTiles<Config, GridRows::keys, Config::kTileKey>;

  // The number of key heads whose CTAs take tickets in turn. 132 SMs with the Q blocks of T = 1024
  // keep 8 heads busy. More heads cost nothing while their queries, dO and dq sums stay in L2 (50
  // MB or more); longer sequences need fewer.
  static constexpr unsigned kMaxInterleavedHeads = 16;
  static constexpr long long kInterleavedBytes = 32 << 20;

  CUTE_DEVICE static unsigned interleaved_heads(BackwardParams const& params) {
    ProblemShape const& shape = params.shape;
    long long const row_bytes =
        shape.head_dim * (sizeof(typename Config::Element) + sizeof(float)) +
        shape.value_dim * sizeof(typename Config::Element);
    long long const head_bytes = row_bytes * rows_in_use(params) * shape.group;
    return min(max(unsigned(kInterleavedBytes / max(head_bytes, 1ll)), 1u), kMaxInterleavedHeads);
  }

  // The number of slices in the last section, whose CTAs begin with the first KV block. It has
  // twice as many slices as the others, or three quarters of all.
  CUTE_DEVICE static unsigned last_section(unsigned slices, unsigned interleaved) {
    constexpr bool kUnevenWork =
        Config::kMask == MaskKind::causal && !Config::kBlockMask && !Config::kTokenGrid;
    if (!kUnevenWork || slices <= interleaved) return 0;
    return min(2 * interleaved, slices - slices / 4);
  }

  // The number of words in BackwardParams::semaphores: a ticket counter, and the semaphore of each
  // CTA.
  CUTE_DEVICE static unsigned words(ProblemShape const& shape) {
    Grid const grid = {shape};
    return 1u + grid.of_slice() * grid.slices();
  }

  // Draws the ticket of a CTA; one thread calls it.
  CUTE_DEVICE static int draw(BackwardParams const& params) {
    return atomicAdd(params.semaphores, 1);
  }

  CUTE_DEVICE DqSemaphore(BackwardParams const& params, int ticket) {
    Grid const grid = {params.shape};
    unsigned const tiles = grid.of_slice();
    unsigned const slices = grid.slices();
    unsigned const interleaved = interleaved_heads(params);
    unsigned const last = slices - last_section(slices, interleaved);
    bool const ascends = unsigned(ticket) >= last * tiles;
    unsigned const first = ascends ? last : ticket / (interleaved * tiles) * interleaved;
    unsigned const heads = ascends ? slices - last : min(interleaved, last - first);
    unsigned const rest = ticket - first * tiles;
    unsigned const slice = first + rest % heads;
    unsigned const position = rest / heads;
    unsigned const tile = ascends ? position : tiles - 1 - position;
    if (shares_bias<Config>(params.bias)) {
      item_ = WorkItem::of_block_by_batch(slice, 1, params.shape.batch);
      item_.tile = tile;
    } else {
      item_ = grid.item_alone(tile, slice);
    }
    progress_ = params.semaphores + 1 + slice * tiles + position;
    bool const begins =
        ascends ? position == 0 : item_.tile + 1 == grid.of_batch_index(item_.batch);
    passed_ = begins ? kFinished : 0;
  }

  // Draws the ticket for all threads of the CTA; `scratch` is an unused word of shared memory.
  CUTE_DEVICE DqSemaphore(BackwardParams const& params, int* scratch)
      : DqSemaphore(params, draw(params, scratch)) {}

  // The work of the CTA, whatever its block index.
  CUTE_DEVICE WorkItem item(BackwardParams const&) const { return item_; }

  // Publishes that this CTA has added everything before `position`. Hazard: one thread calls it,
  // after a barrier with all threads that added, so that its release covers their additions, too.
  CUTE_DEVICE void publish(int position) {
    if constexpr (Config::kBlockMask) {
      if (passed_ < position) look();
      position =
          position == kFinished && passed_ < kFinished ? kAskPredecessor : min(position, passed_);
    }
    store_release(progress_, position);
  }

  // Returns when the predecessor has added everything up to `position`.
  CUTE_DEVICE void wait(int position) {
    while (passed_ <= position) look();
    random_sleep();
  }

 private:
  // The query rows of a head that CTAs read at a time. With a block mask these are the rows of the
  // first or of the middle KV block, whichever has more: windows and documents need few rows of a
  // long sequence. It is a guess, and only the speed depends on it.
  CUTE_DEVICE static int rows_in_use(BackwardParams const& params) {
    if constexpr (!Config::kBlockMask) return params.shape.query_length;
    int const count = params.query_tiles;
    int const middle = Config::kTokenGrid ? 0 : Grid{params.shape}.of_slice() / 2;
    int most = 0;
    for (int index : {0, middle}) {
      BlockMaskRow<true> const blocks({0, count}, params.block_mask, 0, 0, index, count);
      most = max(most, blocks.end - blocks.begin);
    }
    return min(most * Config::kTileQuery, params.shape.query_length);
  }

  // Reads the predecessor's progress once, and moves on to its predecessor after kAskPredecessor.
  CUTE_DEVICE void look() {
    if constexpr (!Config::kBlockMask) {
      passed_ = load_acquire(progress_ - 1);
    } else if (int const progress = load_acquire(progress_ - distance_);
               progress == kAskPredecessor) {
      ++distance_;  // the progress that the finished CTA published before still holds
    } else {
      passed_ = progress;
    }
  }

  CUTE_DEVICE static int draw(BackwardParams const& params, int* scratch) {
    if (threadIdx.x == 0) *scratch = draw(params);
    sync_threads();
    int const ticket = *scratch;
    sync_threads();
    return ticket;
  }

  WorkItem item_;
  int* progress_;
  int passed_;        // the predecessor's progress at the last read
  int distance_ = 1;  // distance in the sequence to the CTA whose semaphore is read
};

}  // namespace memeff
