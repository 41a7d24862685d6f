// Chooses the number of splits of the keys of a forward on this device.
#include <algorithm>
#include <climits>

#include "launch/launch.h"

namespace memeff::host {
namespace {

// Costs in units of the time of one KV block: the overhead of a CTA, and the combine kernel.
constexpr double kBlockOverhead = 3;
constexpr double kCombination = 6;

// While most multiprocessors have no block, each of the others reads this many equal shares of the
// memory's bandwidth. With 32 blocks on the 132 multiprocessors of an H100 it was 2.7 shares. With
// faster memory it is fewer, so the constant for rounds with fewer blocks than multiprocessors is
// smaller. For the end of larger rounds, 2.5 fits the times that 144 to 192 blocks take.
constexpr double kSharesIfFew = 1.75;
constexpr double kSharesAtEnd = 2.5;

// Once every multiprocessor has its blocks, more splits only help to fill the last round.
constexpr long long kMostRounds = 4;

long long resident_blocks(const DeviceKernel& kernel) {
  return (long long)kernel.multiprocessors * kernel.description->blocks_per_sm;
}

// From this many rows on, the products of a key tile take as long as its keys.
constexpr int kManyRows = 64;

// Whether the products bound the time: several large tiles of rows read the same keys, most of them
// from L2. Otherwise the memory does, and the blocks of the whole device share it.
bool bound_by_products(const KernelDescription& description, long long blocks) {
  long long const key_heads = (long long)description.shape.batch * description.shape.key_heads;
  return description.tile_query >= kManyRows && blocks > key_heads;
}

// The time of the last round, which has `blocks` blocks of `key_tiles` KV blocks each. If the
// products bound the time, the multiprocessor with the most blocks determines it. Otherwise all
// multiprocessors share the memory equally until those with fewer blocks have finished. The others
// then read faster, but no longer saturate the memory.
double time_of_last_round(long long blocks, double key_tiles, bool by_products,
                          long long multiprocessors) {
  long long const everywhere = blocks / multiprocessors;
  long long const rest = blocks % multiprocessors;
  double const most = double(everywhere + (rest > 0));
  if (by_products) return most * (key_tiles + kBlockOverhead);
  double const shares = everywhere == 0 ? kSharesIfFew : kSharesAtEnd;
  double const of_rest = rest == 0 ? 0 : std::max(double(rest) / multiprocessors, 1 / shares);
  return most * kBlockOverhead + (everywhere + of_rest) * key_tiles;
}

// The time of all blocks. Blocks that run together on one multiprocessor share its time.
double time_of(long long blocks, double key_tiles, bool by_products, const DeviceKernel& kernel) {
  long long const rest = blocks % resident_blocks(kernel);
  double const share = (key_tiles + kBlockOverhead) / kernel.multiprocessors;
  return (blocks - rest) * share +
         time_of_last_round(rest, key_tiles, by_products, kernel.multiprocessors);
}

// The number of splits, at most `most`, with which `blocks` blocks of `key_tiles` KV blocks each
// finish first.
long long fastest_splits(long long blocks, long long key_tiles, long long most,
                         const DeviceKernel& kernel) {
  long long best = 1;
  bool const by_products = bound_by_products(*kernel.description, blocks);
  double least = time_of(blocks, key_tiles, by_products, kernel);
  long long const useful = std::max(kMostRounds, resident_blocks(kernel) / std::max(blocks, 1ll));
  for (long long splits = 2; splits <= std::min(most, useful); ++splits) {
    double const time =
        time_of(blocks * splits, ceil_div(key_tiles, splits), by_products, kernel) + kCombination;
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
                        std::min(partial_out->sizes[0], kMostSplits), kernel);
}

}  // namespace memeff::host
