// Copies between memories.
#pragma once

#include <cute/config.hpp>

namespace memeff {

CUTE_DEVICE uint32_t shared_address(void const* pointer) {
  return emulator::shared_address(pointer);
}

template <bool kTranspose>
CUTE_DEVICE void load_matrix(uint32_t (&fragment)[4], uint32_t address) {
  emulator::load_matrix(fragment, address, kTranspose);
}

template <bool kTranspose>
CUTE_DEVICE void load_two_matrices(uint32_t (&fragment)[2], uint32_t address) {
  uint32_t four[4];
  emulator::load_matrix(four, emulator::shuffle(address, threadIdx.x % 16), kTranspose);
  for (int i = 0; i < 2; ++i) fragment[i] = four[i];
}

CUTE_DEVICE void store_matrix(uint32_t address, uint32_t const (&fragment)[4]) {
  emulator::store_matrix(address, fragment, false);
}
CUTE_DEVICE void store_matrix_transposed(uint32_t address, uint32_t const (&fragment)[4]) {
  emulator::store_matrix(address, fragment, true);
}

template <class Value>
CUTE_DEVICE void store_shared_value(uint32_t address, Value const& value) {
  std::memcpy(emulator::write_shared(address, sizeof(value)), &value, sizeof(value));
}

template <class Value>
CUTE_DEVICE Value load_shared_value(uint32_t address) {
  Value value;
  std::memcpy(&value, emulator::read_shared(address, sizeof(value)), sizeof(value));
  return value;
}

CUTE_DEVICE void store_shared(uint32_t address, uint32_t value) {
  store_shared_value(address, value);
}
CUTE_DEVICE void store_shared_pair(uint32_t address, float x, float y) {
  store_shared_value(address, make_float2(x, y));
}
CUTE_DEVICE void store_shared_vector(uint32_t address, float x, float y, float z, float w) {
  store_shared_value(address, make_float4(x, y, z, w));
}
CUTE_DEVICE void store_global_if(bool condition, float* address, float x) {
  if (condition) *address = x;
}
CUTE_DEVICE void store_global_vector_if(bool condition, char* address, uint32_t const (&x)[4]) {
  if (condition) *reinterpret_cast<uint4*>(address) = make_uint4(x[0], x[1], x[2], x[3]);
}
CUTE_DEVICE void load_global_vector_if(bool condition, char const* address, uint32_t (&x)[4]) {
  uint4 const vector =
      condition ? *reinterpret_cast<uint4 const*>(address) : make_uint4(0, 0, 0, 0);
  x[0] = vector.x;
  x[1] = vector.y;
  x[2] = vector.z;
  x[3] = vector.w;
}
CUTE_DEVICE void store_shared_pointer(uint32_t address, char const* pointer) {
  store_shared_value(address, pointer);
}

CUTE_DEVICE uint32_t load_shared(uint32_t address) { return load_shared_value<uint32_t>(address); }
CUTE_DEVICE float2 load_shared_pair(uint32_t address) { return load_shared_value<float2>(address); }
CUTE_DEVICE uint4 load_shared_vector(uint32_t address) { return load_shared_value<uint4>(address); }
CUTE_DEVICE char const* load_shared_pointer(uint32_t address) {
  return load_shared_value<char const*>(address);
}

CUTE_DEVICE void copy_async(uint32_t shared, void const* global, bool valid) {
  emulator::copy_async(shared, global, 16, valid ? 16 : 0);
}

CUTE_DEVICE void copy_word_async(uint32_t shared, void const* global, int bytes) {
  emulator::copy_async(shared, global, 4, bytes);
}

template <int kBytes>
CUTE_DEVICE void copy_piece_async(uint32_t shared, void const* global, bool valid) {
  static_assert(kBytes == 8 || kBytes == 4);
  emulator::copy_async(shared, global, kBytes, valid ? kBytes : 0);
}

CUTE_DEVICE void commit_copies() { emulator::commit_copies(); }

template <int kPending>
CUTE_DEVICE void wait_copies() {
  emulator::wait_copies(kPending);
}

template <class Value>
CUTE_DEVICE void store_release(Value* address, Value value) {
  emulator::yield();
  *address = value;
}

template <class Value>
CUTE_DEVICE Value load_acquire(Value const* address) {
  emulator::yield();
  return *address;
}

CUTE_DEVICE int load_relaxed(int const* address) { return load_acquire(address); }

CUTE_DEVICE int max_acquire(int* address, int value) { return atomicMax(address, value); }

CUTE_DEVICE void reduce_add(float* address, float x) {
  emulator::yield();
  *address += x;
}

CUTE_DEVICE void reduce_add(float* address, float x, float y, float z, float w) {
  emulator::yield();
  float const values[] = {x, y, z, w};
  for (int i = 0; i < 4; ++i) address[i] += values[i];
}

}  // namespace memeff
