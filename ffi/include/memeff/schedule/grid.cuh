// Maps a CTA to its work tile. The grid is one-dimensional, because its y and z dimensions end at
// 65535 and batch sizes may exceed that.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// The heaviest tile of a head under a causal mask: the first KV block, to which the most queries
// attend, or the last Q block.
enum class Heaviest { first, last };

// The work tile of a CTA under a causal mask; tile 0 has the most work. There are `tiles` work
// tiles for each of `heads` heads of each batch index. The last CTAs, some three for each SM, take
// the heaviest tiles of all their heads first, because a heavy tile that starts late would end long
// after the others. The CTAs before them stay with one head, for L2 locality.
//
// With grouped heads a CTA that owns keys processes every query head of the group, and the CTAs of
// one head drift apart. All CTAs then go by sections of heads whose `head_bytes` fit L2.
CUTE_DEVICE WorkItem causal_item(ProblemShape const& shape, unsigned block, int tiles, int heads,
                                 int group, long long head_bytes) {
  constexpr int kLastBlocks = 400;
  constexpr long long kSectionBytes = 32 << 20;
  int const all = heads * shape.batch;
  int const last = min(ceil_div(kLastBlocks * group, tiles), all);
  WorkItem item = WorkItem::of_block(block, tiles, heads);
  if (int const rank = int(block) - (all - last) * tiles; rank >= 0) {
    int const fitting = group == 1 ? last : max(int(kSectionBytes / head_bytes), 1);
    int const section = ceil_div(last, ceil_div(last, fitting));
    int const first = rank / tiles / section * section;
    int const here = min(section, last - first);
    int const place = rank - first * tiles;
    int const head_batch = all - last + first + place % here;
    item = {place / here, head_batch % heads, head_batch / heads};
  }
  return item;
}

// The work tile of a CTA: `tiles` for each of `heads` heads of each batch index.
template <class Config, Heaviest kHeaviest>
CUTE_DEVICE WorkItem work_item(ProblemShape const& shape, ScoreView const& bias, unsigned block,
                               int tiles, int heads) {
  constexpr bool kCausal = Config::kMask == MaskKind::causal;
  constexpr bool kOwnsKeys = kHeaviest == Heaviest::first;
  WorkItem item = WorkItem::of_block(block, tiles, heads);
  if (has_bias_tile<Config>() && bias.batch_stride == 0) {
    item = WorkItem::of_block_by_batch(block, tiles, shape.batch);
  } else if constexpr (kCausal) {
    // The bytes of a row of queries, dO and the dq sums.
    int const row_bytes =
        (shape.head_dim + shape.value_dim) * int(sizeof(typename Config::Element)) +
        shape.head_dim * int(sizeof(float));
    item = causal_item(shape, block, tiles, heads, kOwnsKeys ? shape.group : 1,
                       (long long)max(shape.query_length, 1) * row_bytes);
  }
  if (kCausal && !kOwnsKeys) item.tile = tiles - 1 - item.tile;
  return item;
}

}  // namespace memeff
