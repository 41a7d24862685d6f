// Chooses the number of splits of the keys of a forward on this device.
#include <algorithm>
#include <climits>

#include "launch/launch.h"

namespace memeff::host {
namespace {

// Costs in units of the time of one KV block: the overhead of a CTA, and the combine kernel.
constexpr double kBlockOverhead = 3;
constexpr double kCombination = 6;

// Once every multiprocessor has its blocks, more splits only help to fill the last round.
constexpr long long kRounds = 4;

long long resident_blocks(const DeviceKernel& kernel) {
  return (long long)kernel.multiprocessors * kernel.description->blocks_per_sm;
}

// A model of the run time. Blocks that run together on one multiprocessor share its time. The last
// round may not fill the device; it takes at least as long as one block per multiprocessor.
double time_of(long long blocks, double block_time, const DeviceKernel& kernel) {
  long long const resident = resident_blocks(kernel);
  double const share = block_time / kernel.multiprocessors;
  long long const rest = blocks % resident;
  double const last_round = rest == 0 ? 0 : std::max(block_time, rest * share);
  return static_cast<double>(blocks - rest) * share + last_round;
}

// The number of splits, at most `most`, with which `blocks` blocks of `key_tiles` KV blocks each
// finish first.
long long fastest_splits(long long blocks, long long key_tiles, long long most,
                         const DeviceKernel& kernel) {
  long long best = 1;
  double least = time_of(blocks, key_tiles + kBlockOverhead, kernel);
  long long const useful = std::max(kRounds, resident_blocks(kernel) / std::max(blocks, 1ll));
  for (long long splits = 2; splits <= std::min(most, useful); ++splits) {
    double const block_time = ceil_div(key_tiles, splits) + kBlockOverhead;
    double const time = time_of(blocks * splits, block_time, kernel) + kCombination;
    if (time < least) {
      best = splits;
      least = time;
    }
  }
  return best;
}

}  // namespace

long long choose_splits(const DeviceKernel& kernel, Buffers& buffers) {
  const ArrayType* const partial_out = buffers.type("partial_out");
  if (partial_out == nullptr || partial_out->rank == 0) return 1;
  const KernelDescription& description = *kernel.description;
  long long const blocks =
      description.entry_points[0].grid.blocks(LaunchDims(), kernel.multiprocessors);
  if (blocks < 0 || blocks > INT_MAX) return 1;
  return fastest_splits(blocks, ceil_div(description.shape.key_length, description.tile_key),
                        std::min(partial_out->sizes[0], 1ll << 20), kernel);
}

}  // namespace memeff::host
