// The rows of [batch, sequence, head, dim] tensors in global memory.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// The first element of row `row` of one head of a tensor.
template <class Element>
CUTE_DEVICE char* row_pointer(TensorView const& tensor, int batch, int row, int head) {
  return reinterpret_cast<char*>(static_cast<Element*>(tensor.data) + batch * tensor.batch_stride +
                                 row * tensor.row_stride + head * tensor.head_stride);
}

// The bytes from one row of a tensor to the next.
template <class Element>
CUTE_DEVICE long long row_bytes(TensorView const& tensor) {
  return tensor.row_stride * sizeof(Element);
}

}  // namespace memeff
