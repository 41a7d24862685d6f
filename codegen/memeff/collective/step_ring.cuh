// Two buffers in shared memory through which operands stream, one step of a product at a time.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>

namespace memeff {

// While the tensor cores read one buffer, the copies of the next step fill the other. A phase is a
// product of several steps. The first copies of a phase start during the last step of the previous
// one, so the ring never drains.
class StepRing {
 public:
  CUTE_DEVICE StepRing(uint32_t buffers, int bytes)
      : current_(buffers), both_(buffers + (buffers + bytes)) {}

  // Starts the copies of the very first step: load(buffer).
  template <class Load>
  CUTE_DEVICE void start(Load load) {
    load(current_);
    commit_copies();
  }

  // Calls use(step, buffer) for each step, after load(step, buffer) of the next step, or in the
  // last step after load_next(buffer) for the next phase. All threads of the CTA synchronize once
  // per step, before use.
  template <class Load, class Use, class LoadNext>
  CUTE_DEVICE void run(int steps, Load load, Use use, LoadNext load_next) {
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      wait_copies<0>();
      sync_threads();
      uint32_t const buffer = current_;
      current_ = both_ - current_;
      if (step + 1 < steps) {
        load(step + 1, current_);
      } else {
        load_next(current_);
      }
      commit_copies();
      use(step, buffer);
    }
  }

 private:
  uint32_t current_;  // of the next step to be used
  uint32_t both_;     // the sum of both addresses
};

}  // namespace memeff
