// TMA, Hopper's tensor memory accelerator, on CuTe's operations. One thread starts a copy, which
// runs asynchronously.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include <memeff/params.h>

namespace memeff {

using CacheHint = cute::TMA::CacheHintSm90;

CUTE_DEVICE void* shared_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

CUTE_DEVICE void prefetch_map(TensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the copy of a box of a [batch, head, row, column] tensor to shared memory. Elements beyond
// the tensor become zero, and the bytes of the whole box arrive at `barrier`.
CUTE_DEVICE void load_box(TensorMap const& map, uint64_t& barrier, uint32_t shared, int column,
                          int row, int head, int batch, CacheHint hint) {
  cute::SM90_TMA_LOAD_4D::copy(&map, &barrier, static_cast<uint64_t>(hint), shared_pointer(shared),
                               column, row, head, batch);
}

// Starts the copy of `bytes` contiguous bytes, a multiple of 16, to shared memory.
CUTE_DEVICE void load_tma(void const* global, uint64_t& barrier, uint32_t shared, int bytes) {
  cute::SM90_BULK_COPY_G2S::copy(global, &barrier, shared_pointer(shared), bytes);
}

// Starts the copy of a box from shared memory to global memory. Elements beyond the tensor are not
// written.
CUTE_DEVICE void store_box(TensorMap const& map, uint32_t shared, int column, int row, int head,
                           int batch) {
  cute::SM90_TMA_STORE_4D::copy(&map, shared_pointer(shared), column, row, head, batch);
}

// Starts the addition of f32 numbers in shared memory to contiguous ones in global memory. `bytes`
// is a multiple of 16.
CUTE_DEVICE void reduce_add_tma(float* global, uint32_t shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

// Starts the copy of shared memory to contiguous global memory. `bytes` is a multiple of 16.
CUTE_DEVICE void store_tma(void* global, uint32_t shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// Commits this thread's stores and additions as a group.
CUTE_DEVICE void commit_tma_stores() { cute::tma_store_arrive(); }

// Waits until the sources of this thread's committed stores and additions may be overwritten.
CUTE_DEVICE void wait_tma_stores() { cute::tma_store_wait<0>(); }

// Waits until this thread's committed stores and additions have been performed.
CUTE_DEVICE void wait_tma_stores_performed() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes ordinary writes to shared memory visible to TMA and to wgmma.
CUTE_DEVICE void fence_tma_store() { cute::tma_store_fence(); }

// Orders the TMA operations on global memory that follow after what this thread has acquired.
CUTE_DEVICE void fence_tma_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace memeff
