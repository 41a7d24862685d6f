"""The speed of our implementation relative to the fastest peer, by cell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from programs.peers import OURS


def ours(document: dict[str, Any]) -> str:
    """The name of the implementation that the others are compared with: our first one."""
    found = [name for name in document["peers"] if name in OURS]
    if not found:
        raise ValueError(f"expected one of {OURS} among the peers, got {list(document['peers'])}")
    return found[0]


def ratios(cells: Iterable[dict[str, Any]], direction: str, own: str, peers: Iterable[str]):
    """Our speed over that of the fastest peer, by the name of the cell.

    Only cells with a figure for ours and for a peer are included.
    """
    found = {}
    for cell in cells:
        results = cell["results"].get(direction, {})
        others = [results[peer]["seconds"] for peer in peers if "seconds" in results.get(peer, {})]
        if others and "seconds" in results.get(own, {}):
            found[cell["name"]] = min(others) / results[own]["seconds"]
    return found
