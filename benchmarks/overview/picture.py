"""The overview as a picture: a point for each cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reporting import plots

from overview.comparison import DIRECTIONS, Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLORS = ("#2171b5", "#e31a1c")
"""The color of cells at least as fast as the fastest peer, and the color of slower ones."""
_MARKS = dict(zip(DIRECTIONS, ("o", "^"), strict=True))
_TICKS = (0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16)
_LARGEST = 16
"""Larger ratios are drawn here: a call that skips nearly all keys would squeeze the others."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write an SVG or a PNG; the same rows give the same file. It can be read on a phone."""
    figure = drawn(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and with fixed ids, the file depends on the results alone.
    with matplotlib.rc_context({"svg.hashsalt": "overview", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def drawn(rows: Sequence[Row]) -> Figure:
    """The picture: one plot for each device, all with the same scale."""
    devices = [list(own) for _, own in itertools.groupby(rows, key=lambda row: row.device)]
    figure, axes = plt.subplots(
        len(devices),
        sharex=True,
        squeeze=False,
        figsize=(4.8, 1.0 + 0.25 * len(devices) + 0.36 * len(rows)),
        height_ratios=[len(own) for own in devices],
        layout="constrained",
    )
    for axis, own in zip(axes.flat, devices, strict=True):
        axis.set_title(own[0].device, fontsize=9, loc="left")
        _points(axis, own)
        _labels(axis, own)
    last = axes.flat[-1]
    _scale(last, [cell.ratio for row in rows for cell in row.cells])
    handles = [
        last.plot([], [], mark, color="#555", label=plots.TITLES[direction].lower())[0]
        for direction, mark in _MARKS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _points(axis: Axes, rows: Sequence[Row]) -> None:
    axis.axvspan(0.01, 1, color="#fee0d2", zorder=0)
    axis.axvline(1, color="black", linewidth=1)
    for number, row in enumerate(rows):
        for direction, offset in zip(DIRECTIONS, (-0.16, 0.16), strict=True):
            for is_slower in (False, True):
                points = [
                    min(c.ratio, _LARGEST) for c in row.of(direction) if c.is_slower == is_slower
                ]
                axis.plot(
                    points,
                    [number + offset] * len(points),
                    _MARKS[direction],
                    color=_COLORS[is_slower],
                    markersize=4.5,
                    alpha=0.75,
                    markeredgewidth=0,
                )


def _labels(axis: Axes, rows: Sequence[Row]) -> None:
    slower = [sum(cell.is_slower for cell in row.cells) for row in rows]
    labels = [
        f"{row.title}\n{row.date}: {count} of {len(row.cells)} slower"
        for row, count in zip(rows, slower, strict=True)
    ]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    for label, count in zip(axis.get_yticklabels(), slower, strict=True):
        label.set_color(_COLORS[1] if count else "black")
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    for place in range(1, len(rows)):
        axis.axhline(place - 0.5, color="#ccc", linewidth=0.5)


def _scale(axis: Axes, ratios: Sequence[float]) -> None:
    lowest, highest = min(0.9, *ratios) * 0.97, min(_LARGEST, max(1.1, *ratios)) * 1.05
    axis.set_xscale("log")
    axis.set_xlim(lowest, highest)
    ticks = [tick for tick in _TICKS if lowest <= tick <= highest]
    labels = [f"{tick:g}" for tick in ticks]
    if max(ratios) > _LARGEST:
        labels[-1] = f"≥{_LARGEST}"
    axis.set_xticks(ticks, labels, fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("fastest peer's time / ours (red: slower)", fontsize=9)
