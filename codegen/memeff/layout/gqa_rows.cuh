// Maps a row of a tile to its query and head.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// With kPackGqa the query heads of a key head are interleaved: row = query * group + head of the
// group. One tile then reads the keys for all of them, and neighbouring rows have neighbouring
// positions. Without it a row is a query of one head.
template <bool kPackGqa>
struct GqaRows {
  int heads;  // in one tile

  CUTE_DEVICE explicit GqaRows(ProblemShape const& shape) : heads(kPackGqa ? shape.group : 1) {}

  CUTE_DEVICE int count(int queries) const { return kPackGqa ? queries * heads : queries; }
  CUTE_DEVICE int query(int row) const { return kPackGqa ? row / heads : row; }

  // For a tile of key head `tile_head` with kPackGqa, else of query head `tile_head`.
  CUTE_DEVICE int query_head(int tile_head, int row) const {
    return kPackGqa ? tile_head * heads + row % heads : tile_head;
  }
};

// The number of rows of one part of the partial results, which are [parts, partial_rows]. A part is
// a split of the keys or a segment; rows are [batch, heads of tiles, rows of a head].
CUTE_DEVICE long long partial_rows(ProblemShape const& shape) {
  return (long long)shape.batch * shape.query_heads * shape.query_length;
}

// The index of the first partial row of a head of tiles.
template <bool kPackGqa>
CUTE_DEVICE long long partial_row(ProblemShape const& shape, GqaRows<kPackGqa> const& rows,
                                  int part, int batch, int tile_head) {
  long long const head = (long long)batch * (shape.query_heads / rows.heads) + tile_head;
  return part * partial_rows(shape) + head * rows.count(shape.query_length);
}

}  // namespace memeff
