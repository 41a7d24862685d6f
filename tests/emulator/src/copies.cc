// Shared memory, and the copies to and from it.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr uint32_t kThreadBits = 11;
constexpr uint32_t kArrivedCopy = (1u << kThreadBits) - 1;

void require_aligned(void const* address, int bytes, char const* what) {
  if (reinterpret_cast<uintptr_t>(address) % unsigned(bytes) != 0) {
    fail("%s at %p in global memory, no multiple of %d", what, address, bytes);
  }
}

void make(Block& block, AsyncCopy const& copy, uint32_t writer) {
  char* const target = shared_range(block, copy.shared, copy.size, copy.size, "cp.async");
  std::memset(target, 0, size_t(copy.size));
  std::memcpy(target, copy.global, size_t(copy.bytes));
  mark_written(block, copy.shared, copy.size, writer);
}

void make(AsyncCopy const& copy) {
  make(this_block(), copy, uint32_t(this_fiber().thread + 1) | this_fiber().fences << kThreadBits);
}

// Makes a TMA copy now, or queues it for later.
void start(std::function<void()> transfer, Block& block = this_block()) {
  if (at_once()) {
    transfer();
  } else {
    block.transfers.push_back(std::move(transfer));
  }
}

TensorMap read_map(void const* encoded) {
  TensorMap map;
  std::memcpy(&map, encoded, sizeof(map));
  if (map.magic != TensorMap::kMagic) fail("a tensor map that nobody encoded");
  return map;
}

// TMA swizzles the 16-byte chunks of shared memory by their address.
uint32_t swizzled(uint32_t address, uint32_t swizzle_bytes) {
  return address ^ ((address >> 3) & (swizzle_bytes - 16));
}

// Calls use(shared address, global address, bytes) for all 16-byte chunks of a box whose outer two
// extents are 1. The global address is null outside of the tensor.
template <class Use>
void for_each_chunk(TensorMap const& map, uint32_t shared, int const (&start)[4], Use use) {
  uint32_t const row_bytes = map.box[0] * map.element_bytes;
  if (shared % 128 != 0) fail("a box at byte %u of shared memory, no multiple of 128", shared);
  auto inside = [&](int dim, long long index) {
    return index >= 0 && index < (long long)(map.sizes[dim]);
  };
  for (int r = 0; r < map.box[1]; ++r) {
    long long const row = (long long)start[1] + r;
    bool const row_inside = inside(1, row) && inside(2, start[2]) && inside(3, start[3]);
    for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
      long long const column = start[0] + (long long)(byte / map.element_bytes);
      long long const left = ((long long)(map.sizes[0]) - column) * map.element_bytes;
      int const bytes = row_inside && column >= 0 ? int(std::clamp(left, 0ll, 16ll)) : 0;
      char* const global = map.data + column * map.element_bytes + row * (long long)map.strides[0] +
                           start[2] * (long long)map.strides[1] +
                           start[3] * (long long)map.strides[2];
      use(swizzled(shared + uint32_t(r) * row_bytes + byte, map.swizzle_bytes), global, bytes);
    }
  }
}

// Copies a box to shared memory of a block. Its bytes arrive at a barrier there.
void load_box_into(Block& target_block, TensorMap const& map, uint64_t& barrier, uint32_t shared,
                   int const (&start)[4]) {
  auto transfer = [=, block = &target_block, arrived = &barrier, c = start[0], r = start[1],
                   h = start[2], b = start[3]] {
    int total = 0;
    for_each_chunk(map, shared, {c, r, h, b}, [&](uint32_t address, char* global, int bytes) {
      char* const target = shared_range(*block, address, 16, 16, "the load of a box");
      std::memset(target, 0, 16);
      if (bytes > 0) std::memcpy(target, global, size_t(bytes));
      mark_written(*block, address, 16, 0);
      total += 16;
    });
    complete_bytes(*arrived, total);
  };
  emulator::start(transfer, target_block);
}

// In a cluster the high bits of an address are the rank of its block, as on Hopper.
constexpr int kRankBit = 24;

long byte_offset(uint32_t address) {
  return long(address & ((1u << kRankBit) - 1)) - long(kFirstSharedAddress);
}

}  // namespace

char* dynamic_shared() { return this_block().shared; }

void* static_shared(void const* name, int bytes) {
  std::vector<char>& memory = this_block().statics[name];
  if (memory.empty()) memory.assign(size_t(bytes), char(0xff));
  return memory.data();
}

