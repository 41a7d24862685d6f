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
// Batch-invariant calls sum the keys of a row tile in segments that begin at absolute positions, so
// the bits do not depend on the cuts. Each segment is a part of its own. If all of
// them have slots, the cuts of the line are rounded to segments. Otherwise the group in whose
// stretch an item begins computes all of it, and adds up the segments of a row tile in one slot.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// A range of the KV blocks of a row tile, which a CTA computes in one pass.
struct KeyPart {
  int batch;  // -1 after the last
  int head;   // the key head
  int tile;   // of kTileQuery packed rows
  int begin;  // KV blocks
  int end;
  int slot;  // of the partial results, or -1 if the part is the whole row tile, or
             // KeySegments::slot()
};

// The segments of the keys of a batch-invariant call, and where their results are. Hazard: the
// segment of a key must not depend on anything that differs between calls with the same token, so
// it depends on the group and on the position of the key only. Segments have a length first, and
// twice that length from a position on.
template <class Config>
struct KeySegments {
  static_assert(Config::kSmallGroupSegmentKeys % (2 * Config::kTileKey) == 0);
  static_assert(Config::kLargeGroupSegmentKeys % (2 * Config::kTileKey) == 0);
  static_assert(Config::kSmallGroupDoublesAt % (2 * Config::kSmallGroupSegmentKeys) == 0);
  static_assert(Config::kLargeGroupDoublesAt % (2 * Config::kLargeGroupSegmentKeys) == 0);

  ForwardParams const& params;

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

  // Whether CTAs may divide the segments of a row tile, because each has a slot.
  CUTE_DEVICE bool divided() const { return params.out_sum == nullptr; }

  // The slot of a part encodes the number of its segment, and whether the part before it belongs to
  // the same row tile.
  CUTE_DEVICE static int slot(int segment, bool continues) { return 2 * segment + continues; }
  CUTE_DEVICE static int segment(KeyPart const& part) { return part.slot / 2; }
  CUTE_DEVICE static bool continues(KeyPart const& part) { return part.slot % 2 != 0; }

  // The first row of partial results of a segment of the row tile with index `tile`.
  CUTE_DEVICE long long partial_row(int tile, int segment) const {
    int const blocks = ceil_div(params.shape.key_length, Config::kTileKey);
    long long const count = blocks == 0 ? 0 : index(blocks - 1) + 1;
    return (tile * count + segment) * Config::kTileQuery;
  }

  // The maximum and the weight of a row in the sum of its segments. Each consumer has its own,
  // because it must not change those that the other one has yet to read.
  CUTE_DEVICE float2& weights(long long row, int consumer) const {
    return reinterpret_cast<float2*>(params.partial_logsumexp)[2 * row + consumer];
  }

 private:
  CUTE_DEVICE bool is_small() const { return params.shape.group <= Config::kSmallGroup; }

  // The number of segments before their length doubles.
  CUTE_DEVICE int shorter() const {
    return is_small() ? Config::kSmallGroupDoublesAt / Config::kSmallGroupSegmentKeys
                      : Config::kLargeGroupDoublesAt / Config::kLargeGroupSegmentKeys;
  }
};

// The schedule of a latent forward. The producer warp of the kernel iterates over the parts of its
// CTA, and the combine kernel finds the slots by index().
template <class Config, class Mask>
class BalancedKeys {
 public:
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  // Loading the queries, the first scores and storing the output take about as long as four KV
  // blocks. Every segment of an item is stored, so only two of them are costs of the item.
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
    return ceil_div(PackedRows<true>(shape).count(shape.query_length), kTileQuery);
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

  // Whether share `number` of the keys belongs to this CTA, among those that read the same keys.
  CUTE_DEVICE bool has_share(int cta, int number) const {
    return number % together_ == cta % together_;
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
    for (int first = 0; first < items() && before < end; first = next_round(first)) {
      Item const item = this->item(first + lane, cta);
      int const sum = sum_of_lanes(item.units());  // up to this lane
      long long const first_block = before + sum - item.range_size();
      int const part_begin = cut(item, begin - first_block);
      int const part_end = cut(item, end - first_block);
      bool const whole = part_end - part_begin == item.range_size();
      KeyPart part = item.part;
      part.slot = whole ? -1 : part_begin == 0 ? 2 * cta + 1 : 2 * cta;
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
      if (!kKeySegments && is_own && part_begin == 0) {
        long long const last = (first_block + item.range_size()) * groups - 1;
        params_.tile_parts[index(params_.shape, part.batch, part.head, part.tile)] = {
            int(quotient(last, total)) - group + 1, 2 * cta + 1, 2 * (cta + together_),
            2 * together_};
      }
      before += __shfl_sync(0xffffffffu, sum, kWarpSize - 1);
    }
  }

 private:
  // The row tile of this CTA in an item.
  struct Item {
    KeyPart part;   // all KV blocks of the CTA's row tile
    bool has_rows;  // of any row tile of the item

    CUTE_DEVICE int range_size() const { return part.end - part.begin; }
    CUTE_DEVICE int units() const { return range_size() == 0 ? 0 : range_size() + kItemCost; }
  };

  // A divisor of the row tiles, so that no CTA of a group is idle, and even if possible, so that
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

  // The KV block of an item, relative to its first one, at which the line is cut if the cut is at
  // `block`.
  CUTE_DEVICE int cut(Item const& item, long long block) const {
    int const size = item.range_size();
    int const at = int(clamp(block, size));
    if constexpr (kKeySegments) {
      KeySegments<Config> const segments = {params_};
      if (!segments.divided()) return block > -kItemCost ? size : 0;
      if (at == 0 || at == size) return at;
      int const segment = segments.index(item.part.begin + at);
      int const begin = max(segments.begin(segment) - item.part.begin, 0);
      int const end = min(segments.begin(segment + 1) - item.part.begin, size);
      return 2 * at < begin + end ? begin : end;
    }
    return at;
  }

  // Calls use() for a part, or for each of its segments.
  template <class Use>
  CUTE_DEVICE void hand_out(KeyPart const& part, Use use) const {
    if constexpr (kKeySegments) {
      KeySegments<Config> const segments = {params_};
      CUTE_NO_UNROLL
      for (int segment = segments.index(part.begin); segments.begin(segment) < part.end;
           ++segment) {
        int const begin = max(segments.begin(segment), part.begin);
        int const end = min(segments.begin(segment + 1), part.end);
        use(KeyPart{part.batch, part.head, part.tile, begin, end,
                    KeySegments<Config>::slot(segment, begin != part.begin)});
      }
    } else {
      use(part);
    }
  }

  // x / y rounded down, for x + y < 2^52: the quotient in double cannot be rounded up to the next
  // integer. An integer division of 64 bits is a long function, and no copy can begin before it has
  // ended.
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
