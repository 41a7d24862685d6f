#include "buffers.h"

#include <algorithm>
#include <cstdint>

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

void require_rank_4(const Array& array) {
  if (array.type.rank != 4) {
    fail("array " + array.name + ": expected rank 4, got " + to_string(array.type));
  }
}

void require_alignment(const Array& array, const void* data, int alignment) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignment == 0) return;
  fail("array " + array.name + " starts at an address that is not a multiple of " +
       std::to_string(alignment) + " bytes, which this kernel was compiled for: copy it before " +
       "the call");
}

}  // namespace

Buffers::Buffers(const Call& call, const Kernel& kernel, const ffi::RemainingArgs& arguments,
                 const ffi::RemainingRets& results)
    : call_(call), alignment_(kernel.alignment), arguments_(arguments), results_(results) {
  check(false, arguments.size(), call.operands);
  check(true, results.size(), call.results);
}

void Buffers::check(bool is_result, size_t count, const std::vector<ArrayType>& types) const {
  const char* const kind = is_result ? "result" : "operand";
  if (count != types.size()) {
    fail("the custom call got " + std::to_string(count) + " " + kind + "s, expected " +
         std::to_string(types.size()));
  }
  for (size_t position = 0; position < count; ++position) {
    auto const buffer = at(is_result, position);
    const ArrayType& type = types[position];
    auto const dims = buffer.dimensions();
    if (buffer.element_type() != type.dtype || dims.size() != static_cast<size_t>(type.rank) ||
        !std::equal(dims.begin(), dims.end(), type.sizes)) {
      fail(std::string(kind) + " " + names_of(call_, is_result, position) + ": expected " +
           to_string(type) + ", got " + type_of(buffer));
    }
  }
}

ffi::AnyBuffer Buffers::at(bool is_result, size_t position) const {
  if (is_result) {
    auto result = results_.get<ffi::AnyBuffer>(position);
    if (result.has_value()) return **result;
  } else {
    auto operand = arguments_.get<ffi::AnyBuffer>(position);
    if (operand.has_value()) return *operand;
  }
  fail((is_result ? "result " : "operand ") + names_of(call_, is_result, position) +
       " is no buffer");
}

const Array* Buffers::at(int place) const {
  return place < 0 ? nullptr : &call_.arrays[static_cast<size_t>(place)];
}

void* Buffers::data(const Array& array) const {
  return at(array.is_result, static_cast<size_t>(array.position)).untyped_data();
}

TensorView Buffers::tensor(std::string_view name) const { return tensor(call_.find(name)); }

TensorView Buffers::tensor(const Array* array) const {
  if (array == nullptr) return {};
  require_rank_4(*array);
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

ScoreView Buffers::scores(std::string_view name, int alignment) const {
  const Array* const array = call_.find(name);
  if (array == nullptr) return {};
  require_rank_4(*array);
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

BitView Buffers::bits() const {
  const Array* const of_tokens = call_.find("boolean_of_tokens");
  const Array* const array = of_tokens != nullptr ? of_tokens : call_.find("boolean");
  if (array == nullptr) return {};
  require_rank_4(*array);
  const ArrayType& type = array->type;
  void* const start = data(*array);
  require_alignment(*array, start, sizeof(unsigned));
  return {static_cast<const unsigned*>(start),
          stride_of(type, 0),
          stride_of(type, 1),
          stride_of(type, 2),
          of_tokens != nullptr,
          broadcast_of(*array, type.sizes[0])};
}

ArrayView Buffers::captured(const CapturedArray& captured) const {
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
