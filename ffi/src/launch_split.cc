// The forward that splits the keys, and the combination of its partial results.
#include <algorithm>

#include "call.h"

namespace memeff::host {
namespace {

// In the time of a key tile: what a block needs beside its key tiles, and what the combination
// adds.
constexpr double kBlockOverhead = 3;
constexpr double kCombination = 6;

// Blocks of the combination for each multiprocessor; they share all rows.
constexpr long long kCombineBlocks = 8;

// Once every multiprocessor has its blocks, more splits help by filling the last round only.
constexpr long long kRounds = 4;

long long resident_blocks(const DeviceKernel& kernel) {
  return (long long)kernel.multiprocessors * kernel.image->blocks_per_sm;
}

// Blocks that run together on one multiprocessor share its time. Those of the last round, which may
// not fill the device, are as slow as one block for each multiprocessor.
double time_of(long long blocks, double block_time, const DeviceKernel& kernel) {
  long long const resident = resident_blocks(kernel);
  double const share = block_time / kernel.multiprocessors;
  long long const rest = blocks % resident;
  double const last_round = rest == 0 ? 0 : std::max(block_time, rest * share);
  return static_cast<double>(blocks - rest) * share + last_round;
}

// The splits, of at most `most`, with which the blocks of `tiles` tiles of rows and `key_tiles` key
// tiles each are done first.
int choose_splits(long long tiles, long long key_tiles, int most, const DeviceKernel& kernel) {
  int best = 1;
  double least = time_of(tiles, key_tiles + kBlockOverhead, kernel);
  long long const useful = std::max(kRounds, resident_blocks(kernel) / std::max(tiles, 1ll));
  for (int splits = 2; splits <= std::min<long long>(most, useful); ++splits) {
    double const block_time = ceil_div(key_tiles, splits) + kBlockOverhead;
    double const time = time_of(tiles * splits, block_time, kernel) + kCombination;
    if (time < least) {
      best = splits;
      least = time;
    }
  }
  return best;
}

}  // namespace

xla::ffi::Error launch_split(const DeviceKernel& kernel, Buffers& buffers, ForwardParams& params,
                             CUstream stream) {
  ProblemShape const& shape = params.shape;
  KernelImage const& image = *kernel.image;
  long long const packed = image.pack_heads ? shape.group : 1;
  long long const rows = shape.query_length * packed;
  long long const heads = shape.batch * (shape.query_heads / packed);
  long long const tiles = heads * ceil_div(rows, image.tile_query);

  int most = 1;
  if (buffers.has("partial_out")) {
    params.partial_logsumexp = static_cast<float*>(buffers.data("partial_logsumexp"));
    params.partial_out = static_cast<float*>(buffers.data("partial_out"));
    most = static_cast<int>(buffers.dimensions("partial_out").sizes[0]);
    if (buffers.error().failure()) return buffers.error();
  }
  params.splits = choose_splits(tiles, ceil_div(shape.key_length, image.tile_key), most, kernel);
  auto error = launch(kernel, 0, tiles * params.splits, stream, &params);
  if (error.success() && params.splits > 1) {
    long long const blocks = kCombineBlocks * (long long)kernel.multiprocessors;
    error = launch(kernel, 1, std::min(blocks, rows * heads), stream, &params);
  }
  return error;
}

}  // namespace memeff::host
