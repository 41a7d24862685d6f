// TMA, Hopper's tensor memory accelerator.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include <memeff/params.h>

namespace memeff {

using CacheHint = cute::TMA::CacheHintSm90;

CUTE_DEVICE void prefetch_map(TensorMap const&) {}

CUTE_DEVICE void load_box(TensorMap const& map, uint64_t& barrier, uint32_t shared, int column,
                          int row, int head, int batch, CacheHint) {
  emulator::load_box(&map, barrier, shared, {column, row, head, batch});
}
CUTE_DEVICE void prefetch_box(TensorMap const&, int, int, int, int) {}
CUTE_DEVICE void prefetch_bytes(void const*, int) {}
CUTE_DEVICE void load_tma(void const* global, uint64_t& barrier, uint32_t shared, int bytes) {
  emulator::load_tma(global, barrier, shared, bytes);
}
CUTE_DEVICE void store_box(TensorMap const& map, uint32_t shared, int column, int row, int head,
                           int batch) {
  emulator::store_box(&map, shared, {column, row, head, batch});
}

CUTE_DEVICE void reduce_add_tma(float* global, uint32_t shared, int bytes) {
  emulator::reduce_add_tma(global, shared, bytes);
}

CUTE_DEVICE void store_tma(void* global, uint32_t shared, int bytes) {
  emulator::store_tma(static_cast<char*>(global), shared, bytes);
}

CUTE_DEVICE void commit_tma_stores() { emulator::commit_tma_stores(); }
CUTE_DEVICE void wait_tma_stores() { emulator::wait_tma_stores(); }
CUTE_DEVICE void wait_tma_stores_performed() { emulator::wait_tma_stores_performed(); }
CUTE_DEVICE void fence_tma_store() { emulator::fence_async_proxy(); }
CUTE_DEVICE void fence_tma_global() {}

}  // namespace memeff
