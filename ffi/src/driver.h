// The CUDA driver, opened at run time, so that the module imports on machines without a GPU, and
// the errors of the library.
#pragma once

#include <cuda.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// Entry points of libcuda.so.1. Each has the type that cuda.h declares, so a wrong argument is a
// compile error.
struct Driver {
  decltype(&cuInit) init;
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuDeviceGetCount) device_count;
  decltype(&cuDeviceGetAttribute) device_attribute;
  decltype(&cuCtxGetDevice) current_device;
  decltype(&cuLibraryLoadData) library_load;
  decltype(&cuLibraryGetKernel) library_kernel;
  decltype(&cuKernelSetAttribute) kernel_set_attribute;
  decltype(&cuKernelGetFunction) kernel_function;
  decltype(&cuFuncLoad) load_function;
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuMemsetD8Async) memset_async;
  decltype(&cuTensorMapEncodeTiled) encode_tensor_map;
};

// Opens the driver on the first call. On failure returns null and sets `error`.
const Driver* open_driver(std::string* error);

// The name and number of an error: "CUDA_ERROR_NO_BINARY_FOR_GPU (209)".
std::string describe(const Driver& driver, CUresult result);

// Errors end a stage of a handler, which returns them to XLA (handlers.cc). Their messages begin
// with the name of the library.
struct Failure {
  xla::ffi::ErrorCode code;
  std::string message;
};

[[noreturn]] inline void fail(const std::string& message,
                              xla::ffi::ErrorCode code = xla::ffi::ErrorCode::kInvalidArgument) {
  throw Failure{code, "jax_memeff: " + message};
}

[[noreturn]] inline void fail(const Driver& driver, CUresult result, const std::string& message) {
  fail(message + ": " + describe(driver, result), xla::ffi::ErrorCode::kInternal);
}

// For attributes that this version of the library did not write.
[[noreturn]] inline void fail_malformed(const std::string& message) {
  fail(message +
       " (the program was changed, or another version of jax_memeff exported it: "
       "export it again with the installed version)");
}

}  // namespace memeff::host
