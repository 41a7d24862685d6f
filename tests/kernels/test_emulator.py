"""The emulator ends the launch of a wrong kernel with a message."""

from __future__ import annotations

import emulator
import pytest
from emulator import build

from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select

SHARED_BYTES = 4096
THREADS = 128

# Each of these kernels makes one mistake.
KERNELS = """
#include <memeff/arch/barrier.cuh>
#include <memeff/arch/cluster.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/arch/wgmma.cuh>

using namespace memeff;

uint32_t shared() { return shared_address(dynamic_shared()); }
uint64_t& barrier() { return *reinterpret_cast<uint64_t*>(dynamic_shared()); }

#define KERNEL(name) extern "C" void name(); EMULATOR_KERNEL(name) void name()

KERNEL(store_beyond_shared_memory) { store_shared(shared() + 4096, 0); }

KERNEL(load_between_vectors) { load_shared_vector(shared() + 8); }

KERNEL(copy_from_between_vectors) {
  alignas(16) char source[32] = {};
  copy_async(shared(), source + 4, true);
}

KERNEL(read_between_vectors) {
  alignas(16) char source[32] = {};
  uint4 volatile* const vector = reinterpret_cast<uint4 volatile*>(source + 4);
  vector->x = vector->y;
}

KERNEL(follow_null) { *static_cast<int volatile*>(nullptr) = 0; }

KERNEL(leave_one_warp_waiting) {
  if (threadIdx.x < 32) named_barrier_sync(1, 64);
}

KERNEL(disagree_about_a_barrier) { named_barrier_sync(1, threadIdx.x < 32 ? 64 : 128); }

KERNEL(diverge) {
  if (threadIdx.x % 2 == 0) {
    __shfl_xor_sync(~0u, 0, 1);
  } else {
    __ballot_sync(~0u, 1);
  }
}

KERNEL(wait_without_init) { wait_barrier(barrier(), 0); }

KERNEL(arrive_too_often) {
  if (threadIdx.x > 0) return;
  init_barrier(barrier(), 2);
  arrive_and_expect(barrier(), 16);
  arrive_barrier(barrier());
  arrive_barrier(barrier());
}

KERNEL(wait_for_too_many_bytes) {
  alignas(16) static char source[16];
  if (threadIdx.x == 0) {
    init_barrier(barrier(), 1);
    arrive_and_expect(barrier(), 32);
    load_tma(source, barrier(), shared() + 16, 16);
  }
  __syncthreads();
  wait_barrier(barrier(), 0);
}

KERNEL(leave_a_copy_behind) {
  alignas(16) static char source[16];
  if (threadIdx.x > 0) return;
  init_barrier(barrier(), 1);
  load_tma(source, barrier(), shared() + 16, 16);
}

template <bool kPerformed>
void read_what_tma_stores() {
  alignas(16) static int volatile target[4];
  if (threadIdx.x > 0) return;
  target[0] = 0;
  store_shared(shared(), 7);
  fence_tma_store();
  store_tma(const_cast<int*>(target), shared(), 16);
  commit_tma_stores();
  kPerformed ? wait_tma_stores_performed() : wait_tma_stores();
  if (target[0] != 7) emulator::fail("an old number");
}

KERNEL(read_before_a_store_is_performed) { read_what_tma_stores<false>(); }
KERNEL(no_mistake_in_a_read) { read_what_tma_stores<true>(); }

void multiply_tile() {
  uint64_t const tile = 1ull << 62 | 64ull << 32 | 1ull << 16 | shared() / 16;  // 8 rows a KB
  auto c = cute::make_tensor<float>(cute::Shape<cute::_4>{});
  uint32_t const a[4] = {};
  cute::clear(c);
  wgmma<cutlass::bfloat16_t, Major::K>(c, a, tile, true);
  commit_products();
  wait_products<0>();
}

template <bool kFence>
void multiply() {
  for (int i = int(threadIdx.x); i < 1024; i += 128) store_shared(shared() + 4 * i, 0);
  if (kFence) fence_tma_store();
  __syncthreads();
  multiply_tile();
}

KERNEL(multiply_without_a_fence) { multiply<false>(); }
KERNEL(no_mistake) { multiply<true>(); }

template <bool kFence>
void multiply_copied() {
  alignas(16) static char source[16];
  uint64_t& copied = *reinterpret_cast<uint64_t*>(dynamic_shared() + 2048);
  if (threadIdx.x == 0) init_barrier(copied, 128);
  __syncthreads();
  if (threadIdx.x < 64) copy_async(shared() + 16 * threadIdx.x, source, true);
  arrive_when_copied(copied);
  wait_barrier(copied, 0);
  if (kFence) fence_tma_store();
  multiply_tile();
}

KERNEL(multiply_copied_without_a_fence) { multiply_copied<false>(); }
KERNEL(no_mistake_in_a_copy) { multiply_copied<true>(); }

#define CLUSTER_KERNEL(name) EMULATOR_CLUSTER(name, 2) KERNEL(name)

void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

CLUSTER_KERNEL(arrive_at_a_block_that_has_ended) {
  if (cluster_rank() == 1) return;
  sync_cluster();
  init_barrier(barrier(), 128);
  arrive_cluster_barrier(barrier(), 1);
}

CLUSTER_KERNEL(arrive_outside_of_the_cluster) {
  init_barrier(barrier(), 128);
  arrive_cluster_barrier(barrier(), 2);
}

CLUSTER_KERNEL(wait_for_the_other_block) {
  if (threadIdx.x == 0) init_barrier(barrier(), 1);
  sync_cluster();
  if (cluster_rank() == 0) arrive_cluster_barrier(barrier(), 0);
  wait_barrier(barrier(), 0);
  sync_cluster();
}

// Each thread stores a vector to the other block, after a barrier that expects `bytes` bytes of it.
void store_to_the_other_block(int bytes, int offset) {
  int const rank = 1 - cluster_rank();
  uint32_t const number = threadIdx.x;
  uint32_t const place = 16 + number * 16 + offset;
  if (threadIdx.x == 0) init_barrier(barrier(), 128);
  sync_cluster();
  arrive_cluster_and_expect(barrier(), rank, bytes);
  store_cluster_vector(cluster_address(shared() + place, rank), cluster_address(shared(), rank),
                       {number, number, number, number});
  wait_barrier(barrier(), 0);
  if (load_shared(shared() + place) != number) emulator::fail("another number");
  sync_cluster();
}

CLUSTER_KERNEL(expect_more_bytes_than_are_stored) { store_to_the_other_block(32, 0); }
CLUSTER_KERNEL(store_between_vectors_of_a_block) { store_to_the_other_block(16, 8); }
CLUSTER_KERNEL(no_mistake_in_a_store) { store_to_the_other_block(16, 0); }

CLUSTER_KERNEL(no_mistake_in_a_cluster) {
  if (threadIdx.x == 0) init_barrier(barrier(), 128);
  sync_cluster();
  arrive_cluster_barrier(barrier(), 1 - cluster_rank());
  wait_barrier(barrier(), 0);
  sync_cluster();
}
"""

