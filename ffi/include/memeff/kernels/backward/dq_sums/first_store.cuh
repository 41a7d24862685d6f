// Stores the first dQ of each Q block instead of adding it to its f32 sums. So nothing has to zero
// the sums, and no zeros are written to memory and read again.
//
// Any CTA may come first, unless a semaphore orders the additions: two numbers have the same sum in
// either order, and the order of more is undefined anyway. A Q block to which no key attends gets
// no dQ, and its dq is zero.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

// The sums of a Q block, for the thread that adds to them by TMA. BackwardParams has the states of
// all Q blocks in query_gradient_states, which the preprocess kernel sets to kAbsent.
class FirstDqStore {
 public:
  static constexpr int kAbsent = 0;   // the sums are undefined
  static constexpr int kClaimed = 1;  // a CTA will store its dQ
  static constexpr int kPresent = 2;  // other CTAs may add

  // Claims a Q block if it is absent. Call it before the dQ is ready, because the answer takes as
  // long as a read from L2. Hazard: publish the claim before the next one. Then a CTA that waits
  // for another one waits for its products only, and CTAs cannot deadlock.
  CUTE_DEVICE static FirstDqStore claim(BackwardParams const& params, long long tile_index) {
    int* const state = params.query_gradient_states + tile_index;
    return {state, max_acquire(state, kClaimed)};
  }

  // The same if a semaphore orders the additions. Read the state before the semaphore, so that both
  // answers take the time of one, and call update() after it: the predecessor may have been first.
  CUTE_DEVICE static FirstDqStore read(BackwardParams const& params, long long tile_index) {
    int* const state = params.query_gradient_states + tile_index;
    return {state, load_relaxed(state)};
  }
  CUTE_DEVICE void update() {
    if (found_ != kPresent) found_ = load_acquire(state_);
  }

  // Whether to store and not to add. If another CTA has the claim, waits until it has stored.
  CUTE_DEVICE bool stores() {
    if (found_ == kAbsent) return true;
    while (found_ != kPresent) found_ = load_acquire(state_);
    fence_tma_global();
    return false;
  }

  // Called after the store or addition has been committed.
  CUTE_DEVICE void publish() const {
    if (found_ != kAbsent) return;
    wait_tma_stores_performed();
    store_release(state_, kPresent);
  }

 private:
  CUTE_DEVICE FirstDqStore(int* state, int found) : state_(state), found_(found) {}

  int* state_;
  int found_;  // the state before the claim
};

}  // namespace memeff
