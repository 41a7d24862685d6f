// Tiles of [batch, sequence, head, dim] tensors between global and shared memory, moved by the
// tensor memory accelerator through tensor maps.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include <memeff/arch/copy.cuh>
#include <memeff/core/shared_tile.cuh>

namespace memeff {

CUTE_DEVICE void* shared_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

CUTE_DEVICE void prefetch_map(TensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the copy of a box of rows, from row `row` of the tensor on, to row `tile_row` of a tile;
// rows and columns beyond the tensor's become zero. One thread calls it; the bytes arrive at
// `barrier`.
template <class Tile>
CUTE_DEVICE void load_bulk_tile(TensorMap const& map, uint64_t& barrier, uint32_t tile,
                                int tile_row, int row, int head, int batch,
                                cute::TMA::CacheHintSm90 hint) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    cute::SM90_TMA_LOAD_4D::copy(
        &map, &barrier, static_cast<uint64_t>(hint),
        shared_pointer(tile + panel * Tile::kPanelBytes + tile_row * Tile::kRowBytes),
        panel * Tile::kPanelColumns, row, head, batch);
  }
}

// Starts the copy of `bytes` neighbouring bytes, a multiple of 16, to shared memory.
CUTE_DEVICE void load_bulk(void const* global, uint64_t& barrier, uint32_t shared, int bytes) {
  cute::SM90_BULK_COPY_G2S::copy(global, &barrier, shared_pointer(shared), bytes);
}

// Starts the copy of a box of rows of a tile, from `tile_row` on, to row `row` on. What lies beyond
// the tensor is not written. Every writer of the shared rows has passed fence_bulk_store() and a
// barrier before.
template <class Tile>
CUTE_DEVICE void store_bulk_tile(TensorMap const& map, uint32_t tile, int tile_row, int row,
                                 int head, int batch) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    cute::SM90_TMA_STORE_4D::copy(
        &map, shared_pointer(tile + panel * Tile::kPanelBytes + tile_row * Tile::kRowBytes),
        panel * Tile::kPanelColumns, row, head, batch);
  }
  cute::tma_store_arrive();
}

// Makes ordinary writes to shared memory visible to the copy engine.
CUTE_DEVICE void fence_bulk_store() { cute::tma_store_fence(); }

// Zeros rows of a tile from `first` on. Rows beyond a length are in the tensor, may be NaN, and
// 0 * NaN is not 0. kThreads threads share the work; they pass fence_bulk_store() and a barrier
// before a product reads the tile.
template <class Tile, int kThreads>
CUTE_DEVICE void clear_rows(uint32_t tile, int first) {
  constexpr int kChunks = Tile::kColumns / Tile::kChunkColumns;
  for (int i = first * kChunks + int(threadIdx.x) % kThreads; i < Tile::kRows * kChunks;
       i += kThreads) {
    store_shared_vector(tile + Tile::byte_offset(i / kChunks, i % kChunks), 0, 0, 0, 0);
  }
}

// Waits until the shared memory of this thread's stores may be overwritten.
CUTE_DEVICE void wait_bulk_stores() { cute::tma_store_wait<0>(); }

}  // namespace memeff
