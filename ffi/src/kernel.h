// A compiled kernel and its way onto devices: image -> library (once) -> functions (once a device).
#pragma once

#include <map>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// A tensor that a kernel moves through the copy engine, and the box that one copy moves.
struct MapBox {
  std::string name;
  int rows;
  int columns;
};

// What the blocks of an entry point are tiles of: EntryPoint of codegen/spec.py.
enum class Grid { kQueries, kKeys, kQSplits, kBias, kBiasSquares, kOperands };

// What the code generator says of one architecture's kernel; an entry of the custom call's table.
struct KernelImage {
  std::string arch;                       // "sm_90a", or "compute_80" for PTX
  std::string image;                      // fatbin
  std::vector<std::string> entry_points;  // in launch order
  std::vector<Grid> grids;                // of each entry point
  std::vector<int> threads;               // of each entry point
  std::vector<int> shared_bytes;          // dynamic, of each entry point
  std::vector<std::string> block_masks;   // the buffer of each entry point, or a name without one
  int tile_query = 0;
  int tile_key = 0;
  bool persistent = false;   // the grid is no larger than the GPU, and its blocks share the tiles
  std::vector<MapBox> maps;  // in the order of that parameter
  int blocks_per_sm = 0;     // of the main kernel, at least
  bool pack_heads = false;   // see layout/packed_rows.cuh
  int alignment = 0;         // bytes that rows of all tensors are multiples of

  static xla::ffi::ErrorOr<KernelImage> decode(std::string_view arch,
                                               const xla::ffi::Dictionary& attributes);
};

// A kernel on one device.
struct DeviceKernel {
  const KernelImage* image = nullptr;
  const Driver* driver = nullptr;
  int multiprocessors = 0;
  bool waits = false;  // itself for the kernel before it, ours or not
  std::vector<CUkernel> functions;
};

// The table of one custom call, and what became of it on the devices of this process.
class KernelTable {
 public:
  static xla::ffi::ErrorOr<KernelTable> decode(const xla::ffi::Dictionary& kernels);

  // Loads the images that a device of this machine can run; without a driver, none.
  xla::ffi::Error load();

  // The kernel for the current device; prepares it on the device's first call. Thread-safe.
  xla::ffi::ErrorOr<const DeviceKernel*> resolve();

 private:
  struct Cache {
    std::shared_mutex mutex;
    std::map<CUdevice, DeviceKernel> devices;  // append-only: pointers to entries stay valid
  };

  xla::ffi::ErrorOr<DeviceKernel> prepare(const Driver& driver, CUdevice device) const;
  // The image for this capability, else the PTX of the highest one below it.
  const KernelImage* find(int capability) const;

  std::vector<KernelImage> images_;
  std::unique_ptr<Cache> cache_ = std::make_unique<Cache>();
};

// Launches entry point `index` on a one-dimensional grid, with pointers to its parameters and to
// its tensor maps, which one that has no such parameter leaves alone; an empty grid is no launch.
xla::ffi::Error launch(const DeviceKernel& kernel, int index, long long blocks, CUstream stream,
                       const void* params, const void* maps = nullptr);

xla::ffi::Error fill_zero(const DeviceKernel& kernel, void* data, size_t bytes, CUstream stream);

xla::ffi::Error failure(xla::ffi::ErrorCode code, const std::string& message);

}  // namespace memeff::host
