"""Each cell compared with its fastest peer, in groups of cells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from programs.peers import OURS, PEERS
from reporting.results import DIRECTIONS, architecture, device_title, ours, source

TITLES = {
    "main": "main grid",
    "small": "small problems",
    "gqa": "grouped heads",
    "varlen": "packed sequences",
    "dims": "other head dims",
    "large_dims": "head dims above 256",
    "float32": "float32",
    "window": "sliding window",
    "softcap": "soft cap, and without",
    "features": "bias, dropout, both",
    "pairs": "bias of pair representations",
    "masks": "segment ids, boolean masks",
    "lists": "lists of keys",
    "functions": "functions of scores and masks",
    "decode": "few queries, long keys",
    "steps": "decode steps of a server",
    "prompts": "prompts of a server",
    "cpu": "plain JAX",
}
"""Groups of cells in the order of the tables. Other groups, such as the gallery, have no peers."""

DENSE = ("main", "small", "gqa", "varlen", "dims", "large_dims", "float32")
FEATURES = ("window", "softcap", "features", "pairs", "masks", "lists", "functions")
SERVING = ("decode", "steps", "prompts")
RATES = ("lists",)
"""Groups whose tables have rates, because one cell is compared with another."""
ARCHITECTURES = ("hopper", "sm80", "cpu")


@dataclasses.dataclass(frozen=True)
class Result:
    """A cell in one direction."""

    name: str
    direction: str
    seconds: float | None
    """Our time; None if our call failed."""
    peers: Mapping[str, float]
    """The times of the peers that have one, by label."""
    flops: float | None = None
    """The counted operations, if tables have rates; None if they have times."""

    @property
    def peer(self) -> str:
        """The fastest peer."""
        return min(self.peers, key=self.peers.__getitem__)

    @property
    def ratio(self) -> float:
        """The time of the fastest peer over ours: below 1 we are slower.

        A call of ours that failed has 0. Only for results with a peer.
        """
        return 0.0 if self.seconds is None else self.peers[self.peer] / self.seconds

    @property
    def is_slower(self) -> bool:
        """Whether the ratio is below 1 with two decimals, as it is printed.

        >>> [Result("", "forward", 1.0, {"p": time}).is_slower for time in (0.994, 0.996, 1.2)]
        [True, False, False]
        """
        return round(self.ratio, 2) < 1


@dataclasses.dataclass(frozen=True)
class Group:
    """Cells of one kind that were measured on one device."""

    name: str
    device: str
    architecture: str
    dates: tuple[str, ...]
    sources: tuple[str, ...]
    """A sentence on each file."""
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    def compared(self, direction: str | None = None) -> list[Result]:
        """The results with a peer, of one direction or of both."""
        return [r for r in self.results if r.peers and direction in (None, r.direction)]


def mean(results: Iterable[Result]) -> float:
    """The geometric mean of the ratios of calls that did not fail.

    >>> mean([Result("", "forward", 1.0, {"p": time}) for time in (2.0, 0.5)])
    1.0
    """
    logs = [math.log(result.ratio) for result in results if result.ratio]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 0.0


def groups(documents: Iterable[dict[str, Any]]) -> list[Group]:
    """The groups of all documents that have a title: GPUs first, those of a device together."""
    found: dict[tuple[str, str], Group] = {}
    for document in documents:
        for group in of_document(document):
            if group.name in TITLES and group.compared():
                key = group.device, group.name
                found[key] = _joined(found[key], group) if key in found else group
    order = list(TITLES)
    return sorted(
        found.values(),
        key=lambda g: (ARCHITECTURES.index(g.architecture), _newest(g.device), order.index(g.name)),
    )


def of_document(document: dict[str, Any]) -> list[Group]:
    """The groups of one document, also those without a title or a peer."""
    if "steps" in document:
        document = _with_cells(document)
    if not document.get("cells") or not document["peers"]:  # all calls are from pages
        return []
    own = ours(document)
    others = {peer: label for peer, label in document["peers"].items() if peer not in OURS}
    names = dict.fromkeys(cell["group"] for cell in document["cells"])
    return [
        Group(
            name,
            device_title(document),
            architecture(document),
            (document["date"],),
            (source(document, compared=True),),
            tuple(
                result
                for cell in document["cells"]
                if cell["group"] == name
                for result in _results(cell, own, others)
            ),
        )
        for name in names
    ]


def _results(cell: dict[str, Any], own: str, others: dict[str, str]) -> Iterator[Result]:
    for direction in DIRECTIONS:
        records = cell["results"].get(direction, {})
        seconds = {peer: record.get("seconds") for peer, record in records.items()}
        peers = {label: seconds[peer] for peer, label in others.items() if seconds.get(peer)}
        flops = cell["flops"].get(direction) if cell["group"] in RATES else None
        if own in seconds:
            yield Result(cell["name"], direction, seconds[own], peers, flops)


def _joined(first: Group, second: Group) -> Group:
    return dataclasses.replace(
        first,
        dates=(*first.dates, *second.dates),
        sources=(*first.sources, *second.sources),
        results=(*first.results, *second.results),
    )


def _newest(device: str) -> tuple[int, str]:
    """Devices with larger numbers first.

    >>> sorted(["H100", "H200 with sm_80 kernels", "H200"], key=_newest)
    ['H200', 'H200 with sm_80 kernels', 'H100']
    """
    digits = "".join(filter(str.isdigit, device.split(" ")[0]))
    return -int(digits or 0), device


def _with_cells(document: dict[str, Any]) -> dict[str, Any]:
    """The steps of a server as cells: our call without pages, which is what peers run, too."""
    kinds = {"decode": "steps"}
    cells = [
        {
            "name": step["name"],
            "group": kinds.get(step["group"], step["group"]),
            "results": {"forward": step["results"]},
        }
        for step in document["steps"]
    ]
    timed = {name for step in document["steps"] for name in step["results"]}
    labels = document["labels"].items()
    peers = {name: label for name, label in labels if name in PEERS and name in timed}
    return {**document, "cells": cells, "peers": peers}
