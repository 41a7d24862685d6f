// The order in which the CTAs of a persistent grid, one a multiprocessor, take the pieces of a
// problem: each takes the next one when it has finished its own. Pieces with more work come first.
#pragma once

#include <memeff/schedule/grid.cuh>

namespace memeff {

template <MaskKind kMask, int kTileQuery, int kElementBytes>
struct PersistentSchedule {
  // Keys and values of the heads that run at the same time should stay in L2 (50 MB or more).
  static constexpr long long kSectionBytes = 32 << 20;

  // Computed anew for each piece: the producer has few registers.
  CUTE_DEVICE static int query_tiles(ProblemShape const& shape) {
    return ceil_div(shape.query_length, kTileQuery);
  }
  CUTE_DEVICE static int pieces(ProblemShape const& shape) {
    return query_tiles(shape) * shape.query_heads * shape.batch;
  }

  // (head, batch) pairs whose tiles are taken together.
  CUTE_DEVICE static int section_heads(ProblemShape const& shape) {
    long long const head_bytes =
        (long long)shape.key_length * (shape.head_dim + shape.value_dim) * kElementBytes;
    int const fitting = int(kSectionBytes / max(head_bytes, 1ll));
    return min(max(fitting, 1) * shape.group, shape.query_heads * shape.batch);
  }

  // The piece after the one that this CTA has begun with or got here, or one past the last. The
  // counter is zero at launch where the grid does not cover all pieces, else nobody reads it.
  CUTE_DEVICE static int next_piece(ProblemShape const& shape, int* counter) {
    int const end = pieces(shape);
    return end > int(gridDim.x) ? int(gridDim.x) + atomicAdd(counter, 1) : end;
  }

  // A batch of -1 stands for one past the last. Where batch elements share a bias, they take the
  // same tile of a head one after the other, and it is read once for all of them.
  CUTE_DEVICE static WorkItem item(ProblemShape const& shape, int piece, bool shares_bias) {
    int const tiles = query_tiles(shape);
    int tile = piece % tiles;
    int head_batch = piece / tiles;
    if (head_batch >= shape.query_heads * shape.batch) return {0, 0, -1};
    if (kMask == MaskKind::causal || shares_bias) {
      // The last rows have the most keys: they come first.
      int const section = section_heads(shape);
      int const first = head_batch / section * section;
      int const rank = piece - first * tiles;
      int const here = min(section, shape.query_heads * shape.batch - first);
      tile = tiles - 1 - rank / here;
      head_batch = first + rank % here;
    }
    if (shares_bias) return {tile, head_batch / shape.batch, head_batch % shape.batch};
    return {tile, head_batch % shape.query_heads, head_batch / shape.query_heads};
  }
};

}  // namespace memeff
