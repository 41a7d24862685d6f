#include "kernel.h"

#include <climits>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// Libraries of this process by the bytes of their image. Append-only: executables share libraries
// and come and go, and unloading one while another thread launches from it cannot be made safe.
ffi::ErrorOr<CUlibrary> load_library(const Driver& driver, const std::string& image) {
  static std::mutex mutex;
  static std::unordered_map<std::string, CUlibrary> libraries;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto found = libraries.find(image); found != libraries.end()) return found->second;
  CUlibrary library = nullptr;
  CUresult const result =
      driver.library_load(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != CUDA_SUCCESS) {
    const char* advice = result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                             ? "; it is PTX of an NVRTC that is newer than the driver"
                             : "";
    return ffi::Unexpected(
        failure(ffi::ErrorCode::kInternal,
                "the driver refused a compiled kernel: " + describe(driver, result) + advice));
  }
  libraries.emplace(image, library);
  return library;
}

// "sm_90a" -> 90, "compute_80" -> 80
int capability_of(const std::string& arch) { return std::atoi(arch.c_str() + arch.find('_') + 1); }

// The first capability with programmatic dependent launch, for which wait_for_kernel_before() is
// more than nothing.
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

std::optional<Grid> grid_of(const std::string& name) {
  if (name == "queries") return Grid::kQueries;
  if (name == "keys") return Grid::kKeys;
  if (name == "q_splits") return Grid::kQSplits;
  if (name == "bias") return Grid::kBias;
  if (name == "bias_squares") return Grid::kBiasSquares;
  if (name == "operands") return Grid::kOperands;
  return std::nullopt;
}

ffi::ErrorOr<const Driver*> driver_or_error() {
  std::string error;
  const Driver* driver = open_driver(&error);
  if (driver == nullptr) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kFailedPrecondition, error));
  }
  return driver;
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> words;
  std::istringstream stream{std::string(text)};
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

}  // namespace

ffi::Error failure(ffi::ErrorCode code, const std::string& message) {
  return ffi::Error(code, "jax_memeff: " + message);
}

ffi::ErrorOr<KernelImage> KernelImage::decode(std::string_view arch,
                                              const ffi::Dictionary& attributes) {
  auto image = attributes.get<std::string_view>("image");
  auto entry_points = attributes.get<std::string_view>("entry_points");
  auto grids = attributes.get<std::string_view>("grids");
  auto threads = attributes.get<ffi::Span<const int32_t>>("threads");
  auto shared_bytes = attributes.get<ffi::Span<const int32_t>>("shared_bytes");
  auto block_masks = attributes.get<std::string_view>("block_masks");
  auto tile = attributes.get<ffi::Span<const int32_t>>("tile");
  auto alignment = attributes.get<int32_t>("alignment");
  auto blocks_per_sm = attributes.get<int32_t>("blocks_per_sm");
  auto pack_heads = attributes.get<bool>("pack_heads");
  auto persistent = attributes.get<bool>("persistent");
  auto tensor_maps = attributes.get<std::string_view>("tensor_maps");
  auto boxes = attributes.get<ffi::Span<const int32_t>>("boxes");
  if (!image.has_value() || !entry_points.has_value() || !grids.has_value() ||
      !threads.has_value() || !shared_bytes.has_value() || !block_masks.has_value() ||
      !tile.has_value() || !alignment.has_value() || !blocks_per_sm.has_value() ||
      !pack_heads.has_value() || !persistent.has_value() || !tensor_maps.has_value() ||
      !boxes.has_value()) {
    return ffi::Unexpected(
        failure(ffi::ErrorCode::kInvalidArgument,
                "a kernel table entry needs image, entry_points, grids, "
                "threads, shared_bytes, block_masks, tile, alignment, blocks_per_sm, "
                "pack_heads, persistent, tensor_maps and boxes (was the "
                "program exported by another version?)"));
  }
  KernelImage kernel;
  kernel.arch = std::string(arch);
  kernel.image = std::string(*image);
  kernel.entry_points = split(*entry_points);
  for (const std::string& name : split(*grids)) {
    auto const grid = grid_of(name);
    if (!grid) {
      return ffi::Unexpected(failure(ffi::ErrorCode::kInvalidArgument,
                                     "a kernel table entry has the unknown grid " + name +
                                         " (was the program exported by another version?)"));
    }
    kernel.grids.push_back(*grid);
  }
  kernel.threads.assign(threads->begin(), threads->end());
  kernel.shared_bytes.assign(shared_bytes->begin(), shared_bytes->end());
  kernel.block_masks = split(*block_masks);
  std::vector<std::string> const maps = split(*tensor_maps);
  if (kernel.threads.size() != kernel.entry_points.size() ||
      kernel.grids.size() != kernel.entry_points.size() ||
      kernel.shared_bytes.size() != kernel.entry_points.size() ||
      kernel.block_masks.size() != kernel.entry_points.size() || tile->size() != 2 ||
      boxes->size() != 2 * maps.size()) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kInvalidArgument,
                                   "a kernel table entry has " +
                                       std::to_string(kernel.entry_points.size()) +
                                       " entry points and " + std::to_string(maps.size()) +
                                       " tensor maps but not as many launch constants"));
  }
  kernel.tile_query = (*tile)[0];
  kernel.tile_key = (*tile)[1];
  kernel.blocks_per_sm = *blocks_per_sm;
  kernel.pack_heads = *pack_heads;
  kernel.alignment = *alignment;
  kernel.persistent = *persistent;
  for (size_t i = 0; i < maps.size(); ++i) {
    kernel.maps.push_back({maps[i], (*boxes)[2 * i], (*boxes)[2 * i + 1]});
  }
  return kernel;
}

