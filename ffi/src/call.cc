#include "call.h"

#include <cstdint>
#include <sstream>
#include <utility>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, separator);) words.push_back(word);
  return words;
}

// "query+key+value,bias": the first buffer holds three arrays, the second one.
std::map<std::string, Place> places(std::string_view buffers) {
  std::map<std::string, Place> result;
  int position = 0;
  for (const std::string& buffer : split(std::string(buffers), ',')) {
    const std::vector<std::string> names = split(buffer, '+');
    const int slots = static_cast<int>(names.size());
    for (int slot = 0; slot < slots; ++slot) result[names[slot]] = {position, slot, slots, 1};
    ++position;
  }
  return result;
}

// How the batch shares an array that has `elements` of its own.
BatchShare share_of(const Place& place, unsigned long long elements) {
  unsigned long long const period = elements * place.divisor;
  return {period == 0 ? 0 : ~0ull / period + 1, elements};
}

}  // namespace

ffi::TypeId Call::id = {};

ffi::ErrorOr<std::unique_ptr<Call>> Call::decode(const ffi::Dictionary& attributes) {
  auto operands = attributes.get<std::string_view>("operands");
  auto results = attributes.get<std::string_view>("results");
  auto scale = attributes.get<ffi::Span<const float>>("scale");
  auto windows = attributes.get<ffi::Span<const int32_t>>("windows");
  auto dropout_threshold = attributes.get<int32_t>("dropout_threshold");
  auto longest = attributes.get<ffi::Span<const int32_t>>("longest");
  auto divisors = attributes.get<ffi::Span<const int32_t>>("divisors");
  auto bias_alignment = attributes.get<int32_t>("bias_alignment");
  auto kernels = attributes.get<ffi::Dictionary>("kernels");
  if (!operands.has_value() || !results.has_value() || !scale.has_value() || !windows.has_value() ||
      !dropout_threshold.has_value() || !longest.has_value() || !divisors.has_value() ||
      !bias_alignment.has_value() || !kernels.has_value() || scale->size() != 4 ||
      windows->size() != 4 || longest->size() != 2 || divisors->size() != 5) {
    return ffi::Unexpected(
        failure(ffi::ErrorCode::kInvalidArgument,
                "the custom call needs the attributes operands, results, scale (4), windows (4), "
                "dropout_threshold, longest (2), divisors (5), bias_alignment and kernels (was the "
                "program exported by another version?)"));
  }
  auto table = KernelTable::decode(*kernels);
  if (!table.has_value()) return ffi::Unexpected(table.error());
  auto call = std::make_unique<Call>();
  call->kernels = std::move(*table);
  call->operands = places(*operands);
  call->results = places(*results);
  call->scale = {(*scale)[0], (*scale)[1], (*scale)[2], (*scale)[3]};
  call->mask = {};
  call->mask.top_left_left = (*windows)[0];
  call->mask.top_left_right = (*windows)[1];
  call->mask.bottom_right_left = (*windows)[2];
  call->mask.bottom_right_right = (*windows)[3];
  call->dropout_threshold = *dropout_threshold;
  call->longest_query = (*longest)[0];
  call->longest_key = (*longest)[1];
  const int32_t* divisor = divisors->begin();
  for (const char* name : {"key", "value", "bias", "boolean", "bias_gradient"}) {
    for (auto* places : {&call->operands, &call->results}) {
      if (auto found = places->find(name); found != places->end()) {
        found->second.divisor = *divisor;
      }
    }
    ++divisor;
  }
  call->bias_alignment = *bias_alignment;
  if (ffi::Error error = call->kernels.load(); error.failure()) return ffi::Unexpected(error);
  return call;
}

const Place* Buffers::place(const std::string& name) const {
  for (const auto* places : {&call_.operands, &call_.results}) {
    if (auto found = places->find(name); found != places->end()) return &found->second;
  }
  return nullptr;
}

bool Buffers::has(const std::string& name) const { return place(name) != nullptr; }

void Buffers::fail(const std::string& message) {
  if (error_.success()) error_ = failure(ffi::ErrorCode::kInvalidArgument, message);
}

std::optional<ffi::AnyBuffer> Buffers::buffer(const std::string& name) {
  if (auto found = call_.operands.find(name); found != call_.operands.end()) {
    auto buffer = arguments_.get<ffi::AnyBuffer>(found->second.position);
    if (buffer.has_value()) return *buffer;
    fail("operand " + name + " is missing: " + buffer.error().message());
  } else if (auto found = call_.results.find(name); found != call_.results.end()) {
    auto buffer = results_.get<ffi::AnyBuffer>(found->second.position);
    if (buffer.has_value()) return **buffer;
    fail("result " + name + " is missing: " + buffer.error().message());
  }
  return std::nullopt;
}

void* Buffers::data(const std::string& name) {
  auto found = buffer(name);
  return found ? found->untyped_data() : nullptr;
}

size_t Buffers::bytes(const std::string& name) {
  auto found = buffer(name);
  return found ? found->size_bytes() : 0;
}

std::vector<long long> Buffers::dimensions(const std::string& name) {
  auto found = buffer(name);
  if (!found) return {};
  auto const dims = found->dimensions();
  std::vector<long long> result(dims.begin(), dims.end());
  if (place(name)->slots > 1) {
    if (dims.size() != 5 || dims[2] != place(name)->slots) {
      fail(name + " needs a buffer [B, T, " + std::to_string(place(name)->slots) + ", N, H]");
      return {};
    }
    result.erase(result.begin() + 2);
  }
  return result;
}

