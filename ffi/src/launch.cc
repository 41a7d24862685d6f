#include "launch.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <numeric>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// The tensor maps through which TMA accesses the arrays of a call.

constexpr int kElementBytes = 2;  // only kernels of 16-bit elements have maps

static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
static_assert(alignof(CUtensorMap) <= alignof(TensorMap));

// Four dims of an array, innermost first, and the strides of all but the first, in elements.
struct MappedArray {
  void* data;
  long long sizes[4];
  long long strides[3];
};

// [dim, sequence, head, batch] of an array [batch, sequence, head, dim].
MappedArray map_tensor(TensorView const& view, ArrayType const& type) {
  return {view.data,
          {type.sizes[3], type.sizes[1], type.sizes[2], type.sizes[0]},
          {view.row_stride, view.head_stride, view.batch_stride}};
}

// [key, query, head, batch] of an array [batch, head, query, key]. A broadcast dim of one element
// has a stride, too, because TMA refuses strides of 0.
MappedArray map_scores(void* data, ArrayType const& type) {
  long long const row = type.sizes[3];
  long long const head = type.sizes[2] * row;
  return {
      data, {row, type.sizes[2], type.sizes[1], type.sizes[0]}, {row, head, type.sizes[1] * head}};
}

// Encodes one map. The rows of a box are as wide as the swizzle of its tile in shared memory
// (core/shared_tile.cuh). Elements beyond the array read as zero and are not written.
TensorMap encode(const Driver& driver, const MapBox& box, const Array& source,
                 MappedArray const& array) {
  cuuint64_t sizes[4];
  cuuint64_t strides[3];
  std::copy_n(array.sizes, 4, sizes);
  std::transform(array.strides, array.strides + 3, strides,
                 [](long long stride) { return cuuint64_t(stride) * kElementBytes; });
  cuuint32_t const extents[] = {static_cast<cuuint32_t>(box.columns),
                                static_cast<cuuint32_t>(box.rows), 1, 1};
  cuuint32_t const steps[] = {1, 1, 1, 1};
  bool const wide = box.columns * kElementBytes == 128;
  CUtensorMap map;
  CUresult const result = driver.encode_tensor_map(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, array.data, sizes, strides, extents, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(driver, result, "the driver refused the tensor map of " + source.name);
  }
  TensorMap encoded;
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

// The parameter of kernels that take tensor maps. A kernel declares as many as it has: ForwardMaps
// or BackwardMaps, followed by the maps of further arrays.
struct MapTable {
  static constexpr size_t kMost = 16;
  TensorMap maps[kMost];
};

// The maps of a kernel, in the order of its description, with the addresses of this execution.
// A map is zero if the call does not have its array.
MapTable encode_maps(const DeviceKernel& kernel, const Buffers& buffers) {
  MapTable table = {};
  for (size_t i = 0; i < kernel.kernel->maps.size(); ++i) {
    const MapBox& box = kernel.kernel->maps[i];
    const Array* const source = buffers.at(box.array);
    if (source == nullptr) continue;
    MappedArray const array = box.is_scores ? map_scores(buffers.data(*source), source->type)
                                            : map_tensor(buffers.tensor(source), source->type);
    table.maps[i] = encode(*kernel.driver, box, *source, array);
  }
  return table;
}

// How many CTAs divide the keys of a forward, or share a KV block of a backward, on this device.

// At most so many partial results have room in a workspace; larger sizes count as this one.
constexpr long long kMostSplits = 1ll << 20;

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

// The fastest number of splits of the keys of a forward that the workspaces have room for.
long long choose_splits(const Call& call, const DeviceKernel& kernel) {
  const Array* const partial_out = call.find("partial_out");
  if (partial_out == nullptr || partial_out->type.rank == 0) return 1;
  long long const blocks = kernel.kernel->entry_points[0].grid.size(1, kernel.multiprocessors);
  if (blocks < 0 || blocks > INT_MAX) return 1;
  return fastest_splits(blocks, ceil_div(call.shape.key_length, kernel.kernel->tile_key),
                        std::min(partial_out->type.sizes[0], kMostSplits),
                        bound_by_products(call.shape, kernel, blocks), kernel);
}

// Sets how many CTAs share a KV block of a backward: schedule/split_q.cuh. The workspace has room
// for `most`. As many as possible divide query heads, and the others Q blocks, if they fill the
// device.
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

// Parameters and launches.

// Fills the fields of features. The host does not read them back.
void fill_fields(const Kernel& kernel, const Buffers& buffers, void* params) {
  for (const ParamsField& field : kernel.fields) {
    char* const place = static_cast<char*>(params) + field.offset;
    if (field.array < 0) {
      std::memcpy(place, &field.number, sizeof(field.number));
    } else {
      void* const data = buffers.data(*buffers.at(field.array));
      std::memcpy(place, &data, sizeof(data));
    }
  }
}

// Zeroes what is marked `zeroed`; the preprocess kernel clears sums of dq and semaphores.
void fill_zero(const DeviceKernel& kernel, const Buffers& buffers, CUstream stream) {
  for (int place : kernel.kernel->zeroed) {
    const Array& array = *buffers.at(place);
    size_t bytes = ffi::ByteWidth(array.type.dtype);
    for (int dim = 0; dim < array.type.rank; ++dim) bytes *= size_t(array.type.sizes[dim]);
    CUresult const result = kernel.driver->memset_async(
        reinterpret_cast<CUdeviceptr>(buffers.data(array)), 0, bytes, stream);
    if (result != CUDA_SUCCESS) {
      fail(*kernel.driver, result, "array " + array.name + " could not be zeroed");
    }
  }
}

// Launches a one-dimensional grid; an empty grid is not launched.
void launch(const DeviceKernel& kernel, size_t index, long long blocks, void** parameters,
            CUstream stream) {
  if (blocks == 0) return;
  const EntryPoint& entry = kernel.kernel->entry_points[index];
  if (blocks < 0 || blocks > INT_MAX) {
    fail(entry.name + " would need " +
         (blocks < 0 ? std::string("more than 2^63") : std::to_string(blocks)) +
         " blocks and a grid has at most 2147483647: split the batch");
  }
  CUlaunchAttribute dependent = {};
  dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  dependent.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(blocks);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = static_cast<unsigned>(entry.threads);
  config.sharedMemBytes = static_cast<unsigned>(entry.shared_bytes);
  config.hStream = stream;
  config.attrs = &dependent;
  config.numAttrs = kernel.waits ? 1 : 0;
  CUresult const result = kernel.driver->launch(
      &config, reinterpret_cast<CUfunction>(kernel.functions[index]), parameters, nullptr);
  if (result != CUDA_SUCCESS) fail(*kernel.driver, result, "launch of " + entry.name + " failed");
}

MaskParams mask_of(const Call& call, const Buffers& buffers) {
  MaskParams mask = call.mask;
  mask.query_lengths = buffers.start<int>("query_lengths");
  mask.key_lengths = buffers.start<int>("key_lengths");
  mask.query_position = buffers.start<int>("query_position");
  mask.key_position = buffers.start<int>("key_position");
  mask.query_segments = buffers.start<int>("query_segments");
  mask.key_segments = buffers.start<int>("key_segments");
  const Array* const segments = call.find("query_segments");
  if (segments != nullptr && segments->type.rank == 3) mask.segment_pairs = segments->type.sizes[1];
  mask.boolean = buffers.bits();
  return mask;
}

// Null pointers without an array.
BlockMask block_mask_of(const Buffers& buffers, const Array* array) {
  if (array == nullptr) return {};
  const ArrayType* const type = &array->type;
  auto const stride = [&](int dim, long long rows) {
    return type->sizes[dim] == 1 ? 0 : static_cast<int>(rows);
  };
  return {buffers.data(*array), stride(0, type->sizes[1] * type->sizes[2]),
          stride(1, type->sizes[2])};
}

// Launches all entry points of a kernel. `params` is the first parameter of each.
template <class Params>
void launch_all(const DeviceKernel& kernel, const Buffers& buffers, long long splits,
                WithArrays<Params>& params, CUstream stream) {
  const Kernel& own = *kernel.kernel;
  fill_fields(own, buffers, &params);
  for (size_t i = 0; i < own.captured.size(); ++i) {
    params.table.arrays[i] = buffers.captured(own.captured[i]);
  }
  MapTable maps = encode_maps(kernel, buffers);
  fill_zero(kernel, buffers, stream);
  for (size_t i = 0; i < own.entry_points.size(); ++i) {
    const EntryPoint& entry = own.entry_points[i];
    params.block_mask = block_mask_of(buffers, buffers.at(entry.block_mask));
    void* parameters[] = {&params, entry.takes_maps ? &maps : nullptr};
    launch(kernel, i, entry.grid.size(splits, kernel.multiprocessors), parameters, stream);
  }
}

// The parts of the parameters that all directions have.
template <class Params>
void fill(const Call& call, const Buffers& buffers, Params* params) {
  params->shape = call.shape;
  params->shape.query_starts = buffers.start<int>("query_starts");
  params->shape.key_starts = buffers.start<int>("key_starts");
  params->scale = call.scale;
  params->mask = mask_of(call, buffers);
  params->bias = buffers.scores("bias", call.bias_alignment);
  params->query = buffers.tensor("query");
  params->key = buffers.tensor("key");
  params->value = buffers.tensor("value");
  params->out = buffers.tensor("out");
  params->logsumexp = buffers.start<float>("logsumexp");
}

}  // namespace

