// One custom call: its attributes, checked and decoded once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attributes/array_type.h"
#include "images/kernel_table.h"
#include "memeff/params.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// An operand or a result as XLA passes it. If it holds several arrays, `name` joins their names by
// "+".
struct BufferType {
  std::string name;
  ArrayType type;
};

// The state of a call site: the instantiate stage makes it, and the later stages read it.
struct Call {
  static xla::ffi::TypeId id;

  KernelTable kernels;
  std::vector<BufferType> operands;
  std::vector<BufferType> results;
  std::vector<Array> arrays;  // of all operands and results; absent ones have no entry
  ScoreScale scale = {};
  MaskParams mask = {};          // bounds only
  std::vector<int32_t> numbers;  // of features: see ParamsField
  int longest_query = 0;         // of packed sequences
  int longest_key = 0;
  int bias_alignment = 1;  // in bytes, of the rows of the bias

  // Hazard: the attributes may come from a file. An accepted call must never crash the process, so
  // everything is checked against the descriptions of the kernels before anything is loaded or
  // launched.
  //
  //   operands, results             "query,key/5,value+bias": names, "+" between those of one
  //                                 buffer, after "/" the divisor of an array that a vmap
  //                                 broadcasts
  //   operand_types, result_types   "bf16[2,128,4,64] f32[2,4,128]", one for each buffer
  //   scale                         float[4]: ScoreScale
  //   windows                       int[4]: the bounds of MaskParams
  //   numbers                       int[]: those of features, any 32 bits
  //   longest                       int[2]: T and S of packed sequences, else 0
  //   bias_alignment                int
  //   kernels                       a dictionary of SealedImage by architecture, and "archs"
  //   seal                          SHA-256 of all of these: see seal_of
  static xla::ffi::ErrorOr<std::unique_ptr<Call>> decode(Direction direction,
                                                         const xla::ffi::Dictionary& attributes);

  // Null if the call has no array of this name.
  const Array* find(std::string_view name) const { return host::find(arrays, name); }
};

// The digest of the attributes of a call, without `seal`.
xla::ffi::ErrorOr<std::string> seal_of(Direction direction, const xla::ffi::Dictionary& attributes);

}  // namespace memeff::host
