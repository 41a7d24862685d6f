// The state of a running launch.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator/machine.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr int kNamedBarriers = 16;

// The behaviour of the machine. The same settings give the same run.
struct Settings {
  int capability = 80;
  int multiprocessors = 3;
  uint64_t seed = 0;
};
Settings& settings();

uint64_t random_number();

// Draws whether an asynchronous operation takes effect now or as late as the program allows.
inline bool at_once() { return random_number() % 2 == 0; }

// The condition of a waiting thread: the masked word equals `value`, or differs from it. `what`
// names it in messages, with a number unless that is negative.
struct Wait {
  uint64_t const* word = nullptr;
  uint64_t mask = 0;
  uint64_t value = 0;
  bool equal = false;
  char const* what = "";
  long number = -1;

  bool over() const { return word == nullptr || ((*word & mask) == value) == equal; }
  bool is_for_same(Wait const& other) const {
    return word == other.word && mask == other.mask && value == other.value && equal == other.equal;
  }
};

struct AsyncCopy {
  uint32_t shared;
  void const* global;
  int size;
  int bytes;
};

struct Block;

// Blocks that run at the same time. All of their threads have a barrier.
struct Cluster {
  std::vector<Block*> blocks;  // null if the block has ended
  int arrived = 0;
  uint64_t generation = 0;
};

struct Fiber {
  Block* block = nullptr;
  int thread = 0;
  std::jmp_buf context;
  char* stack = nullptr;
  bool started = false;
  bool done = false;
  Wait wait;

  std::vector<AsyncCopy> open_copies;
  std::vector<AsyncCopy> uncommitted_copies;  // these, and those that took effect at once
  std::deque<std::vector<AsyncCopy>> copy_groups;

  uint64_t products = 0;        // started
  uint64_t product_groups = 0;  // committed
  uint64_t stores = 0;          // of TMA, whose sources in shared memory have not been read
  uint64_t writes = 0;          // of TMA stores that have been read
  bool stores_committed = true;
  uint32_t fences = 0;
  uint32_t fenced_arrivals = 0;     // Block::copy_arrivals at its last fence
  uint64_t cluster_generation = 0;  // in which it arrived at the barrier of the cluster
};

// One warp's part of a wgmma: 16 rows of the accumulators.
struct Product {
  Format format;
  Operand left;
  Operand right;
  bool left_in_registers;
  bool accumulate;
  int elements;  // of a lane
  uint64_t group;
  bool at_once;
  int lanes = 0;  // that have started it
  float* c[kLanes];
  uint32_t a[kLanes][4];
  std::vector<float> before[kLanes];  // the earlier accumulators; empty if unchanged
};

struct Exchange {
  uint32_t in[kLanes][8];
  uint32_t out[kLanes][4];
};

struct Warp {
  uint64_t asleep_until = 0;  // until this turn, or until no other warp can run
  std::vector<Wait> waits;    // of its lanes, each once, if no lane could run; else empty
  int live = kLanes;
  int arrived = 0;
  uint64_t generation = 0;
  char const* instruction = nullptr;  // that the arrived lanes execute
  Exchange exchanges[2];              // of even and odd generations
  std::deque<Product> products;
  uint64_t newest_group = ~uint64_t(0);  // of products
  bool newest_at_once = false;           // whether they take effect at once
  uint64_t finished_products = 0;
};

struct NamedBarrier {
  int arrived = 0;
  int threads = 0;
  uint64_t generation = 0;
};

struct Block {
  unsigned index;
  std::shared_ptr<Cluster> cluster;
  int live;
  char* shared;
  int shared_bytes;
  // For each word of shared memory the last thread that wrote it, plus one, and from bit 11 on the
  // number of async-proxy fences that it had passed; 0 if TMA wrote the word. If a barrier
  // announces the write, the thread is kArrivedCopy, and the number is copy_arrivals.
  std::vector<uint32_t> writers;
  uint32_t copy_arrivals = 0;
  std::map<void const*, std::vector<char>> statics;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  NamedBarrier barriers[kNamedBarriers];
  std::vector<std::function<void()>> transfers;  // pending TMA copies
  std::vector<std::function<void()>> writes;     // of TMA stores that have been read
};

// The running thread; null in the scheduler.
Fiber* current_fiber();
Fiber& this_fiber();
Warp& this_warp();
inline Block& this_block() { return *this_fiber().block; }
inline int this_lane() { return this_fiber().thread % kLanes; }

// Waits until the masked word equals `value` (or differs from it).
void wait_for(Wait const& wait);
// Runs other threads, often for many turns, because the last action of this thread may unblock
// them.
void stall();
// Records the progress of a thread. A launch without progress counts as hanging.
void note_progress();

// Synchronizes all lanes of the warp. The last lane calls `last` with the words of every lane. The
// results in `out` stay valid until each lane synchronizes again.
Exchange& meet(char const* instruction, uint32_t const* words, int count,
               std::function<void(Exchange&)> const& last);

// A range of shared memory, checked.
char* shared_range(Block& block, uint32_t address, int bytes, int alignment, char const* what);
// The block of the cluster with this rank, which must be running.
Block& cluster_block(int rank);

// A checked range that TMA or wgmma will read: its writers must have passed a fence.
char const* async_read(Block& block, uint32_t address, int bytes, char const* what);
void mark_written(Block& block, uint32_t address, int bytes, uint32_t writer);

void complete_bytes(uint64_t& barrier, int bytes);
void complete_arrival(uint64_t& barrier);
// The barrier at the address of this block's `barrier` in another block.
uint64_t& in_block(uint64_t const& barrier, Block& block);
void thread_exits(Fiber& fiber);

// Runs a grid to its end. Returns an error message, empty on success.
std::string run_grid(std::string const& name, void (*kernel)(void**), void** arguments,
                     unsigned blocks, unsigned cluster, unsigned threads, unsigned shared_bytes);

// A tensor map, as cuTensorMapEncodeTiled of the emulated driver encodes it.
struct TensorMap {
  static constexpr uint32_t kMagic = 0x7E45074D;
  uint32_t magic;
  uint32_t swizzle_bytes;
  char* data;
  uint64_t sizes[4];    // elements, innermost first
  uint64_t strides[3];  // bytes
  uint16_t box[4];
  uint32_t element_bytes;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