void launch_forward(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                    CUstream stream) {
  WithArrays<ForwardParams> params = {};
  fill(call, buffers, &params);
  params.tile_counter = buffers.start<TileCounter>("tile_counter");
  params.partial_logsumexp = buffers.start<float>("partial_logsumexp");
  params.partial_out = buffers.start<float>("partial_out");
  params.out_sum = buffers.start<float>("out_sum");
  params.score_sum = buffers.start<float>("score_sum");
  params.query_hi_lo = buffers.start<char>("query_hi_lo");
  params.key_hi_lo = buffers.start<char>("key_hi_lo");
  params.value_hi_lo = buffers.start<char>("value_hi_lo");
  params.tile_parts = buffers.start<TileParts>("tile_parts");
  params.keeps_gaps = call.find("filled_out") != nullptr;
  params.marks_empty = call.find("marked_query_lengths") != nullptr;
  if (params.marks_empty) {
    params.mask.query_lengths = buffers.start<int>("marked_query_lengths");
  }

  long long const splits = choose_splits(call, kernel);
  params.splits = static_cast<int>(splits);
  // The latent forward divides the keys itself, and needs the number of slots.
  const Array* const slots = call.find("partial_out");
  if (slots != nullptr && params.tile_parts != nullptr) {
    params.splits = static_cast<int>(std::min(slots->type.sizes[0], kMostSplits));
  }
  launch_all(kernel, buffers, splits, params, stream);
}