uint32_t shared_address(void const* pointer) {
  long const offset = static_cast<char const*>(pointer) - this_block().shared;
  if (offset < 0 || offset > this_block().shared_bytes) fail("no address of shared memory");
  uint32_t const address = kFirstSharedAddress + uint32_t(offset);
  return this_block().cluster->blocks.size() > 1 ? address | uint32_t(cluster_rank()) << kRankBit
                                                 : address;
}

char* shared_range(Block& block, uint32_t address, int bytes, int alignment, char const* what) {
  long const offset = byte_offset(address);
  if (offset < 0 || offset + bytes > block.shared_bytes) {
    fail("%s of %d bytes at byte %ld of shared memory, which has %d", what, bytes, offset,
         block.shared_bytes);
  }
  if (offset % alignment != 0) {
    fail("%s at byte %ld of shared memory, no multiple of %d", what, offset, alignment);
  }
  return block.shared + offset;
}

void mark_written(Block& block, uint32_t address, int bytes, uint32_t writer) {
  uint32_t const first = uint32_t(byte_offset(address)) / 4;
  uint32_t const last = uint32_t(byte_offset(address) + bytes - 1) / 4;
  std::fill(block.writers.begin() + first, block.writers.begin() + last + 1, writer);
}

char const* async_read(Block& block, uint32_t address, int bytes, char const* what) {
  char const* const source = shared_range(block, address, bytes, 16, what);
  uint32_t const first = uint32_t(byte_offset(address)) / 4;
  for (uint32_t word = first; word < first + uint32_t(bytes) / 4; ++word) {
    uint32_t const writer = block.writers[word];
    if (writer == 0) continue;
    if ((writer & kArrivedCopy) == kArrivedCopy) {
      if (this_fiber().fenced_arrivals < writer >> kThreadBits) {
        fail("%s reads byte %u of shared memory, which was copied, without a fence", what,
             4 * word);
      }
      continue;
    }
    uint32_t const thread = (writer & ((1u << kThreadBits) - 1)) - 1;
    if (block.fibers[thread].fences == writer >> kThreadBits) {
      fail("%s reads byte %u of shared memory, which thread %u wrote and did not fence", what,
           4 * word, thread);
    }
  }
  return source;
}

char const* read_shared(uint32_t address, int bytes) {
  return shared_range(this_block(), address, bytes, bytes, "a load");
}

char* write_shared(uint32_t address, int bytes) {
  char* const target = shared_range(this_block(), address, bytes, bytes, "a store");
  mark_written(this_block(), address, bytes,
               uint32_t(this_fiber().thread + 1) | this_fiber().fences << kThreadBits);
  return target;
}

void fence_async_proxy() {
  ++this_fiber().fences;
  this_fiber().fenced_arrivals = this_block().copy_arrivals;
}

void copy_async(uint32_t shared, void const* global, int size, int bytes) {
  shared_range(this_block(), shared, size, size, "cp.async");
  if (bytes > 0) require_aligned(global, size, "cp.async");
  AsyncCopy const copy = {shared, global, size, bytes};
  this_fiber().uncommitted_copies.push_back(copy);
  if (at_once()) {
    make(copy);
  } else {
    this_fiber().open_copies.push_back(copy);
  }
}

void commit_copies() {
  Fiber& fiber = this_fiber();
  fiber.copy_groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
  fiber.uncommitted_copies.clear();
}

void arrive_when_copied(uint64_t& barrier) {
  Fiber& fiber = this_fiber();
  if (!fiber.copy_groups.empty()) fail("an arrival of copies of which some are committed");
  start([=, block = &this_block(), arrived = &barrier, copies = fiber.uncommitted_copies] {
    uint32_t const number = ++block->copy_arrivals;
    for (AsyncCopy const& copy : copies) make(*block, copy, kArrivedCopy | number << kThreadBits);
    complete_arrival(*arrived);
  });
  fiber.open_copies.clear();
  fiber.uncommitted_copies.clear();
}

void wait_copies(int pending) {
  auto& groups = this_fiber().copy_groups;
  while (int(groups.size()) > pending) {
    for (AsyncCopy const& copy : groups.front()) make(copy);
    groups.pop_front();
  }
}

void load_box(void const* encoded, uint64_t& barrier, uint32_t shared, int const (&start)[4]) {
  load_box_into(this_block(), read_map(encoded), barrier, shared, start);
}

