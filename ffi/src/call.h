// One custom call: what its attributes say, decoded once, and access to its buffers by name.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernel.h"
#include "memeff/params.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// Where a named array is: a buffer, or slot `slot` of one [B, T, slots, N, H] that holds several.
struct Place {
  std::string name;
  bool is_result;
  int position;  // among the operands, or the results
  int slot;
  int slots;
  int divisor;  // of the batch index, where elements of the batch share the array: see
                // BatchBroadcast
};

// Sizes of an array, outermost first.
struct Dimensions {
  static constexpr int kMost = 5;
  int rank;
  long long sizes[kMost];
};

// State of a call site: made in the instantiate stage, read by the later ones.
struct Call {
  static xla::ffi::TypeId id;

  KernelTable kernels;
  std::vector<Place> places;  // of all operands and results; those that are absent have none
  ScoreScale scale;
  MaskParams mask;  // bounds only
  int dropout_threshold;
  int longest_query;  // of packed sequences
  int longest_key;
  int bias_alignment;  // bytes that the kernel expects rows of the bias to start at a multiple of

  static xla::ffi::ErrorOr<std::unique_ptr<Call>> decode(const xla::ffi::Dictionary& attributes);

  // Null where the call has no array of this name.
  const Place* find(std::string_view name) const;
};

// The buffers of one execution, by the names that the call site gave them. The first failure is
// kept; a launcher asks for everything it needs and checks once. XLA may record each execution anew
// (a command buffer whose addresses change), so nothing here allocates unless it fails.
class Buffers {
 public:
  Buffers(const Call& call, const KernelImage& image, const xla::ffi::RemainingArgs& arguments,
          const xla::ffi::RemainingRets& results)
      : call_(call), alignment_(image.alignment), arguments_(arguments), results_(results) {}

  bool has(std::string_view name) const { return call_.find(name) != nullptr; }

  // Start of a buffer, or null where the call has none of this name.
  void* data(std::string_view name);

  // A row-major [batch, sequence, head, dim] array that starts where the kernel expects rows to.
  TensorView tensor(std::string_view name);

  // A row-major buffer that broadcasts to the scores, and starts at a multiple of `alignment`
  // bytes; null where the call has none of this name.
  ScoreView scores(std::string_view name, int alignment = 1);

  size_t bytes(std::string_view name);

  // Without the slots of a buffer that holds several arrays; rank 0 where the call has none.
  Dimensions dimensions(std::string_view name);

  // The same of a buffer of rank 4; rank 0 where there is none, or one of another rank, which
  // fails.
  Dimensions four_dimensions(std::string_view name);

  ProblemShape shape();

  const xla::ffi::Error& error() const { return error_; }

 private:
  struct Found {
    const Place& place;
    xla::ffi::AnyBuffer buffer;
  };

  // None where the call has no array of this name, or, which fails, no buffer for it.
  std::optional<Found> find(std::string_view name);
  std::optional<xla::ffi::AnyBuffer> buffer(const Place& place);
  Dimensions dimensions(std::optional<Found> const& found);
  Dimensions four_dimensions(std::optional<Found> const& found);
  void fail(const std::string& message);
  void require_alignment(const Place& place, const void* data, int alignment);

  const Call& call_;
  int alignment_;
  const xla::ffi::RemainingArgs& arguments_;
  const xla::ffi::RemainingRets& results_;
  xla::ffi::Error error_ = xla::ffi::Error::Success();
};

// Mask and dropout of a call with the pointers of this execution.
MaskParams mask_of(const Call& call, Buffers& buffers);

// The map of tiles of this name; none where the call has no such buffer.
BlockMask block_mask_of(Buffers& buffers, std::string_view name);

DropoutParams dropout_of(const Call& call, Buffers& buffers);

xla::ffi::Error launch_forward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                               CUstream stream);
// The forward of a kernel that splits the keys; fills in the part of `params` that is about it.
xla::ffi::Error launch_split(const DeviceKernel& kernel, Buffers& buffers, ForwardParams& params,
                             CUstream stream);
xla::ffi::Error launch_backward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                                CUstream stream);

inline long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

}  // namespace memeff::host