void launch_backward(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                     CUstream stream) {
  WithArrays<BackwardParams> params = {};
  fill(call, buffers, &params);
  params.out_gradient = buffers.tensor("out_gradient");
  params.query_gradient = buffers.tensor("query_gradient");
  params.key_gradient = buffers.tensor("key_gradient");
  params.value_gradient = buffers.tensor("value_gradient");
  params.logsumexp_gradient = buffers.start<float>("logsumexp_gradient");
  params.row_statistics = buffers.start<float>("row_statistics");
  params.query_gradient_sum = buffers.start<float>("query_gradient_sum");
  params.query_gradient_states = buffers.start<int>("query_gradient_states");
  params.key_gradient_sum = buffers.start<float>("key_gradient_sum");
  params.value_gradient_sum = buffers.start<float>("value_gradient_sum");
  params.bias_gradient = buffers.scores("bias_gradient", call.bias_alignment);
  params.semaphores = buffers.start<int>("semaphores");
  params.bias_gradient_sum = buffers.start<float>("bias_gradient_sum");
  params.query_hi_lo = buffers.start<char>("query_hi_lo");
  params.key_hi_lo = buffers.start<char>("key_hi_lo");
  params.value_hi_lo = buffers.start<char>("value_hi_lo");
  params.out_gradient_hi_lo = buffers.start<char>("out_gradient_hi_lo");

  params.query_tiles =
      static_cast<int>(ceil_div(params.shape.query_length, kernel.kernel->tile_query));
  set_splits(call, kernel, params);
  long long const splits = static_cast<long long>(params.head_splits) * params.row_splits;
  launch_all(kernel, buffers, splits, params, stream);
}

void launch_tangent(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                    CUstream stream) {
  WithArrays<TangentParams> params = {};
  fill(call, buffers, &params);
  params.tile_counter = buffers.start<TileCounter>("tile_counter");
  params.query_tangent = buffers.tensor("query_tangent");
  params.key_tangent = buffers.tensor("key_tangent");
  params.value_tangent = buffers.tensor("value_tangent");
  params.out_tangent = buffers.tensor("out_tangent");
  params.logsumexp_tangent = buffers.start<float>("logsumexp_tangent");
  launch_all(kernel, buffers, 1, params, stream);
}

}  // namespace memeff::host
