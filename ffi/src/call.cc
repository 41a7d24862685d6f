#include "call.h"

#include <algorithm>
#include <array>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// Changes with the attributes, so that programs of other versions are errors in words.
constexpr int kVersion = 2;

template <size_t kColumns>
using Rows = std::vector<std::array<long long, kColumns>>;

// The parts between commas; an empty text has no parts.
std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    size_t const end = std::min(text.find(','), text.size());
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

// Reads attributes of a dictionary, and adds each to the checksum: its size in bytes, and its
// bytes.
class Reader {
 public:
  Reader(const ffi::Dictionary& attributes, uint64_t* checksum)
      : attributes_(attributes), checksum_(*checksum) {}

  std::string_view text(std::string_view name) {
    auto const text = get<std::string_view>(name);
    add(text.data(), text.size());
    return text;
  }

  template <class T>
  T number(std::string_view name) {
    T const number = get<T>(name);
    add(&number, sizeof(number));
    return number;
  }

  template <class T>
  std::vector<T> numbers(std::string_view name) {
    auto const numbers = get<ffi::Span<const T>>(name);
    add(numbers.begin(), numbers.size() * sizeof(T));
    return {numbers.begin(), numbers.end()};
  }

  template <class T, size_t kCount>
  std::array<T, kCount> numbers(std::string_view name) {
    auto const all = numbers<T>(name);
    if (all.size() != kCount) fail_count(name, all.size(), std::to_string(kCount));
    std::array<T, kCount> result = {};
    std::copy(all.begin(), all.end(), result.begin());
    return result;
  }

  template <size_t kColumns>
  Rows<kColumns> rows(std::string_view name) {
    auto const all = numbers<int64_t>(name);
    if (all.size() % kColumns != 0) {
      fail_count(name, all.size(), "rows of " + std::to_string(kColumns));
    }
    Rows<kColumns> rows(all.size() / kColumns);
    for (size_t i = 0; i < all.size(); ++i) rows[i / kColumns][i % kColumns] = all[i];
    return rows;
  }

 private:
  template <class T>
  T get(std::string_view name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    fail_malformed("the custom call has no attribute " + std::string(name) +
                   " of the expected type: " + value.error().message());
  }

  void add(const void* data, size_t bytes) {
    uint64_t const size = bytes;
    std::string_view const prefix(reinterpret_cast<const char*>(&size), sizeof(size));
    checksum_ = checksum({static_cast<const char*>(data), bytes}, checksum(prefix, checksum_));
  }

  [[noreturn]] static void fail_count(std::string_view name, size_t count,
                                      const std::string& expected) {
    fail_malformed("the attribute " + std::string(name) + " has " + std::to_string(count) +
                   " elements, expected " + expected);
  }

  const ffi::Dictionary& attributes_;
  uint64_t& checksum_;
};

Kernel read_kernel(const std::string& arch, Reader reader) {
  Kernel kernel;
  kernel.arch = arch;
  auto const numbers = reader.numbers<int64_t, 6>("numbers");
  kernel.capability = static_cast<int>(numbers[0]);
  kernel.is_ptx = numbers[1] != 0;
  kernel.tile_query = static_cast<int>(numbers[2]);
  kernel.tile_key = static_cast<int>(numbers[3]);
  kernel.alignment = static_cast<int>(numbers[4]);
  kernel.blocks_per_sm = static_cast<int>(numbers[5]);
  auto const names = split(reader.text("entry_names"));
  auto const entries = reader.rows<8>("entries");
  if (names.size() != entries.size()) fail_malformed("a kernel has unnamed entries");
  for (size_t i = 0; i < entries.size(); ++i) {
    auto const& row = entries[i];
    Grid const grid = {row[2], static_cast<Grid::Splits>(row[3]), static_cast<int>(row[4]),
                       static_cast<int>(row[5])};
    kernel.entry_points.push_back({names[i], static_cast<int>(row[0]), static_cast<int>(row[1]),
                                   grid, static_cast<int>(row[6]), row[7] != 0});
  }
  for (auto const& row : reader.rows<4>("maps")) {
    kernel.maps.push_back({static_cast<int>(row[0]), static_cast<int>(row[1]),
                           static_cast<int>(row[2]), row[3] != 0});
  }
  for (auto const& row : reader.rows<2>("captured")) {
    kernel.captured.push_back({static_cast<int>(row[0]), static_cast<int>(row[1])});
  }
  for (auto const& row : reader.rows<3>("fields")) {
    kernel.fields.push_back({static_cast<int>(row[0]), static_cast<int>(row[1]),
                             static_cast<int32_t>(static_cast<uint32_t>(row[2]))});
  }
  for (int64_t array : reader.numbers<int64_t>("zeroed")) {
    kernel.zeroed.push_back(static_cast<int>(array));
  }
  kernel.code = reader.text("image");
  return kernel;
}

