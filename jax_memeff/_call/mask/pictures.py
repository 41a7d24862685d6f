"""Pictures of one (batch, head) slice of the scores: what they show, and how they are drawn.

The class of a tile says what kernels do with it: skip it, compute it, or compute and test it. The
rules for windows and lengths repeat those of ``IntervalMask`` in codegen/memeff/mask/interval.cuh,
and a test compares the two. All other conditions come from the block mask that kernels read.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jax_memeff._call import values
from jax_memeff._call.mask import block_mask, checks, expression
from jax_memeff._call.mask.block_mask import ALL, NONE, SOME, Tiling
from jax_memeff._call.mask.conditions import BlockTable, Conditions, with_boolean_lists
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.offsets import checked as offsets_of_call

MOST_ELEMENTS = 512
"""The most rows, and the most columns, of a picture. If a mask has more, the picture samples this
many, evenly spaced."""

MOST_TILES = 2**26
"""The most tiles of a picture, which take a few bytes each: a million rows and columns in tiles of
128 x 128."""


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """Which scores of one (batch, head) slice are valid, and what kernels do with each tile.

    ``str(picture)`` is a drawing in characters, :meth:`show` prints it, and :meth:`plot` draws it
    with matplotlib.
    """

    sizes: tuple[int, int]
    """T and S."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""
    classes: np.ndarray
    """uint8 [Q blocks, KV blocks]: 0 for a skipped tile, 1 for a full one, 2 for a partial one."""
    rows: np.ndarray
    """int [r]: the local indices of the sampled rows: all of them, or 512."""
    columns: np.ndarray
    """int [c], likewise for columns."""
    valid: np.ndarray
    """bool [r, c]: whether these elements are valid: no mask, score function or bias masks them."""
    values: np.ndarray | None = None
    """float [r, c]: a score of 0 after the score function and the bias, if there are any."""
    title: str = ""

    def __str__(self) -> str:
        return _text(self)

    def show(self) -> None:
        """Print the drawing in characters."""
        print(self)

    def plot(self, axes: Any = None) -> Any:
        """Draw with matplotlib.

        Args:
            axes: a ``matplotlib.axes.Axes``; None makes a figure with ``pyplot``.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError: ``axes`` is not an Axes.
        """
        return _figure(self, axes)


def picture_of_mask(
    mask: Conditions,
    sizes: tuple[Any, Any],
    tile: tuple[int, int],
    *,
    batch: int = 0,
    head: int = 0,
    offsets: Offsets | None = None,
) -> Picture:
    """The picture of a mask, which need not be canonical.

    Raises:
        TypeError: the mask is traced, or a size is not an integer.
        ValueError: a size is below 1, or ``batch`` or ``head`` is beyond the arrays of the mask.
    """
    T, S = sizes if sizes[1] is not None else (sizes[0], sizes[0])
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        raise TypeError(f"tile must be (rows, columns), got {tile!r:.80}")
    named = {"T": T, "S": S, "rows of tile": tile[0], "columns of tile": tile[1]}
    rows, columns, *own_tile = (values.size(name, value, 1) for name, value in named.items())
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((mask, offsets))):
        raise TypeError(
            "a picture needs a mask with concrete values, got a traced one; draw it outside "
            "jax.jit, jax.grad and jax.vmap"
        )
    counts = [
        _count(name, index, sizes)
        for (name, index), sizes in zip(
            {"batch": batch, "head": head}.items(), _slices(mask), strict=True
        )
    ]
    scores_shape = counts[0], counts[1], rows, columns
    # A mask that is the same for all batch indices may have one offset for each of them.
    of_batch: list[Any] = [getattr(offsets, name, None) for name in ("query", "key")]
    batches = [counts[0], *(x.size for x in of_batch if getattr(x, "ndim", 0) == 1)]
    offsets = offsets_of_call(offsets, max(batches), counts[1])
    mask = checks.checked(mask.without_block_masks(), scores_shape, clamps=True)
    return picture_of_canonical(
        mask.canonical(counts[0], rows, columns),
        scores_shape,
        (own_tile[0], own_tile[1]),
        batch=batch,
        head=head,
        offsets=offsets,
    )


