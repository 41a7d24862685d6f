#include "mutate.h"

#include <climits>
#include <cmath>
#include <iterator>
#include <limits>

#include "attributes/array_type.h"
#include "attributes/sha256.h"
#include "attributes/text.h"

namespace handlers {
namespace {

using Random = std::mt19937_64;

constexpr size_t kHeaderBytes = 32;

constexpr const char* kWords[] = {"0",
                                  "-1",
                                  "1",
                                  "3",
                                  "65",
                                  "1e9",
                                  "2147483648",
                                  "9223372036854775807",
                                  "99999999999999999999",
                                  "query",
                                  "none",
                                  "nan",
                                  "-",
                                  "...",
                                  "*",
                                  "",
                                  "B~",
                                  "f32[2,3]",
                                  "bf16[0,128,4,64]",
                                  "forward",
                                  "4294967297"};
constexpr char kSeparators[] = " ,/+*?~[]x\n";

size_t below(Random& random, size_t bound) { return bound == 0 ? 0 : random() % bound; }

template <class Items>
auto& any_of(Random& random, Items& items) {
  return *std::next(items.begin(), static_cast<long>(below(random, items.size())));
}

int32_t extreme(Random& random) {
  constexpr int32_t kNumbers[] = {0, 1, -1, 2, 3, 7, 255, 256, 1 << 28, 1 << 30, INT_MAX, INT_MIN};
  return kNumbers[below(random, std::size(kNumbers))];
}

float extreme_float(Random& random) {
  constexpr float kNumbers[] = {0,
                                -1,
                                1e-45f,
                                3e38f,
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()};
  return kNumbers[below(random, std::size(kNumbers))];
}

// The begin and end of a random word between separators.
std::pair<size_t, size_t> word_of(Random& random, const std::string& text) {
  size_t const inside = below(random, text.size());
  size_t const begin = text.find_last_of(kSeparators, inside);
  size_t const end = text.find_first_of(kSeparators, inside);
  return {begin == std::string::npos || begin == inside ? inside : begin + 1,
          end == std::string::npos ? text.size() : std::max(end, inside)};
}

void mutate_text(Random& random, std::string* text) {
  auto const [begin, end] = word_of(random, *text);
  switch (below(random, 8)) {
    case 0:
    case 1:
    case 2:
      text->replace(begin, end - begin, kWords[below(random, std::size(kWords))]);
      break;
    case 3: {  // swaps two words
      auto const [other_begin, other_end] = word_of(random, *text);
      if (other_begin < end) break;
      std::string const first = text->substr(begin, end - begin);
      std::string const second = text->substr(other_begin, other_end - other_begin);
      text->replace(other_begin, second.size(), first);
      text->replace(begin, first.size(), second);
      break;
    }
    case 4:
      text->erase(begin, end - begin + 1);
      break;
    case 5:
      text->insert(begin, text->substr(begin, end - begin) +
                              kSeparators[below(random, std::size(kSeparators) - 1)]);
      break;
    case 6:
      text->resize(below(random, text->size() + 1));
      break;
    default:
      if (!text->empty()) (*text)[below(random, text->size())] = static_cast<char>(random());
  }
}

void mutate_lines(Random& random, std::string* text) {
  std::vector<std::string> lines;
  for (std::string_view line : memeff::host::split(*text, '\n')) lines.emplace_back(line);
  if (lines.empty()) return;
  std::string& line = any_of(random, lines);
  switch (below(random, 3)) {
    case 0:
      line.clear();
      break;
    case 1:
      line += "\n" + any_of(random, lines);
      break;
    default:
      std::swap(line, any_of(random, lines));
  }
  text->clear();
  for (const std::string& each : lines) *text += each + "\n";
}

// Changes the description with a matching header and digest, or any byte without them.
void mutate_image(Random& random, std::string* image) {
  if (image->size() < kHeaderBytes + memeff::host::kDigestBytes || below(random, 3) == 0) {
    if (below(random, 2) == 0) {
      image->resize(below(random, image->size() + 1));
    } else if (!image->empty()) {
      size_t const most = below(random, 2) == 0 ? image->size() : kHeaderBytes;
      (*image)[below(random, std::min(most, image->size()))] ^= char(1 + below(random, 255));
    }
    return;
  }
  size_t description_bytes = 0;
  for (int i = 7; i >= 0; --i) {
    description_bytes = description_bytes << 8 | static_cast<unsigned char>((*image)[16 + i]);
  }
  std::string const sealed = image->substr(0, image->size() - memeff::host::kDigestBytes);
  if (description_bytes > sealed.size() - kHeaderBytes) return;
  std::string description = sealed.substr(kHeaderBytes, description_bytes);
  if (below(random, 4) == 0) {
    mutate_lines(random, &description);
  } else {
    mutate_text(random, &description);
  }
  std::string changed = sealed.substr(0, 16);
  for (int i = 0; i < 8; ++i) changed += static_cast<char>(description.size() >> 8 * i);
  changed += sealed.substr(24, 8) + description + sealed.substr(kHeaderBytes + description_bytes);
  *image = changed + memeff::host::sha256(changed);
}

void mutate_attribute(Random& random, Attributes* attributes, bool* changed_image) {
  if (attributes->empty()) return;
  auto& [name, attribute] = any_of(random, *attributes);
  size_t const kind = below(random, 12);
  if (kind == 0) {
    *changed_image = *changed_image || attribute.kind == Kind::kDict;
    attributes->erase(std::string(name));
    return;
  }
  if (kind == 1) {
    auto& other = any_of(random, *attributes).second;
    *changed_image = *changed_image || attribute.kind == Kind::kDict || other.kind == Kind::kDict;
    std::swap(attribute, other);
    return;
  }
  if (kind == 2) {
    constexpr Kind kKinds[] = {Kind::kText, Kind::kInt, Kind::kInts, Kind::kFloats, Kind::kDict};
    *changed_image = *changed_image || attribute.kind == Kind::kDict;
    attribute.kind = kKinds[below(random, std::size(kKinds))];
    if (attribute.kind == Kind::kInt) attribute.ints.resize(1);
    return;
  }
  switch (attribute.kind) {
    case Kind::kText: {
      bool const is_image = attribute.text.rfind("\x89MEMEFF", 0) == 0;
      if (is_image) mutate_image(random, &attribute.text);
      if (!is_image) mutate_text(random, &attribute.text);
      *changed_image = *changed_image || is_image;
      break;
    }
    case Kind::kInt:
      attribute.ints[0] = extreme(random);
      break;
    case Kind::kInts:
      if (attribute.ints.empty() || below(random, 6) == 0) {
        attribute.ints.resize(below(random, 6));
      } else {
        any_of(random, attribute.ints) = extreme(random);
      }
      break;
    case Kind::kFloats:
      if (attribute.floats.empty() || below(random, 6) == 0) {
        attribute.floats.resize(below(random, 6));
      } else {
        any_of(random, attribute.floats) = extreme_float(random);
      }
      break;
    case Kind::kDict:
      mutate_attribute(random, &attribute.dict, changed_image);
  }
}

void mutate_buffers(Random& random, std::vector<Buffer>* buffers) {
  if (buffers->empty()) return;
  Buffer& buffer = any_of(random, *buffers);
  switch (below(random, 6)) {
    case 0:
      buffers->erase(buffers->begin() + static_cast<long>(below(random, buffers->size())));
      break;
    case 1:
      buffers->push_back(Buffer(buffer));
      break;
    case 2:
      std::swap(buffer, any_of(random, *buffers));
      break;
    case 3:
      buffer.dtype = static_cast<int32_t>(below(random, 20));
      break;
    case 4:
      buffer.dims.resize(below(random, 7), 2);
      break;
    default:
      if (!buffer.dims.empty()) {
        int64_t& dim = any_of(random, buffer.dims);
        dim = std::max<int64_t>(0, below(random, 2) == 0 ? dim - 1 : extreme(random));
      }
  }
}

// Makes buffers of the types in the attributes, as XLA does for an edited program.
void follow(const Attributes& attributes, const char* name, std::vector<Buffer>* buffers) {
  auto const found = attributes.find(name);
  if (found == attributes.end()) return;
  std::vector<Buffer> announced;
  for (std::string_view text : memeff::host::split(found->second.text, ' ')) {
    auto const type = memeff::host::ArrayType::parse(text);
    if (!type) return;
    announced.push_back({static_cast<int32_t>(type->dtype),
                         std::vector<int64_t>(type->sizes, type->sizes + type->rank)});
  }
  *buffers = announced;
}

}  // namespace

Case mutate(Case call, Random& random, bool* changed_image) {
  *changed_image = false;
  for (size_t count = 1 + below(random, 4); count > 0; --count) {
    if (below(random, 4) > 0) {
      mutate_attribute(random, &call.attributes, changed_image);
    } else {
      mutate_buffers(random, below(random, 2) == 0 ? &call.operands : &call.results);
    }
  }
  if (below(random, 8) == 0) {
    const char* const targets[] = {"jax_memeff_forward", "jax_memeff_backward",
                                   "jax_memeff_tangent"};
    call.target = targets[below(random, 3)];
  }
  if (below(random, 2) == 0) {
    follow(call.attributes, "operand_types", &call.operands);
    follow(call.attributes, "result_types", &call.results);
  }
  if (below(random, 4) > 0) seal(&call);
  return call;
}

}  // namespace handlers
