// The tiles of query or key rows: their places in workspaces, and those that packed sequences fill.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// The tiles of packed sequences, numbered along a head: places in workspaces, and CTAs of grids.
//
// A sequence has at most one tile more than its tokens fill: sequence b begins at tile
// starts[b] / kTile + b. It has at most length / kTile + 1 tiles, rounded down, so it ends at or
// before the start of the next one.
template <int kTile>
struct SequenceTiles {
  int const* starts;  // [sequences + 1]
  int sequences;
  int tokens;

  CUTE_DEVICE static SequenceTiles of_queries(ProblemShape const& shape) {
    return {shape.query_starts, shape.batch, shape.query_tokens};
  }
  CUTE_DEVICE static SequenceTiles of_keys(ProblemShape const& shape) {
    return {shape.key_starts, shape.batch, shape.key_tokens};
  }

  // The number of tiles of a head.
  CUTE_DEVICE int count() const { return tokens / kTile + sequences; }

  CUTE_DEVICE int begin(int sequence) const { return starts[sequence] / kTile + sequence; }

  // The first CTA of a sequence, and the one after its last. CTAs of tiles before the first
  // sequence count as its own, so that every CTA belongs to a sequence.
  CUTE_DEVICE int first_cta(int sequence) const { return sequence == 0 ? 0 : begin(sequence); }
  CUTE_DEVICE int end_cta(int sequence) const {
    return sequence + 1 < sequences ? begin(sequence + 1) : count();
  }

  // The sequence of a CTA. Whole warps call it: each lane tests the begin of another sequence.
  CUTE_DEVICE int sequence_of_cta(int cta) const {
    int const lane = int(threadIdx.x) % kWarpSize;
    long long step = 1;
    while (step * kWarpSize < sequences) step *= kWarpSize;
    int sequence = 0;
    CUTE_NO_UNROLL
    for (; step > 0; step /= kWarpSize) {
      long long const tested = sequence + (lane + 1) * step;
      bool const has_begun = tested < sequences && begin(int(tested)) <= cta;
      sequence += int(step) * __popc(__ballot_sync(0xffffffffu, has_begun));
    }
    return sequence;
  }

  // The same for a thread alone.
  CUTE_DEVICE int sequence_of_cta_alone(int cta) const {
    int low = 0;
    int high = sequences;
    CUTE_NO_UNROLL
    while (high - low > 1) {
      int const middle = low + (high - low) / 2;
      (begin(middle) <= cta ? low : high) = middle;
    }
    return low;
  }
};

// The index of one (batch, head, query tile); `tiles` is the number of tiles of a (batch, head)
// slice, unless sequences are packed.
template <class Config>
CUTE_DEVICE long long query_tile_index(ProblemShape const& shape, int tiles, int batch, int head,
                                       int tile) {
  if constexpr (Config::kPacked) {
    auto const sequences = SequenceTiles<Config::kTileQuery>::of_queries(shape);
    return (long long)head * sequences.count() + sequences.begin(batch) + tile;
  }
  long long const head_batch = (long long)batch * shape.query_heads + head;
  return head_batch * tiles + tile;
}

template <class Config>
CUTE_DEVICE long long query_tile_index(BackwardParams const& params, int batch, int head,
                                       int tile) {
  return query_tile_index<Config>(params.shape, params.query_tiles, batch, head, tile);
}

// The index of one (batch, key head, key tile).
template <class Config>
CUTE_DEVICE long long key_tile_index(ProblemShape const& shape, int tiles, int batch, int head,
                                     int tile) {
  if constexpr (Config::kPacked) {
    auto const sequences = SequenceTiles<Config::kTileKey>::of_keys(shape);
    return (long long)head * sequences.count() + sequences.begin(batch) + tile;
  }
  long long const head_batch = (long long)batch * shape.key_heads + head;
  return head_batch * tiles + tile;
}

}  // namespace memeff
