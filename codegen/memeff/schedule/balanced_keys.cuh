// Divides the KV blocks of all work tiles evenly over the CTAs of a persistent grid (stream-K,
// Osama et al. 2023). Each CTA computes its share from the lengths, so a long sequence among short
// ones leaves no SM idle, and no separate kernel plans the work.
//
// Row tiles of the same sequence read the same keys. So `together` of them form an item, whose row
// tiles are computed at the same time by a group of as many CTAs, and L2 serves all but the first
// read of a KV block. All items lie on one line, each with kItemCost units before its KV blocks:
//
//   | cost | blocks of item 0 | cost | blocks of item 1 | ...
//
// Each group of CTAs gets an equal stretch of the line. If a stretch ends within an item, the item
// is cut into parts, whose results are partial: a group has at most two, at the ends of its
// stretch.
//
// Batch-invariant calls sum the keys of a row tile in segments that begin at absolute positions
// (KeySegments), so the bits do not depend on the cuts, which are rounded to segments. The group
// that has the first keys of an item adds up its segments in a running sum. Other parts of an item
// have a slot for each segment. If the slots do not suffice for an item, it is not cut.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// The segments of the keys of a batch-invariant call. They begin at absolute positions, so the bits
// of a sum over them do not depend on how CTAs divide the keys.

// Hazard: the segment of a key must not depend on anything that differs between calls with the same
// token, so it depends on the group and on the position of the key only. Segments have a length
// first, and twice that length from a position on.
template <class Config>
struct KeySegments {
  static_assert(Config::kSmallGroupSegmentKeys % (2 * Config::kTileKey) == 0);
  static_assert(Config::kLargeGroupSegmentKeys % (2 * Config::kTileKey) == 0);
  static_assert(Config::kSmallGroupDoublesAt % (2 * Config::kSmallGroupSegmentKeys) == 0);
  static_assert(Config::kLargeGroupDoublesAt % (2 * Config::kLargeGroupSegmentKeys) == 0);

  ProblemShape const& shape;

  // The segment with a KV block.
  CUTE_DEVICE int index(int block) const {
    int const unit = is_small() ? block / (Config::kSmallGroupSegmentKeys / Config::kTileKey)
                                : block / (Config::kLargeGroupSegmentKeys / Config::kTileKey);
    return unit < shorter() ? unit : (unit + shorter()) / 2;
  }

  // The first KV block of a segment.
  CUTE_DEVICE int begin(int index) const {
    int const unit = index < shorter() ? index : 2 * index - shorter();
    return unit * ((is_small() ? Config::kSmallGroupSegmentKeys : Config::kLargeGroupSegmentKeys) /
                   Config::kTileKey);
  }

  // The number of segments with KV blocks of [begin, end).
  CUTE_DEVICE int count(int begin, int end) const {
    return begin < end ? index(end - 1) - index(begin) + 1 : 0;
  }

 private:
  CUTE_DEVICE bool is_small() const { return shape.group <= Config::kSmallGroup; }

  // The number of segments before their length doubles.
  CUTE_DEVICE int shorter() const {
    return is_small() ? Config::kSmallGroupDoublesAt / Config::kSmallGroupSegmentKeys
                      : Config::kLargeGroupDoublesAt / Config::kLargeGroupSegmentKeys;
  }
};

// A range of the KV blocks of a row tile, which a CTA computes in one pass.
struct KeyPart {
  int batch;  // -1 after the last
  int head;   // the key head
  int tile;   // of kTileQuery rows (GqaRows)
  int begin;  // KV blocks
  int end;
  int slot;  // of the partial results, or -1 if the part is the whole row tile, or the bits of a
             // SegmentResult
};

// A SegmentResult is the place of a segment's result. A CTA that computes a row tile from its first
// key on adds up the segments, in order, in its running sum. Other segments have slots, which the
// combine kernel adds to that sum.
struct SegmentResult {
  int slot;        // -1: the running sum
  bool ends;       // the running sum is complete, and it is the whole row tile
  bool continues;  // the part before it belongs to the same row tile

  CUTE_DEVICE static SegmentResult of(KeyPart const& part) {
    return {part.slot / 4 - 1, part.slot % 4 / 2 != 0, part.slot % 2 != 0};
  }
  CUTE_DEVICE int bits() const { return 4 * (slot + 1) + 2 * ends + continues; }
};

