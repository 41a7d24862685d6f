"""A picture drawn with matplotlib, which is not a dependency of the package."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_memeff._call.mask.pictures import text
from jax_memeff._call.mask.pictures.tile_classes import FULL, PARTIAL, SKIPPED

if TYPE_CHECKING:
    from jax_memeff._call.mask.pictures.picture import Picture

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


def drawing(picture: Picture, axes: Any = None) -> Any:
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
    names = [list(palette)[kind] for kind in np.unique(kinds.compressed())]
    if names:
        handles = [patches.Patch(color=palette[name], label=name) for name in names]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    _lines(picture, axes)
    axes.set_xlabel("key column")
    axes.set_ylabel("query row")
    title = text.summary(picture).replace(": ", "\n", 1)
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
