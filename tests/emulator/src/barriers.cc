// Barriers, and the synchronization of the lanes of a warp.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

// An mbarrier, packed into the 64 bits that a kernel reserves for it.
struct Mbarrier {
  uint64_t phase : 1;
  uint64_t pending : 11;   // arrivals
  uint64_t arrivals : 11;  // of a phase
  int64_t bytes : 24;      // expected but not arrived
  uint64_t magic : 17;
};
static_assert(sizeof(Mbarrier) == 8);
constexpr uint64_t kPhaseBit = 1;
constexpr uint64_t kMagic = 0x15a5a;

Mbarrier read(uint64_t const& word) {
  Mbarrier barrier;
  std::memcpy(&barrier, &word, sizeof(barrier));
  if (barrier.magic != kMagic) fail("an mbarrier that is not initialized");
  return barrier;
}

void write(uint64_t& word, Mbarrier barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.arrivals;
    note_progress();
  }
  std::memcpy(&word, &barrier, sizeof(barrier));
}

void complete(NamedBarrier& barrier) {
  barrier.arrived = 0;
  barrier.threads = 0;
  ++barrier.generation;
  note_progress();
}

// Counts this thread as one of the `threads` that arrive.
NamedBarrier& arrive_at(int index, int threads) {
  if (index < 1 || index >= kNamedBarriers) fail("there is no named barrier %d", index);
  if (threads % kLanes != 0) fail("barrier %d for %d threads, no whole warps", index, threads);
  NamedBarrier& barrier = this_block().barriers[index];
  if (barrier.threads != 0 && barrier.threads != threads) {
    fail("barrier %d is for %d threads, and for %d", index, barrier.threads, threads);
  }
  barrier.threads = threads;
  ++barrier.arrived;
  return barrier;
}

void complete_if_all_arrived(Cluster& cluster) {
  int live = 0;
  for (Block const* block : cluster.blocks) live += block == nullptr ? 0 : block->live;
  if (cluster.arrived == 0 || cluster.arrived < live) return;
  cluster.arrived = 0;
  ++cluster.generation;
  note_progress();
}

long byte_in_shared(uint64_t const& barrier) {
  return reinterpret_cast<char const*>(&barrier) - this_block().shared;
}

}  // namespace

uint64_t& in_block(uint64_t const& barrier, Block& block) {
  return *reinterpret_cast<uint64_t*>(block.shared + byte_in_shared(barrier));
}

Exchange& meet(char const* instruction, uint32_t const* words, int count,
               std::function<void(Exchange&)> const& last) {
  Warp& warp = this_warp();
  uint64_t const generation = warp.generation;
  Exchange& exchange = warp.exchanges[generation % 2];
  if (warp.arrived > 0 && instruction != warp.instruction &&
      std::strcmp(instruction, warp.instruction) != 0) {
    fail("lanes of a warp execute %s and %s at a time", warp.instruction, instruction);
  }
  if (count > 0 && warp.live != kLanes) {
    fail("%s of a warp in which %d lanes have exited", instruction, kLanes - warp.live);
  }
  warp.instruction = instruction;
  std::memcpy(exchange.in[this_lane()], words, size_t(count) * sizeof(uint32_t));
  if (++warp.arrived == warp.live) {
    last(exchange);
    warp.arrived = 0;
    ++warp.generation;
    note_progress();
  } else {
    wait_for({&warp.generation, ~uint64_t(0), generation, false, instruction});
  }
  return exchange;
}

void sync_warp() {
  meet("__syncwarp", nullptr, 0, [](Exchange&) {});
}

void sync_threads() {
  Block& block = this_block();
  NamedBarrier& barrier = block.barriers[0];
  uint64_t const generation = barrier.generation;
  if (++barrier.arrived == block.live) {
    complete(barrier);
  } else {
    wait_for({&barrier.generation, ~uint64_t(0), generation, false, "__syncthreads"});
  }
}

void named_barrier(int index, int threads) {
  NamedBarrier& barrier = arrive_at(index, threads);
  uint64_t const generation = barrier.generation;
  if (barrier.arrived == threads) {
    complete(barrier);
  } else {
    wait_for({&barrier.generation, ~uint64_t(0), generation, false, "named barrier", index});
  }
}

void arrive_named_barrier(int index, int threads) {
  NamedBarrier& barrier = arrive_at(index, threads);
  if (barrier.arrived == threads) complete(barrier);
  stall();
}

int cluster_rank() { return int(this_block().index % this_block().cluster->blocks.size()); }

Block& cluster_block(int rank) {
  std::vector<Block*> const& blocks = this_block().cluster->blocks;
  if (rank < 0 || rank >= int(blocks.size())) fail("there is no block %d in the cluster", rank);
  if (blocks[size_t(rank)] == nullptr) fail("an access to block %d, which has ended", rank);
  return *blocks[size_t(rank)];
}

void arrive_cluster() {
  Cluster& cluster = *this_block().cluster;
  this_fiber().cluster_generation = cluster.generation;
  ++cluster.arrived;
  complete_if_all_arrived(cluster);
  stall();
}

void wait_cluster() {
  Fiber& fiber = this_fiber();
  wait_for({&this_block().cluster->generation, ~uint64_t(0), fiber.cluster_generation, false,
            "the barrier of the cluster"});
}

void arrive_cluster_barrier(uint64_t& barrier, int rank, int expected_bytes) {
  arrive_barrier(in_block(barrier, cluster_block(rank)), expected_bytes);
}

void thread_exits(Fiber& fiber) {
  Block& block = *fiber.block;
  Warp& warp = block.warps[fiber.thread / kLanes];
  --block.live;
  --warp.live;
  if (warp.arrived > 0 && warp.arrived == warp.live) {
    warp.arrived = 0;
    ++warp.generation;
  }
  if (block.barriers[0].arrived > 0 && block.barriers[0].arrived == block.live) {
    complete(block.barriers[0]);
  }
  complete_if_all_arrived(*block.cluster);
}

void init_barrier(uint64_t& word, int arrivals) {
  Mbarrier barrier = {};
  barrier.pending = barrier.arrivals = unsigned(arrivals);
  barrier.magic = kMagic;
  std::memcpy(&word, &barrier, sizeof(barrier));
}

void arrive_barrier(uint64_t& word, int expected_bytes) {
  Mbarrier barrier = read(word);
  if (barrier.pending == 0)
    fail("too many arrivals at the mbarrier at byte %ld", byte_in_shared(word));
  barrier.bytes += expected_bytes;
  --barrier.pending;
  write(word, barrier);
  stall();
}

void complete_arrival(uint64_t& word) {
  Mbarrier barrier = read(word);
  if (barrier.pending == 0) fail("too many arrivals of copies at an mbarrier");
  --barrier.pending;
  write(word, barrier);
}

void complete_bytes(uint64_t& word, int bytes) {
  Mbarrier barrier = read(word);
  barrier.bytes -= bytes;
  write(word, barrier);
}

void wait_barrier(uint64_t& word, int parity) {
  read(word);
  wait_for(
      {&word, kPhaseBit, uint64_t(parity), false, "the mbarrier at byte", byte_in_shared(word)});
}

}  // namespace emulator