// The schedule of a latent forward. The producer warp of the kernel iterates over the parts of its
// CTA, and the combine kernel finds the slots by index().
template <class Config, class Mask>
class BalancedKeys {
 public:
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  // Loading the queries, the first scores and storing the output take about as long as four KV
  // blocks. Each segment pays for its own store, so with segments an item costs only two.
  static constexpr bool kKeySegments = Config::kSegmentKeys > 0;
  static constexpr int kItemCost = kKeySegments ? 2 : 4;

  CUTE_DEVICE explicit BalancedKeys(ForwardParams const& params, int ctas)
      : params_(params),
        tiles_(row_tiles(params.shape)),
        together_(row_tiles_together(tiles_, ctas)) {
    groups_ = ctas / together_;
  }

  // The number of row tiles of a key head and batch index, for the longest sequence.
  CUTE_DEVICE static int row_tiles(ProblemShape const& shape) {
    return ceil_div(GqaRows<true>(shape).count(shape.query_length), kTileQuery);
  }

  // The CTAs of a cluster of kCluster that compute the same KV blocks at the same time, each for a
  // row tile of its own; 1 if not all CTAs of a cluster do.
  template <int kCluster>
  CUTE_DEVICE int sharers() const {
    return together_ % kCluster == 0 ? kCluster : 1;
  }

  // The index of the TileParts of a row tile.
  CUTE_DEVICE static int index(ProblemShape const& shape, int batch, int head, int tile) {
    return (batch * shape.key_heads + head) * row_tiles(shape) + tile;
  }

  // Calls use(part) for the parts of a CTA, in order, by all lanes of a warp.
  template <class Use>
  CUTE_DEVICE void for_each_part(int cta, Use use) const {
    Line const line = this->line();
    long long const total = line.units;
    if (total == 0) return;
    int const groups = groups_of(line);
    int const group = cta / together_;
    if (group >= groups) return;
    long long const begin = quotient(total * group, groups);
    long long const end = quotient(total * (group + 1), groups);
    int const lane = int(threadIdx.x) % kWarpSize;
    long long before = 0;
    int slots = 0;
    for (int first = 0; first < items() && before < end; first = next_round(first)) {
      Item const item = this->item(first + lane, cta);
      int const sum = sum_of_lanes(item.units());  // up to this lane
      long long const first_block = before + sum - item.range_size();
      int part_begin = cut(item, begin - first_block);
      int part_end = cut(item, end - first_block);
      bool const whole = part_end - part_begin == item.range_size();
      KeyPart part = item.part;
      part.slot = whole ? -1 : part_begin == 0 ? 2 * cta + 1 : 2 * cta;
      TileParts parts;
      if constexpr (kKeySegments) {
        parts = segment_parts(item, first_block, total, groups, cta, slots, part_begin, part_end,
                              part.slot);
      }
      part.begin += part_begin;
      part.end = item.part.begin + part_end;
      bool const is_own = part_begin < part_end && item.has_rows;
      unsigned own = __ballot_sync(0xffffffffu, is_own);
      CUTE_NO_UNROLL
      for (; own != 0; own &= own - 1) {
        int const source = kWarpSize - 1 - __clz(int(own & -own));
        hand_out(KeyPart{__shfl_sync(0xffffffffu, part.batch, source),
                         __shfl_sync(0xffffffffu, part.head, source),
                         __shfl_sync(0xffffffffu, part.tile, source),
                         __shfl_sync(0xffffffffu, part.begin, source),
                         __shfl_sync(0xffffffffu, part.end, source),
                         __shfl_sync(0xffffffffu, part.slot, source)},
                 use);
      }
      if (is_own && part_begin == 0) {
        if constexpr (!kKeySegments) {
          long long const last = (first_block + item.range_size()) * groups - 1;
          parts = {int(quotient(last, total)) - group + 1, 2 * cta + 1, 2 * (cta + together_),
                   2 * together_};
        }
        params_.tile_parts[index(params_.shape, part.batch, part.head, part.tile)] = parts;
      }
      before += __shfl_sync(0xffffffffu, sum, kWarpSize - 1);
    }
  }

 private:
  static constexpr int kMostSlots = 1 << 28;  // more than any call has
  static constexpr int kWhole = -2;           // instead of a slot: the part is a whole item

  // The row tile of this CTA in an item.
  struct Item {
    KeyPart part;   // all KV blocks of the CTA's row tile
    bool has_rows;  // of any row tile of the item

    CUTE_DEVICE int range_size() const { return part.end - part.begin; }
    CUTE_DEVICE int units() const { return range_size() == 0 ? 0 : range_size() + kItemCost; }
  };

