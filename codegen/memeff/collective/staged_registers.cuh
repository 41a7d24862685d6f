// Values that are staged in shared memory while the tensor cores work.
//
// If the accumulators of both products fill the register file, the compiler spills to local memory
// at places of its choice. Kernels instead explicitly stage values that the products do not need,
// at the cost of a few shared-memory accesses per tile. Each thread has its own slots, so this
// needs no synchronization.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>

namespace memeff {

// A pointer that is kept in a register, or staged in shared memory.
template <bool kStaged>
class StagedPointer {
 public:
  static constexpr int kBytes = 0;
  CUTE_DEVICE StagedPointer(uint32_t, char const* pointer) : pointer_(pointer) {}
  CUTE_DEVICE char const* get() const { return pointer_; }

 private:
  char const* pointer_;
};

template <>
class StagedPointer<true> {
 public:
  static constexpr int kBytes = 8;  // per thread
  CUTE_DEVICE StagedPointer(uint32_t slots, char const* pointer)
      : slot_(slots + thread_index() * kBytes) {
    store_shared_pointer(slot_, pointer);
  }
  CUTE_DEVICE char const* get() const { return load_shared_pointer(slot_); }

 private:
  uint32_t slot_;
};

}  // namespace memeff
