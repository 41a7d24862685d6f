#include "mutate.h"

#include <climits>
#include <cmath>
#include <iterator>
#include <limits>

namespace handlers {
namespace {

using Random = std::mt19937_64;

size_t below(Random& random, size_t bound) { return bound == 0 ? 0 : random() % bound; }

template <class Items>
auto& any_of(Random& random, Items& items) {
  return *std::next(items.begin(), static_cast<long>(below(random, items.size())));
}

int64_t extreme(Random& random) {
  constexpr int64_t kNumbers[] = {0,         1,         -1,        2,        3,       7,
                                  255,       256,       1 << 28,   1 << 30,  INT_MAX, INT_MIN,
                                  1ll << 32, 1ll << 62, LLONG_MAX, LLONG_MIN};
  return kNumbers[below(random, std::size(kNumbers))];
}

float extreme_float(Random& random) {
  constexpr float kNumbers[] = {0,
                                -1,
                                1e-45f,
                                3e38f,
                                std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()};
  return kNumbers[below(random, std::size(kNumbers))];
}

void mutate_text(Random& random, std::string* text) {
  constexpr const char* kTexts[] = {"", ",", ",,query", "query", "sm_90a", "none", "archs"};
  size_t const place = below(random, text->size());
  switch (below(random, 5)) {
    case 0:
      text->resize(place);
      break;
    case 1:
      text->insert(place, kTexts[below(random, std::size(kTexts))]);
      break;
    case 2:
      *text = kTexts[below(random, std::size(kTexts))];
      break;
    case 3:
      text->insert(place, 1, ',');
      break;
    default:
      if (!text->empty()) (*text)[place] = static_cast<char>(random());
  }
}

template <class T, class Extreme>
void mutate_numbers(Random& random, std::vector<T>* numbers, const Extreme& extreme_number) {
  switch (numbers->empty() ? 0 : below(random, 6)) {
    case 0:
      numbers->resize(below(random, 20));
      break;
    case 1:
      std::swap(any_of(random, *numbers), any_of(random, *numbers));
      break;
    default:
      any_of(random, *numbers) = static_cast<T>(extreme_number(random));
  }
}

void mutate_attribute(Random& random, Attributes* attributes) {
  if (attributes->empty()) return;
  auto& [name, attribute] = any_of(random, *attributes);
  switch (below(random, 12)) {
    case 0:
      attributes->erase(std::string(name));
      return;
    case 1:
      std::swap(attribute, any_of(random, *attributes).second);
      return;
    case 2: {
      constexpr Kind kKinds[] = {Kind::kText,  Kind::kInt,    Kind::kInts, Kind::kLong,
                                 Kind::kLongs, Kind::kFloats, Kind::kDict};
      attribute.kind = kKinds[below(random, std::size(kKinds))];
      if (attribute.kind == Kind::kInt) attribute.ints.resize(1);
      if (attribute.kind == Kind::kLong) attribute.longs.resize(1);
      return;
    }
  }
  switch (attribute.kind) {
    case Kind::kText:
      return mutate_text(random, &attribute.text);
    case Kind::kInt:
      attribute.ints[0] = static_cast<int32_t>(extreme(random));
      return;
    case Kind::kLong:
      attribute.longs[0] = extreme(random);
      return;
    case Kind::kInts:
      return mutate_numbers(random, &attribute.ints, extreme);
    case Kind::kLongs:
      return mutate_numbers(random, &attribute.longs, extreme);
    case Kind::kFloats:
      return mutate_numbers(random, &attribute.floats, extreme_float);
    case Kind::kDict:
      return mutate_attribute(random, &attribute.dict);
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
      buffer.dims.resize(below(random, 9), 2);
      break;
    default:
      if (!buffer.dims.empty()) {
        int64_t& dim = any_of(random, buffer.dims);
        dim = std::max<int64_t>(0, below(random, 2) == 0 ? dim - 1 : extreme(random));
      }
  }
}

}  // namespace

Case mutate(Case call, Random& random) {
  for (size_t count = below(random, 4); count > 0; --count) {
    if (below(random, 4) > 0) {
      mutate_attribute(random, &call.attributes);
    } else {
      mutate_buffers(random, below(random, 2) == 0 ? &call.operands : &call.results);
    }
  }
  if (below(random, 8) == 0) {
    const char* const targets[] = {"jax_memeff_forward", "jax_memeff_backward",
                                   "jax_memeff_tangent"};
    call.target = targets[below(random, 3)];
  }
  return call;
}

}  // namespace handlers
