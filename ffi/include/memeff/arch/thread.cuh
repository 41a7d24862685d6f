// What a thread knows of itself and its block, how kernels of one call follow each other, how
// values are hidden from the optimiser, and how the tests make a warp late.
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
template <class Pointee>
CUTE_DEVICE void hide_value(Pointee*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// Nothing, unless MEMEFF_RANDOM_SLEEP is defined: then the warp sometimes sleeps for a moment,
// which is another one in every run. It stands wherever warps meet, so that a test sees what
// happens when any of them is late there.
CUTE_DEVICE void random_sleep() {
#ifdef MEMEFF_RANDOM_SLEEP
  unsigned clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  unsigned const hash =
      (clock + 0x9e3779b9u * (block_index() * 32 + thread_index() / 32)) * 0x85ebca6bu;
  if ((hash >> 16) % 8 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(hash >> 22));
#endif
}

// Programmatic dependent launch (CUDA programming guide): our kernels follow each other, and those
// of others, without the gap of a launch. Each lets the blocks of the next take their places as
// soon as all of its own have started, if that is one of ours, and waits until the kernels before
// it have ended, before it reads or writes anything.
CUTE_DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
CUTE_DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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
