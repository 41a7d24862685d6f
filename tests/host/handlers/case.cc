#include "case.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

namespace handlers {
namespace {

// Reads the files of tests/host/handlers/__init__.py: numbers in 4 or 8 bytes, texts after their
// size.
class File {
 public:
  explicit File(const char* path) : stream_(path, std::ios::binary) {
    if (!stream_) {
      std::fprintf(stderr, "no file %s\n", path);
      std::exit(2);
    }
  }

  template <class T>
  T number() {
    T value = {};
    stream_.read(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  }

  std::string text() {
    std::string text(number<uint32_t>(), '\0');
    stream_.read(text.data(), static_cast<std::streamsize>(text.size()));
    return text;
  }

  template <class T>
  std::vector<T> numbers() {
    std::vector<T> values(number<uint32_t>());
    for (T& value : values) value = number<T>();
    return values;
  }

  Attributes attributes() {
    Attributes attributes;
    for (uint32_t count = number<uint32_t>(); count > 0; --count) {
      std::string const name = text();
      attributes[name] = attribute();
    }
    return attributes;
  }

  std::vector<Buffer> buffers() {
    std::vector<Buffer> buffers(number<uint32_t>());
    for (Buffer& buffer : buffers) {
      buffer.dtype = number<int32_t>();
      buffer.dims = numbers<int64_t>();
    }
    return buffers;
  }

 private:
  Attribute attribute() {
    Attribute attribute;
    attribute.kind = static_cast<Kind>(number<char>());
    switch (attribute.kind) {
      case Kind::kText:
        attribute.text = text();
        break;
      case Kind::kInt:
      case Kind::kInts:
        attribute.ints = numbers<int32_t>();
        break;
      case Kind::kLong:
      case Kind::kLongs:
        attribute.longs = numbers<int64_t>();
        break;
      case Kind::kFloats:
        attribute.floats = numbers<float>();
        break;
      case Kind::kDict:
        attribute.dict = attributes();
    }
    return attribute;
  }

  std::ifstream stream_;
};

}  // namespace

std::vector<Case> read_cases(const char* path) {
  File file(path);
  std::vector<Case> cases(file.number<uint32_t>());
  for (Case& call : cases) {
    call.target = file.text();
    call.capability = file.number<int32_t>();
    call.attributes = file.attributes();
    call.operands = file.buffers();
    call.results = file.buffers();
  }
  return cases;
}

void Frame::add_scalar(XLA_FFI_DataType dtype, const void* value) {
  types_.push_back(XLA_FFI_AttrType_SCALAR);
  scalars_.push_back(
      std::make_unique<XLA_FFI_Scalar>(XLA_FFI_Scalar{dtype, const_cast<void*>(value)}));
  values_.push_back(scalars_.back().get());
}

template <class T>
void Frame::add_array(XLA_FFI_DataType dtype, const std::vector<T>& values) {
  types_.push_back(XLA_FFI_AttrType_ARRAY);
  arrays_.push_back(std::make_unique<XLA_FFI_Array>(
      XLA_FFI_Array{dtype, values.size(), const_cast<T*>(values.data())}));
  values_.push_back(arrays_.back().get());
}

Frame::Frame(const Attributes& attributes) {
  for (auto const& [name, attribute] : attributes) {
    names_.push_back({name.data(), name.size()});
    switch (attribute.kind) {
      case Kind::kText:
        types_.push_back(XLA_FFI_AttrType_STRING);
        texts_.push_back(std::make_unique<XLA_FFI_ByteSpan>(
            XLA_FFI_ByteSpan{attribute.text.data(), attribute.text.size()}));
        values_.push_back(texts_.back().get());
        break;
      case Kind::kInt:
        add_scalar(XLA_FFI_DataType_S32, attribute.ints.data());
        break;
      case Kind::kLong:
        add_scalar(XLA_FFI_DataType_S64, attribute.longs.data());
        break;
      case Kind::kInts:
        add_array(XLA_FFI_DataType_S32, attribute.ints);
        break;
      case Kind::kLongs:
        add_array(XLA_FFI_DataType_S64, attribute.longs);
        break;
      case Kind::kFloats:
        add_array(XLA_FFI_DataType_F32, attribute.floats);
        break;
      case Kind::kDict:
        types_.push_back(XLA_FFI_AttrType_DICTIONARY);
        dicts_.push_back(std::make_unique<Frame>(attribute.dict));
        values_.push_back(dicts_.back()->get());
    }
  }
  for (XLA_FFI_ByteSpan& name : names_) name_pointers_.push_back(&name);
  attrs_ = {
      XLA_FFI_Attrs_STRUCT_SIZE, nullptr,       static_cast<int64_t>(names_.size()), types_.data(),
      name_pointers_.data(),     values_.data()};
}

memeff::host::Direction direction_of(const std::string& target) {
  using memeff::host::Direction;
  if (target == "jax_memeff_forward") return Direction::kForward;
  return target == "jax_memeff_backward" ? Direction::kBackward : Direction::kTangent;
}

}  // namespace handlers
