#include "buffers.h"

#include <algorithm>
#include <cstdint>

#include "errors.h"

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

// The dtype and sizes of a buffer of any rank, in an error.
std::string type_of(const ffi::AnyBuffer& buffer) {
  auto const dims = buffer.dimensions();
  ArrayType type;
  type.dtype = buffer.element_type();
  type.rank = static_cast<int>(std::min<size_t>(dims.size(), ArrayType::kMostDims));
  std::copy_n(dims.begin(), type.rank, type.sizes);
  bool const is_whole = dims.size() <= ArrayType::kMostDims;
  return to_string(type) + (is_whole ? "" : " and more dims");
}

// The names of the arrays of a buffer, joined by "+".
std::string names_of(const Call& call, bool is_result, size_t position) {
  std::string names;
  for (const Array& array : call.arrays) {
    if (array.is_result == is_result && array.position == static_cast<int>(position)) {
      names += (names.empty() ? "" : "+") + array.name;
    }
  }
  return names;
}

template <class Find>
ffi::Error check(const Call& call, bool is_result, size_t count, const Find& buffer_at) {
  const std::string kind = is_result ? "result" : "operand";
  auto const& types = is_result ? call.results : call.operands;
  if (count != types.size()) {
    return failure(ffi::ErrorCode::kInvalidArgument,
                   "the custom call got " + std::to_string(count) + " " + kind + "s, expected " +
                       std::to_string(types.size()));
  }
  for (size_t position = 0; position < count; ++position) {
    auto const buffer = buffer_at(position);
    const ArrayType& type = types[position];
    if (buffer) {
      auto const dims = buffer->dimensions();
      if (buffer->element_type() == type.dtype && dims.size() == static_cast<size_t>(type.rank) &&
          std::equal(dims.begin(), dims.end(), type.sizes)) {
        continue;
      }
    }
    return failure(ffi::ErrorCode::kInvalidArgument,
                   kind + " " + names_of(call, is_result, position) + ": expected " +
                       to_string(type) + ", got " + (buffer ? type_of(*buffer) : "no buffer"));
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error Buffers::check() const {
  ffi::Error error = host::check(call_, false, arguments_.size(),
                                 [&](size_t position) { return operand(position); });
  if (error.failure()) return error;
  return host::check(call_, true, results_.size(),
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

const Array* Buffers::at(int place) const {
  return place < 0 ? nullptr : &call_.arrays[static_cast<size_t>(place)];
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

TensorView Buffers::tensor(std::string_view name) { return tensor(call_.find(name)); }

TensorView Buffers::tensor(const Array* array) {
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
  const Array* const array = at(captured.array);
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
