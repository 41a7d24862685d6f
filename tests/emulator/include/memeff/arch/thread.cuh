// Thread and CTA indices, dynamic shared memory, and dependent launches.
#pragma once

#include <cute/config.hpp>

namespace memeff {

CUTE_DEVICE int thread_index() { return int(threadIdx.x); }
CUTE_DEVICE unsigned block_index() { return blockIdx.x; }
CUTE_DEVICE unsigned grid_size() { return gridDim.x; }
template <class Value>
CUTE_DEVICE void hide_value(Value&) {}

CUTE_DEVICE void random_sleep() {
#ifdef MEMEFF_RANDOM_SLEEP
  emulator::yield();
#endif
}

CUTE_DEVICE void sleep_briefly() { emulator::yield(); }

// Kernels run one after the other, so there is nothing to wait for.
CUTE_DEVICE void let_next_kernel_start() {}
CUTE_DEVICE void wait_for_kernel_before() {}

CUTE_DEVICE char* dynamic_shared() { return emulator::dynamic_shared(); }

template <class Object>
CUTE_DEVICE Object& static_shared() {
  static char const name = 0;
  return *static_cast<Object*>(emulator::static_shared(&name, sizeof(Object)));
}

}  // namespace memeff
