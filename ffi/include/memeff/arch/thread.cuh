// What a thread knows of itself and its block, and how it hides values from the optimiser.
#pragma once

#include <cute/config.hpp>

namespace memeff {

// threadIdx.x, read anew. What is computed from it is then computed where it is used and does not
// occupy registers across a main loop that needs them all.
CUTE_DEVICE int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// blockIdx.x, read anew: an epilogue that asks again for its CTA's coordinates keeps them out of
// the registers of the main loop. Before the loop blockIdx.x is better, which is known to be
// uniform.
CUTE_DEVICE unsigned block_index() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// The optimiser knows nothing of the value from here on.
CUTE_DEVICE void hide_value(unsigned& value) { asm volatile("" : "+r"(value)); }

// The shared memory that the launch asks for. It starts at a multiple of 1024 bytes.
CUTE_DEVICE char* dynamic_shared() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// One object for all threads of the block; its type names it, and is used once in a kernel.
template <class Object>
CUTE_DEVICE Object& static_shared() {
  __shared__ Object object;
  return object;
}

}  // namespace memeff
