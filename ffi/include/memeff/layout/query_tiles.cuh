// The index of a tile of query or key rows in workspaces.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// The index of one (batch, head, query tile); `tiles` is the number of tiles of a (batch, head)
// slice.
//
// Packed sequences take at most one tile more each than their tokens fill: sequence b begins at
// tile starts[b] / kTileQuery + b of a head. It has at most length / kTileQuery + 1 tiles, rounded
// down, so it ends at or before the start of the next one.
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

// This thread's dq sums for block (m, n) of its accumulators, in the sums of a tile.
template <int kThreads, class Float, class Accumulators>
CUTE_DEVICE Float* query_gradient_sums(Float* tile, Accumulators const& accumulators, int m,
                                       int n) {
  int const block = m * int(cute::size<2>(accumulators)) + n;
  // Keep the constant last: it becomes an immediate, and all blocks use one address register.
  return tile + threadIdx.x * 4 + block * (kThreads * 4);
}

// The index of one (batch, key head, key tile).
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