void read_kernels(const ffi::Dictionary& attributes, uint64_t* checksum, KernelTable* kernels) {
  // The oldest supported headers cannot enumerate a dictionary, so "archs" lists its names.
  Reader reader(attributes, checksum);
  for (const std::string& arch : split(reader.text("archs"))) {
    auto const own = attributes.get<ffi::Dictionary>(arch);
    if (!own.has_value()) fail_malformed("the custom call lacks a kernel that it lists");
    kernels->add(read_kernel(arch, Reader(*own, checksum)));
  }
}

// Reads the types of buffers: for each the number of its dtype, its rank and its sizes. Products of
// the sizes of such a type, and so strides and bytes, cannot overflow.
std::vector<ArrayType> read_types(const std::vector<int64_t>& numbers) {
  constexpr long long kMostBytes = 1ll << 62;
  std::vector<ArrayType> types;
  for (auto place = numbers.begin(); place != numbers.end();) {
    ArrayType type;
    size_t const rest = static_cast<size_t>(numbers.end() - place);
    if (rest < 2 || place[1] < 0 || place[1] > ArrayType::kMostDims ||
        rest - 2 < static_cast<size_t>(place[1])) {
      fail_malformed("a type of a buffer in its attributes is cut off, or has too many dims");
    }
    type.dtype = static_cast<ffi::DataType>(*place++);
    type.rank = static_cast<int>(*place++);
    // Counts a size of 0 as 1, because strides are products of the other sizes.
    long long bytes = static_cast<long long>(ffi::ByteWidth(type.dtype));
    bool fits = true;
    for (int dim = 0; dim < type.rank; ++dim) {
      long long const size = type.sizes[dim] = *place++;
      fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, std::max(size, 1ll), &bytes);
    }
    if (!fits || bytes > kMostBytes) {
      fail_malformed("a buffer " + to_string(type) + " is larger than an address space");
    }
    types.push_back(type);
  }
  return types;
}

// The arrays of the call: for each its buffer, its slot there, the number of slots and its divisor.
void read_arrays(const std::vector<std::string>& names, const Rows<4>& rows, Call* call) {
  size_t const operands = call->operands.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    auto const [buffer, slot, slots, divisor] = rows[i];
    bool const is_result = buffer >= static_cast<long long>(operands);
    size_t const position = static_cast<size_t>(buffer) - (is_result ? operands : 0);
    auto const& buffers = is_result ? call->results : call->operands;
    if (names.size() != rows.size() || buffer < 0 || position >= buffers.size()) {
      fail_malformed("its arrays are not those of its buffers");
    }
    ArrayType type = buffers[position];
    if (slots > 1) {
      std::copy(type.sizes + 3, type.sizes + 5, type.sizes + 2);
      --type.rank;
    }
    call->arrays.push_back({names[i], is_result, static_cast<int>(position), static_cast<int>(slot),
                            static_cast<int>(slots), divisor, type});
  }
}

ProblemShape shape_of(const std::array<int32_t, 9>& sizes) {
  ProblemShape shape = {};
  shape.batch = sizes[0];
  shape.query_length = sizes[1];
  shape.key_length = sizes[2];
  shape.query_heads = sizes[3];
  shape.key_heads = sizes[4];
  shape.group = shape.key_heads == 0 ? 0 : shape.query_heads / shape.key_heads;
  shape.head_dim = sizes[5];
  shape.value_dim = sizes[6];
  shape.query_tokens = sizes[7];
  shape.key_tokens = sizes[8];
  return shape;
}

