"""Pictures show the classes of tiles that the device code computes, for random masks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from emulator import build

from jax_memeff import Offsets
from jax_memeff._call.mask import Mask, Window, pictures
from jax_memeff._cuda.custom_call import UNBOUNDED

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

BATCH = 2
SOURCE = """
#include <memeff/mask/interval.cuh>

namespace memeff {

template <MaskKind kKind>
void classes(MaskParams const& mask, ProblemShape const& shape, int batch, int rows, int columns,
             unsigned char* found) {
  IntervalMask<kKind, false, true> const own(mask, shape, batch);
  int const count = ceil_div(shape.key_length, columns);
  for (int row = 0; row < shape.query_length; row += rows) {
    TileRange const range = own.key_tiles(row, rows, columns);
    for (int tile = 0; tile < count; ++tile) {
      bool const computed = tile >= range.begin && tile < range.end;
      bool const tested = own.needs_test(row, rows, tile * columns, columns);
      *found++ = computed ? 1 + tested : 0;
    }
  }
}

extern "C" void tile_classes(int kind, int const* windows, int const* sizes, int const* lengths,
                             int const* positions, int batch, unsigned char* found) {
  MaskParams mask{};
  mask.top_left_left = windows[0], mask.top_left_right = windows[1];
  mask.bottom_right_left = windows[2], mask.bottom_right_right = windows[3];
  mask.query_lengths = lengths, mask.key_lengths = lengths + 2;
  mask.query_position = positions, mask.key_position = positions + 2;
  ProblemShape shape{};
  shape.query_length = sizes[0], shape.key_length = sizes[1];
  auto const of_kind = kind == 0   ? classes<MaskKind::none>
                       : kind == 1 ? classes<MaskKind::causal>
                                   : classes<MaskKind::window>;
  of_kind(mask, shape, batch, sizes[2], sizes[3], found);
}

}  // namespace memeff
"""


def numbers(*values: Any) -> Any:
    return (ctypes.c_int * len(values))(*map(int, values))


@pytest.mark.rotating(3)
def test_random_windows_lengths_and_positions():
    path = build.kernel_library("tile_classes", SOURCE)
    on_device = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL).tile_classes
    random = np.random.default_rng(11)
    seen: set[tuple[int, int]] = set()
    for _ in range(400):
        sizes = random.integers(1, 70, 2).tolist()
        tile = random.choice([1, 8, 16, 64], 2).tolist()
        lengths = random.integers(0, [sizes[0] + 1, sizes[1] + 1], (BATCH, 2)).T
        positions = random.integers(0, 60, (2, BATCH))
        bounds = [None if random.random() < 0.5 else int(x) for x in random.integers(-20, 40, 4)]
        mask = Mask(
            top_left=Window(*bounds[:2]),
            bottom_right=Window(*bounds[2:]),
            query_lengths=lengths[0],
            key_lengths=lengths[1],
        )
        has_left, has_right = (any(x is not None for x in bounds[i::2]) for i in range(2))
        kind = 2 if has_left else int(has_right)
        batch = int(random.integers(BATCH))
        offsets = Offsets(query=positions[0], key=positions[1])
        scores = (BATCH, 1, sizes[0], sizes[1])
        found = pictures.tile_classes(mask, scores, (tile[0], tile[1]), offsets, batch, 0)
        want = np.zeros_like(found)
        windows = numbers(*(UNBOUNDED if x is None else x for x in bounds))
        on_device(
            kind,
            windows,
            numbers(*sizes, *tile),
            numbers(*lengths.ravel()),
            numbers(*positions.ravel()),
            batch,
            want.ctypes.data_as(ctypes.c_void_p),
        )
        np.testing.assert_array_equal(found, want)
        seen |= {(kind, int(own)) for own in np.unique(want)}
    assert seen == {(kind, own) for kind in range(3) for own in range(3)}
