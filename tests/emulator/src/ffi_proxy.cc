// Wraps the handlers of the host library for XLA's CPU client: adds a stream, which that client
// does not have, and passes buffers that end at inaccessible pages.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "machine.h"
#include "xla/ffi/api/c_api.h"

namespace {

constexpr size_t kAlignment = 16;  // that the host library requires

XLA_FFI_Error* null_stream(XLA_FFI_Stream_Get_Args* arguments) {
  arguments->stream = nullptr;
  return nullptr;
}

XLA_FFI_Api const* with_stream(XLA_FFI_Api const* api) {
  static std::vector<char> const copy = [api] {
    std::vector<char> bytes(api->struct_size);
    std::memcpy(bytes.data(), api, bytes.size());
    reinterpret_cast<XLA_FFI_Api*>(bytes.data())->XLA_FFI_Stream_Get = null_stream;
    return bytes;
  }();
  return reinterpret_cast<XLA_FFI_Api const*>(copy.data());
}

size_t bytes_of(XLA_FFI_Buffer const& buffer) {
  size_t bytes = 0;
  switch (buffer.dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E4M3FN:
      bytes = 1;
      break;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      bytes = 2;
      break;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
      bytes = 8;
      break;
    default:
      bytes = 4;
  }
  for (int64_t dim = 0; dim < buffer.rank; ++dim) bytes *= size_t(buffer.dims[dim]);
  return bytes;
}

// A copy of a buffer that ends, or every second time begins, at an inaccessible page. The memory
// around it is NaN, and so are results before they are written, unless they are written in place.
class GuardedBuffer {
 public:
  GuardedBuffer(XLA_FFI_Buffer const& original, bool has_contents, bool at_end)
      : buffer_(original), original_(original.data), bytes_(bytes_of(original)) {
    size_t const page = size_t(sysconf(_SC_PAGESIZE));
    size_t const room = (bytes_ + page - 1) / page * page;
    mapped_bytes_ = room + 2 * page;
    mapping_ = static_cast<char*>(
        mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    char* const begin = mapping_ + page;
    mprotect(begin, room, PROT_READ | PROT_WRITE);
    std::memset(begin, 0xff, room);
    char* const data = at_end ? begin + (room - bytes_) / kAlignment * kAlignment : begin;
    if (has_contents && bytes_ > 0) std::memcpy(data, original_, bytes_);
    buffer_.data = data;
  }
  GuardedBuffer(GuardedBuffer const&) = delete;
  ~GuardedBuffer() { munmap(mapping_, mapped_bytes_); }

  void copy_back() const {
    if (bytes_ > 0) std::memcpy(original_, buffer_.data, bytes_);
  }
  XLA_FFI_Buffer* get() { return &buffer_; }
  void* original() const { return original_; }

 private:
  XLA_FFI_Buffer buffer_;
  void* original_;
  size_t bytes_;
  size_t mapped_bytes_;
  char* mapping_;
};

using Buffers = std::vector<std::unique_ptr<GuardedBuffer>>;

// Copies `originals` to `buffers`. Results are copied only if an operand is written in place.
std::vector<void*> guard(void* const* originals, int64_t count, Buffers const* operands,
                         Buffers* buffers) {
  std::vector<void*> guarded;
  for (int64_t i = 0; i < count; ++i) {
    auto const& original = *static_cast<XLA_FFI_Buffer const*>(originals[i]);
    bool const has_contents =
        operands == nullptr ||
        std::any_of(operands->begin(), operands->end(),
                    [&](auto const& operand) { return operand->original() == original.data; });
    bool const at_end = (emulator::settings().seed + uint64_t(i)) % 2 == 0;
    buffers->push_back(std::make_unique<GuardedBuffer>(original, has_contents, at_end));
    guarded.push_back(buffers->back()->get());
  }
  return guarded;
}

XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return handler(frame);  // a query of metadata
  XLA_FFI_CallFrame copy = *frame;
  Buffers operands;
  Buffers results;
  std::vector<void*> const arguments =
      guard(frame->args.args, frame->args.size, nullptr, &operands);
  std::vector<void*> const returned =
      guard(frame->rets.rets, frame->rets.size, &operands, &results);
  copy.api = with_stream(frame->api);
  copy.args.args = const_cast<void**>(arguments.data());
  copy.rets.rets = const_cast<void**>(returned.data());
  XLA_FFI_Error* const error = handler(&copy);
  for (auto const& result : results) result->copy_back();
  return error;
}

constexpr int kMostHandlers = 4;
XLA_FFI_Handler* handlers[kMostHandlers];
int handler_count = 0;

template <int kIndex>
XLA_FFI_Error* proxy(XLA_FFI_CallFrame* frame) {
  return call(handlers[kIndex], frame);
}

}  // namespace

extern "C" XLA_FFI_Handler* emulator_proxy(XLA_FFI_Handler* handler) {
  static XLA_FFI_Handler* const proxies[] = {proxy<0>, proxy<1>, proxy<2>, proxy<3>};
  if (handler_count == kMostHandlers) return nullptr;
  handlers[handler_count] = handler;
  return proxies[handler_count++];
}
