// The buffers of one execution, by their names in the call.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "call.h"

namespace memeff::host {

// Keeps the first failure: a launcher asks for everything that it needs and checks once. Hazard:
// XLA may record each execution anew (a command buffer whose addresses change), so nothing here may
// allocate, except for an error.
class Buffers {
 public:
  Buffers(const Call& call, const Kernel& kernel, const xla::ffi::RemainingArgs& arguments,
          const xla::ffi::RemainingRets& results)
      : call_(call), alignment_(kernel.alignment), arguments_(arguments), results_(results) {}

  // Checks that XLA passes the buffers that the attributes announce, by number, dtype and sizes.
  // Hazard: call it first, because all other numbers were computed for those.
  xla::ffi::Error check() const;

  bool has(std::string_view name) const { return call_.find(name) != nullptr; }

  // The start of an array, or null if the call has no array of this name.
  void* data(std::string_view name);
  template <class T>
  T* start(std::string_view name) {
    return static_cast<T*>(data(name));
  }

  // A row-major [batch, sequence, head, dim] array. Its start must have the alignment that the
  // kernel was compiled for.
  TensorView tensor(std::string_view name);
  TensorView tensor(const Array* array);

  // A row-major array that broadcasts to the scores and must start at a multiple of `alignment`
  // bytes; null if the call has no array of this name.
  ScoreView scores(std::string_view name, int alignment = 1);

  // An array of a feature.
  ArrayView captured(const CapturedArray& captured);

  // The array at a place among those of the call; null for -1.
  const Array* at(int place) const;
  void* data(const Array& array);

  // The type of an array, without the dim of slots; null if the call has no array of this name.
  const ArrayType* type(std::string_view name) const;

  const xla::ffi::Error& error() const { return error_; }

 private:
  std::optional<xla::ffi::AnyBuffer> operand(size_t position) const;
  std::optional<xla::ffi::AnyBuffer> result(size_t position) const;
  bool has_rank_4(const Array& array);
  void fail(const std::string& message);
  void require_alignment(const Array& array, const void* data, int alignment);

  const Call& call_;
  int alignment_;
  const xla::ffi::RemainingArgs& arguments_;
  const xla::ffi::RemainingRets& results_;
  xla::ffi::Error error_ = xla::ffi::Error::Success();
};

}  // namespace memeff::host
