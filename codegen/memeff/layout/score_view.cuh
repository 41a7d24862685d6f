// Element access to an array that broadcasts to the scores, with any strides, sizes and alignment.
#pragma once

#include <memeff/core/math.cuh>

namespace memeff {

// Two elements in adjacent columns, loaded or stored as one vector if they are aligned.
template <class Element>
struct alignas(2 * sizeof(Element)) Pair {
  Element first;
  Element second;
};

// One (batch, head) slice of a ScoreView, from the first element of a tile on.
template <class Element>
struct ScoreViewSlice {
  Element* origin;
  long long row_stride;
  long long column_stride;
  bool paired;  // pairs that begin at an even column are aligned

  CUTE_DEVICE ScoreViewSlice(ScoreView const& view, int batch, int head, int row, int column)
      : row_stride(view.row_stride), column_stride(view.column_stride) {
    origin = static_cast<Element*>(view.data) + batch * view.batch_stride +
             head * view.head_stride + row * row_stride + column * column_stride;
    paired = column_stride == 1 && row_stride % 2 == 0 &&
             reinterpret_cast<unsigned long long>(origin) % sizeof(Pair<Element>) == 0;
  }

  CUTE_DEVICE Element* at(int row, int column) const {
    return origin + row * row_stride + column * column_stride;
  }

  // Loads the elements at `column`, which is even, and at the next column. Elements from the bound
  // on are 0.
  template <bool kPaired>
  CUTE_DEVICE Pair<Element> load(int row, int column, int column_bound) const {
    Pair<Element> pair = {Element(0), Element(0)};
    if (kPaired && column + 1 < column_bound) {
      pair = *reinterpret_cast<Pair<Element> const*>(origin + row * row_stride + column);
    } else {
      if (column < column_bound) pair.first = *at(row, column);
      if (!kPaired && column + 1 < column_bound) pair.second = *at(row, column + 1);
    }
    return pair;
  }

  CUTE_DEVICE void store(int row, int column, int column_bound, float first, float second) const {
    if (paired && column + 1 < column_bound) {
      *reinterpret_cast<Pair<Element>*>(at(row, column)) = {Element(first), Element(second)};
    } else {
      if (column < column_bound) *at(row, column) = Element(first);
      if (column + 1 < column_bound) *at(row, column + 1) = Element(second);
    }
  }
};

}  // namespace memeff