  // A divisor of the row tiles, so that no CTA of a group is idle, preferably an even one, so that
  // clusters of two share their copies.
  CUTE_DEVICE static int row_tiles_together(int tiles, int ctas) {
    int const together = tiles % 4 == 0 ? 4 : tiles % 2 == 0 ? 2 : tiles % 3 == 0 ? 3 : 1;
    return together <= ctas ? together : 1;
  }

  // The first row of the item with this row tile.
  CUTE_DEVICE int first_row(int tile) const { return tile / together_ * together_ * kTileQuery; }

  // The KV blocks of the item with this row tile.
  CUTE_DEVICE TileRange blocks(Mask const& mask, int tile) const {
    int const row = first_row(tile);
    TileRange range = mask.key_tiles(row, together_ * kTileQuery, kTileKey);
    if (range.begin >= range.end) return {0, 0};
    if constexpr (kKeySegments) {
      // The order of a score's sum depends on the consumer, and each part begins with the same one.
      // So every consumer has the same KV blocks in all calls. Masked blocks change no bit.
      range = {range.begin / 2 * 2, ceil_div(range.end, 2) * 2};
    }
    return range;
  }

  // Clamps a cut at `block` to the item, relative to its first KV block, and rounds it to a border
  // of segments if there are any.
  CUTE_DEVICE int cut(Item const& item, long long block) const {
    int const size = item.range_size();
    int const at = int(clamp(block, size));
    if constexpr (kKeySegments) {
      if (at == 0 || at == size) return at;
      TileRange const near = segment(item, at);
      return 2 * at < near.begin + near.end ? near.begin : near.end;
    }
    return at;
  }

  // The blocks of the segment with block `at` of an item, both relative to its first block.
  CUTE_DEVICE TileRange segment(Item const& item, int at) const {
    KeySegments<Config> const segments = {params_.shape};
    int const index = segments.index(item.part.begin + at);
    return {max(segments.begin(index) - item.part.begin, 0),
            min(segments.begin(index + 1) - item.part.begin, item.range_size())};
  }

  // Gives slots to the segments of the items of all lanes, after the first `slots`, which are in
  // use, and returns the parts of this lane's item. The part [part_begin, part_end) of this CTA
  // changes if the item is not cut. `slot` becomes that of its first segment, or if it begins the
  // item, -1 or kWhole.
  CUTE_DEVICE TileParts segment_parts(Item const& item, long long first_block, long long total,
                                      int groups, int cta, int& slots, int& part_begin,
                                      int& part_end, int& slot) const {
    KeySegments<Config> const segments = {params_.shape};
    int const size = item.range_size();
    // The first cut that lies at the end of the first segment or farther after rounding.
    long long const half = ceil_div(segment(item, 0).end, 2);
    int const next_group =
        int(min(quotient((first_block + half) * groups + total - 1, total), (long long)groups));
    int const first_cut = cut(item, quotient(total * next_group, groups) - first_block);
    int const first = item.part.begin + first_cut;
    int count = segments.count(first, item.part.end);
    int const sum = sum_of_lanes(count);
    int const ctas = int(gridDim.x);
    // Hazard: `splits` is the number of slots in the workspace, and the first ones are the running
    // sums of the CTAs.
    bool const fits = (long long)(slots + sum) * together_ <= params_.splits - ctas;
    int const own = ctas + (slots + sum - count) * together_ + cta % together_;
    // Hazard: all segments of a call may be more than an int can count.
    slots = min(slots + __shfl_sync(0xffffffffu, sum, kWarpSize - 1), kMostSlots);
    if (count > 0 && !fits) {
      count = 0;
      part_begin = 0;
      part_end = next_group - 1 == cta / together_ ? size : 0;
    }
    slot = own + segments.count(first, item.part.begin + part_begin) * together_;
    if (part_begin == 0) slot = part_end == size ? kWhole : -1;
    return {1 + count, cta, own, together_};
  }

  // Calls use() for a part, or for each of its segments.
  template <class Use>
  CUTE_DEVICE void hand_out(KeyPart const& part, Use use) const {
    if constexpr (kKeySegments) {
      KeySegments<Config> const segments = {params_.shape};
      int slot = max(part.slot, -1);
      CUTE_NO_UNROLL
      for (int index = segments.index(part.begin); segments.begin(index) < part.end; ++index) {
        int const begin = max(segments.begin(index), part.begin);
        int const end = min(segments.begin(index + 1), part.end);
        SegmentResult const result = {slot, part.slot == kWhole && end == part.end,
                                      begin != part.begin};
        use(KeyPart{part.batch, part.head, part.tile, begin, end, result.bits()});
        if (slot >= 0) slot += together_;
      }
    } else {
      use(part);
    }
  }

