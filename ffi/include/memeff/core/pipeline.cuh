// Rings of buffers in shared memory that a producer fills and consumers read.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/thread.cuh>

namespace memeff {

// Position in a ring of kStages buffers. The parity is that of the pass over the ring.
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
};

// A ring of buffers in shared memory between one producer thread, whose copies arrive by bytes, or
// producers that write, which arrive once each, and consumer warps, which arrive once each when
// they have read a buffer.
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

  // The producer: a buffer that was never filled counts as empty, hence the opposite parity.
  CUTE_DEVICE uint64_t& acquire(PipelineStage<kStages> const& stage, int bytes) {
    wait_barrier(empty[stage.index], stage.parity ^ 1);
    random_sleep();
    arrive_and_expect(full[stage.index], bytes);
    return full[stage.index];
  }

  // The producer, where it fills the buffer with ordinary writes.
  CUTE_DEVICE void acquire(PipelineStage<kStages> const& stage) {
    wait_barrier(empty[stage.index], stage.parity ^ 1);
    random_sleep();
  }
  CUTE_DEVICE void commit(PipelineStage<kStages> const& stage) {
    arrive_barrier(full[stage.index]);
    random_sleep();
  }

  // A consumer.
  CUTE_DEVICE void wait(PipelineStage<kStages> const& stage) {
    wait_barrier(full[stage.index], stage.parity);
    random_sleep();
  }
  // A wait that is over. It ends a basic block: in one block the assembler mixes what should run
  // under a product with what starts it, or with what stands behind the wait for it.
  CUTE_DEVICE void wait_again(PipelineStage<kStages> const& stage) {
    wait_barrier(full[stage.index], stage.parity);
  }
  // What was read must have been used: an arrival overtakes loads, ldmatrix among them, and the
  // copy engine overwrites what they have not read yet.
  CUTE_DEVICE void release(PipelineStage<kStages> const& stage) {
    arrive_barrier(empty[stage.index]);
    random_sleep();
  }
};

}  // namespace memeff
