#include "launch/buffers.h"

#include <cstdint>

#include "attributes/text.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// The parameters with which kernels map the batch index of the call to an array of `elements`
// elements.
BatchBroadcast broadcast_of(const Array& array, long long elements) {
  auto const period = static_cast<unsigned long long>(elements * array.divisor);
  return {period == 0 ? 0 : ~0ull / period + 1, static_cast<unsigned long long>(elements)};
}

// The stride of a dim in elements; 0 for a dim of one element, which is broadcast.
long long stride_of(const ArrayType& type, int dim) {
  long long elements = type.sizes[dim] == 1 ? 0 : 1;
  for (int inner = dim + 1; inner < type.rank; ++inner) elements *= type.sizes[inner];
  return elements;
}

template <class Find>
ffi::Error check(const char* kind, const std::vector<BufferType>& expected, size_t count,
                 const Find& buffer_at) {
  if (count != expected.size()) {
    return failure(ffi::ErrorCode::kInvalidArgument,
                   "the custom call got " + std::to_string(count) + " " + kind + "s, expected " +
                       std::to_string(expected.size()));
  }
  for (size_t position = 0; position < count; ++position) {
    auto const buffer = buffer_at(position);
    const BufferType& announced = expected[position];
    if (buffer && has_type(*buffer, announced.type)) continue;
    return failure(ffi::ErrorCode::kInvalidArgument,
                   std::string(kind) + " " + announced.name + ": expected " +
                       to_string(announced.type) + ", got " +
                       (buffer ? type_of(*buffer) : std::string("no buffer")));
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error Buffers::check() const {
  ffi::Error error = host::check("operand", call_.operands, arguments_.size(),
                                 [&](size_t position) { return operand(position); });
  if (error.failure()) return error;
  return host::check("result", call_.results, results_.size(),
                     [&](size_t position) { return result(position); });
}

std::optional<ffi::AnyBuffer> Buffers::operand(size_t position) const {
  auto buffer = arguments_.get<ffi::AnyBuffer>(position);
  return buffer.has_value() ? std::optional(*buffer) : std::nullopt;
}

std::optional<ffi::AnyBuffer> Buffers::result(size_t position) const {
  auto buffer = results_.get<ffi::AnyBuffer>(position);
  return buffer.has_value() ? std::optional(**buffer) : std::nullopt;
}

void Buffers::fail(const std::string& message) {
  if (error_.success()) error_ = failure(ffi::ErrorCode::kInvalidArgument, message);
}

const ArrayType* Buffers::type(std::string_view name) const {
  const Array* const array = call_.find(name);
  return array == nullptr ? nullptr : &array->type;
}

size_t Buffers::bytes(std::string_view name) const {
  const ArrayType* const found = type(name);
  if (found == nullptr) return 0;
  size_t bytes = ffi::ByteWidth(found->dtype);
  for (int dim = 0; dim < found->rank; ++dim) bytes *= static_cast<size_t>(found->sizes[dim]);
  return bytes;
}

void* Buffers::data(std::string_view name) {
  const Array* const array = call_.find(name);
  return array == nullptr ? nullptr : data(*array);
}

void* Buffers::data(const Array& array) {
  auto const position = static_cast<size_t>(array.position);
  auto const buffer = array.is_result ? result(position) : operand(position);
  if (buffer) return buffer->untyped_data();
  fail("array " + array.name + " has no buffer");
  return nullptr;
}

bool Buffers::has_rank_4(const Array& array) {
  if (array.type.rank == 4) return true;
  fail("array " + array.name + ": expected rank 4, got " + to_string(array.type));
  return false;
}

TensorView Buffers::tensor(std::string_view name) {
  const Array* const array = call_.find(name);
  if (array == nullptr || !has_rank_4(*array)) return {};
  const ArrayType& type = array->type;
  TensorView view = {};
  view.head_stride = type.sizes[3];
  long long const slot_stride = type.sizes[2] * view.head_stride;
  view.row_stride = array->slots * slot_stride;
  view.batch_stride = type.sizes[1] * view.row_stride;
  view.share = broadcast_of(*array, type.sizes[0]);
  view.data = data(*array);
  if (array->slot > 0 && view.data != nullptr) {
    view.data = static_cast<char*>(view.data) +
                array->slot * slot_stride * static_cast<long long>(ffi::ByteWidth(type.dtype));
  }
  require_alignment(*array, view.data, alignment_);
  return view;
}

void Buffers::require_alignment(const Array& array, const void* data, int alignment) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignment == 0) return;
  fail("array " + array.name + " starts at an address that is not a multiple of " +
       std::to_string(alignment) + " bytes, which this kernel was compiled for: copy it before " +
       "the call");
}

ScoreView Buffers::scores(std::string_view name, int alignment) {
  const Array* const array = call_.find(name);
  if (array == nullptr || !has_rank_4(*array)) return {};
  const ArrayType& type = array->type;
  void* const start = data(*array);
  require_alignment(*array, start, alignment);
  return {start,
          stride_of(type, 0),
          stride_of(type, 1),
          stride_of(type, 2),
          stride_of(type, 3),
          broadcast_of(*array, type.sizes[0])};
}

ArrayView Buffers::captured(const CapturedArray& captured) {
  const Array* const array = call_.find(captured.name);
  if (array == nullptr) return {};
  ArrayView view = {};
  view.data = data(*array);
  require_alignment(*array, view.data, captured.alignment);
  for (int dim = 0; dim < array->type.rank; ++dim) {
    view.sizes[dim] = array->type.sizes[dim];
    view.strides[dim] = stride_of(array->type, dim);
  }
  view.share = broadcast_of(*array, array->type.rank == 0 ? 1 : array->type.sizes[0]);
  return view;
}

}  // namespace memeff::host
