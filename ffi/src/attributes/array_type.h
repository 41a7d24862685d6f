// The element type and sizes of an array, as attributes spell them: "bf16[2,128,4,64]".
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

struct ArrayType {
  static constexpr int kMostDims = 6;

  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  int rank = 0;
  long long sizes[kMostDims] = {};

  // Returns none for text that is no type, or has too many dims or more than 2^62 bytes. So
  // products of the sizes of a parsed type cannot overflow.
  static std::optional<ArrayType> parse(std::string_view text);

  bool operator==(const ArrayType& other) const;
  bool operator!=(const ArrayType& other) const { return !(*this == other); }
};

// The type with a name such as "bf16"; none if no kernel has such a type.
std::optional<xla::ffi::DataType> parse_dtype(std::string_view name);

std::string to_string(const ArrayType& type);

// to_string() of a buffer's type, of any rank.
std::string type_of(const xla::ffi::AnyBuffer& buffer);

// Compares without allocating.
bool has_type(const xla::ffi::AnyBuffer& buffer, const ArrayType& type);

}  // namespace memeff::host
