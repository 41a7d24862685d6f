// Where the tiles of query and key rows stand in workspaces.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// Index of one (batch, head, query tile); `tiles` is how many a head of a batch element has.
//
// Packed sequences take the tiles they need and no more: sequence b begins at tile
// starts[b] / kTileQuery + b of a head. It has at most length / kTileQuery + 1 tiles, rounded
// down, so it ends where the next one begins or before.
template <class Config>
CUTE_DEVICE long long query_tile_index(ProblemShape const& shape, int tiles, int batch, int head,
                                       int tile) {
  if constexpr (Config::kVarlen) {
    int const head_tiles = shape.query_tokens / Config::kTileQuery + shape.batch;
    return (long long)head * head_tiles + shape.query_starts[batch] / Config::kTileQuery + batch +
           tile;
  }
  long long const head_batch = (long long)batch * shape.query_heads + head;
  return head_batch * tiles + tile;
}

template <class Config>
CUTE_DEVICE long long query_tile_index(BackwardParams const& params, int batch, int head,
                                       int tile) {
  return query_tile_index<Config>(params.shape, params.query_tiles, batch, head, tile);
}

// Where this thread's sums of dq are among those of a tile: of block (m, n) of its accumulators.
template <int kThreads, class Float, class Accumulators>
CUTE_DEVICE Float* query_gradient_sums(Float* tile, Accumulators const& accumulators, int m,
                                       int n) {
  int const block = m * int(cute::size<2>(accumulators)) + n;
  // The constant last: it goes into the instruction, and all blocks have one address.
  return tile + threadIdx.x * 4 + block * (kThreads * 4);
}

// Index of one (batch, key head, key tile), likewise.
template <class Config>
CUTE_DEVICE long long key_tile_index(ProblemShape const& shape, int tiles, int batch, int head,
                                     int tile) {
  if constexpr (Config::kVarlen) {
    int const head_tiles = shape.key_tokens / Config::kTileKey + shape.batch;
    return (long long)head * head_tiles + shape.key_starts[batch] / Config::kTileKey + batch + tile;
  }
  long long const head_batch = (long long)batch * shape.key_heads + head;
  return head_batch * tiles + tile;
}

}  // namespace memeff
