// Which query and which head a row of a tile is.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// Packed, the query heads that share a key head take turns: row = query * group + head of the
// group, so that one tile reads the keys for all of them, and neighbouring rows have neighbouring
// positions. Otherwise a row is a query of one head.
template <bool kPackHeads>
struct PackedRows {
  int heads;  // in one tile

  CUTE_DEVICE explicit PackedRows(ProblemShape const& shape)
      : heads(kPackHeads ? shape.group : 1) {}

  CUTE_DEVICE int count(int queries) const { return kPackHeads ? queries * heads : queries; }
  CUTE_DEVICE int query(int row) const { return kPackHeads ? row / heads : row; }

  // Of a tile of key head `tile_head`, or of query head `tile_head` where nothing is packed.
  CUTE_DEVICE int query_head(int tile_head, int row) const {
    return kPackHeads ? tile_head * heads + row % heads : tile_head;
  }
};

// Partial results are [splits, partial_rows], rows being [batch, heads of tiles, rows of a head].
CUTE_DEVICE long long partial_rows(ProblemShape const& shape) {
  return (long long)shape.batch * shape.query_heads * shape.query_length;
}

}  // namespace memeff
