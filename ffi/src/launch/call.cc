#include "launch/call.h"

#include <climits>
#include <cmath>
#include <cstdint>
#include <utility>

#include "attributes/sha256.h"
#include "attributes/text.h"
#include "images/sealed_image.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kMostBuffers = 64;
constexpr std::string_view kArrayNameCharacters = "abcdefghijklmnopqrstuvwxyz0123456789_";

// The attributes of a custom call, as views into XLA's memory.
struct Attributes {
  std::string_view operands;
  std::string_view operand_types;
  std::string_view results;
  std::string_view result_types;
  ffi::Span<const float> scale;
  ffi::Span<const int32_t> windows;
  ffi::Span<const int32_t> numbers;
  ffi::Span<const int32_t> longest;
  int32_t bias_alignment;
  std::vector<std::pair<std::string_view, std::string_view>> images;  // by architecture
};

// Reads attributes of a dictionary. Keeps the first error: an attribute that is missing or has
// another type.
class Reader {
 public:
  explicit Reader(const ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <class T>
  T get(std::string_view name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    fail("the custom call has no attribute " + std::string(name) +
         " of the expected type: " + value.error().message());
    return T();
  }

  template <class T>
  ffi::Span<const T> array(std::string_view name, size_t size) {
    auto const values = get<ffi::Span<const T>>(name);
    if (values.size() != size) {
      fail("the attribute " + std::string(name) + " has " + std::to_string(values.size()) +
           " elements, expected " + std::to_string(size));
    }
    return values;
  }

  void fail(const std::string& message) {
    if (error_.empty()) error_ = message;
  }

  const std::string& error() const { return error_; }

 private:
  const ffi::Dictionary& attributes_;
  std::string error_;
};

ffi::ErrorOr<Attributes> read(const ffi::Dictionary& attributes) {
  Reader reader(attributes);
  Attributes read;
  read.operands = reader.get<std::string_view>("operands");
  read.operand_types = reader.get<std::string_view>("operand_types");
  read.results = reader.get<std::string_view>("results");
  read.result_types = reader.get<std::string_view>("result_types");
  read.scale = reader.array<float>("scale", 4);
  read.windows = reader.array<int32_t>("windows", 4);
  read.numbers = reader.get<ffi::Span<const int32_t>>("numbers");
  read.longest = reader.array<int32_t>("longest", 2);
  read.bias_alignment = reader.get<int32_t>("bias_alignment");
  if (!reader.error().empty()) return ffi::Unexpected(malformed(reader.error()));

  auto const kernels = attributes.get<ffi::Dictionary>("kernels");
  if (!kernels.has_value()) {
    return ffi::Unexpected(malformed("the custom call has no dictionary as attribute kernels"));
  }
  // The oldest supported headers cannot enumerate a dictionary, so "archs" lists its names.
  Reader images(*kernels);
  for (std::string_view arch : split(images.get<std::string_view>("archs"), ',')) {
    read.images.emplace_back(arch, images.get<std::string_view>(arch));
  }
  if (read.images.empty()) images.fail("the attribute kernels has no architectures");
  if (!images.error().empty()) return ffi::Unexpected(malformed(images.error()));
  return read;
}

template <class T>
void append(const T* values, size_t count, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

std::string seal_of(Direction direction, const Attributes& attributes) {
  std::string sealed(name_of(direction));
  for (std::string_view text : {attributes.operands, attributes.operand_types, attributes.results,
                                attributes.result_types}) {
    sealed.append("\n").append(text);
  }
  sealed += "\n";
  append(attributes.scale.begin(), attributes.scale.size(), &sealed);
  append(attributes.windows.begin(), attributes.windows.size(), &sealed);
  append(attributes.numbers.begin(), attributes.numbers.size(), &sealed);
  append(attributes.longest.begin(), attributes.longest.size(), &sealed);
  append(&attributes.bias_alignment, 1, &sealed);
  for (auto const& [arch, image] : attributes.images) {
    sealed.append(arch).append("\n");
    // The last bytes of an image are the digest of the rest.
    sealed += image.substr(image.size() - std::min(image.size(), kDigestBytes));
  }
  return sha256(sealed);
}

// Decodes the operands and results of a call. add() returns an error text, empty if all is well.
class BufferAttributes {
 public:
  explicit BufferAttributes(Call* call) : call_(*call) {}

  std::string add(std::string_view kind, std::string_view all_names, std::string_view all_types) {
    auto const names = split(all_names, ',');
    auto const types = split(all_types, ' ');
    if (names.size() != types.size() || names.size() > kMostBuffers) {
      return "the attribute " + std::string(kind) + "s names " + std::to_string(names.size()) +
             " buffers and " + std::string(kind) + "_types has " + std::to_string(types.size()) +
             ", expected as many, and at most " + std::to_string(kMostBuffers);
    }
    for (size_t position = 0; position < names.size(); ++position) {
      auto const type = ArrayType::parse(types[position]);
      if (!type) {
        return "the attribute " + std::string(kind) + "_types has " + quoted(types[position]) +
               ", expected a type like 'bf16[2,128,4,64]'";
      }
      bool const is_result = kind == "result";
      (is_result ? call_.results : call_.operands).push_back({"", *type});
      std::string const error = add_arrays(names[position], is_result, position, *type);
      if (!error.empty()) return "the attribute " + std::string(kind) + "s has " + error;
    }
    return "";
  }

 private:
  std::string add_arrays(std::string_view joined, bool is_result, size_t position, ArrayType type) {
    auto const names = split(joined, '+');
    int const slots = static_cast<int>(names.size());
    if (slots == 0) return "a buffer without a name";
    if (slots > 1) {
      if (type.rank != 5 || type.sizes[2] != slots) {
        return quoted(joined) + " with the type " + to_string(type) + ", expected [B, T, " +
               std::to_string(slots) + ", N, H]";
      }
      std::copy(type.sizes + 3, type.sizes + 5, type.sizes + 2);
      --type.rank;
    }
    for (int slot = 0; slot < slots; ++slot) {
      size_t const slash = names[slot].find('/');
      std::string_view const name = names[slot].substr(0, slash);
      auto divisor = std::optional<long long>(1);
      if (slash != std::string_view::npos) {
        divisor = parse_number(names[slot].substr(slash + 1), 1, INT_MAX);
      }
      if (name.empty() || name.find_first_not_of(kArrayNameCharacters) != std::string_view::npos) {
        return "the name " + quoted(name);
      }
      if (!divisor) return "the divisor of " + quoted(names[slot]) + ", expected 1 to 2147483647";
      if (call_.find(name) != nullptr) return quoted(name) + ", which the call has twice";
      std::string& joined_names = (is_result ? call_.results : call_.operands).back().name;
      joined_names.append(slot > 0 ? "+" : "").append(name);
      call_.arrays.push_back(
          {std::string(name), is_result, static_cast<int>(position), slot, slots, *divisor, type});
    }
    return "";
  }

  Call& call_;
};

// Decodes the numbers of a call. Returns an error text, empty if all is well.
std::string set_numbers(const Attributes& attributes, Call* call) {
  const float* const scale = attributes.scale.begin();
  call->scale = {scale[0], scale[1], scale[2], scale[3]};
  for (int i = 0; i < 3; ++i) {
    if (!std::isfinite(scale[i])) {
      return "the attribute scale has " + std::to_string(scale[i]) + ", expected finite numbers";
    }
  }
  if (scale[1] <= 0 || scale[3] <= 0 || std::isnan(scale[3])) {
    return "the attribute scale has " + std::to_string(scale[1]) + " and " +
           std::to_string(scale[3]) + " as its second and last number, expected positive ones";
  }
  if (call->find("bias") != nullptr && !std::isfinite(scale[3])) {
    return "the attribute scale has an infinite factor of the bias";
  }
  const int32_t* const windows = attributes.windows.begin();
  for (int i = 0; i < 4; ++i) {
    // Global positions shift the diagonal, so a bound may exceed the largest length.
    if (windows[i] > kUnbounded || windows[i] < -kUnbounded) {
      return "the attribute windows has " + std::to_string(windows[i]) + ", expected at most " +
             std::to_string(kUnbounded) + " in magnitude";
    }
  }
  call->mask.top_left_left = windows[0];
  call->mask.top_left_right = windows[1];
  call->mask.bottom_right_left = windows[2];
  call->mask.bottom_right_right = windows[3];
  call->numbers.assign(attributes.numbers.begin(), attributes.numbers.end());
  call->longest_query = attributes.longest.begin()[0];
  call->longest_key = attributes.longest.begin()[1];
  bool const packed = call->find("query_starts") != nullptr;
  for (int longest : {call->longest_query, call->longest_key}) {
    if (packed ? longest < 1 || longest > kMaxLength : longest != 0) {
      return "the attribute longest has " + std::to_string(longest) + ", expected 1 to " +
             std::to_string(kMaxLength) + " for packed sequences and 0 for others";
    }
  }
  int const alignment = call->bias_alignment = attributes.bias_alignment;
  if (alignment < 1 || alignment > 16 || (alignment & (alignment - 1)) != 0) {
    return "the attribute bias_alignment is " + std::to_string(alignment) +
           ", expected a power of two up to 16";
  }
  return "";
}

// Checks that a call has the arrays that the launchers read without asking. The description of the
// kernel has checked their types.
std::string check_required(Direction direction, const Call& call) {
  std::vector<std::string_view> required = {"query", "key", "value", "out", "logsumexp"};
  if (direction == Direction::kBackward) {
    required.insert(required.end(), {"out_gradient", "row_statistics"});
  }
  if (direction == Direction::kTangent) {
    required.insert(required.end(), {"out_tangent", "logsumexp_tangent"});
  }
  if (call.find("query_starts") != nullptr) {
    bool const is_marked =
        direction == Direction::kForward && call.find("marked_query_lengths") != nullptr;
    required.insert(required.end(), {"key_starts", "key_lengths",
                                     is_marked ? "marked_query_lengths" : "query_lengths"});
  }
  for (std::string_view name : required) {
    if (call.find(name) == nullptr) {
      return "the custom call has no array '" + std::string(name) +
             "' in its attributes operands and results";
    }
  }
  for (std::string_view name : {"bias", "bias_gradient"}) {
    const Array* const bias = call.find(name);
    if (bias == nullptr || bias->type.rank != 4) continue;
    long long const row =
        bias->type.sizes[3] * static_cast<long long>(ffi::ByteWidth(bias->type.dtype));
    if (row % call.bias_alignment != 0) {
      return "the attribute bias_alignment is " + std::to_string(call.bias_alignment) +
             ", expected a divisor of the length of a row of " + std::string(name) + " " +
             to_string(bias->type) + " in bytes";
    }
  }
  return "";
}

}  // namespace

ffi::TypeId Call::id = {};

ffi::ErrorOr<std::unique_ptr<Call>> Call::decode(Direction direction,
                                                 const ffi::Dictionary& dictionary) {
  auto const attributes = read(dictionary);
  if (!attributes.has_value()) return ffi::Unexpected(attributes.error());
  auto call = std::make_unique<Call>();
  BufferAttributes buffers(call.get());
  std::string error = buffers.add("operand", attributes->operands, attributes->operand_types);
  if (error.empty()) error = buffers.add("result", attributes->results, attributes->result_types);
  if (error.empty()) error = set_numbers(*attributes, call.get());
  if (error.empty()) error = check_required(direction, *call);
  if (!error.empty()) return ffi::Unexpected(malformed(error));

  for (auto const& [arch, bytes] : attributes->images) {
    auto const image = SealedImage::open(arch, bytes);
    if (!image.has_value()) return ffi::Unexpected(image.error());
    auto description =
        KernelDescription::parse(image->description, arch, direction, call->arrays,
                                 call->longest_query, call->longest_key, call->numbers.size());
    if (!description.has_value()) return ffi::Unexpected(description.error());
    ffi::Error const added =
        call->kernels.add({std::string(arch), std::string(image->code), std::move(*description)});
    if (added.failure()) return ffi::Unexpected(added);
  }
  auto const seal = dictionary.get<std::string_view>("seal");
  if (!seal.has_value() || *seal != seal_of(direction, *attributes)) {
    return ffi::Unexpected(
        malformed("the attribute seal is not the digest of the others: one of them was changed"));
  }
  if (ffi::Error loaded = call->kernels.load(); loaded.failure()) return ffi::Unexpected(loaded);
  return call;
}

ffi::ErrorOr<std::string> seal_of(Direction direction, const ffi::Dictionary& dictionary) {
  auto const attributes = read(dictionary);
  if (!attributes.has_value()) return ffi::Unexpected(attributes.error());
  return seal_of(direction, *attributes);
}

}  // namespace memeff::host
