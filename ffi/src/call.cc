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
void add_places(std::string_view buffers, bool is_result, std::vector<Place>* places) {
  int position = 0;
  for (const std::string& buffer : split(std::string(buffers), ',')) {
    const std::vector<std::string> names = split(buffer, '+');
    const int slots = static_cast<int>(names.size());
    for (int slot = 0; slot < slots; ++slot) {
      places->push_back({names[slot], is_result, position, slot, slots, 1});
    }
    ++position;
  }
}

// How the batch shares an array that has `elements` of its own.
BatchBroadcast broadcast_of(const Place& place, unsigned long long elements) {
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
  add_places(*operands, false, &call->places);
  add_places(*results, true, &call->places);
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
  for (std::string_view name : {"key", "value", "bias", "boolean", "bias_gradient"}) {
    for (Place& place : call->places) {
      if (place.name == name) place.divisor = *divisor;
    }
    ++divisor;
  }
  call->bias_alignment = *bias_alignment;
  if (ffi::Error error = call->kernels.load(); error.failure()) return ffi::Unexpected(error);
  return call;
}

const Place* Call::find(std::string_view name) const {
  for (const Place& place : places) {
    if (place.name == name) return &place;
  }
  return nullptr;
}

void Buffers::fail(const std::string& message) {
  if (error_.success()) error_ = failure(ffi::ErrorCode::kInvalidArgument, message);
}

std::optional<ffi::AnyBuffer> Buffers::buffer(const Place& place) {
  if (place.is_result) {
    auto buffer = results_.get<ffi::AnyBuffer>(place.position);
    if (buffer.has_value()) return **buffer;
    fail("result " + place.name + " is missing: " + buffer.error().message());
  } else {
    auto buffer = arguments_.get<ffi::AnyBuffer>(place.position);
    if (buffer.has_value()) return *buffer;
    fail("operand " + place.name + " is missing: " + buffer.error().message());
  }
  return std::nullopt;
}

std::optional<Buffers::Found> Buffers::find(std::string_view name) {
  const Place* place = call_.find(name);
  if (place == nullptr) return std::nullopt;
  auto const found = buffer(*place);
  if (!found) return std::nullopt;
  return Found{*place, *found};
}

void* Buffers::data(std::string_view name) {
  auto const found = find(name);
  return found ? found->buffer.untyped_data() : nullptr;
}

size_t Buffers::bytes(std::string_view name) {
  auto const found = find(name);
  return found ? found->buffer.size_bytes() : 0;
}

Dimensions Buffers::dimensions(std::string_view name) { return dimensions(find(name)); }

Dimensions Buffers::dimensions(std::optional<Found> const& found) {
  if (!found) return {};
  const Place& place = found->place;
  auto const dims = found->buffer.dimensions();
  bool const is_shared = place.slots > 1;
  if (is_shared && (dims.size() != 5 || dims[2] != place.slots)) {
    fail(place.name + " needs a buffer [B, T, " + std::to_string(place.slots) + ", N, H]");
    return {};
  }
  if (dims.size() > Dimensions::kMost) {
    fail(place.name + " needs at most rank " + std::to_string(Dimensions::kMost) + ", got rank " +
         std::to_string(dims.size()));
    return {};
  }
  Dimensions result = {};
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    if (!is_shared || dim != 2) result.sizes[result.rank++] = dims[dim];
  }
  return result;
}

Dimensions Buffers::four_dimensions(std::string_view name) { return four_dimensions(find(name)); }

Dimensions Buffers::four_dimensions(std::optional<Found> const& found) {
  Dimensions const dims = dimensions(found);
  if (!found || dims.rank == 4) return dims;
  fail(found->place.name + " needs rank 4, got rank " + std::to_string(dims.rank));
  return {};
}

