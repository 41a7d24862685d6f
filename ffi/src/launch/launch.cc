#include "launch/launch.h"

#include <climits>
#include <cstring>

#include "attributes/text.h"
#include "launch/tensor_map.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// Fills the fields of features. The host does not read them back.
void fill_fields(const Call& call, const KernelDescription& kernel, Buffers& buffers,
                 void* params) {
  for (const ParamsField& field : kernel.fields) {
    char* const place = static_cast<char*>(params) + field.offset;
    if (field.array.empty()) {
      std::memcpy(place, &call.numbers[static_cast<size_t>(field.number)], sizeof(int32_t));
    } else {
      void* const data = buffers.data(field.array);
      std::memcpy(place, &data, sizeof(data));
    }
  }
}

// Fills the table of the arrays of features, and zeroes those that must start at zero.
ffi::Error fill_arrays(const DeviceKernel& kernel, Buffers& buffers, CUstream stream,
                       ArrayTable* table) {
  ArrayView* view = table->arrays;
  for (const CapturedArray& captured : kernel.description->captured) {
    *view = buffers.captured(captured);
    if (buffers.error().failure()) return buffers.error();
    if (captured.zeroed) {
      ffi::Error error = fill_zero(kernel, view->data, buffers.bytes(captured.name), stream);
      if (error.failure()) return error;
    }
    ++view;
  }
  return ffi::Error::Success();
}

// Launches a one-dimensional grid; an empty grid is not launched.
ffi::Error launch(const DeviceKernel& kernel, size_t index, long long blocks, void** parameters,
                  CUstream stream) {
  if (blocks == 0) return ffi::Error::Success();
  const EntryPoint& entry = kernel.description->entry_points[index];
  if (blocks < 0 || blocks > INT_MAX) {
    return failure(ffi::ErrorCode::kInvalidArgument,
                   entry.name + " would need " +
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
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kInternal,
                 "launch of " + entry.name + " failed: " + describe(*kernel.driver, result));
}

}  // namespace

ffi::Error fill_zero(const DeviceKernel& kernel, void* data, size_t bytes, CUstream stream) {
  CUresult const result =
      kernel.driver->memset_async(reinterpret_cast<CUdeviceptr>(data), 0, bytes, stream);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kInternal,
                 "a workspace could not be zeroed: " + describe(*kernel.driver, result));
}

ProblemShape shape_of(const KernelDescription& kernel, Buffers& buffers) {
  ProblemShape shape = kernel.shape;
  shape.query_starts = static_cast<const int*>(buffers.data("query_starts"));
  shape.key_starts = static_cast<const int*>(buffers.data("key_starts"));
  return shape;
}

MaskParams mask_of(const Call& call, Buffers& buffers) {
  MaskParams mask = call.mask;
  mask.query_lengths = static_cast<const int*>(buffers.data("query_lengths"));
  mask.key_lengths = static_cast<const int*>(buffers.data("key_lengths"));
  mask.query_position = static_cast<const int*>(buffers.data("query_position"));
  mask.key_position = static_cast<const int*>(buffers.data("key_position"));
  mask.query_segments = static_cast<const int*>(buffers.data("query_segments"));
  mask.key_segments = static_cast<const int*>(buffers.data("key_segments"));
  if (const ArrayType* segments = buffers.type("query_segments");
      segments != nullptr && segments->rank == 3) {
    mask.segment_pairs = segments->sizes[1];
  }
  mask.boolean = buffers.scores("boolean");
  return mask;
}

BlockMask block_mask_of(Buffers& buffers, std::string_view name) {
  const ArrayType* const type = buffers.type(name);
  if (type == nullptr) return {};
  auto const stride = [&](int dim, long long rows) {
    return type->sizes[dim] == 1 ? 0 : static_cast<int>(rows);
  };
  return {buffers.data(name), stride(0, type->sizes[1] * type->sizes[2]),
          stride(1, type->sizes[2])};
}

ffi::Error launch_all(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                      const LaunchDims& dims, void* params, BlockMask* block_mask,
                      ArrayTable* table, CUstream stream) {
  const KernelDescription& description = *kernel.description;
  fill_fields(call, description, buffers, params);
  MapTable maps = {};
  ffi::Error error = encode_maps(kernel, buffers, &maps);
  if (error.success()) error = fill_arrays(kernel, buffers, stream, table);
  for (size_t i = 0; i < description.entry_points.size() && error.success(); ++i) {
    const EntryPoint& entry = description.entry_points[i];
    *block_mask = block_mask_of(buffers, entry.block_mask);
    if (buffers.error().failure()) return buffers.error();
    void* parameters[] = {params, entry.takes_maps ? &maps : nullptr};
    error = launch(kernel, i, entry.grid.blocks(dims, kernel.multiprocessors), parameters, stream);
  }
  return error;
}

}  // namespace memeff::host
