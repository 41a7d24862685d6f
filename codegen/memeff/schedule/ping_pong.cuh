// The order in which the consumers of a CTA issue their products.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// Ping-pong (Shah et al. 2024, FlashAttention-3, section 3.1): a consumer issues its products after
// those of the consumer before it, and then computes its softmax while others issue theirs.
//
// Hazard: every consumer must wait and pass equally often, also for the work that it skips, or the
// others wait forever. kFirstBarrier is the first of kConsumers named barriers.
template <bool kEnabled, int kConsumers, int kFirstBarrier>
struct PingPongBarrier {
  static constexpr bool kIsEnabled = kEnabled;
  // The threads of the consumer that waits at a barrier, and of the one that lets it pass.
  static constexpr int kThreads = 2 * kWarpgroupSize;

  // Each consumer calls this once. Consumer 0 issues first.
  CUTE_DEVICE static void begin(int consumer) {
    if (consumer == kConsumers - 1) pass(consumer);
  }

  // Waits until the consumer before this one has issued.
  CUTE_DEVICE static void wait(int consumer) {
    if constexpr (kEnabled) named_barrier_sync(kFirstBarrier + consumer, kThreads);
  }

  // Lets the next consumer issue.
  CUTE_DEVICE static void pass(int consumer) {
    int const next = consumer + 1 == kConsumers ? 0 : consumer + 1;
    if constexpr (kEnabled) named_barrier_arrive(kFirstBarrier + next, kThreads);
  }
};

}  // namespace memeff
