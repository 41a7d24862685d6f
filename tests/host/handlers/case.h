// A custom call as a value: the content of a program file, which tests change at will.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "xla/ffi/api/ffi.h"

namespace handlers {

struct Attribute;
using Attributes = std::map<std::string, Attribute>;  // sorted, as XLA passes them

enum class Kind : unsigned char {
  kText = 's',
  kInt = 'i',
  kInts = 'I',
  kLong = 'l',
  kLongs = 'L',
  kFloats = 'F',
  kDict = 'd'
};

struct Attribute {
  Kind kind = Kind::kText;
  std::string text;
  std::vector<int32_t> ints;
  std::vector<int64_t> longs;
  std::vector<float> floats;
  Attributes dict;
};

struct Buffer {
  int32_t dtype;
  std::vector<int64_t> dims;
};

struct Case {
  std::string target;
  int32_t capability;  // of the device
  Attributes attributes;
  std::vector<Buffer> operands;
  std::vector<Buffer> results;
};

std::vector<Case> read_cases(const char* path);

// The attributes in XLA's form. Valid as long as this object and the attributes exist.
class Frame {
 public:
  explicit Frame(const Attributes& attributes);
  XLA_FFI_Attrs* get() { return &attrs_; }

 private:
  void add_scalar(XLA_FFI_DataType dtype, const void* value);
  template <class T>
  void add_array(XLA_FFI_DataType dtype, const std::vector<T>& values);

  XLA_FFI_Attrs attrs_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan> names_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<void*> values_;
  std::vector<std::unique_ptr<XLA_FFI_ByteSpan>> texts_;
  std::vector<std::unique_ptr<XLA_FFI_Scalar>> scalars_;
  std::vector<std::unique_ptr<XLA_FFI_Array>> arrays_;
  std::vector<std::unique_ptr<Frame>> dicts_;
};

// Instantiates, initializes and executes the call. Returns the message of the first error, or "".
std::string run(const Case& call);

// The direction of a custom call target.
memeff::host::Direction direction_of(const std::string& target);

// Sets up the driver of driver.cc.
void set_device(int capability, int element_bytes, memeff::host::Direction direction);
// The number of blocks launched since the last call of this function.
long long take_launched_blocks();

}  // namespace handlers
