// Compiled kernels and how they are loaded: image -> library (once per process) -> functions (once
// per device).
#pragma once

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "images/driver.h"
#include "images/kernel_description.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// The kernel of one architecture.
struct KernelImage {
  std::string arch;  // "sm_90a", or "compute_80" for PTX
  std::string code;  // fatbin
  KernelDescription description;
};

// A kernel on one device.
struct DeviceKernel {
  const KernelDescription* description = nullptr;
  const Driver* driver = nullptr;
  int multiprocessors = 0;
  bool waits = false;  // waits for the previous kernel of the stream itself (dependent launch)
  std::vector<CUkernel> functions;
};

// The kernels of one custom call, and their functions on the devices of this process.
class KernelTable {
 public:
  // Adds the image of an architecture, "sm_90a" or "compute_80". Each may be added once.
  xla::ffi::Error add(KernelImage image);

  // Loads the images that the devices of this machine can run. Without a driver it does nothing.
  xla::ffi::Error load();

  // The kernel for the current device; prepares it on the device's first call. Thread-safe.
  xla::ffi::ErrorOr<const DeviceKernel*> resolve();

 private:
  struct Cache {
    std::shared_mutex mutex;
    std::map<CUdevice, DeviceKernel> devices;  // append-only: pointers to entries stay valid
  };

  xla::ffi::ErrorOr<DeviceKernel> prepare(const Driver& driver, CUdevice device) const;
  // The image for this capability, else the PTX of the highest capability below it.
  const KernelImage* find(int capability) const;

  std::vector<KernelImage> images_;
  std::unique_ptr<Cache> cache_ = std::make_unique<Cache>();
};

}  // namespace memeff::host
