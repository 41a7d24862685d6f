// The names that nvcc has built in, for a C++ compiler. It is included before everything else.
#pragma once

#include <crt/host_defines.h>

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/machine.h"

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 gridDim;

using std::max;
using std::min;

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float __int_as_float(int x) { return bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
inline int __float_as_int(float x) { return bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }

// These are never fused with other operations.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }

// These round towards zero and saturate; NaN gives 0.
inline int __float2int_rz(float x) {
  if (!(x > -0x1p31f)) return x != x ? 0 : INT32_MIN;
  return x < 0x1p31f ? int(x) : INT32_MAX;
}
inline unsigned __float2uint_rz(float x) {
  if (!(x > 0)) return 0;
  return x < 0x1p32f ? unsigned(x) : UINT32_MAX;
}
inline float rsqrtf(float x) { return float(1 / std::sqrt(double(x))); }
#define __logf(x) std::log(float(x))

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift % 32));
}

inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}

inline void __syncthreads() { emulator::sync_threads(); }
inline void __threadfence() {}
inline void __syncwarp(unsigned = ~0u) { emulator::sync_warp(); }
// Returns all lanes; __syncwarp() waits for those that have not exited.
inline unsigned __activemask() { return ~0u; }

template <class Value>
Value __shfl_sync(unsigned, Value value, int lane) {
  return bit_cast<Value>(emulator::shuffle(bit_cast<uint32_t>(value), lane));
}

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lanes) {
  return __shfl_sync(mask, value, int(threadIdx.x % 32) ^ lanes);
}

inline unsigned __ballot_sync(unsigned, int predicate) { return emulator::ballot(predicate != 0); }
inline int __any_sync(unsigned, int predicate) { return emulator::ballot(predicate != 0) != 0; }
inline int __all_sync(unsigned, int predicate) { return emulator::ballot(predicate == 0) == 0; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }
inline int __mulhi(int x, int y) { return int(int64_t(x) * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }

template <class Value>
Value __ldg(Value const* address) {
  return *address;
}

// Atomic, because no other thread runs inside it. Others may run before.
template <class Value>
Value atomicAdd(Value* address, Value value) {
  emulator::yield();
  Value const old = *address;
  *address += value;
  return old;
}

template <class Value>
Value atomicMax(Value* address, Value value) {
  emulator::yield();
  Value const old = *address;
  if (value > old) *address = value;
  return old;
}

template <class Value>
Value atomicExch(Value* address, Value value) {
  emulator::yield();
  Value const old = *address;
  *address = value;
  return old;
}

// A kernel library exports, besides a kernel, a function that calls it with pointers to the
// parameters.
namespace emulator {

template <class... Params, int... kIndex>
void call(void (*kernel)(Params...), void** arguments, std::integer_sequence<int, kIndex...>) {
  kernel(*static_cast<std::remove_cv_t<Params>*>(arguments[kIndex])...);
}

template <class... Params>
void call(void (*kernel)(Params...), void** arguments) {
  call(kernel, arguments, std::make_integer_sequence<int, sizeof...(Params)>{});
}

}  // namespace emulator

#define EMULATOR_KERNEL(name) \
  extern "C" void emulated_##name(void** arguments) { emulator::call(name, arguments); }

// Such a library also exports the number of blocks of a cluster, if it is not 1.
#define EMULATOR_CLUSTER(name, blocks) \
  extern "C" unsigned cluster_of_##name() { return blocks; }