  // x / y rounded down, for x + y < 2^52: the quotient in double cannot be rounded up to the next
  // integer. An integer division of 64 bits is a long function, and no copy can begin before it
  // ends.
  CUTE_DEVICE static long long quotient(long long x, long long y) {
    return (long long)(double(x) / double(y));
  }

  CUTE_DEVICE static long long clamp(long long x, int size) {
    return min(max(x, 0ll), (long long)size);
  }

  // The number of items of each key head and batch index.
  CUTE_DEVICE int items_of_head() const { return tiles_ / together_; }

  CUTE_DEVICE int items() const {
    return params_.shape.batch * params_.shape.key_heads * items_of_head();
  }

  // The item at `index`; beyond the last one it has no KV blocks.
  CUTE_DEVICE Item item(int index, int cta) const {
    if (index >= items()) return {{0, 0, 0, 0, 0, 0}, false};
    int const head_batch = index / items_of_head();
    int const batch = head_batch / params_.shape.key_heads;
    int const tile = index % items_of_head() * together_ + cta % together_;
    Mask const mask(params_.mask, params_.shape, batch);
    TileRange const range = blocks(mask, tile);
    return {{batch, head_batch % params_.shape.key_heads, tile, range.begin, range.end, -1},
            first_row(tile) < mask.query_length};
  }

  // The line of all items.
  struct Line {
    long long units = 0;
    int items = 0;    // with KV blocks
    int longest = 0;  // item, in units
  };

  // The number of groups that divide the line. If items are equally long and it costs little, the
  // number is chosen so that parts end where items do, which saves partial results.
  CUTE_DEVICE int groups_of(Line const& line) const {
    int const groups = int(min(line.units, (long long)groups_));
    if ((long long)line.items * line.longest != line.units) return groups;
    int aligned = groups - groups % line.items;
    if (line.items > groups) {
      aligned = ceil_div(line.items, ceil_div(line.items, groups));
      if (line.items % aligned != 0) return groups;
    }
    return groups - aligned <= groups / 16 ? aligned : groups;
  }

  // Sums up all items; every lane of a warp calls it.
  CUTE_DEVICE Line line() const {
    Line line;
    auto const add = [&](int first) {
      int const units = item(first + int(threadIdx.x) % kWarpSize, 0).units();
      line.units += __shfl_sync(0xffffffffu, sum_of_lanes(units), kWarpSize - 1);
      line.items += __popc(__ballot_sync(0xffffffffu, units > 0));
      line.longest = max(line.longest, units);
    };
    if (items_of_head() <= kWarpSize) {
#pragma unroll 4  // overlaps the loads of lengths
      for (int first = 0; first < items(); first += kWarpSize) add(first);
    } else {
      for (int first = 0; first < items(); first = next_round(first)) add(first);
    }
    CUTE_UNROLL
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      line.longest = max(line.longest, __shfl_xor_sync(0xffffffffu, line.longest, distance));
    }
    return line;
  }

  // The first of the next items that the lanes of a warp take. If the longest sequence is long, the
  // short ones have many items without rows; these are skipped.
  CUTE_DEVICE int next_round(int first) const {
    first += kWarpSize;
    int const count = items_of_head();
    if (count <= kWarpSize) return first;
    while (first < items()) {
      int const head_batch = first / count;
      int const batch = head_batch / params_.shape.key_heads;
      int const row = (first - head_batch * count) * together_ * kTileQuery;
      if (row < Mask(params_.mask, params_.shape, batch).query_length) break;
      first = (head_batch + 1) * count;
    }
    return first;
  }

  // The sum over this lane and those below it.
  CUTE_DEVICE static int sum_of_lanes(int x) {
    int const lane = int(threadIdx.x) % kWarpSize;
    CUTE_UNROLL
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      int const below = __shfl_sync(0xffffffffu, x, max(lane - distance, 0));
      if (lane >= distance) x += below;
    }
    return x;
  }

  ForwardParams const& params_;
  int tiles_;     // per key head and batch index
  int together_;  // row tiles of an item
  int groups_;    // of CTAs
};

}  // namespace memeff
