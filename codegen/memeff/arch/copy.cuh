// Copies between memories, one instruction each, on CuTe's copy operations.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <memeff/arch/thread.cuh>

// cp.async begins with sm_80.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define MEMEFF_ASYNC_COPIES 0
#else
#define MEMEFF_ASYNC_COPIES 1
#endif

namespace memeff {

CUTE_DEVICE uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8x8 matrices. A transposed load gives each lane the elements of a column.
template <bool kTranspose>
CUTE_DEVICE void load_matrix(uint32_t (&fragment)[4], uint32_t address) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address));
  }
}

// Loads two 8x8 matrices. Only the addresses of the first 16 lanes count.
template <bool kTranspose>
CUTE_DEVICE void load_two_matrices(uint32_t (&fragment)[2], uint32_t address) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address));
  }
}

// The inverse of load_matrix<false>; needs sm_90.
CUTE_DEVICE void store_matrix(uint32_t address, uint32_t const (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// The inverse of load_matrix<true>.
CUTE_DEVICE void store_matrix_transposed(uint32_t address, uint32_t const (&fragment)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}

CUTE_DEVICE void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

CUTE_DEVICE void store_shared_pair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

CUTE_DEVICE void store_shared_vector(uint32_t address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

CUTE_DEVICE uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

CUTE_DEVICE float2 load_shared_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

CUTE_DEVICE uint4 load_shared_vector(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// A predicated store: if the condition is false, the address may be invalid. Unlike a branch it
// does not end the basic block.
CUTE_DEVICE void store_global_if(bool condition, float* address, float x) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.f32 [%1], %2;}" ::"r"(int(condition)),
      "l"(address), "f"(x)
      : "memory");
}
CUTE_DEVICE void store_global_vector_if(bool condition, char* address, uint32_t const (&x)[4]) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(
          int(condition)),
      "l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// Loads zeros if the condition is false.
CUTE_DEVICE void load_global_vector_if(bool condition, char const* address, uint32_t (&x)[4]) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
      "mov.b32 %3, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%5];}"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "r"(int(condition)), "l"(address)
      : "memory");
}

CUTE_DEVICE void store_shared_pointer(uint32_t address, char const* pointer) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(pointer) : "memory");
}

CUTE_DEVICE char const* load_shared_pointer(uint32_t address) {
  char const* pointer;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(pointer) : "r"(address) : "memory");
  return pointer;
}

// Copies 16 bytes from global to shared memory. If `valid` is false, it writes zeros and reads
// nothing, so the address may be outside the tensor. From sm_80 on the data bypasses registers.
#if MEMEFF_ASYNC_COPIES
CUTE_DEVICE void copy_async(uint32_t shared, void const* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Copies the first `bytes` of 4 bytes and fills the rest with zeros.
CUTE_DEVICE void copy_word_async(uint32_t shared, void const* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// copy_async() for 8 or 4 bytes. These are cached in L1, because neighbouring copies read the same
// sectors.
template <int kBytes>
CUTE_DEVICE void copy_piece_async(uint32_t shared, void const* global, bool valid) {
  static_assert(kBytes == 8 || kBytes == 4);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
               "n"(kBytes), "r"(valid ? kBytes : 0)
               : "memory");
}
#else
// Before sm_80 a copy is a load and a store. The asm of the load is not volatile on purpose: the
// compiler then issues the loads of an unrolled loop together and waits once. That is safe because
// no kernel writes what it reads here.
CUTE_DEVICE void copy_async(uint32_t shared, void const* global, bool valid) {
  uint32_t x, y, z, w;
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x), "=&r"(y), "=&r"(z), "=&r"(w)
      : "l"(__cvta_generic_to_global(global)), "r"(int(valid)));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

// Copies the first `bytes` of 4 bytes, an even number, and fills the rest with zeros.
CUTE_DEVICE void copy_word_async(uint32_t shared, void const* global, int bytes) {
  uint32_t word;
  asm("{\n"
      ".reg .pred p;\n"
      ".reg .b16 half;\n"
      "mov.b32 %0, 0;\n"
      "setp.eq.b32 p, %2, 4;\n"
      "@p ld.global.nc.b32 %0, [%1];\n"
      "setp.eq.b32 p, %2, 2;\n"
      "@p ld.global.nc.b16 half, [%1];\n"
      "@p cvt.u32.u16 %0, half;\n"
      "}"
      : "=&r"(word)
      : "l"(__cvta_generic_to_global(global)), "r"(bytes));
  store_shared(shared, word);
}

template <int kBytes>
CUTE_DEVICE void copy_piece_async(uint32_t shared, void const* global, bool valid) {
  static_assert(kBytes == 8 || kBytes == 4);
  CUTE_UNROLL
  for (int byte = 0; byte < kBytes; byte += 4) {
    copy_word_async(shared + byte, static_cast<char const*>(global) + byte, valid ? 4 : 0);
  }
}
#endif

CUTE_DEVICE void commit_copies() { cute::cp_async_fence(); }

// Waits until at most kPending of the youngest committed groups are in flight.
template <int kPending>
CUTE_DEVICE void wait_copies() {
  cute::cp_async_wait<kPending>();
  random_sleep();
}

// Release and acquire of a word that other CTAs poll: writes before the store are visible after a
// load that returns its value.
CUTE_DEVICE void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

CUTE_DEVICE void store_release(unsigned long long* address, unsigned long long value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

CUTE_DEVICE int load_acquire(int const* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

CUTE_DEVICE unsigned long long load_acquire(unsigned long long const* address) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// The same, without an order of what this thread reads afterwards.
CUTE_DEVICE int load_relaxed(int const* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Raises such a word to at least `value`. Returns what it was.
CUTE_DEVICE int max_acquire(int* address, int value) {
  int old;
  asm volatile("atom.acquire.gpu.global.max.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

// Adds a float, or four of them, to global memory. The order among threads is undefined, so the
// sum's last bits vary. Four at a time need sm_90.
CUTE_DEVICE void reduce_add(float* address, float x) { atomicAdd(address, x); }
CUTE_DEVICE void reduce_add(float* address, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
}

}  // namespace memeff
