// The buffers of one execution, by the names that the call site gave them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "launch/call.h"

namespace memeff::host {

// The first failure is kept; a launcher asks for everything it needs and checks once. XLA may record
// each execution anew (a command buffer whose addresses change), so nothing here allocates unless it
// fails.
class Buffers {
 public:
  Buffers(const Call& call, const KernelDescription& kernel,
          const xla::ffi::RemainingArgs& arguments, const xla::ffi::RemainingRets& results)
      : call_(call), alignment_(kernel.alignment), arguments_(arguments), results_(results) {}

  // Whether XLA passes the buffers that the attributes announce, by number, dtype and sizes. The
  // sizes of the attributes are those that were checked against the kernel, so this comes first.
  xla::ffi::Error check() const;

  bool has(std::string_view name) const { return call_.find(name) != nullptr; }

  // Start of an array, or null if the call has none of this name.
  void* data(std::string_view name);

  // A row-major [batch, sequence, head, dim] array that starts where the kernel expects rows to.
  TensorView tensor(std::string_view name);

  // A row-major array that broadcasts to the scores, and starts at a multiple of `alignment` bytes;
  // null if the call has none of this name.
  ScoreView scores(std::string_view name, int alignment = 1);

  // An array that a feature brings.
  ArrayView captured(const CapturedArray& captured);

  // Without the slots of a buffer that holds several arrays; null if the call has none.
  const ArrayType* type(std::string_view name) const;

  size_t bytes(std::string_view name) const;

  const xla::ffi::Error& error() const { return error_; }

 private:
  std::optional<xla::ffi::AnyBuffer> operand(size_t position) const;
  std::optional<xla::ffi::AnyBuffer> result(size_t position) const;
  void* data(const Array& array);
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
