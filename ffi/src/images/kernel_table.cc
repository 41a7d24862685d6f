#include "images/kernel_table.h"

#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "attributes/text.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// Loads code once per process. Hazard: libraries are never unloaded. Executables come and go and
// share them, and no lock makes it safe to unload a library while another thread launches from it.
ffi::ErrorOr<CUlibrary> load_library(const Driver& driver, const std::string& code) {
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
    return ffi::Unexpected(
        failure(ffi::ErrorCode::kInternal,
                "the driver refused a compiled kernel: " + describe(driver, result) + advice));
  }
  libraries.emplace(code, library);
  return library;
}

// "sm_90a" -> 90, "compute_80" -> 80
int capability_of(const std::string& arch) { return std::atoi(arch.c_str() + arch.find('_') + 1); }

// The first capability with programmatic dependent launch. Hazard: in code for earlier ones
// wait_for_kernel_before() does nothing, so such kernels must not be launched with it.
constexpr int kDependentLaunch = 90;

bool is_ptx(const std::string& arch) { return arch.rfind("compute_", 0) == 0; }

ffi::ErrorOr<int> capability_of(const Driver& driver, CUdevice device) {
  int major = 0;
  int minor = 0;
  CUresult result =
      driver.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  if (result == CUDA_SUCCESS) {
    result = driver.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  }
  if (result != CUDA_SUCCESS) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kInternal,
                                   "the compute capability of device " + std::to_string(device) +
                                       " could not be read: " + describe(driver, result)));
  }
  return 10 * major + minor;
}

ffi::ErrorOr<const Driver*> driver_or_error() {
  std::string error;
  const Driver* driver = open_driver(&error);
  if (driver == nullptr) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kFailedPrecondition, error));
  }
  return driver;
}

}  // namespace

ffi::Error KernelTable::add(KernelImage image) {
  std::string_view digits = image.arch;
  if (size_t const underscore = digits.find('_'); underscore != std::string_view::npos) {
    digits.remove_prefix(underscore + 1);
  }
  bool const is_real = image.arch.rfind("sm_", 0) == 0;
  if (is_real && !digits.empty() && (digits.back() == 'a' || digits.back() == 'f')) {
    digits.remove_suffix(1);
  }
  if ((!is_real && !is_ptx(image.arch)) || !parse_number(digits, 10, 999)) {
    return malformed("the attribute kernels has the architecture " + quoted(image.arch) +
                     ", expected one like 'sm_90a' or 'compute_80'");
  }
  for (const KernelImage& other : images_) {
    if (other.arch == image.arch) {
      return malformed("the attribute kernels has " + image.arch + " twice");
    }
  }
  images_.push_back(std::move(image));
  return ffi::Error::Success();
}

ffi::Error KernelTable::load() {
  std::string without_driver;
  const Driver* driver = open_driver(&without_driver);
  // XLA may compile for a GPU on a machine without one, so this is no error. If the program runs on
  // such a machine, the initialize stage reports the missing driver.
  if (driver == nullptr) return ffi::Error::Success();
  int devices = 0;
  if (CUresult result = driver->device_count(&devices); result != CUDA_SUCCESS) {
    return failure(ffi::ErrorCode::kInternal,
                   "the devices could not be counted: " + describe(*driver, result));
  }
  for (int device = 0; device < devices; ++device) {
    auto capability = capability_of(*driver, device);
    if (!capability.has_value()) return capability.error();
    if (const KernelImage* image = find(*capability); image != nullptr) {
      auto library = load_library(*driver, image->code);
      if (!library.has_value()) return library.error();
    }
  }
  return ffi::Error::Success();
}

const KernelImage* KernelTable::find(int capability) const {
  const KernelImage* ptx = nullptr;
  for (const KernelImage& image : images_) {
    int const written_for = capability_of(image.arch);
    if (!is_ptx(image.arch)) {
      if (written_for == capability) return &image;
    } else if (written_for <= capability &&
               (ptx == nullptr || written_for > capability_of(ptx->arch))) {
      ptx = &image;
    }
  }
  return ptx;
}

ffi::ErrorOr<const DeviceKernel*> KernelTable::resolve() {
  auto driver = driver_or_error();
  if (!driver.has_value()) return ffi::Unexpected(driver.error());
  CUdevice device = 0;
  if (CUresult result = (*driver)->current_device(&device); result != CUDA_SUCCESS) {
    return ffi::Unexpected(
        failure(ffi::ErrorCode::kInternal,
                "no device is current on this thread: " + describe(**driver, result)));
  }
  {
    std::shared_lock<std::shared_mutex> lock(cache_->mutex);
    if (auto found = cache_->devices.find(device); found != cache_->devices.end()) {
      return &found->second;
    }
  }
  std::unique_lock<std::shared_mutex> lock(cache_->mutex);
  if (auto found = cache_->devices.find(device); found != cache_->devices.end()) {
    return &found->second;
  }
  auto kernel = prepare(**driver, device);
  if (!kernel.has_value()) return ffi::Unexpected(kernel.error());
  return &cache_->devices.emplace(device, std::move(*kernel)).first->second;
}

ffi::ErrorOr<DeviceKernel> KernelTable::prepare(const Driver& driver, CUdevice device) const {
  auto capability = capability_of(driver, device);
  if (!capability.has_value()) return ffi::Unexpected(capability.error());
  DeviceKernel kernel;
  kernel.driver = &driver;
  const KernelImage* const image = find(*capability);
  if (image == nullptr) {
    std::string archs;
    for (const KernelImage& image : images_) archs += (archs.empty() ? "" : ", ") + image.arch;
    return ffi::Unexpected(failure(
        ffi::ErrorCode::kFailedPrecondition,
        "this program was compiled for " + archs + " and runs on a device of compute capability " +
            std::to_string(*capability / 10) + "." + std::to_string(*capability % 10) +
            "; set JAX_MEMEFF_ARCHS to all architectures it should run on and lower it again"));
  }
  kernel.description = &image->description;
  kernel.waits = capability_of(image->arch) >= kDependentLaunch;
  if (CUresult result = driver.device_attribute(&kernel.multiprocessors,
                                                CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
      result != CUDA_SUCCESS) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kInternal,
                                   "the multiprocessors of device " + std::to_string(device) +
                                       " could not be counted: " + describe(driver, result)));
  }
  auto library = load_library(driver, image->code);
  if (!library.has_value()) return ffi::Unexpected(library.error());
  for (const EntryPoint& entry : image->description.entry_points) {
    CUkernel function = nullptr;
    CUresult result = driver.library_kernel(&function, *library, entry.name.c_str());
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
      return ffi::Unexpected(failure(ffi::ErrorCode::kInternal,
                                     "kernel " + entry.name + " could not be prepared for device " +
                                         std::to_string(device) + ": " + describe(driver, result)));
    }
    kernel.functions.push_back(function);
  }
  return kernel;
}

}  // namespace memeff::host
