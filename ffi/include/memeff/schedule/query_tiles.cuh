// Where the tiles of query rows stand in the workspaces of the backward.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// Index of one (batch, head, query tile).
//
// Packed sequences take the tiles they need and no more: sequence b begins at tile
// starts[b] / kTileQuery + b of a head. It has at most length / kTileQuery + 1 tiles, rounded
// down, so it ends where the next one begins or before.
template <class Config>
CUTE_DEVICE long long query_tile_index(BackwardParams const& params, int batch, int head,
                                       int tile) {
  ProblemShape const& shape = params.shape;
  if constexpr (Config::kVarlen) {
    int const head_tiles = shape.query_tokens / Config::kTileQuery + shape.batch;
    return (long long)head * head_tiles + shape.query_starts[batch] / Config::kTileQuery + batch +
           tile;
  }
  long long const head_batch = (long long)batch * shape.query_heads + head;
  return head_batch * params.query_tiles + tile;
}

}  // namespace memeff