void load_cluster_box(void const* encoded, uint64_t& barrier, uint32_t shared,
                      int const (&start)[4], int first, int blocks) {
  for (int i = 0; i < blocks; ++i) {
    Block& block = cluster_block(first + i);
    load_box_into(block, read_map(encoded), in_block(barrier, block), shared, start);
  }
}

uint32_t cluster_address(uint32_t shared, int rank) {
  cluster_block(rank);  // must exist
  return uint32_t(byte_offset(shared) + long(kFirstSharedAddress)) | uint32_t(rank) << kRankBit;
}

void store_cluster(uint32_t target, uint32_t barrier, uint32_t const (&words)[4]) {
  Block& block = cluster_block(int(target >> kRankBit));
  if (target >> kRankBit != barrier >> kRankBit) fail("a store and its barrier in two blocks");
  auto* const arrived =
      reinterpret_cast<uint64_t*>(shared_range(block, barrier, 8, 8, "the barrier of a store"));
  auto transfer = [=, to = &block, a = words[0], b = words[1], c = words[2], d = words[3]] {
    uint32_t const vector[4] = {a, b, c, d};
    std::memcpy(shared_range(*to, target, 16, 16, "a store to another block"), vector, 16);
    mark_written(*to, target, 16, 0);
    complete_bytes(*arrived, 16);
  };
  emulator::start(transfer, block);
}

void load_tma(void const* global, uint64_t& barrier, uint32_t shared, int bytes) {
  require_aligned(global, 16, "a TMA load");
  if (bytes % 16 != 0) fail("a TMA load of %d bytes, no multiple of 16", bytes);
  start([=, block = &this_block(), arrived = &barrier] {
    std::memcpy(shared_range(*block, shared, bytes, 16, "a TMA load"), global, size_t(bytes));
    mark_written(*block, shared, bytes, 0);
    complete_bytes(*arrived, bytes);
  });
}

void store_box(void const* encoded, uint32_t shared, int const (&start)[4]) {
  TensorMap const map = read_map(encoded);
  ++this_fiber().stores;
  this_fiber().stores_committed = false;
  emulator::start(
      [=, fiber = &this_fiber(), c = start[0], r = start[1], h = start[2], b = start[3]] {
        for_each_chunk(map, shared, {c, r, h, b}, [&](uint32_t address, char* global, int bytes) {
          char const* const source = async_read(*fiber->block, address, 16, "the store of a box");
          if (bytes > 0) std::memcpy(global, source, size_t(bytes));
        });
        --fiber->stores;
      });
}

namespace {

// Starts an operation of TMA on contiguous global memory. It reads shared memory first, and calls
// write(global, source) for every 16 bytes later.
template <class Element, class Write>
void start_tma(Element* global, uint32_t shared, int bytes, const char* what, Write write) {
  require_aligned(global, 16, what);
  if (bytes % 16 != 0) fail("%s of %d bytes, no multiple of 16", what, bytes);
  ++this_fiber().stores;
  this_fiber().stores_committed = false;
  start([=, fiber = &this_fiber()] {
    std::vector<char> sources;
    for (int i = 0; i < bytes; i += 16) {
      char const* const source = async_read(*fiber->block, shared + i, 16, what);
      sources.insert(sources.end(), source, source + 16);
    }
    --fiber->stores;
    ++fiber->writes;
    auto const write_all = [=] {
      for (int i = 0; i < bytes; i += 16) {
        write(global + i / int(sizeof(Element)), sources.data() + i);
      }
      --fiber->writes;
    };
    if (at_once()) return write_all();
    fiber->block->writes.push_back(write_all);
  });
}

}  // namespace

void store_tma(char* global, uint32_t shared, int bytes) {
  start_tma(global, shared, bytes, "a TMA store",
            [](char* target, char const* source) { std::memcpy(target, source, 16); });
}

void reduce_add_tma(float* global, uint32_t shared, int bytes) {
  start_tma(global, shared, bytes, "a TMA reduction", [](float* target, char const* source) {
    float values[4];
    std::memcpy(values, source, 16);
    for (int j = 0; j < 4; ++j) target[j] += values[j];
  });
}

void commit_tma_stores() { this_fiber().stores_committed = true; }

void wait_tma_stores() {
  if (!this_fiber().stores_committed) fail("a wait for TMA stores that are not committed");
  wait_for({&this_fiber().stores, ~uint64_t(0), 0, true, "TMA stores"});
}

void wait_tma_stores_performed() {
  wait_tma_stores();
  wait_for({&this_fiber().writes, ~uint64_t(0), 0, true, "writes of TMA stores"});
}

}  // namespace emulator
