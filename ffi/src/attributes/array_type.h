// Element type and sizes of an array, as attributes write them: "bf16[2,128,4,64]".
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

  // None for what is no type, has too many dims, or more bytes than 2^62: products of sizes do not
  // overflow once a type is parsed.
  static std::optional<ArrayType> parse(std::string_view text);

  bool operator==(const ArrayType& other) const;
  bool operator!=(const ArrayType& other) const { return !(*this == other); }
};

// "bf16" and so on; none for a type that no kernel has.
std::optional<xla::ffi::DataType> parse_dtype(std::string_view name);

std::string to_string(const ArrayType& type);

// The same of a buffer, of any rank.
std::string type_of(const xla::ffi::AnyBuffer& buffer);

// Compares without allocating.
bool has_type(const xla::ffi::AnyBuffer& buffer, const ArrayType& type);

}  // namespace memeff::host
