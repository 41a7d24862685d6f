"""A picture in characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jax_memeff._call.mask.pictures.tile_classes import FULL, PARTIAL, SKIPPED

if TYPE_CHECKING:
    from jax_memeff._call.mask.pictures.picture import Picture

_MOST_COLUMNS = 40
"""Cells of a line, each two characters wide, so that squares look square."""

_OF_TILE = {SKIPPED: "· ", FULL: "██", PARTIAL: "▒▒"}
_LEVELS = "▁▂▃▄▅▆▇█"
_MASKED, _NOT_FINITE = "· ", "! "


def drawing(picture: Picture) -> str:
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
        int((picture.classes == own).sum()) for own in (SKIPPED, FULL, PARTIAL)
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
        own = picture.classes[row // rows]
        cells = []
        for column, holds in enumerate(valid):
            if column and column % columns == 0:
                cells.append("│ ")
            is_skipped = own[column // columns] == SKIPPED
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
    own, valid = values[np.ix_(*places)], picture.valid[np.ix_(*places)]
    shown = valid & np.isfinite(own)
    cells = np.where(valid, _NOT_FINITE, _MASKED)
    legend = "all elements are masked"
    if shown.any():
        low, high = float(own[shown].min()), float(own[shown].max())
        # Both are divided by 2, because the difference of two floats may overflow.
        above_low = np.where(shown, own, low) / np.float64(2) - low / 2
        scaled = above_low / (high / 2 - low / 2 or 1)
        levels = np.minimum((scaled * len(_LEVELS)).astype(int), len(_LEVELS) - 1)
        cells = np.where(shown, np.array([2 * level for level in _LEVELS])[levels], cells)
        legend = f"a score of 0 becomes {low:.3g} (▁) to {high:.3g} (█), · masked"
    if (valid & ~shown).any():
        legend = legend if shown.any() else "no element has a finite score, · masked"
        legend += ", ! NaN or inf"
    return ["".join(line) for line in cells], legend
