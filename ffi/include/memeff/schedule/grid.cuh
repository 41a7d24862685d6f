// Which piece of the problem a CTA works on. The grid is one-dimensional: its y and z dimensions
// end at 65535, which batch sizes pass.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Which of a head's tiles has the most work under a causal mask: of keys the first, which the most
// queries attend to, and of queries the last.
enum class Heaviest { first, last };

// The piece of a CTA under a causal mask, tile 0 being the one with the most work, with `tiles`
// pieces for each of `heads` heads of each batch element. The last CTAs, some three for each
// multiprocessor, take the tiles with the most work of all their heads first: a CTA that began late
// with much of it would end long after the others. Those before them stay with one head, which L2
// likes better.
//
// A CTA of keys that a group of query heads shares works as many times as long, and CTAs of one
// head drift apart, so all of them go by sections of heads whose `head_bytes` fit L2.
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

// The piece of a CTA: `tiles` pieces for each of `heads` heads of each batch element.
template <class Config, Heaviest kHeaviest>
CUTE_DEVICE WorkItem work_item(ProblemShape const& shape, ScoreView const& bias, unsigned block,
                               int tiles, int heads) {
  constexpr bool kCausal = Config::kMask == MaskKind::causal;
  constexpr bool kOwnsKeys = kHeaviest == Heaviest::first;
  WorkItem item = WorkItem::of_block(block, tiles, heads);
  if (has_bias_tile<Config>() && bias.batch_stride == 0) {
    item = WorkItem::of_block_by_batch(block, tiles, shape.batch);
  } else if constexpr (kCausal) {
    // Queries, dO and the sums of dq.
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
