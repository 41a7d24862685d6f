#include "driver.h"

#include <dlfcn.h>

#include <mutex>

namespace memeff::host {
namespace {

template <class Function>
bool find(void* library, const char* name, Function* function, std::string* error) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return true;
  *error = std::string("libcuda.so.1 has no ") + name +
           ": the kernels need an NVIDIA driver of CUDA 12.4 or later";
  return false;
}

bool open(Driver* driver, std::string* error) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    *error = std::string("the NVIDIA driver could not be opened: ") + dlerror();
    return false;
  }
  return find(library, "cuInit", &driver->init, error) &&
         find(library, "cuGetErrorName", &driver->get_error_name, error) &&
         find(library, "cuDeviceGetCount", &driver->device_count, error) &&
         find(library, "cuDeviceGetAttribute", &driver->device_attribute, error) &&
         find(library, "cuCtxGetDevice", &driver->current_device, error) &&
         find(library, "cuLibraryLoadData", &driver->library_load, error) &&
         find(library, "cuLibraryGetKernel", &driver->library_kernel, error) &&
         find(library, "cuKernelSetAttribute", &driver->kernel_set_attribute, error) &&
         find(library, "cuKernelGetFunction", &driver->kernel_function, error) &&
         find(library, "cuFuncLoad", &driver->load_function, error) &&
         find(library, "cuLaunchKernelEx", &driver->launch, error) &&
         find(library, "cuMemsetD8Async", &driver->memset_async, error) &&
         find(library, "cuTensorMapEncodeTiled", &driver->encode_tensor_map, error);
}

}  // namespace

const Driver* open_driver(std::string* error) {
  static std::mutex mutex;
  static Driver driver;
  static bool opened = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (opened) return &driver;
  if (!open(&driver, error)) return nullptr;
  if (CUresult result = driver.init(0); result != CUDA_SUCCESS) {
    *error = "cuInit failed: " + describe(driver, result);
    return nullptr;
  }
  opened = true;
  return &driver;
}

std::string describe(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  if (driver.get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown";
  return std::string(name) + " (" + std::to_string(static_cast<int>(result)) + ")";
}

}  // namespace memeff::host