std::vector<long long> Buffers::four_dimensions(const std::string& name) {
  if (!has(name)) return {};
  auto const dims = dimensions(name);
  if (dims.size() == 4) return dims;
  fail(name + " needs rank 4, got rank " + std::to_string(dims.size()));
  return {};
}

TensorView Buffers::tensor(const std::string& name) {
  TensorView view = {};
  auto const dims = four_dimensions(name);
  if (dims.empty()) return view;
  view.head_stride = dims[3];
  long long const slot_stride = dims[2] * view.head_stride;
  view.row_stride = place(name)->slots * slot_stride;
  view.batch_stride = dims[1] * view.row_stride;
  view.share = share_of(*place(name), dims[0]);
  view.data = static_cast<char*>(data(name)) +
              place(name)->slot * slot_stride * ffi::ByteWidth(buffer(name)->element_type());
  require_alignment(name, view.data, alignment_);
  return view;
}

void Buffers::require_alignment(const std::string& name, const void* data, int alignment) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignment == 0) return;
  fail(name + " starts at an address that is not a multiple of " + std::to_string(alignment) +
       " bytes, which this kernel was compiled for: copy it before the call");
}

ScoreView Buffers::scores(const std::string& name, int alignment) {
  ScoreView view = {};
  auto const dims = four_dimensions(name);
  if (dims.empty()) return view;
  auto stride = [&](size_t dim) {
    long long elements = dims[dim] == 1 ? 0 : 1;
    for (size_t inner = dim + 1; inner < dims.size(); ++inner) elements *= dims[inner];
    return elements;
  };
  view = {data(name), stride(0), stride(1), stride(2), stride(3), share_of(*place(name), dims[0])};
  require_alignment(name, view.data, alignment);
  return view;
}

ProblemShape Buffers::shape() {
  ProblemShape shape = {};
  auto const query = dimensions("query");
  auto const key = dimensions("key");
  auto const value = dimensions("value");
  if (query.size() != 4 || key.size() != 4 || value.size() != 4) {
    fail("query, key and value need rank 4");
    return shape;
  }
  if (query[1] > kMaxLength || key[1] > kMaxLength) {
    fail("sequences of at most " + std::to_string(kMaxLength) + " are supported, got " +
         std::to_string(query[1]) + " queries and " + std::to_string(key[1]) + " keys");
    return shape;
  }
  shape.batch = static_cast<int>(query[0]);
  shape.query_length = static_cast<int>(query[1]);
  shape.query_heads = static_cast<int>(query[2]);
  shape.head_dim = static_cast<int>(query[3]);
  shape.key_length = static_cast<int>(key[1]);
  shape.key_heads = static_cast<int>(key[2]);
  shape.value_dim = static_cast<int>(value[3]);
  shape.group = shape.query_heads / shape.key_heads;
  if (has("query_starts")) {
    shape.query_tokens = std::exchange(shape.query_length, call_.longest_query);
    shape.key_tokens = std::exchange(shape.key_length, call_.longest_key);
    shape.query_starts = static_cast<const int*>(data("query_starts"));
    shape.key_starts = static_cast<const int*>(data("key_starts"));
    auto const starts = dimensions("query_starts");
    shape.batch = starts.empty() ? 0 : static_cast<int>(starts[0]) - 1;
  }
  return shape;
}

MaskParams mask_of(const Call& call, Buffers& buffers) {
  MaskParams mask = call.mask;
  mask.query_lengths = static_cast<const int*>(buffers.data("query_lengths"));
  mask.key_lengths = static_cast<const int*>(buffers.data("key_lengths"));
  mask.query_position = static_cast<const int*>(buffers.data("query_position"));
  mask.key_position = static_cast<const int*>(buffers.data("key_position"));
  mask.query_segments = static_cast<const int*>(buffers.data("query_segments"));
  mask.key_segments = static_cast<const int*>(buffers.data("key_segments"));
  if (auto const segments = buffers.dimensions("query_segments"); segments.size() == 3) {
    mask.segment_pairs = segments[1];
  }
  mask.boolean = buffers.scores("boolean");
  return mask;
}

TileMap tile_map_of(Buffers& buffers, const std::string& name) {
  auto const dims = buffers.four_dimensions(name);
  if (dims.empty()) return {};
  auto const stride = [&](size_t dim, long long lines) {
    return dims[dim] == 1 ? 0 : static_cast<int>(lines);
  };
  return {buffers.data(name), stride(0, dims[1] * dims[2]), stride(1, dims[2])};
}

DropoutParams dropout_of(const Call& call, Buffers& buffers) {
  DropoutParams dropout = {};
  dropout.key_words = static_cast<const unsigned*>(buffers.data("key_words"));
  dropout.batch_base = static_cast<const unsigned*>(buffers.data("batch_base"));
  dropout.head_index = static_cast<const unsigned*>(buffers.data("head_index"));
  dropout.threshold = call.dropout_threshold;
  dropout.scale = 256.0f / static_cast<float>(256 - call.dropout_threshold);
  return dropout;
}

}  // namespace memeff::host
