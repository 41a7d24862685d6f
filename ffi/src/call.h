// One custom call: its attributes, checked and decoded once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "memeff/params.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

enum class Direction { kForward, kBackward, kTangent };

// The element type and sizes of an array.
struct ArrayType {
  static constexpr int kMostDims = 6;

  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  int rank = 0;
  long long sizes[kMostDims] = {};
};

std::string to_string(const ArrayType& type);  // "bf16[2,128,4,64]"

// A named array of the call: a buffer, or slot `slot` of a buffer [B, T, slots, N, H] that holds
// several arrays.
struct Array {
  std::string name;
  bool is_result;
  int position;  // among the operands, or the results
  int slot;
  int slots;
  long long divisor;  // of the batch index, if a vmap broadcasts the array: see BatchBroadcast
  ArrayType type;     // without the dim of slots
};

// The state of a call site: the instantiate stage makes it, and the later stages read it.
struct Call {
  static xla::ffi::TypeId id;

  KernelTable kernels;
  std::vector<ArrayType> operands;
  std::vector<ArrayType> results;
  std::vector<Array> arrays;  // of all operands and results; absent ones have no entry
  ProblemShape shape = {};    // without pointers
  ScoreScale scale = {};
  MaskParams mask = {};    // bounds only
  int bias_alignment = 1;  // in bytes, of the rows of the bias

  // Python computes every number (jax_memeff/_cuda/custom_call.py), in the order in
  // which decode() reads them. A checksum covers them and the images, so what was damaged or edited
  // is an error. This is integrity and not security: whoever writes a program controls the machine
  // code in it (docs/deployment/export.md).
  static std::unique_ptr<Call> decode(Direction direction, const xla::ffi::Dictionary& attributes);

  // Null if the call has no array of this name.
  const Array* find(std::string_view name) const;
};

// Continues a checksum (FNV-1a, 64 bits) over more bytes.
constexpr uint64_t kEmptyChecksum = 0xcbf29ce484222325;
uint64_t checksum(std::string_view bytes, uint64_t before = kEmptyChecksum);

}  // namespace memeff::host
