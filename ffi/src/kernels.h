// Compiled kernels and how they are loaded: image -> library (once per process) -> functions (once
// per device).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace memeff::host {

inline long long ceil_div(long long a, long long b) { return a / b + (a % b > 0); }

// The CTAs of an entry point. Python computes them from the sizes of the call, and this adds what
// depends on the device. `splits` is the number of parts of the keys in a forward, or of CTAs that
// share a KV block in a backward.
struct Grid {
  enum Splits { kNone, kEach, kSome };

  long long ctas;
  Splits splits;    // kEach: of each split; kSome: without splits there are none
  int most_per_sm;  // bounds the CTAs for each SM; 0 for no bound
  int cluster;      // CTAs; it divides `ctas`

  // The number of CTAs; negative if it does not fit 63 bits.
  long long size(long long splits, int multiprocessors) const;
};

struct EntryPoint {
  std::string name;
  int threads;
  int shared_bytes;  // dynamic
  Grid grid;
  int block_mask;  // an array of the call, or -1
  bool takes_maps;
};

// An array that a kernel copies by TMA, and the box of one copy.
struct MapBox {
  int array;  // -1 if the call does not have it
  int rows;
  int columns;
  bool is_scores;  // [batch, head, query, key] instead of [batch, sequence, head, dim]
};

// An array of a feature: an entry of ArrayTable.
struct CapturedArray {
  int array;
  int alignment;  // in bytes
};

// A field of the parameters that a feature fills, with the address of an array or with a number.
struct ParamsField {
  int offset;  // in bytes
  int array;   // -1 for a number
  int32_t number;
};

// The kernel of one architecture.
struct Kernel {
  std::string arch;  // "sm_90a", or "compute_80" for PTX
  int capability;    // that the code is written for: 90
  bool is_ptx;
  std::string code;  // fatbin
  int tile_query;
  int tile_key;
  int alignment;                         // bytes that rows of query, key, ... start at multiples of
  int blocks_per_sm;                     // at least, of the main kernel
  std::vector<EntryPoint> entry_points;  // in launch order
  std::vector<MapBox> maps;              // in the order of that parameter
  std::vector<CapturedArray> captured;   // in the order of ArrayTable
  std::vector<ParamsField> fields;
  std::vector<int> zeroed;  // arrays that are zero when the first entry point begins
};

// A kernel on one device.
struct DeviceKernel {
  const Kernel* kernel = nullptr;
  const Driver* driver = nullptr;
  int multiprocessors = 0;
  bool waits = false;  // waits for the previous kernel of the stream itself (dependent launch)
  std::vector<CUkernel> functions;
};

// The kernels of one custom call, and their functions on the devices of this process.
class KernelTable {
 public:
  void add(Kernel kernel) { kernels_.push_back(std::move(kernel)); }

  // Loads the images that the devices of this machine can run. Without a driver it does nothing.
  void load();

  // The kernel for the current device; prepares it on the device's first call. Thread-safe.
  const DeviceKernel& resolve();

 private:
  struct Cache {
    std::shared_mutex mutex;
    std::map<CUdevice, DeviceKernel> devices;  // append-only: pointers to entries stay valid
  };

  DeviceKernel prepare(const Driver& driver, CUdevice device) const;
  // The kernel for this capability, else the PTX of the highest capability below it.
  const Kernel* find(int capability) const;

  std::vector<Kernel> kernels_;
  std::unique_ptr<Cache> cache_ = std::make_unique<Cache>();
};

}  // namespace memeff::host
