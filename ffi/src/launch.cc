#include "launch.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "errors.h"
#include "tensor_map.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

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

// Zeroes the results and workspaces to which the kernels add.
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
