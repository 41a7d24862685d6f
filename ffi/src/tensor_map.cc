#include "tensor_map.h"

#include <algorithm>
#include <cstring>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr int kElementBytes = 2;  // the kernels that use maps are those of f16 and bf16

static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
static_assert(alignof(CUtensorMap) <= alignof(TensorMap));

// What a map is of: four dims, innermost first, and the strides of all but the first, in elements.
struct MappedArray {
  void* data;
  long long sizes[4];
  long long strides[3];
};

// [dim, sequence, head, batch].
MappedArray map_tensor(TensorView const& view, Dimensions const& dims) {
  return {view.data,
          {dims.sizes[3], dims.sizes[1], dims.sizes[2], dims.sizes[0]},
          {view.row_stride, view.head_stride, view.batch_stride}};
}

// [key, query, head, batch]. Dims of one element are broadcast, and have strides all the same: none
// of a map's is 0.
MappedArray map_scores(void* data, Dimensions const& dims) {
  long long const row = dims.sizes[3];
  long long const plane = dims.sizes[2] * row;
  return {data,
          {row, dims.sizes[2], dims.sizes[1], dims.sizes[0]},
          {row, plane, dims.sizes[1] * plane}};
}

// The rows of a box are as wide as the swizzle of its shared tile (core/shared_tile.cuh); what lies
// beyond the tensor reads as zero and is not written.
ffi::Error encode(const Driver& driver, const MapBox& box, MappedArray const& array,
                  TensorMap* encoded) {
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
    return failure(
        ffi::ErrorCode::kInternal,
        box.name + " could not be described to the copy engine: " + describe(driver, result));
  }
  std::memcpy(encoded, &map, sizeof(map));
  return ffi::Error::Success();
}

}  // namespace

ffi::Error encode_maps(const DeviceKernel& kernel, Buffers& buffers, size_t least, size_t most,
                       TensorMap* maps) {
  const std::vector<MapBox>& boxes = kernel.image->maps;
  if (boxes.size() < least || boxes.size() > most) {
    return failure(ffi::ErrorCode::kInvalidArgument,
                   "expected " + std::to_string(least) + " to " + std::to_string(most) +
                       " tensor maps, got " + std::to_string(boxes.size()) +
                       " (was the program exported by another version?)");
  }
  for (const MapBox& box : boxes) {
    TensorMap* const map = maps++;
    Dimensions const dims = buffers.four_dimensions(box.name);
    if (dims.rank == 0) continue;
    MappedArray const array = box.name == "bias" ? map_scores(buffers.data(box.name), dims)
                                                 : map_tensor(buffers.tensor(box.name), dims);
    if (buffers.error().failure()) return buffers.error();
    if (auto error = encode(*kernel.driver, box, array, map); error.failure()) return error;
  }
  return buffers.error();
}

}  // namespace memeff::host
