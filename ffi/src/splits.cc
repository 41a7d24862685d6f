// How many CTAs divide the keys of a forward, or share a KV block of a backward, on this device.
#include <algorithm>
#include <climits>
#include <numeric>

#include "launch.h"

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
  return (long long)kernel.multiprocessors * kernel.kernel->blocks_per_sm;
}

// From this many rows on, the products of a key tile take as long as its keys.
constexpr int kManyRows = 64;

// Whether the products bound the time: several large tiles of rows read the same keys, most of them
// from L2. Otherwise the memory does, and the blocks of the whole device share it.
bool bound_by_products(const ProblemShape& shape, const DeviceKernel& kernel, long long blocks) {
  long long const key_heads = (long long)shape.batch * shape.key_heads;
  return kernel.kernel->tile_query >= kManyRows && blocks > key_heads;
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
long long fastest_splits(long long blocks, long long key_tiles, long long most, bool by_products,
                         const DeviceKernel& kernel) {
  long long best = 1;
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

// The most CTAs for each SM that divide Q blocks: as many as codegen/kernels/sm90/backward.py asks
// for. Under a causal mask the first KV block has twice the mean work.
int most_ctas_per_sm(MaskParams const& mask) {
  bool const is_left_bounded = std::min(mask.top_left_left, mask.bottom_right_left) < kUnbounded;
  bool const is_right_bounded = std::min(mask.top_left_right, mask.bottom_right_right) < kUnbounded;
  return is_right_bounded && !is_left_bounded ? 2 : 1;
}

}  // namespace

long long choose_splits(const Call& call, const DeviceKernel& kernel) {
  const Array* const partial_out = call.find("partial_out");
  if (partial_out == nullptr || partial_out->type.rank == 0) return 1;
  long long const blocks = kernel.kernel->entry_points[0].grid.size(1, kernel.multiprocessors);
  if (blocks < 0 || blocks > INT_MAX) return 1;
  return fastest_splits(blocks, ceil_div(call.shape.key_length, kernel.kernel->tile_key),
                        std::min(partial_out->type.sizes[0], kMostSplits),
                        bound_by_products(call.shape, kernel, blocks), kernel);
}

// The workspace has room for `most`. As many as possible divide query heads, and the others Q
// blocks, if they fill the device.
void set_splits(const Call& call, const DeviceKernel& kernel, BackwardParams& params) {
  params.head_splits = 1;
  params.row_splits = 1;
  const Array* const sums = call.find("key_gradient_sum");
  if (sums == nullptr || sums->type.rank != 2) return;
  long long const most = std::clamp(sums->type.sizes[0], 1ll, 1ll << 20);
  // Without query heads the group is 0, and gcd(most, 0) is `most`.
  long long const heads = std::gcd(most, std::max(params.shape.group, 1));
  params.head_splits = static_cast<int>(heads);
  params.shape.group /= params.head_splits;
  params.shape.key_heads *= params.head_splits;
  long long const tiles = ceil_div(params.shape.key_length, kernel.kernel->tile_key);
  // Three sizes of 31 bits may have a product of more than 63 bits. Such a call has enough blocks.
  long long blocks = 0;
  if (__builtin_mul_overflow(tiles * params.shape.key_heads, params.shape.batch, &blocks)) return;
  long long const ctas =
      static_cast<long long>(most_ctas_per_sm(params.mask)) * kernel.multiprocessors;
  long long const rows = ctas / std::max(blocks, 1ll);
  params.row_splits = static_cast<int>(std::clamp(rows, 1ll, most / heads));
}

}  // namespace memeff::host
