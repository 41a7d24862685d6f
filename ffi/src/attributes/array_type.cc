#include "attributes/array_type.h"

#include <algorithm>

#include "attributes/text.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr long long kMostBytes = 1ll << 62;

struct Named {
  std::string_view name;
  ffi::DataType dtype;
};

constexpr Named kDtypes[] = {{"pred", ffi::DataType::PRED}, {"s8", ffi::DataType::S8},
                             {"u8", ffi::DataType::U8},     {"s16", ffi::DataType::S16},
                             {"u16", ffi::DataType::U16},   {"s32", ffi::DataType::S32},
                             {"u32", ffi::DataType::U32},   {"s64", ffi::DataType::S64},
                             {"u64", ffi::DataType::U64},   {"f16", ffi::DataType::F16},
                             {"f32", ffi::DataType::F32},   {"f64", ffi::DataType::F64},
                             {"bf16", ffi::DataType::BF16}, {"f8e4m3fn", ffi::DataType::F8E4M3FN}};

std::string name_of(ffi::DataType dtype) {
  for (const Named& named : kDtypes) {
    if (named.dtype == dtype) return std::string(named.name);
  }
  return "dtype " + std::to_string(static_cast<int>(dtype));
}

template <class Sizes>
std::string text_of(ffi::DataType dtype, const Sizes& begin, size_t rank) {
  std::string text = name_of(dtype) + "[";
  for (size_t dim = 0; dim < rank; ++dim) text += (dim ? "," : "") + std::to_string(begin[dim]);
  return text + "]";
}

}  // namespace

std::optional<ffi::DataType> parse_dtype(std::string_view name) {
  for (const Named& named : kDtypes) {
    if (named.name == name) return named.dtype;
  }
  return std::nullopt;
}

std::optional<ArrayType> ArrayType::parse(std::string_view text) {
  size_t const open = text.find('[');
  if (open == std::string_view::npos || text.back() != ']') return std::nullopt;
  auto const dtype = parse_dtype(text.substr(0, open));
  auto const sizes = split(text.substr(open + 1, text.size() - open - 2), ',');
  if (!dtype || sizes.size() > kMostDims) return std::nullopt;
  ArrayType type;
  type.dtype = *dtype;
  // Counts a size of 0 as 1, because strides are products of the other sizes and must not overflow.
  long long bytes = static_cast<long long>(ffi::ByteWidth(*dtype));
  for (std::string_view word : sizes) {
    auto const size = parse_number(word, 0, kMostBytes);
    if (!size || __builtin_mul_overflow(bytes, std::max(*size, 1ll), &bytes)) return std::nullopt;
    type.sizes[type.rank++] = *size;
  }
  if (bytes > kMostBytes) return std::nullopt;
  return type;
}

bool ArrayType::operator==(const ArrayType& other) const {
  return dtype == other.dtype && rank == other.rank && std::equal(sizes, sizes + rank, other.sizes);
}

std::string to_string(const ArrayType& type) {
  return text_of(type.dtype, type.sizes, static_cast<size_t>(type.rank));
}

std::string type_of(const ffi::AnyBuffer& buffer) {
  auto const dims = buffer.dimensions();
  return text_of(buffer.element_type(), dims.begin(), dims.size());
}

bool has_type(const ffi::AnyBuffer& buffer, const ArrayType& type) {
  auto const dims = buffer.dimensions();
  return buffer.element_type() == type.dtype && dims.size() == static_cast<size_t>(type.rank) &&
         std::equal(dims.begin(), dims.end(), type.sizes);
}

}  // namespace memeff::host