def number_of_tiles(sizes: tuple[int, int], tile: tuple[int, int]) -> int:
    """The number of tiles that cover this many rows and columns.

    >>> number_of_tiles((300, 64), (128, 64))
    3
    """
    return math.prod(-(-count // size) for count, size in zip(sizes, tile, strict=True))


def picture_of_canonical(
    mask: Conditions,
    scores_shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    *,
    batch: int,
    head: int,
    offsets: Offsets | None,
) -> Picture:
    """The picture of a canonical mask for a call of (B, N, T, S).

    Raises:
        ValueError: it would have more than ``MOST_TILES`` tiles.
    """
    offsets = Offsets() if offsets is None else offsets
    mask = with_boolean_lists(mask, scores_shape[1], scores_shape[3])
    sizes = scores_shape[2:]
    tiles = number_of_tiles(sizes, tile)
    if tiles > MOST_TILES:
        raise ValueError(
            f"tile: a picture must have at most {MOST_TILES} tiles, got {tiles} tiles of "
            f"{tile[0]} x {tile[1]} for {sizes[0]} rows and {sizes[1]} columns; pass larger tiles"
        )
    rows, columns = (_sample(size) for size in sizes)
    frame = expression.Frame.of(mask, sizes, offsets)
    compiled = expression.compiled(mask, frame)
    return Picture(
        sizes=sizes,
        tile=tile,
        classes=tile_classes(compiled, scores_shape, tile, offsets, batch, head),
        rows=rows,
        columns=columns,
        valid=_valid(mask, frame, elements(rows, columns, batch, head, offsets)),
    )


def elements(
    rows: np.ndarray, columns: np.ndarray, batch: int, head: int, offsets: Offsets
) -> expression.Element:
    """The user's indices, int32[], int32[], int32 [r, 1] and int32 [1, c], of a picture's elements.

    Args:
        rows, columns: local indices.
        batch, head: local indices of the slice.
        offsets: those of the call.
    """
    first = (np.asarray(x).reshape(-1) for x in (offsets.query, offsets.key))
    starts = (int(x[batch % x.size]) for x in first)
    query, key = (
        np.asarray(index + start, np.int32)
        for index, start in zip((rows[:, None], columns[None]), starts, strict=True)
    )
    place = (np.int32(x) + np.int32(y) for x, y in ((batch, offsets.batch), (head, offsets.head)))
    # NumPy arrays instead of JAX's: a picture compiles nothing.
    return expression.Element(*place, query, key)  # type: ignore[arg-type]


def _valid(mask: Conditions, frame: expression.Frame, element: expression.Element) -> np.ndarray:
    """Whether each element is valid, bool [r, c]."""
    sizes = element.query.shape[0], element.key.shape[1]
    if not mask.kinds():
        return np.ones(sizes, bool)

    def of_row(row: jax.Array) -> jax.Array:
        place = element.batch, element.head, row
        return jax.vmap(
            lambda column: expression.holds(mask, expression.Element(*place, column), frame)
        )(element.key[0])

    return np.asarray(jax.jit(jax.vmap(of_row))(element.query[:, 0]))


def _sample(size: int) -> np.ndarray:
    if size <= MOST_ELEMENTS:
        return np.arange(size)
    return np.arange(MOST_ELEMENTS) * size // MOST_ELEMENTS


def _count(name: str, index: Any, sizes: set[int]) -> int:
    """The number of batch indices, or of heads, of the call that is drawn."""
    index = values.static_integer(name, index, "a Python integer", "draw it outside of jax.jit")
    count = max(sizes, default=1)
    if count == 1 and 0 <= index < values.INT32_MAX:
        return index + 1
    if not 0 <= index < count:
        raise ValueError(f"{name} must be in [0, {count}), the size of the mask, got {index}")
    return count


def _slices(mask: Conditions) -> tuple[set[int], set[int]]:
    """The sizes that the arrays of a mask have along the batch and along the heads."""
    batches: set[int] = set()
    heads: set[int] = set()
    lengths = [(mask.query_lengths, mask.key_lengths), *mask.more_lengths]
    batches |= {x.shape[0] for pair in lengths for x in pair if x is not None}
    batches |= {x.shape[0] for pair in mask.segment_ids for x in pair if x.ndim == 2}
    shapes = [x.shape for x in mask.booleans]
    shapes += [x.listed.shape if isinstance(x, BlockTable) else x.shape for x in mask.block_lists]
    shapes += [x.shape for x in mask.key_lists]
    for shape in shapes:
        first, second, *_ = (1,) * (4 - len(shape)) + tuple(shape)
        batches.add(first)
        heads.add(second)
    for excluded in mask.excluded:
        slices = _slices(excluded)
        batches |= slices[0]
        heads |= slices[1]
    return batches, heads


SKIPPED, FULL, PARTIAL = NONE, ALL, SOME
"""A skipped tile is never loaded. The elements of a full one are all valid, so a kernel tests none
of them; it tests each element of a partial one."""

_NO_BOUND = 2**30


def tile_classes(
    mask: Conditions,
    scores_shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    offsets: Offsets,
    batch: int,
    head: int,
) -> np.ndarray:
    """The class of each tile of one (batch, head) slice, uint8 [Q blocks, KV blocks].

    Args:
        mask: canonical, with at most one function.
        scores_shape: (B, N, T, S).
        tile: rows and columns.
        offsets: those of the call.
        batch, head: local indices of the slice.
    """
    tiling = Tiling(scores_shape[2:], tile)
    computed, tested = _of_intervals(mask, tiling, offsets, batch)
    levels = block_mask.of_mask(mask, scores_shape, offsets, tiling)
    if levels is not None:
        block_levels = np.asarray(levels)
        block_levels = block_levels[batch % block_levels.shape[0], head % block_levels.shape[1]]
        computed &= block_levels != NONE
        tested |= block_levels == SOME
    return np.where(computed, np.where(tested, PARTIAL, FULL), SKIPPED).astype(np.uint8)


def _of_intervals(
    mask: Conditions, tiling: Tiling, offsets: Offsets, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Whether static windows and lengths let a tile be computed, and whether they test it.

    Both are bool [Q blocks, KV blocks]. Uses only NumPy, so that drawing a window needs no device.
    """
    (rows, columns), (tile_rows, tile_columns) = tiling.sizes, tiling.tile
    queries = rows if mask.query_lengths is None else int(mask.query_lengths[batch])
    keys = columns if mask.key_lengths is None else int(mask.key_lengths[batch])
    shift = _index(offsets.query, batch) - _index(offsets.key, batch)
    first, last = -_NO_BOUND, _NO_BOUND
    for window, distance in (
        (mask.top_left, shift),
        (mask.bottom_right, shift + keys - queries),
    ):
        if window is not None and window.left is not None:
            first = max(first, distance - window.left)
        if window is not None and window.right is not None:
            last = min(last, distance + window.right)

    def begin(row: np.ndarray) -> np.ndarray:
        return np.maximum(row + first, 0)

    def end(row: np.ndarray) -> np.ndarray:
        return np.minimum(row + last + 1, keys)

    row = np.arange(tiling.counts[0], dtype=np.int64)[:, None] * tile_rows
    column = np.arange(tiling.counts[1], dtype=np.int64) * tile_columns
    last_row = np.minimum(row + tile_rows, queries) - 1
    stop = np.maximum(end(last_row), 0)
    start = np.minimum(begin(row), stop) // tile_columns * tile_columns
    computed = (last_row >= row) & (column >= start) & (column < stop)
    tested = (column + tile_columns > end(row)) | (column < begin(row + tile_rows - 1))
    return computed, tested


def _index(position: object, batch: int) -> int:
    """The global index of the first row or column of a batch index."""
    positions = np.asarray(position).reshape(-1)
    return int(positions[batch % positions.size])


_MOST_COLUMNS = 40
"""Cells of a line, each two characters wide, so that squares look square."""

_OF_TILE = {SKIPPED: "· ", FULL: "██", PARTIAL: "▒▒"}
_LEVELS = "▁▂▃▄▅▆▇█"
_MASKED, _NOT_FINITE = "· ", "! "


def _text(picture: Picture) -> str:
    """The title, the number of tiles of each class, and a grid of elements, values or tiles."""
    lines = [picture.title] if picture.title else []
    lines.append(summary(picture))
    if picture.values is not None:
        grid, legend = _values(picture, picture.values)
    elif max(picture.sizes) <= _MOST_COLUMNS:
        grid, legend = _elements(picture), "■ valid, · masked, blank: skipped tile"
    else:
        grid, legend = _tiles(picture)
    return "\n".join(line.rstrip() for line in [*lines, legend, *grid])


def summary(picture: Picture) -> str:
    """The numbers of tiles, in one line."""
    count = picture.classes.size
    skipped, full, partial = (
        int((picture.classes == tile_class).sum()) for tile_class in (SKIPPED, FULL, PARTIAL)
    )
    (T, S), (rows, columns) = picture.sizes, picture.tile
    return (
        f"T {T}, S {S}, tiles of {rows} x {columns}: {skipped} skipped, {partial} partial, "
        f"{full} full; {(count - skipped) / count:.0%} computed"
    )


def _elements(picture: Picture) -> list[str]:
    """One cell for each element, with lines between the tiles."""
    rows, columns = picture.tile
    lines = []
    for row, valid in enumerate(picture.valid):
        if row and row % rows == 0:
            lines.append(_rule(picture))
        classes = picture.classes[row // rows]
        cells = []
        for column, holds in enumerate(valid):
            if column and column % columns == 0:
                cells.append("│ ")
            is_skipped = classes[column // columns] == SKIPPED
            cells.append("  " if is_skipped else "■ " if holds else "· ")
        lines.append("".join(cells))
    return lines


def _rule(picture: Picture) -> str:
    widths = [
        min(picture.tile[1], picture.sizes[1] - start)
        for start in range(0, picture.sizes[1], picture.tile[1])
    ]
    return "┼─".join("──" * width for width in widths)


def _tiles(picture: Picture) -> tuple[list[str], str]:
    """One cell for each tile, or for a square of tiles if there are many."""
    size = -(-max(picture.classes.shape) // _MOST_COLUMNS)
    cells = _together(picture.classes, size)
    legend = "██ full, ▒▒ partial, · skipped"
    if size > 1:
        legend += f"; a cell is {size} x {size} tiles, and partial if they differ"
    return ["".join(_OF_TILE[int(cell)] for cell in line) for line in cells], legend


def _together(classes: np.ndarray, size: int) -> np.ndarray:
    """Merge squares of tiles; a square whose classes differ is PARTIAL.

    >>> _together(np.array([[1, 1, 0], [1, 1, 2]], np.uint8), 2)
    array([[1, 2]], dtype=uint8)
    """
    padding = [(0, -count % size) for count in classes.shape]
    padded = np.pad(classes, padding, mode="edge")
    shape = padded.shape[0] // size, size, padded.shape[1] // size, size
    squares = padded.reshape(shape).swapaxes(1, 2).reshape(shape[0], shape[2], -1)
    same = (squares == squares[..., :1]).all(-1)
    return np.where(same, squares[..., 0], PARTIAL).astype(np.uint8)


def _values(picture: Picture, values: np.ndarray) -> tuple[list[str], str]:
    """The values of some elements, quantized to levels."""
    places = [np.arange(min(n, _MOST_COLUMNS)) * n // min(n, _MOST_COLUMNS) for n in values.shape]
    drawn, valid = values[np.ix_(*places)], picture.valid[np.ix_(*places)]
    shown = valid & np.isfinite(drawn)
    cells = np.where(valid, _NOT_FINITE, _MASKED)
    legend = "all elements are masked"
    if shown.any():
        low, high = float(drawn[shown].min()), float(drawn[shown].max())
        # Both are divided by 2, because the difference of two floats may overflow.
        above_low = np.where(shown, drawn, low) / np.float64(2) - low / 2
        scaled = above_low / (high / 2 - low / 2 or 1)
        levels = np.minimum((scaled * len(_LEVELS)).astype(int), len(_LEVELS) - 1)
        cells = np.where(shown, np.array([2 * level for level in _LEVELS])[levels], cells)
        legend = f"a score of 0 becomes {low:.3g} (▁) to {high:.3g} (█), · masked"
    if (valid & ~shown).any():
        legend = legend if shown.any() else "no element has a finite score, · masked"
        legend += ", ! NaN or inf"
    return ["".join(line) for line in cells], legend


COLORS = {
    "skipped tile": "#e8e8e8",
    "masked in a partial tile": "#fdd0a2",
    "valid in a partial tile": "#6baed6",
    "full tile": "#08519c",
}
"""The color of each kind of element, in the order of the numbers in the image."""

COLORS_WITHOUT_VALUE = {
    "skipped tile": COLORS["skipped tile"],
    "masked": COLORS["masked in a partial tile"],
    "NaN or inf": "#e31a1c",
}
"""Likewise in a picture of values, for elements that have no finite one."""

_MOST_LINES = 64
"""With more tiles than this along an axis, no lines are drawn between them."""


def _figure(picture: Picture, axes: Any = None) -> Any:
    """The picture on these axes, or on those of a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: ``axes`` is not an Axes.
    """
    try:
        types = importlib.import_module("matplotlib.axes")
        colors = importlib.import_module("matplotlib.colors")
        patches = importlib.import_module("matplotlib.patches")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: run pip install matplotlib, or "
            "call show() for a drawing in characters"
        ) from error
    if axes is None:
        _, axes = pyplot.subplots(figsize=(5.5, 5.5), layout="constrained")
    elif not isinstance(axes, types.Axes):
        raise TypeError(f"axes must be a matplotlib.axes.Axes or None, got {axes!r:.80}")
    T, S = picture.sizes
    place: dict[str, Any] = {"extent": (0, S, T, 0), "interpolation": "nearest", "aspect": "auto"}
    palette = COLORS if picture.values is None else COLORS_WITHOUT_VALUE
    kinds = kinds_of(picture)
    axes.imshow(
        kinds,
        cmap=colors.ListedColormap(list(palette.values())),
        vmin=-0.5,
        vmax=len(palette) - 0.5,
        **place,
    )
    if picture.values is not None:
        shown = np.ma.masked_array(picture.values, ~np.ma.getmaskarray(kinds))
        image = axes.imshow(shown, cmap="viridis", **place)
        axes.figure.colorbar(image, ax=axes, label="what a score of 0 becomes", shrink=0.8)
    kind_names = [list(palette)[kind] for kind in np.unique(kinds.compressed())]
    if kind_names:
        handles = [patches.Patch(color=palette[name], label=name) for name in kind_names]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    _lines(picture, axes)
    axes.set_xlabel("key column")
    axes.set_ylabel("query row")
    title = summary(picture).replace(": ", "\n", 1)
    axes.set_title(f"{picture.title}\n{title}" if picture.title else title, fontsize="medium")
    if T == S:
        axes.set_box_aspect(1)
    return axes


def kinds_of(picture: Picture) -> np.ma.MaskedArray:
    """int [r, c]: the index in ``COLORS`` of each element of the picture, or in
    ``COLORS_WITHOUT_VALUE``. Elements with a value are masked out.
    """
    tiles = np.ix_(picture.rows // picture.tile[0], picture.columns // picture.tile[1])
    classes = picture.classes[tiles]
    if picture.values is not None:
        kinds = np.where(classes == SKIPPED, 0, np.where(picture.valid, 2, 1))
        return np.ma.masked_array(kinds, (kinds == 2) & np.isfinite(picture.values))
    kinds = np.where(classes == PARTIAL, np.where(picture.valid, 2, 1), 0)
    return np.ma.masked_array(np.where(classes == FULL, 3, kinds))


def _lines(picture: Picture, axes: Any) -> None:
    """Thin lines between the tiles."""
    for size, tile, line in zip(
        picture.sizes, picture.tile, (axes.axhline, axes.axvline), strict=True
    ):
        if size // tile <= _MOST_LINES:
            for place in range(tile, size, tile):
                line(place, color="white", linewidth=0.6, alpha=0.8)
