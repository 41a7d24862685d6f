// Locates the keys and values of a work tile: in tensors with a row for each batch index, in packed
// sequences, in tensors whose batch a vmap broadcasts, or in a pool of pages.
#pragma once

#include <memeff/core/float8.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/sequences.cuh>

namespace memeff {

// Row 0 of one key head. All code that locates a key or a value asks this object, so a new way to
// store them changes only this file. Row 0 of a pool is the first row of its first page, and
// `pages` maps the keys of the sequence to rows.
template <class Config>
struct KeyValueSource {
  Origin origin;
  int head;
  PageTable<Config> pages;

  // `first_key`: with pages, those before it are not copied by address (FirstKey).
  template <class Params>
  CUTE_DEVICE KeyValueSource(Params const& params, int batch, int key_head, int first_key = 0)
      : origin(key_origin<Config>(params.shape, batch)),
        head(key_head),
        pages(params, batch, first_key) {}

  // The first element of `row`, for kernels that copy by address.
  CUTE_DEVICE char* row(TensorView const& tensor, int row = 0) const {
    return row_pointer<KeyValueElement<Config>>(tensor, batch(tensor), origin.row + row, head);
  }

  // The batch index of the tensor, for kernels that copy through a tensor map.
  CUTE_DEVICE int batch(TensorView const& tensor) const {
    return element_of<Config>(tensor, origin.batch);
  }
};

}  // namespace memeff
