// The f32 sums of dQ in global memory, to which the CTAs of all KV blocks add.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/params.h>
#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

// Adds the dQ of one Q block, in the order of Tiles::Sums.
template <class Tiles, class Accumulators>
CUTE_DEVICE void add_to_dq_sums(BackwardParams const& params, int batch, int head, int tile,
                                Accumulators const& query_gradient) {
  float* const sums = params.query_gradient_sum +
                      Tiles::tile_index(params, batch, head, tile) * Tiles::kQueryTileFloats;
  CUTE_UNROLL
  for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
      int const block = m * int(cute::size<2>(query_gradient)) + n;
      Tiles::Sums::add(sums, block, query_gradient(0, m, n), query_gradient(1, m, n),
                       query_gradient(2, m, n), query_gradient(3, m, n));
    }
  }
}

// Stores the first dQ of each Q block instead of adding it to its f32 sums. So nothing has to zero
// the sums, and no zeros are written to memory and read again.
//
// Any CTA may come first, unless a semaphore orders the additions: two numbers have the same sum in
// either order, and the order of more is undefined anyway. A Q block to which no key attends gets
// no dQ, and its dq is zero.

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

// Tracks which heads have complete dq sums. A postprocess kernel rounds the sums of these heads
// while the last CTAs of the main kernel still run: in its last round many SMs have no CTA.
//
// BackwardParams::semaphores counts, for each (batch, key head) slice, the KV blocks whose last
// addition has been performed. The preprocess kernel clears it.

template <class Config>
struct FinishedDq {
  static_assert(!Config::kPacked);

  BackwardParams const& params;

  // The number of words in BackwardParams::semaphores.
  CUTE_DEVICE unsigned words() const { return params.shape.batch * params.shape.key_heads; }

  // Called by one thread of a KV block, after the additions of its CTA have been performed.
  CUTE_DEVICE void add_kv_block(WorkItem const& item) const {
    __threadfence();
    atomicAdd(count(item.batch, item.head), 1);
  }

  // Called by all threads of a CTA. Afterwards they see the sums of a query head.
  CUTE_DEVICE void wait(int batch, int query_head) const {
    if (threadIdx.x == 0) {
      int const kv_blocks = ceil_div(params.shape.key_length, Config::kTileKey);
      int* const finished = count(batch, query_head / params.shape.group);
      while (load_acquire(finished) < kv_blocks) sleep_briefly();
    }
    sync_threads();
  }

 private:
  CUTE_DEVICE int* count(int batch, int key_head) const {
    return params.semaphores + batch * params.shape.key_heads + key_head;
  }
};

}  // namespace memeff
