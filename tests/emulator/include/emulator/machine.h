// The machine on which kernels run without a GPU. The headers of arch/ in this directory call it.
//
// A thread is a fiber. It runs until it waits; then the scheduler picks a random warp of the blocks
// on the machine. Asynchronous operations (copies, the products of wgmma) take effect either when
// they are started or as late as the program allows, at random.
#pragma once

#include <cstdint>

namespace emulator {

enum class Format { bf16, f16, tf32 };

// Ends the launch with this message. Does not return.
[[noreturn]] void fail(char const* format, ...) __attribute__((format(printf, 1, 2)));

// Lets other threads run.
void yield();

// Shared memory. Addresses are 32 bits wide and begin at 1024; every access is checked.
constexpr uint32_t kFirstSharedAddress = 1024;
char* dynamic_shared();
void* static_shared(void const* name, int bytes);
uint32_t shared_address(void const* pointer);
// Ordinary accesses. `bytes` is also the required alignment.
char const* read_shared(uint32_t address, int bytes);
char* write_shared(uint32_t address, int bytes);

// Barriers.
void sync_threads();
void sync_warp();
void named_barrier(int barrier, int threads);
void arrive_named_barrier(int barrier, int threads);  // does not wait
void init_barrier(uint64_t& barrier, int arrivals);
void arrive_barrier(uint64_t& barrier, int expected_bytes);
void wait_barrier(uint64_t& barrier, int parity);

// Clusters: blocks that run at the same time. The rank is the index of this block in its cluster.
int cluster_rank();
void arrive_cluster();  // does not wait
void wait_cluster();
// Arrives at the barrier of the same address in another block of the cluster, or in this one.
void arrive_cluster_barrier(uint64_t& barrier, int rank, int expected_bytes = 0);
// The same address in another block of the cluster, with its rank in the high bits.
uint32_t cluster_address(uint32_t shared, int rank);
// Starts the store of 16 bytes to another block. They arrive at a barrier there.
void store_cluster(uint32_t target, uint32_t barrier, uint32_t const (&words)[4]);

// Instructions that the lanes of a warp execute together.
uint32_t shuffle(uint32_t value, int lane);
uint32_t ballot(bool predicate);
void load_matrix(uint32_t (&fragment)[4], uint32_t address, bool transpose);
void store_matrix(uint32_t address, uint32_t const (&fragment)[4], bool transpose);
void mma(Format format, float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1);

// cp.async: copies `bytes` of `size` bytes and fills the rest with zeros.
void copy_async(uint32_t shared, void const* global, int size, int bytes);
void commit_copies();
void wait_copies(int pending);
// Arrives at the barrier when all copies that this thread has started are complete.
void arrive_when_copied(uint64_t& barrier);

// wgmma: c (+)= a b of m64nNk16, with the left operand in registers or in shared memory. The
// accumulators are NaN until they have been waited for.
struct Operand {
  uint64_t descriptor;
  bool contiguous_k;
};
void wgmma(Format format, float* c, int elements, uint32_t const* a, Operand left, Operand right,
           bool accumulate);
void commit_products();
void wait_products(int pending);

// TMA.
void load_box(void const* map, uint64_t& barrier, uint32_t shared, int const (&start)[4]);
// The box arrives at the same addresses of all `blocks` blocks of the cluster.
void load_cluster_box(void const* map, uint64_t& barrier, uint32_t shared, int const (&start)[4],
                      int first, int blocks);
void load_tma(void const* global, uint64_t& barrier, uint32_t shared, int bytes);
void store_box(void const* map, uint32_t shared, int const (&start)[4]);
void store_tma(char* global, uint32_t shared, int bytes);
void reduce_add_tma(float* global, uint32_t shared, int bytes);
void commit_tma_stores();
void wait_tma_stores();
void wait_tma_stores_performed();
// Makes earlier writes of this thread visible to TMA and to wgmma.
void fence_async_proxy();

}  // namespace emulator
