"""Result files as the tables and pictures use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring.documents import LARGEST_DIFFERENCE
from programs.peers import OURS


def read(path: Path) -> dict[str, Any]:
    """The document of a file, without the figures of wrong results."""
    document = json.loads(path.read_text())
    for cell in document.get("cells", ()):
        for records in cell["results"].values():
            _drop_wrong_results(records)
    return document


def device_title(document: dict[str, Any]) -> str:
    """The device, and the architecture of the kernels if it is not the device's own.

    >>> device_title({"device": {"name": "NVIDIA H200"}, "residency": {"arch": "compute_80"}})
    'NVIDIA H200 with kernels for compute_80'
    """
    name = document["device"]["name"]
    if "residency" in document:
        name += f" with kernels for {document['residency']['arch']}"
    return name


def _drop_wrong_results(records: dict[str, dict[str, Any]]) -> None:
    """Replaces the figure of a peer by an error if its results are wrong: if they differ from ours,
    and those of another peer do not.

    >>> records = {"fa4": {"difference": 1.31}, "torch_cudnn": {"difference": 0.003}}
    >>> _drop_wrong_results(records)
    >>> records["fa4"]
    {'error': 'wrong results: they differ by 1.3, and those of other peers by 0.003'}
    """
    differences = {
        peer: record["difference"]
        for peer, record in records.items()
        if peer not in OURS and "difference" in record
    }
    right = [found for found in differences.values() if found <= LARGEST_DIFFERENCE]
    if not right:
        return
    for peer, difference in differences.items():
        if not difference <= LARGEST_DIFFERENCE:
            agreement = f"and those of other peers by {max(right):.1g}"
            records[peer] = {
                "error": f"wrong results: they differ by {difference:.2g}, {agreement}"
            }
