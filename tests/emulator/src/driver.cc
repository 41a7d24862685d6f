// The part of libcuda.so.1 that the host library uses. An image is the path of a library that g++
// made, streams are ignored, and all calls are synchronous.
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "machine.h"

namespace {

// The message of the last failure, which cuGetErrorName returns.
std::string& message() {
  thread_local std::string text;
  return text;
}

CUresult failure(CUresult result, std::string const& text) {
  message() = text;
  return result;
}

int shared_limit() {
  int const capability = emulator::settings().capability;
  int const kilobytes = capability == 80 ? 163 : capability < 90 ? 99 : capability < 120 ? 227 : 99;
  return kilobytes << 10;
}

struct Kernel {
  std::string name;
  void (*call)(void**);
  unsigned cluster;  // blocks
};

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult, char const** name) {
  *name = message().c_str();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  emulator::Settings const& settings = emulator::settings();
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = settings.capability / 10;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = settings.capability % 10;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = settings.multiprocessors;
      return CUDA_SUCCESS;
    default:
      return failure(CUDA_ERROR_INVALID_VALUE, "an attribute that is not emulated");
  }
}

CUresult cuLibraryLoadData(CUlibrary* library, void const* code, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  void* const opened = dlopen(static_cast<char const*>(code), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) return failure(CUDA_ERROR_INVALID_IMAGE, dlerror());
  *library = static_cast<CUlibrary>(opened);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, char const* name) {
  void* const symbol = dlsym(library, (std::string("emulated_") + name).c_str());
  if (symbol == nullptr) return failure(CUDA_ERROR_NOT_FOUND, dlerror());
  auto* const cluster =
      reinterpret_cast<unsigned (*)()>(dlsym(library, (std::string("cluster_of_") + name).c_str()));
  auto* const found = new Kernel{name, reinterpret_cast<void (*)(void**)>(symbol),
                                 cluster == nullptr ? 1 : cluster()};
  *kernel = reinterpret_cast<CUkernel>(found);
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute, int bytes, CUkernel, CUdevice) {
  if (bytes <= shared_limit()) return CUDA_SUCCESS;
  return failure(CUDA_ERROR_INVALID_VALUE, std::to_string(bytes) + " bytes of shared memory");
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(CUlaunchConfig const* config, CUfunction function, void** arguments,
                          void**) {
  Kernel const& kernel = *reinterpret_cast<Kernel const*>(function);
  std::string const error =
      emulator::run_grid(kernel.name, kernel.call, arguments, config->gridDimX, kernel.cluster,
                         config->blockDimX, config->sharedMemBytes);
  return error.empty() ? CUDA_SUCCESS : failure(CUDA_ERROR_LAUNCH_FAILED, error);
}

CUresult cuMemsetD8Async(CUdeviceptr data, unsigned char value, size_t bytes, CUstream) {
  std::memset(reinterpret_cast<void*>(data), value, bytes);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* encoded, CUtensorMapDataType type, cuuint32_t rank,
                                void* data, cuuint64_t const* sizes, cuuint64_t const* strides,
                                cuuint32_t const* box, cuuint32_t const*, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  emulator::TensorMap map = {};
  map.magic = emulator::TensorMap::kMagic;
  map.data = static_cast<char*>(data);
  map.element_bytes = 2;
  map.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;
  bool valid = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 && rank == 4 &&
               (swizzle == CU_TENSOR_MAP_SWIZZLE_128B || swizzle == CU_TENSOR_MAP_SWIZZLE_64B) &&
               reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
               box[0] * map.element_bytes <= map.swizzle_bytes && box[2] == 1 && box[3] == 1;
  for (int dim = 0; dim < 4; ++dim) {
    valid = valid && sizes[dim] > 0 && sizes[dim] <= 1ull << 32 && box[dim] > 0 && box[dim] <= 256;
    map.sizes[dim] = sizes[dim];
    map.box[dim] = uint16_t(box[dim]);
  }
  for (int dim = 0; dim < 3; ++dim) {
    valid = valid && strides[dim] % 16 == 0 && strides[dim] < 1ull << 40;
    map.strides[dim] = strides[dim];
  }
  if (!valid) return failure(CUDA_ERROR_INVALID_VALUE, "a tensor map that is no map");
  std::memcpy(encoded, &map, sizeof(map));
  return CUDA_SUCCESS;
}

void emulator_configure(int capability, int multiprocessors, unsigned long long seed) {
  emulator::settings() = {capability, multiprocessors, seed};
}

}  // extern "C"
