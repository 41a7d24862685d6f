// A row at the end of a forward: its position, and the factor of its output, its logsumexp and its
// maximum.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/layout/gqa_rows.cuh>

namespace memeff {

// The indices of a row, and whether it is valid.
struct RowPosition {
  int batch;
  int head;
  int query;
  bool valid;  // below the query length, and not a partial row that the combine kernel finishes
};

// The rows of a tile of one (batch index, head): it begins at `row`, and rows from `bound` on are
// not valid. With kPackGqa both count the rows of all heads of a tile.
template <bool kPackGqa = false>
struct RowsOfTile {
  GqaRows<kPackGqa> rows;
  int batch;
  int head;
  int row;
  int bound;

  CUTE_DEVICE RowsOfTile(ProblemShape const& shape, int batch, int head, int row, int bound)
      : rows(shape), batch(batch), head(head), row(row), bound(bound) {}

  CUTE_DEVICE RowPosition at(int tile_row) const {
    int const r = row + tile_row;
    return {batch, rows.query_head(head, r), rows.query(r), r < bound};
  }
};

// The result of a row. A row without keys, or one that is not valid, has the factor 0, and its
// logsumexp and maximum are -inf.
struct RowEnd {
  float factor;     // normalizes the output
  float logsumexp;  // natural logarithm
  float maximum;    // of the scores; only a softmax of Config::kRowMaxima has it

  CUTE_DEVICE static RowEnd empty() { return {0.0f, -infinity(), -infinity()}; }
};

}  // namespace memeff
