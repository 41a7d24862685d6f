// Ring buffers in shared memory that a producer fills and consumers read.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/thread.cuh>

namespace memeff {

// A position in a ring of kStages buffers. The parity alternates with each pass over the ring.
template <int kStages>
struct PipelineStage {
  int index = 0;
  int parity = 0;

  CUTE_DEVICE void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }

  // Advances by `count` buffers, at most kStages.
  CUTE_DEVICE void advance(int count) {
    index += count;
    if (index >= kStages) {
      index -= kStages;
      parity ^= 1;
    }
  }
};

// The barriers of a ring buffer between producers and consumer warps. A buffer is filled by one
// thread whose TMA copies arrive by bytes, by several producers that write and arrive once each, or
// by both. Each consumer warp arrives once when it has read a buffer.
template <int kStages>
struct Pipeline {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  CUTE_DEVICE void init(int consumer_arrivals, int producer_arrivals = 1) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full[stage], producer_arrivals);
      init_barrier(empty[stage], consumer_arrivals);
    }
  }

  // Producer: waits until the buffer is empty and announces `bytes`. A buffer that was never filled
  // counts as empty, hence the opposite parity.
  CUTE_DEVICE uint64_t& acquire(PipelineStage<kStages> const& stage, int bytes) {
    wait_barrier(empty[stage.index], stage.parity ^ 1);
    random_sleep();
    arrive_and_expect(full[stage.index], bytes);
    return full[stage.index];
  }

  // Producer that fills the buffer with ordinary writes: waits until it is empty. Call commit()
  // after the writes.
  CUTE_DEVICE void acquire(PipelineStage<kStages> const& stage) {
    wait_barrier(empty[stage.index], stage.parity ^ 1);
    random_sleep();
  }
  CUTE_DEVICE void commit(PipelineStage<kStages> const& stage) {
    arrive_barrier(full[stage.index]);
    random_sleep();
  }

  // Consumer: waits until the buffer is full.
  CUTE_DEVICE void wait(PipelineStage<kStages> const& stage) {
    wait_barrier(full[stage.index], stage.parity);
    random_sleep();
  }
  // Redundant wait: it forces a basic-block boundary that ptxas cannot schedule across. Within one
  // basic block ptxas mixes instructions that should overlap a product with those that issue it or
  // follow its wait.
  CUTE_DEVICE void wait_again(PipelineStage<kStages> const& stage) {
    wait_barrier(full[stage.index], stage.parity);
  }
  // Hazard: the values loaded from the buffer must have been used already. An arrival overtakes
  // pending loads, including ldmatrix, and TMA would overwrite the buffer before they read it.
  CUTE_DEVICE void release(PipelineStage<kStages> const& stage) {
    arrive_barrier(empty[stage.index]);
    random_sleep();
  }
};

}  // namespace memeff
