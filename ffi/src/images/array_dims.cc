#include "images/array_dims.h"

#include <algorithm>
#include <climits>
#include <optional>

#include "attributes/text.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr std::string_view kDimNameCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";

}  // namespace

const Array* find(const std::vector<Array>& arrays, std::string_view name) {
  for (const Array& array : arrays) {
    if (array.name == name) return &array;
  }
  return nullptr;
}

void ArrayDims::bind(std::string_view name, long long size) {
  if (!dims_.bind(name, size)) {
    reader_.fail("two sizes of " + quoted(name) + ": " + std::to_string(*dims_.find(name)) +
                 " and " + std::to_string(size));
  }
}

void ArrayDims::bind(const std::vector<Words>& rows, long long longest_query,
                     long long longest_key) {
  if (longest_query > 0) {
    bind("T", longest_query);
    bind("S", longest_key);
  }
  for (const Words& row : rows) {
    const ArrayType& type = find(arrays_, row[1])->type;
    for (int dim = 0; dim < type.rank; ++dim) {
      bind(std::string(row[1]) + "." + std::to_string(dim), type.sizes[dim]);
    }
    if (row.size() != static_cast<size_t>(type.rank) + 3) continue;  // an error, or "..."
    for (int dim = 0; dim < type.rank; ++dim) {
      std::string_view const pattern = row[dim + 3];
      long long const size = type.sizes[dim];
      if (pattern.find_first_not_of(kDimNameCharacters) == std::string_view::npos &&
          !parse_number(pattern, 0, LLONG_MAX) && !dims_.find(pattern)) {
        bind(pattern, size);
      } else if (pattern == "B+1" && size > 0 && !dims_.find("B")) {
        bind("B", size - 1);
      }
    }
  }
}

// The size of a dim that kernels hold in 32 bits, at most `most`.
int ArrayDims::size_of(std::string_view name, long long most) const {
  if (reader_.failed()) return 0;
  auto const size = dims_.find(name);
  if (!size) reader_.fail("no array with the dim " + quoted(name));
  if (size && *size > most) {
    reader_.fail(std::string(name) + " = " + std::to_string(*size) + ", expected at most " +
                 std::to_string(most));
  }
  return reader_.failed() ? 0 : static_cast<int>(*size);
}

ProblemShape ArrayDims::shape(long long padded_head_dim, long long padded_value_dim) {
  ProblemShape shape = {};
  shape.batch = size_of("B", INT_MAX - 1);
  shape.query_length = size_of("T", kMaxLength);
  shape.key_length = size_of("S", kMaxLength);
  shape.query_heads = size_of("N", INT_MAX);
  shape.key_heads = size_of("K", INT_MAX);
  shape.head_dim = size_of("H", padded_head_dim);
  shape.value_dim = size_of("Hv", padded_value_dim);
  if (dims_.find("query_tokens")) {
    shape.query_tokens = size_of("query_tokens", INT_MAX);
    shape.key_tokens = size_of("key_tokens", INT_MAX);
  }
  if (reader_.failed()) return shape;
  bool const divides =
      shape.key_heads == 0 ? shape.query_heads == 0 : shape.query_heads % shape.key_heads == 0;
  if (!divides) {
    reader_.fail("N = " + std::to_string(shape.query_heads) +
                 " query heads, expected a multiple of K = " + std::to_string(shape.key_heads) +
                 " key heads");
    return shape;
  }
  shape.group = shape.key_heads == 0 ? 0 : shape.query_heads / shape.key_heads;
  bind("group_rows", static_cast<long long>(shape.query_length) * shape.group);
  bind("T_or_1", std::max(shape.query_length, 1));
  bind("S_or_1", std::max(shape.key_length, 1));
  return shape;
}

bool ArrayDims::fits(std::string_view pattern, long long size) const {
  if (pattern == "*") return true;
  if (auto const exact = parse_number(pattern, 0, LLONG_MAX)) return size == *exact;
  char const last = pattern.empty() ? ' ' : pattern.back();
  std::string_view const name = pattern.substr(0, pattern.size() - (pattern.empty() ? 0 : 1));
  if (last == '?') return size == 1 || dims_.find(name) == size;
  // An array that a vmap broadcasts: any number of elements, but some if there is a batch index.
  if (last == '~') return dims_.find(name) && (size > 0 || dims_.find(name) == 0);
  if (size_t const plus = pattern.find('+'); plus != std::string_view::npos) {
    auto const base = dims_.find(pattern.substr(0, plus));
    return base && pattern.substr(plus) == "+1" && size == *base + 1;
  }
  if (size_t const star = pattern.find('*'); star != std::string_view::npos) {
    auto const base = dims_.find(pattern.substr(0, star));
    auto const factor = parse_number(pattern.substr(star + 1), 1, LLONG_MAX);
    long long product = 0;
    return base && factor && !__builtin_mul_overflow(*base, *factor, &product) && size == product;
  }
  if (size_t const slash = pattern.find('/'); slash != std::string_view::npos) {
    auto const base = dims_.find(pattern.substr(0, slash));
    auto const tile = parse_number(pattern.substr(slash + 1), 1, LLONG_MAX);
    return base && tile && size == ceil_div(*base, *tile);
  }
  return dims_.find(pattern) == size;
}

void ArrayDims::check(const Words& row) const {
  if (reader_.failed()) return;
  const Array& array = *find(arrays_, row[1]);
  auto const dtype = parse_dtype(row[2]);
  std::string expected = std::string(row[2]) + "[";
  for (size_t i = 3; i < row.size(); ++i) expected += (i > 3 ? "," : "") + std::string(row[i]);
  expected += "]";
  bool is_right = dtype && array.type.dtype == *dtype;
  if (row.size() != 4 || row[3] != "...") {
    is_right = is_right && row.size() == static_cast<size_t>(array.type.rank) + 3;
    for (int dim = 0; is_right && dim < array.type.rank; ++dim) {
      is_right = fits(row[dim + 3], array.type.sizes[dim]);
    }
  }
  if (!is_right) {
    reader_.fail_array(
        row[1], "expected " + expected + " with" + sizes() + ", got " + to_string(array.type));
  }
  // Kernels compute (batch index / divisor) % elements with a fraction of 64 bits, which bounds the
  // product.
  long long period = 0;
  if (array.type.rank > 0 &&
      (__builtin_mul_overflow(array.divisor, array.type.sizes[0], &period) || period > INT_MAX)) {
    reader_.fail_array(row[1], "expected at most 2147483647 as the product of its divisor " +
                                   std::to_string(array.divisor) + " and its elements, got " +
                                   to_string(array.type));
  }
}

std::string ArrayDims::sizes() const {
  std::string text;
  for (const char* name : {"B", "T", "S", "N", "K", "H", "Hv"}) {
    if (auto const size = dims_.find(name))
      text += std::string(" ") + name + "=" + std::to_string(*size);
  }
  return text;
}

}  // namespace memeff::host
