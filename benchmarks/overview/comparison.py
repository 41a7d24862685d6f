"""The ratio of each cell to its fastest peer, in groups of cells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from programs.peers import OURS, PEERS
from reporting.ratios import ours, ratios
from reporting.results import device_title

DIRECTIONS = ("forward", "forward_backward")
TITLES = {
    "main": "main grid",
    "small": "small problems",
    "gqa": "grouped heads",
    "window": "sliding window",
    "dims": "other head dims",
    "large_dims": "head dims above 256",
    "softcap": "soft cap, and without",
    "varlen": "packed sequences",
    "features": "bias, dropout, both",
    "pairs": "bias of pair representations",
    "masks": "segment ids, boolean masks",
    "float32": "float32",
    "decode": "few queries, long keys",
    "steps": "steps of a server",
    "functions": "functions of scores and masks",
    "cpu": "plain JAX on a CPU",
}
"""Groups of cells in the order of the rows. Other groups, such as the gallery, have no peers."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell in one direction."""

    name: str
    direction: str
    ratio: float
    """The time of the fastest peer over ours: below 1 we are slower."""
    peer: str
    """The label of the fastest peer."""

    @property
    def is_slower(self) -> bool:
        """Whether the ratio is below 1 with two decimals, as it is printed.

        >>> [Cell("", "forward", ratio, "").is_slower for ratio in (0.994, 0.996, 1.2)]
        [True, False, False]
        """
        return round(self.ratio, 2) < 1


@dataclasses.dataclass(frozen=True)
class Row:
    """Cells of one kind that were measured together."""

    title: str
    device: str
    date: str
    peers: tuple[str, ...]
    """The labels of the peers that have a figure in a cell."""
    cells: tuple[Cell, ...]

    def of(self, direction: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.direction == direction]


def mean(cells: Iterable[Cell]) -> float:
    """The geometric mean of the ratios, of which there is at least one.

    >>> mean([Cell("", "forward", 2.0, ""), Cell("", "forward", 0.5, "")])
    1.0
    """
    logs = [math.log(cell.ratio) for cell in cells]
    return math.exp(math.fsum(logs) / len(logs))


def rows(documents: Iterable[dict[str, Any]]) -> list[Row]:
    """A row for each group of cells, and in the main grid for each head dim."""
    found: dict[tuple[int, str, str], Row] = {}
    order = list(TITLES)
    for document in documents:
        if "steps" in document:
            document = _with_cells(document)
        if not document.get("cells"):
            continue
        own = ours(document)
        others = {peer: label for peer, label in document["peers"].items() if peer not in OURS}
        for cell in document["cells"]:
            group = cell["group"]
            if group not in TITLES:
                continue
            title = TITLES[group]
            if group == "main":
                title += f", head dim {cell['head_dim']}"
            device = device_title(document)
            key = order.index(group), device, title
            row = found.get(key) or Row(title, device, document["date"], (), ())
            found[key] = _with(row, cell, own, others)
    return [found[key] for key in sorted(found, key=_place) if found[key].cells]


def _with_cells(document: dict[str, Any]) -> dict[str, Any]:
    """The steps of a server as cells: the call without pages, which is what peers run, too."""
    cells = [
        {"name": step["name"], "group": "steps", "results": {"forward": step["results"]}}
        for step in document["steps"]
    ]
    labels = document["labels"].items()
    peers = {name: label for name, label in labels if name in PEERS}
    return {**document, "cells": cells, "peers": peers}


def _place(key: tuple[int, str, str]) -> tuple[str, int, int, str]:
    """Rows of a device together; then by group; then by the number at the end of the title.

    >>> _place((0, "GPU", "main grid, head dim 64")) < _place((0, "GPU", "main grid, head dim 128"))
    True
    """
    group, device, title = key
    last = title.rsplit(" ", 1)[-1]
    return device, group, int(last) if last.isdigit() else 0, title


def _with(row: Row, cell: dict[str, Any], own: str, others: dict[str, str]) -> Row:
    """The row and one cell more, in both directions."""
    cells, peers = list(row.cells), list(row.peers)
    for direction in DIRECTIONS:
        records = cell["results"].get(direction, {})
        seconds = {peer: records[peer]["seconds"] for peer in others if _measured(records, peer)}
        peers += [others[peer] for peer in seconds if others[peer] not in peers]
        for name, ratio in ratios([cell], direction, own, others).items():
            fastest = min(seconds, key=lambda peer: seconds[peer])
            cells.append(Cell(name, direction, ratio, others[fastest]))
    return dataclasses.replace(row, cells=tuple(cells), peers=tuple(peers))


def _measured(records: dict[str, Any], peer: str) -> bool:
    return "seconds" in records.get(peer, {})
