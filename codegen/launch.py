"""The data for launching a kernel: its entry points, their grids, and its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from .strategy import Sizes


class BlockMask(NamedTuple):
    """The block mask for tiles of ``query`` rows and ``key`` columns, with a row for each tile of
    ``lines`` (codegen/memeff/mask/block_mask.cuh).

    A tile is cut into ``parts`` equal bands of rows; each has two bits of the tile's byte: skipped,
    full or partial.
    """

    lines: Literal["queries", "keys"]
    query: int
    key: int
    parts: int = 1

    @property
    def name(self) -> str:
        """The name of the buffer."""
        parts = f"x{self.parts}" if self.parts > 1 else ""
        return f"{self.lines}_{self.query}x{self.key}{parts}"


class Grid(NamedTuple):
    """The grid of an entry point, in CTAs.

    ``ctas`` computes them from the sizes of a call. What depends on the device is left to the host
    library (ffi/src/launch.cc): ``splits`` is ``"each"`` if every split of the keys or queries has
    so many CTAs, and ``"some"`` if there are none without splits. ``most_per_sm`` limits the CTAs
    that are launched for each SM, if it is not 0.
    """

    ctas: Callable[[Sizes], int]
    splits: Literal["", "each", "some"] = ""
    most_per_sm: int = 0

    def times(self, count: int) -> Grid:
        """``count`` CTAs for each of this grid."""
        return self._replace(ctas=lambda sizes: count * self.ctas(sizes))


class EntryPoint(NamedTuple):
    """A ``__global__`` function of the source, with the data for its launch.

    ``shared_bytes`` is the dynamic shared memory of a CTA. ``takes_maps`` is whether the tensor
    maps of the spec are its second parameter; after the first comes the table of
    ``KernelSpec.captured_arrays``, if there are any. ``cpp_class`` is the device class that it
    runs, and ``blocks`` the CTAs per SM that it is compiled for, in C++; if it is "", the class has
    the number. ``cluster`` CTAs form a cluster, and it divides the grid. ``overlaps`` is whether it
    runs beside the last CTAs of the entry point before it, and waits for their results itself.
    """

    name: str
    threads: int
    shared_bytes: int
    grid: Grid
    takes_maps: bool = False
    block_mask: BlockMask | None = None
    cpp_class: str = ""
    blocks: str = ""
    cluster: int = 1
    overlaps: bool = False


class TensorMap(NamedTuple):
    """A tensor in global memory and its TMA box."""

    name: str
    rows: int
    columns: int


MOST_ARRAYS = 16
MOST_DIMS = 6
"""``kMostArrays`` and ``ArrayView::kMostDims`` of ffi/include/memeff/params.h."""


class CapturedArray(NamedTuple):
    """An array of a feature: ``ArrayView`` of ffi/include/memeff/params.h.

    ``alignment`` is in bytes. A ``zeroed`` one is a result that is zero when the first kernel
    begins.
    """

    name: str
    alignment: int = 4
    zeroed: bool = False


class ParamsField(NamedTuple):
    """A field of the kernels' first parameter that a feature fills.

    ``path`` is its name in the parameters of both directions (ffi/include/memeff/params.h), and
    ``offset`` its first byte there, which the source asserts. ``value`` is the array whose address
    it holds, or one of the feature's ``numbers``.
    """

    path: str
    offset: int
    value: str


class Workspace(NamedTuple):
    """Global memory that the kernels of a spec write besides their results.

    A ``zeroed`` one is zero when the first kernel begins. The others hold any bits, and a kernel
    zeroes what it adds to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "int32"] = "float32"
    zeroed: bool = False
