// Thread and CTA indices, dependent launches, values hidden from the optimizer, and random delays
// for tests.
#pragma once

#include <cute/config.hpp>

namespace memeff {

// Reads threadIdx.x anew. The compiler then recomputes the values derived from it at each use, so
// they hold no registers across a main loop that needs them all.
CUTE_DEVICE int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Reads blockIdx.x anew. An epilogue that recomputes its CTA's coordinates keeps them out of the
// registers of the main loop. Before the loop use blockIdx.x, which the compiler treats as uniform.
CUTE_DEVICE unsigned block_index() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Reads gridDim.x anew, so that it holds no register between two uses.
CUTE_DEVICE unsigned grid_size() {
  unsigned size;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
  return size;
}

// Hides the value from the optimizer.
CUTE_DEVICE void hide_value(unsigned& value) { asm volatile("" : "+r"(value)); }
template <class Pointee>
CUTE_DEVICE void hide_value(Pointee*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// Lets the race hunts (tests/kernels/test_races.py) make any warp late: with MEMEFF_RANDOM_SLEEP
// defined, a warp sometimes sleeps for a random time. It is called wherever warps synchronize.
// Otherwise it does nothing.
CUTE_DEVICE void random_sleep() {
#ifdef MEMEFF_RANDOM_SLEEP
  unsigned clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  unsigned const hash =
      (clock + 0x9e3779b9u * (block_index() * 32 + thread_index() / 32)) * 0x85ebca6bu;
  if ((hash >> 16) % 8 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(hash >> 22));
#endif
}

// For loops that poll: leaves the issue slots of the SM to its other warps.
CUTE_DEVICE void sleep_briefly() { asm volatile("nanosleep.u32 500;"); }

// Programmatic dependent launch (CUDA programming guide) removes the launch gap between two kernels
// of this library: the CTAs of the next kernel may start as soon as all CTAs of this one have
// started. Hazard: a kernel must call wait_for_kernel_before() before it reads or writes global
// memory.
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

// The dynamic shared memory of the launch. It starts at a multiple of 1024 bytes, as 128-byte
// swizzles require.
CUTE_DEVICE char* dynamic_shared() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// One object in static shared memory for all threads of the CTA. Its type identifies it, so a
// kernel must use each type only once.
template <class Object>
CUTE_DEVICE Object& static_shared() {
  __shared__ Object object;
  return object;
}

}  // namespace memeff
