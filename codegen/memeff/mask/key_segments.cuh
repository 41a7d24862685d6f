// The segments of the keys of a batch-invariant call. They begin at absolute positions, so the bits
// of a sum over them do not depend on how CTAs divide the keys.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

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

}  // namespace memeff
