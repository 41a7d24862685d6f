// Checks the arrays of a call against the dims in the description of a kernel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attributes/array_type.h"
#include "attributes/dims.h"
#include "images/description_reader.h"
#include "memeff/params.h"

namespace memeff::host {

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

// Null if the call has no array of this name.
const Array* find(const std::vector<Array>& arrays, std::string_view name);

// Binds the names of dims to sizes and compares arrays with them. Failures go to the reader.
class ArrayDims {
 public:
  ArrayDims(const std::vector<Array>& arrays, DescriptionReader* reader)
      : arrays_(arrays), reader_(*reader) {}

  // Gives each name in the lines "array" its size, that of the first array with the name.
  // longest_query and longest_key are T and S of packed sequences, else 0.
  void bind(const std::vector<Words>& rows, long long longest_query, long long longest_key);

  // The sizes that all kernels have, checked against the limits of this kernel. Also binds the
  // names derived from them.
  ProblemShape shape(long long padded_head_dim, long long padded_value_dim);

  // Compares the dtype and dims of an array with its line.
  void check(const Words& row) const;

  const Dims& dims() const { return dims_; }

 private:
  void bind(std::string_view name, long long size);
  int size_of(std::string_view name, long long most) const;
  bool fits(std::string_view pattern, long long size) const;
  std::string sizes() const;

  const std::vector<Array>& arrays_;
  DescriptionReader& reader_;
  Dims dims_;
};

}  // namespace memeff::host
