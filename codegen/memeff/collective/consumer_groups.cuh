// Consumer groups (intra-CTA split-KV): the warps of a group divide the rows of a work tile, and
// the groups divide its keys.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

// Divides kWarps_ warps into kGroups_ groups of consecutive warps. All groups synchronize at the
// named barrier kAllBarrier, or by __syncthreads() if they are the whole CTA.
template <int kWarps_, int kGroups_, int kAllBarrier = 0>
struct WarpConsumerGroups {
  static constexpr int kConsumerGroups = kGroups_;
  static constexpr int kWarps = kWarps_ / kConsumerGroups;  // per group
  static constexpr int kThreads = kWarps * kWarpSize;
  static_assert(kWarps * kConsumerGroups == kWarps_ && kConsumerGroups <= 15);

  CUTE_DEVICE static int index() { return threadIdx.x / kThreads; }
  CUTE_DEVICE static int thread() { return threadIdx.x % kThreads; }

  // Waits for the other warps of the group. Barrier 0 belongs to __syncthreads().
  CUTE_DEVICE static void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(index() + 1, kThreads);
    }
  }

  // Waits for all groups.
  CUTE_DEVICE static void sync_all() {
    if constexpr (kAllBarrier == 0) {
      sync_threads();
    } else {
      named_barrier_sync(kAllBarrier, kConsumerGroups * kThreads);
    }
  }
};

// Merges the outputs that the groups have for the same rows, at the end of a work tile. The result
// is in the first group's registers.
template <class ConsumerGroup, class Softmax, int kOutputs>
struct ConsumerGroupMerge {
  static constexpr int kStatisticsBytes =
      ConsumerGroup::kConsumerGroups * ConsumerGroup::kThreads * Softmax::kStagedBytes;
  static constexpr int kOutputBytes = kOutputs * int(sizeof(float));  // per group
  static constexpr int kBytes =
      ConsumerGroup::kConsumerGroups == 1
          ? 0
          : kStatisticsBytes + (ConsumerGroup::kConsumerGroups - 1) * kOutputBytes;

  // All threads of all groups call it. Hazard: no thread may still read `shared` on entry.
  template <class Output>
  CUTE_DEVICE static void run(uint32_t shared, Softmax& softmax, Output& output,
                              float softmax_scale) {
    if constexpr (ConsumerGroup::kConsumerGroups > 1) {
      if (ConsumerGroup::index() > 0) {
        softmax.stage_registers(shared);
        for_each_block(
            shared, ConsumerGroup::index(),
            [&](uint32_t slot, int m, int n) {
              store_shared_vector(slot, output(0, m, n), output(1, m, n), output(2, m, n),
                                  output(3, m, n));
            },
            output);
      }
      ConsumerGroup::sync_all();
      if (ConsumerGroup::index() > 0) return;
      CUTE_UNROLL
      for (int group = 1; group < ConsumerGroup::kConsumerGroups; ++group) {
        add(shared, group, softmax, output, softmax_scale);
      }
    }
  }

 private:
  // Adds the output of another group to that of the first group, with the factors of
  // OnlineSoftmax::merge().
  template <class Output>
  CUTE_DEVICE static void add(uint32_t shared, int group, Softmax& softmax, Output& output,
                              float softmax_scale) {
    Softmax other;
    other.unstage(shared + group * ConsumerGroup::kThreads * Softmax::kStagedBytes);
    typename Softmax::Weights const weights = softmax.merge(other, softmax_scale);
    for_each_block(
        shared, group,
        [&](uint32_t slot, int m, int n) {
          uint4 const theirs = load_shared_vector(slot);
          float const values[4] = {__uint_as_float(theirs.x), __uint_as_float(theirs.y),
                                   __uint_as_float(theirs.z), __uint_as_float(theirs.w)};
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            int const r = 2 * m + i / 2;
            output(i, m, n) = output(i, m, n) * weights.own[r] + values[i] * weights.other[r];
          }
        },
        output);
  }

  // A lane's accumulators, 16 bytes at a time; those of a warp are contiguous.
  template <class Use, class Output>
  CUTE_DEVICE static void for_each_block(uint32_t shared, int group, Use use, Output const&) {
    uint32_t const outputs =
        shared + kStatisticsBytes + (group - 1) * kOutputBytes + ConsumerGroup::thread() * 16;
    constexpr int kColumns = cute::size<2>(Output{});
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(Output{}); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        use(outputs + (m * kColumns + n) * (ConsumerGroup::kThreads * 16), m, n);
      }
    }
  }
};

}  // namespace memeff
