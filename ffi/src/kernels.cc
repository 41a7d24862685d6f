#include "kernels.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// Loads code once per process. Hazard: libraries are never unloaded. Executables come and go and
// share them, and no lock makes it safe to unload a library while another thread launches from it.
CUlibrary load_library(const Driver& driver, const std::string& code) {
  static std::mutex mutex;
  static std::unordered_map<std::string, CUlibrary> libraries;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto found = libraries.find(code); found != libraries.end()) return found->second;
  CUlibrary library = nullptr;
  CUresult const result =
      driver.library_load(&library, code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != CUDA_SUCCESS) {
    const char* advice = result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                             ? "; it is PTX of an NVRTC that is newer than the driver"
                             : "";
    fail("the driver refused a compiled kernel: " + describe(driver, result) + advice,
         ffi::ErrorCode::kInternal);
  }
  libraries.emplace(code, library);
  return library;
}

// The first capability with programmatic dependent launch. Hazard: in code for earlier ones
// wait_for_kernel_before() does nothing, so such kernels must not be launched with it.
constexpr int kDependentLaunch = 90;

int attribute_of(const Driver& driver, CUdevice device, CUdevice_attribute attribute,
                 const char* name) {
  int value = 0;
  if (CUresult result = driver.device_attribute(&value, attribute, device);
      result != CUDA_SUCCESS) {
    fail(
        driver, result,
        std::string("the ") + name + " of device " + std::to_string(device) + " could not be read");
  }
  return value;
}

int capability_of(const Driver& driver, CUdevice device) {
  constexpr const char* kName = "compute capability";
  return 10 * attribute_of(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kName) +
         attribute_of(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, kName);
}

}  // namespace

long long Grid::size(long long split_count, int multiprocessors) const {
  if (splits == kSome && split_count <= 1) return 0;
  long long size = ctas;
  if (splits == kEach && __builtin_mul_overflow(ctas, split_count, &size)) return -1;
  if (most_per_sm == 0) return size;
  long long const clusters = static_cast<long long>(most_per_sm) * multiprocessors / cluster;
  return std::min(size, std::max(clusters, 1ll) * cluster);
}

void KernelTable::load() {
  std::string without_driver;
  const Driver* driver = open_driver(&without_driver);
  // XLA may compile for a GPU on a machine without one, so this is no error. If the program runs on
  // such a machine, the initialize stage reports the missing driver.
  if (driver == nullptr) return;
  int devices = 0;
  if (CUresult result = driver->device_count(&devices); result != CUDA_SUCCESS) {
    fail(*driver, result, "the devices could not be counted");
  }
  for (int device = 0; device < devices; ++device) {
    const Kernel* kernel = find(capability_of(*driver, device));
    if (kernel != nullptr) load_library(*driver, kernel->code);
  }
}

const Kernel* KernelTable::find(int capability) const {
  const Kernel* ptx = nullptr;
  for (const Kernel& kernel : kernels_) {
    if (!kernel.is_ptx) {
      if (kernel.capability == capability) return &kernel;
    } else if (kernel.capability <= capability &&
               (ptx == nullptr || kernel.capability > ptx->capability)) {
      ptx = &kernel;
    }
  }
  return ptx;
}

const DeviceKernel& KernelTable::resolve() {
  std::string error;
  const Driver* driver = open_driver(&error);
  if (driver == nullptr) fail(error, ffi::ErrorCode::kFailedPrecondition);
  CUdevice device = 0;
  if (CUresult result = driver->current_device(&device); result != CUDA_SUCCESS) {
    fail(*driver, result, "no device is current on this thread");
  }
  {
    std::shared_lock<std::shared_mutex> lock(cache_->mutex);
    if (auto found = cache_->devices.find(device); found != cache_->devices.end()) {
      return found->second;
    }
  }
  std::unique_lock<std::shared_mutex> lock(cache_->mutex);
  if (auto found = cache_->devices.find(device); found != cache_->devices.end()) {
    return found->second;
  }
  return cache_->devices.emplace(device, prepare(*driver, device)).first->second;
}

DeviceKernel KernelTable::prepare(const Driver& driver, CUdevice device) const {
  int const capability = capability_of(driver, device);
  DeviceKernel kernel;
  kernel.driver = &driver;
  kernel.kernel = find(capability);
  if (kernel.kernel == nullptr) {
    std::string archs;
    for (const Kernel& other : kernels_) archs += (archs.empty() ? "" : ", ") + other.arch;
    fail("this program was compiled for " + archs + " and runs on a device of compute capability " +
             std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
             "; set JAX_MEMEFF_ARCHS to all architectures it should run on and lower it again",
         ffi::ErrorCode::kFailedPrecondition);
  }
  kernel.waits = kernel.kernel->capability >= kDependentLaunch;
  kernel.multiprocessors = attribute_of(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                        "number of multiprocessors");
  CUlibrary const library = load_library(driver, kernel.kernel->code);
  for (const EntryPoint& entry : kernel.kernel->entry_points) {
    CUkernel function = nullptr;
    CUresult result = driver.library_kernel(&function, library, entry.name.c_str());
    if (result == CUDA_SUCCESS) {
      result = driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           entry.shared_bytes, function, device);
    }
    // Deadlock hazard: load the code now. The driver would otherwise load it at the first launch
    // and wait there for all work of the device. If that work is a collective, it waits for the
    // launches of another device, which may wait for this one.
    CUfunction loaded = nullptr;
    if (result == CUDA_SUCCESS) result = driver.kernel_function(&loaded, function);
    if (result == CUDA_SUCCESS) result = driver.load_function(loaded);
    if (result != CUDA_SUCCESS) {
      fail(driver, result,
           "kernel " + entry.name + " could not be prepared for device " + std::to_string(device));
    }
    kernel.functions.push_back(function);
  }
  return kernel;
}

}  // namespace memeff::host
