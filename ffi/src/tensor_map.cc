#include "tensor_map.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace memeff::host {
namespace {

constexpr int kElementBytes = 2;  // only kernels of 16-bit elements use TMA

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

}  // namespace

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

}  // namespace memeff::host
