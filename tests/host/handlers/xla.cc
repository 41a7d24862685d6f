// XLA's side of a call: the few functions of its API that handlers use, and buffers with exactly
// the bytes of their types.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "case.h"
#include "handlers.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace handlers {
namespace {

struct State {
  void* data = nullptr;
  void (*deleter)(void*) = nullptr;
};

State state;

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* arguments) {
  return new XLA_FFI_Error{arguments->message};
}

template <class Arguments>
void message_of(Arguments* arguments) {
  arguments->message = arguments->error->message.c_str();
}

void destroy(XLA_FFI_Error_Destroy_Args* arguments) { delete arguments->error; }

XLA_FFI_Error* set_state(XLA_FFI_State_Set_Args* arguments) {
  state = {arguments->state, memeff::host::call_type_info()->deleter};
  return nullptr;
}

XLA_FFI_Error* get_state(XLA_FFI_State_Get_Args* arguments) {
  arguments->state = state.data;
  return nullptr;
}

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* arguments) {
  arguments->stream = nullptr;
  return nullptr;
}

XLA_FFI_Api const* api() {
  static XLA_FFI_Api const api = [] {
    XLA_FFI_Api api = {};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                       XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = create_error;
#if XLA_FFI_API_MINOR < 4  // before jaxlib 0.11
    api.XLA_FFI_Error_GetMessage = message_of;
#else
    api.XLA_FFI_Error_GetDetails = message_of;
#endif
    api.XLA_FFI_Error_Destroy = destroy;
    api.XLA_FFI_State_Set = set_state;
    api.XLA_FFI_State_Get = get_state;
    api.XLA_FFI_Stream_Get = get_stream;
    return api;
  }();
  return &api;
}

long long element_bytes(int32_t dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
      return 8;
    default:
      return 4;
  }
}

// The memory of a buffer. The sanitizer checks the ends of malloc's memory; a large buffer is only
// reserved address space.
class Memory {
 public:
  explicit Memory(const Buffer& buffer) {
    constexpr long long kMostOnHeap = 1 << 16;
    constexpr long long kMost = 1ll << 40;
    long long bytes = element_bytes(buffer.dtype);
    for (int64_t dim : buffer.dims) {
      if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes) || bytes > kMost) return;
    }
    bytes_ = static_cast<size_t>(bytes);
    if (bytes <= kMostOnHeap) {
      data = std::malloc(bytes_);
    } else {
      constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
      mapped_ = data != MAP_FAILED;
      if (!mapped_) data = nullptr;
    }
    fits = data != nullptr || bytes_ == 0;
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (mapped_) {
      munmap(data, bytes_);
    } else {
      std::free(data);
    }
  }

  void* data = nullptr;
  bool fits = false;

 private:
  size_t bytes_ = 0;
  bool mapped_ = false;
};

struct Buffers {
  std::vector<std::unique_ptr<Memory>> memories;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
  std::vector<XLA_FFI_ArgType> argument_types;
  std::vector<XLA_FFI_RetType> result_types;
  bool fit = true;

  explicit Buffers(const std::vector<Buffer>& all) {
    for (const Buffer& buffer : all) {
      memories.push_back(std::make_unique<Memory>(buffer));
      fit = fit && memories.back()->fits;
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                         static_cast<XLA_FFI_DataType>(buffer.dtype), memories.back()->data,
                         static_cast<int64_t>(buffer.dims.size()),
                         const_cast<int64_t*>(buffer.dims.data())});
    }
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    argument_types.assign(all.size(), XLA_FFI_ArgType_BUFFER);
    result_types.assign(all.size(), XLA_FFI_RetType_BUFFER);
  }
};

std::string call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, Frame* frame,
                 Buffers* operands, Buffers* results) {
  XLA_FFI_CallFrame call = {};
  call.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  call.api = api();
  call.stage = stage;
  call.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  call.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  if (operands != nullptr) {
    call.args.size = static_cast<int64_t>(operands->pointers.size());
    call.args.types = operands->argument_types.data();
    call.args.args = operands->pointers.data();
    call.rets.size = static_cast<int64_t>(results->pointers.size());
    call.rets.types = results->result_types.data();
    call.rets.rets = results->pointers.data();
  }
  call.attrs = *frame->get();
  XLA_FFI_Error* const error = handler(&call);
  std::string const message = error == nullptr ? "" : error->message;
  delete error;
  return message;
}

}  // namespace

std::string run(const Case& call_case) {
  memeff::host::call_type_id()->type_id = 1;
  for (memeff::host::Target const& target : memeff::host::targets()) {
    if (call_case.target != target.name) continue;
    Frame frame(call_case.attributes);
    std::string error =
        call(target.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE, &frame, nullptr, nullptr);
    Buffers operands(call_case.operands);
    Buffers results(call_case.results);
    if (error.empty()) {
      error =
          call(target.initialize, XLA_FFI_ExecutionStage_INITIALIZE, &frame, &operands, &results);
    }
    if (error.empty() && !(operands.fit && results.fit)) error = "no memory for the buffers";
    if (error.empty()) {
      error = call(target.execute, XLA_FFI_ExecutionStage_EXECUTE, &frame, &operands, &results);
    }
    if (state.data != nullptr) state.deleter(state.data);
    state = {};
    return error;
  }
  return "no such target";
}

}  // namespace handlers