MISTAKES = {
    "store_beyond_shared_memory": "a store of 4 bytes at byte 4096 of shared memory, which has",
    "load_between_vectors": "a load at byte 8 of shared memory, no multiple of 16",
    "copy_from_between_vectors": "cp.async at .* in global memory, no multiple of 16",
    "read_between_vectors": "a misaligned vector access",
    "follow_null": "an access to .*, outside of all buffers",
    "leave_one_warp_waiting": "the kernel hangs; 32 threads of block 0 warp 0 at named barrier 1",
    "disagree_about_a_barrier": "barrier 1 is for (64|128) threads, and for (64|128)",
    "diverge": "lanes of a warp execute (shfl and vote|vote and shfl) at a time",
    "wait_without_init": "an mbarrier that is not initialized",
    "arrive_too_often": "too many arrivals at the mbarrier at byte 0",
    "wait_for_too_many_bytes": "the kernel hangs; .* at the mbarrier at byte 0",
    "leave_a_copy_behind": "block 0 ends while 1 TMA copies are in flight",
    "read_before_a_store_is_performed": "an old number",
    "multiply_without_a_fence": "wgmma reads byte .* wrote and did not fence",
    "multiply_copied_without_a_fence": "wgmma reads byte .*, which was copied, without a fence",
}


MISTAKES_IN_CLUSTERS = {
    "arrive_at_a_block_that_has_ended": "an access to block 1, which has ended",
    "arrive_outside_of_the_cluster": "there is no block 2 in the cluster",
    "expect_more_bytes_than_are_stored": "the kernel hangs; .* at the mbarrier at byte 0",
    "store_between_vectors_of_a_block": "a store to another block at byte .* no multiple of 16",
    "wait_for_the_other_block": "(too many arrivals at|the kernel hangs; .* block 1 .* at) "
    "the mbarrier at byte 0",
}


def launch(name, blocks=1):
    emulator.configure("sm_90a", seed=3, multiprocessors=1)
    emulator.launch(KERNELS, name, blocks=blocks, threads=THREADS, shared_bytes=SHARED_BYTES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_the_launch(name, machine):
    with pytest.raises(RuntimeError, match=MISTAKES[name]):
        machine.submit(launch, name).result()


@pytest.mark.parametrize("name", MISTAKES_IN_CLUSTERS)
def test_a_mistake_in_a_cluster_ends_the_launch(name, machine):
    with pytest.raises(RuntimeError, match=MISTAKES_IN_CLUSTERS[name]):
        machine.submit(launch, name, 2).result()


def test_blocks_of_a_cluster_run_together(machine):
    machine.submit(launch, "no_mistake_in_a_cluster", 6).result()
    machine.submit(launch, "no_mistake_in_a_store", 6).result()
    with pytest.raises(RuntimeError, match="3 blocks do not form clusters of 2"):
        machine.submit(launch, "no_mistake_in_a_cluster", 3).result()


def test_another_kernel_runs_after_a_mistake(machine):
    machine.submit(launch, "no_mistake").result()
    machine.submit(launch, "no_mistake_in_a_read").result()
    machine.submit(launch, "no_mistake_in_a_copy").result()


def test_another_plan_compiles_no_kernel_again(tmp_path, monkeypatch):
    """Another run of tests has other neighbours, and another number of processes."""
    compiled = []

    def compile(name, source):
        compiled.append(source)
        library = tmp_path / f"{name}_{len(compiled)}.so"
        library.touch()
        return library

    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "kernel_library", compile)
    monkeypatch.setattr(build, "_announced", {})
    first, both, second = (
        select(Problem("forward", "bf16", head_dim, head_dim, "sm_80"))
        for head_dim in (32, 64, 128)
    )
    build.announce([first, both])
    assert build.library_of(first).resolve() == build.library_of(both).resolve()
    build.announce([both, second])
    build.library_of(both)
    assert build.library_of(second).resolve() != build.library_of(both).resolve()
    found = [[spec.name in source for spec in (first, both, second)] for source in compiled]
    assert found == [[True, True, False], [False, False, True]]