ffi::ErrorOr<KernelTable> KernelTable::decode(const ffi::Dictionary& kernels) {
  KernelTable table;
  // The dictionary cannot be enumerated with its names through the oldest supported headers, so the
  // table carries them.
  auto archs = kernels.get<std::string_view>("archs");
  if (!archs.has_value()) return ffi::Unexpected(archs.error());
  for (const std::string& arch : split(*archs)) {
    auto entry = kernels.get<ffi::Dictionary>(arch);
    if (!entry.has_value()) return ffi::Unexpected(entry.error());
    auto image = KernelImage::decode(arch, *entry);
    if (!image.has_value()) return ffi::Unexpected(image.error());
    table.images_.push_back(std::move(*image));
  }
  return table;
}

ffi::Error KernelTable::load() {
  std::string without_driver;
  const Driver* driver = open_driver(&without_driver);
  // XLA compiles for a GPU on machines that have none, too. Should the program run, initialize says
  // what is missing.
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
      auto library = load_library(*driver, image->image);
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
  kernel.image = find(*capability);
  if (kernel.image == nullptr) {
    std::string archs;
    for (const KernelImage& image : images_) archs += (archs.empty() ? "" : ", ") + image.arch;
    return ffi::Unexpected(failure(
        ffi::ErrorCode::kFailedPrecondition,
        "this program was compiled for " + archs + " and runs on a device of compute capability " +
            std::to_string(*capability / 10) + "." + std::to_string(*capability % 10) +
            "; set JAX_MEMEFF_ARCHS to all architectures it should run on and lower it again"));
  }
  kernel.waits = capability_of(kernel.image->arch) >= kDependentLaunch;
  if (CUresult result = driver.device_attribute(&kernel.multiprocessors,
                                                CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
      result != CUDA_SUCCESS) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kInternal,
                                   "the multiprocessors of device " + std::to_string(device) +
                                       " could not be counted: " + describe(driver, result)));
  }
  auto library = load_library(driver, kernel.image->image);
  if (!library.has_value()) return ffi::Unexpected(library.error());
  for (size_t i = 0; i < kernel.image->entry_points.size(); ++i) {
    const std::string& name = kernel.image->entry_points[i];
    CUkernel function = nullptr;
    CUresult result = driver.library_kernel(&function, *library, name.c_str());
    if (result == CUDA_SUCCESS) {
      result = driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           kernel.image->shared_bytes[i], function, device);
    }
    // The driver would load the code at the first launch and wait for all work of the device then.
    // Where that work is a collective, it waits for another device, and that for its launches.
    CUfunction loaded = nullptr;
    if (result == CUDA_SUCCESS) result = driver.kernel_function(&loaded, function);
    if (result == CUDA_SUCCESS) result = driver.load_function(loaded);
    if (result != CUDA_SUCCESS) {
      return ffi::Unexpected(failure(ffi::ErrorCode::kInternal,
                                     "kernel " + name + " could not be prepared for device " +
                                         std::to_string(device) + ": " + describe(driver, result)));
    }
    kernel.functions.push_back(function);
  }
  return kernel;
}

ffi::Error launch(const DeviceKernel& kernel, int index, long long blocks, CUstream stream,
                  const void* params, const void* maps) {
  if (blocks == 0) return ffi::Error::Success();
  const std::string& name = kernel.image->entry_points[index];
  if (blocks > INT_MAX) {
    return failure(ffi::ErrorCode::kInvalidArgument,
                   name + " would need " + std::to_string(blocks) +
                       " blocks and a grid has at most 2147483647: split the batch");
  }
  void* arguments[] = {const_cast<void*>(params), const_cast<void*>(maps)};
  CUlaunchAttribute dependent = {};
  dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  dependent.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(blocks);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kernel.image->threads[index]);
  config.sharedMemBytes = static_cast<unsigned>(kernel.image->shared_bytes[index]);
  config.hStream = stream;
  config.attrs = &dependent;
  config.numAttrs = kernel.waits ? 1 : 0;
  CUresult const result = kernel.driver->launch(
      &config, reinterpret_cast<CUfunction>(kernel.functions[index]), arguments, nullptr);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kInternal,
                 "launch of " + name + " failed: " + describe(*kernel.driver, result));
}

ffi::Error fill_zero(const DeviceKernel& kernel, void* data, size_t bytes, CUstream stream) {
  CUresult const result =
      kernel.driver->memset_async(reinterpret_cast<CUdeviceptr>(data), 0, bytes, stream);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kInternal,
                 "a workspace could not be zeroed: " + describe(*kernel.driver, result));
}

}  // namespace memeff::host
