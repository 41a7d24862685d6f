"""Plots of results, with matplotlib. The same results give the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from programs.peers import OURS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GRID_TITLE = "TFLOP/s over the sequence length"
SPEED_TITLE = "Speed relative to each peer; to the right of 1 we are faster"

TITLES = {"forward": "Forward", "forward_backward": "Forward + backward"}


def cells_of_grid(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of the main grid, which has a plot over the length."""
    return [cell for cell in document["cells"] if cell["group"] == "main"]


def draw(document: dict[str, Any], own: str, path: Path) -> bool:
    """Write the plot of results; False if they have nothing to compare.

    Args:
        document: the results.
        own: the name of our implementation among the peers.
        path: of an SVG or a PNG.
    """
    cells = cells_of_grid(document)
    figure = _grid(document, cells) if cells else _speeds(document, own)
    if figure is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and with fixed ids, the file depends on the results alone.
    with matplotlib.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return True


def _grid(document: dict[str, Any], cells: list[dict[str, Any]]) -> Any:
    """TFLOP/s over T, a panel for each direction, head dim and mask."""
    columns = sorted({(cell["head_dim"], cell["causal"]) for cell in cells})
    figure, axes = plt.subplots(
        len(TITLES),
        len(columns),
        figsize=(3 * len(columns), 3.2 * len(TITLES)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for row, (direction, title) in zip(axes, TITLES.items(), strict=True):
        row[0].set_ylabel(f"{title}, TFLOP/s")
        for axis, (dim, causal) in zip(row, columns, strict=True):
            axis.set_title(f"head dim {dim}{', causal' if causal else ''}", fontsize="medium")
            for number, (peer, label) in enumerate(document["peers"].items()):
                points = sorted(
                    (cell["query_length"], cell["results"][direction][peer]["tflops"])
                    for cell in cells
                    if (cell["head_dim"], cell["causal"]) == (dim, causal)
                    and "tflops" in cell["results"][direction][peer]
                )
                axis.plot(
                    [length for length, _ in points],
                    [rate for _, rate in points],
                    marker="o",
                    markersize=3,
                    linewidth=2.5 if peer in OURS else 1.2,
                    color=f"C{number}",
                    label=label,
                )
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("T")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return figure


def _speeds(document: dict[str, Any], own: str) -> Any:
    """Our speed relative to each peer, with a row for each cell; None without a ratio."""
    found = {
        direction: {
            (cell["name"], peer): records[peer]["seconds"] / records[own]["seconds"]
            for cell in document["cells"]
            if (records := cell["results"].get(direction)) and "seconds" in records.get(own, {})
            for peer in document["peers"]
            if peer != own and "seconds" in records.get(peer, {})
        }
        for direction in TITLES
    }
    panels = {direction: ratios for direction, ratios in found.items() if ratios}
    if not panels:
        return None
    names = [
        cell["name"]
        for cell in document["cells"]
        if any((cell["name"], peer) in own for own in panels.values() for peer in document["peers"])
    ]
    names = list(dict.fromkeys(names))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.5 + 3.5 * len(panels), 1.4 + 0.22 * len(names)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (direction, ratios) in zip(axes[0], panels.items(), strict=True):
        axis.axvline(1, color="black", linewidth=1)
        for number, (peer, label) in enumerate(document["peers"].items()):
            points = [(ratios[name, peer], name) for name in names if (name, peer) in ratios]
            if peer != own and points:
                axis.plot(
                    [ratio for ratio, _ in points],
                    [names.index(name) for _, name in points],
                    "o",
                    color=f"C{number}",
                    label=label,
                    markersize=5,
                )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_yticks(range(len(names)), names, fontsize="small")
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlabel(f"{TITLES[direction]}: time of a peer / ours")
        axis.grid(alpha=0.3)
    entries: dict[str, Any] = {}
    for axis in axes[0]:
        entries |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=3)
    return figure