std::string_view name_of(Direction direction) {
  return direction == Direction::kForward    ? "forward"
         : direction == Direction::kBackward ? "backward"
                                             : "tangent";
}

std::string name_of(ffi::DataType dtype) {
  constexpr std::pair<ffi::DataType, const char*> kNames[] = {
      {ffi::DataType::PRED, "pred"}, {ffi::DataType::S8, "s8"},
      {ffi::DataType::U8, "u8"},     {ffi::DataType::S16, "s16"},
      {ffi::DataType::U16, "u16"},   {ffi::DataType::S32, "s32"},
      {ffi::DataType::U32, "u32"},   {ffi::DataType::S64, "s64"},
      {ffi::DataType::U64, "u64"},   {ffi::DataType::F16, "f16"},
      {ffi::DataType::F32, "f32"},   {ffi::DataType::F64, "f64"},
      {ffi::DataType::BF16, "bf16"}, {ffi::DataType::F8E4M3FN, "f8e4m3fn"}};
  for (auto const& [known, name] : kNames) {
    if (known == dtype) return name;
  }
  return "dtype " + std::to_string(static_cast<int>(dtype));
}

}  // namespace

ffi::TypeId Call::id = {};

std::string to_string(const ArrayType& type) {
  std::string text = name_of(type.dtype) + "[";
  for (int dim = 0; dim < type.rank; ++dim) {
    text += (dim ? "," : "") + std::to_string(type.sizes[dim]);
  }
  return text + "]";
}

const Array* Call::find(std::string_view name) const {
  for (const Array& array : arrays) {
    if (array.name == name) return &array;
  }
  return nullptr;
}

uint64_t checksum(std::string_view bytes, uint64_t sum) {
  for (char byte : bytes) sum = (sum ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return sum;
}

std::unique_ptr<Call> Call::decode(Direction direction, const ffi::Dictionary& attributes) {
  auto const version = attributes.get<int32_t>("version");
  if (!version.has_value() || *version != kVersion) {
    std::string const got = version.has_value() ? std::to_string(*version) : "none";
    fail_malformed("the custom call has attributes of version " + got + ", expected " +
                   std::to_string(kVersion));
  }
  uint64_t sum = kEmptyChecksum;
  Reader reader(attributes, &sum);
  auto call = std::make_unique<Call>();
  auto const own = reader.text("direction");
  auto names = split(reader.text("operands"));
  for (std::string& name : split(reader.text("results"))) names.push_back(std::move(name));
  auto const arrays = reader.rows<4>("arrays");
  auto const operands = reader.numbers<int64_t>("operand_types");
  auto const results = reader.numbers<int64_t>("result_types");
  call->shape = shape_of(reader.numbers<int32_t, 9>("sizes"));
  auto const scale = reader.numbers<float, 4>("scale");
  call->scale = {scale[0], scale[1], scale[2], scale[3]};
  auto const windows = reader.numbers<int32_t, 4>("windows");
  call->mask.top_left_left = windows[0];
  call->mask.top_left_right = windows[1];
  call->mask.bottom_right_left = windows[2];
  call->mask.bottom_right_right = windows[3];
  call->bias_alignment = reader.number<int32_t>("bias_alignment");
  auto const kernels = attributes.get<ffi::Dictionary>("kernels");
  if (!kernels.has_value()) {
    fail_malformed("the custom call has no dictionary as attribute kernels");
  }
  read_kernels(*kernels, &sum, &call->kernels);
  auto const expected = attributes.get<int64_t>("checksum");
  if (!expected.has_value() || static_cast<uint64_t>(*expected) != sum) {
    fail_malformed("the checksum of the attributes and kernels of the custom call does not match");
  }
  if (own != name_of(direction)) fail_malformed("the custom call is a " + std::string(own));
  call->operands = read_types(operands);
  call->results = read_types(results);
  read_arrays(names, arrays, call.get());
  call->kernels.load();
  return call;
}

}  // namespace memeff::host
