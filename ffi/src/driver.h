// The CUDA driver, opened at run time, so that the module imports on machines without a GPU.
#pragma once

#include <cuda.h>

#include <string>

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

}  // namespace memeff::host
