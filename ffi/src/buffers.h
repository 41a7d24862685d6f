// The buffers of one execution, by their names in the call.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "call.h"

namespace memeff::host {

// Hazard: XLA may record each execution anew (a command buffer whose addresses change), so nothing
// here may allocate, except for an error.
class Buffers {
 public:
  // Checks that XLA passes the buffers that the attributes announce, by number, dtype and sizes:
  // all other numbers were computed for those.
  Buffers(const Call& call, const Kernel& kernel, const xla::ffi::RemainingArgs& arguments,
          const xla::ffi::RemainingRets& results);

  // The start of an array, or null if the call has no array of this name.
  template <class T>
  T* start(std::string_view name) const {
    const Array* const array = call_.find(name);
    return array == nullptr ? nullptr : static_cast<T*>(data(*array));
  }

  // A row-major [batch, sequence, head, dim] array. Its start must have the alignment that the
  // kernel was compiled for.
  TensorView tensor(std::string_view name) const;
  TensorView tensor(const Array* array) const;

  // A row-major array that broadcasts to the scores and must start at a multiple of `alignment`
  // bytes; null if the call has no array of this name.
  ScoreView scores(std::string_view name, int alignment = 1) const;

  // The boolean mask, of the scores or of tokens; null if the call has none.
  BitView bits() const;

  // An array of a feature.
  ArrayView captured(const CapturedArray& captured) const;

  // The array at a place among those of the call; null for -1.
  const Array* at(int place) const;
  void* data(const Array& array) const;

 private:
  void check(bool is_result, size_t count, const std::vector<ArrayType>& types) const;
  xla::ffi::AnyBuffer at(bool is_result, size_t position) const;

  const Call& call_;
  int alignment_;
  const xla::ffi::RemainingArgs& arguments_;
  const xla::ffi::RemainingRets& results_;
};

}  // namespace memeff::host