TensorView Buffers::tensor(std::string_view name) {
  auto const found = find(name);
  Dimensions const dims = four_dimensions(found);
  if (dims.rank == 0) return {};
  const Place& place = found->place;
  TensorView view = {};
  view.head_stride = dims.sizes[3];
  long long const slot_stride = dims.sizes[2] * view.head_stride;
  view.row_stride = place.slots * slot_stride;
  view.batch_stride = dims.sizes[1] * view.row_stride;
  view.share = broadcast_of(place, dims.sizes[0]);
  view.data = static_cast<char*>(found->buffer.untyped_data()) +
              place.slot * slot_stride * ffi::ByteWidth(found->buffer.element_type());
  require_alignment(place, view.data, alignment_);
  return view;
}

void Buffers::require_alignment(const Place& place, const void* data, int alignment) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignment == 0) return;
  fail(place.name + " starts at an address that is not a multiple of " + std::to_string(alignment) +
       " bytes, which this kernel was compiled for: copy it before the call");
}

ScoreView Buffers::scores(std::string_view name, int alignment) {
  auto const found = find(name);
  Dimensions const dims = four_dimensions(found);
  if (dims.rank == 0) return {};
  auto stride = [&](int dim) {
    long long elements = dims.sizes[dim] == 1 ? 0 : 1;
    for (int inner = dim + 1; inner < dims.rank; ++inner) elements *= dims.sizes[inner];
    return elements;
  };
  void* const data = found->buffer.untyped_data();
  require_alignment(found->place, data, alignment);
  return {data,      stride(0), stride(1),
          stride(2), stride(3), broadcast_of(found->place, dims.sizes[0])};
}

ProblemShape Buffers::shape() {
  ProblemShape shape = {};
  Dimensions const query = dimensions("query");
  Dimensions const key = dimensions("key");
  Dimensions const value = dimensions("value");
  if (query.rank != 4 || key.rank != 4 || value.rank != 4) {
    fail("query, key and value need rank 4");
    return shape;
  }
  if (query.sizes[1] > kMaxLength || key.sizes[1] > kMaxLength) {
    fail("sequences of at most " + std::to_string(kMaxLength) + " are supported, got " +
         std::to_string(query.sizes[1]) + " queries and " + std::to_string(key.sizes[1]) + " keys");
    return shape;
  }
  shape.batch = static_cast<int>(query.sizes[0]);
  shape.query_length = static_cast<int>(query.sizes[1]);
  shape.query_heads = static_cast<int>(query.sizes[2]);
  shape.head_dim = static_cast<int>(query.sizes[3]);
  shape.key_length = static_cast<int>(key.sizes[1]);
  shape.key_heads = static_cast<int>(key.sizes[2]);
  shape.value_dim = static_cast<int>(value.sizes[3]);
  shape.group = shape.query_heads / shape.key_heads;
  if (has("query_starts")) {
    shape.query_tokens = std::exchange(shape.query_length, call_.longest_query);
    shape.key_tokens = std::exchange(shape.key_length, call_.longest_key);
    shape.query_starts = static_cast<const int*>(data("query_starts"));
    shape.key_starts = static_cast<const int*>(data("key_starts"));
    Dimensions const starts = dimensions("query_starts");
    shape.batch = starts.rank == 0 ? 0 : static_cast<int>(starts.sizes[0]) - 1;
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
  if (Dimensions const segments = buffers.dimensions("query_segments"); segments.rank == 3) {
    mask.segment_pairs = segments.sizes[1];
  }
  mask.boolean = buffers.scores("boolean");
  return mask;
}

BlockMask block_mask_of(Buffers& buffers, std::string_view name) {
  Dimensions const dims = buffers.four_dimensions(name);
  if (dims.rank == 0) return {};
  auto const stride = [&](int dim, long long lines) {
    return dims.sizes[dim] == 1 ? 0 : static_cast<int>(lines);
  };
  return {buffers.data(name), stride(0, dims.sizes[1] * dims.sizes[2]), stride(1, dims.sizes[2])};
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
