"""Result files as the tables and pictures use them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from measuring.documents import LARGEST_DIFFERENCE
from programs.peers import OURS

DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
_HOPPER = ("H100", "H200", "GH200")
_UNSAID = re.compile(r"^NVIDIA | 80GB HBM3$|\(R\)|\(TM\)| CPU @ [\d.]+GHz| Processor")
_OLD = "host clock around"
"""How the clock of results begins that counts the host's work for each batch."""


def read(path: Path) -> dict[str, Any]:
    """The document of a file, without the figures of wrong results, and with the file's name."""
    document = json.loads(path.read_text())
    for cell in document.get("cells", ()):
        for records in cell["results"].values():
            _drop_wrong_results(records)
    return document | {"file": path.name}


def device_title(document: dict[str, Any]) -> str:
    """The device, and the architecture of the kernels if it is not the device's own.

    >>> device_title({"device": {"name": "NVIDIA H200"}, "residency": {"arch": "compute_80"}})
    'H200 with sm_80 kernels'
    >>> device_title({"device": {"name": "NVIDIA H100 80GB HBM3"}})
    'H100'
    >>> device_title({"device": {"name": "Intel(R) Xeon(R) Gold 6248R CPU @ 3.00GHz on 4 threads"}})
    'Intel Xeon Gold 6248R on 4 threads'
    """
    name = _UNSAID.sub("", document["device"]["name"])
    if "residency" in document:
        name += f" with {document['residency']['arch'].replace('compute', 'sm')} kernels"
    return name


def architecture(document: dict[str, Any]) -> str:
    """``cpu``, ``hopper``, or ``sm80`` for GPUs that run the kernels with mma.sync.

    >>> architecture({"device": {"name": "NVIDIA A100-SXM4-80GB", "platform": "gpu"}})
    'sm80'
    >>> architecture({"device": {"name": "NVIDIA H200"}, "residency": {"arch": "compute_80"}})
    'sm80'
    >>> architecture({"device": {"name": "Some CPU on 4 threads", "platform": "cpu"}})
    'cpu'
    """
    device = document["device"]
    if device.get("platform") == "cpu":
        return "cpu"
    is_hopper = any(name in device["name"] for name in _HOPPER)
    return "hopper" if is_hopper and "residency" not in document else "sm80"


def ours(document: dict[str, Any]) -> str:
    """The name of the implementation that the others are compared with: our first one."""
    found = [name for name in document["peers"] if name in OURS]
    if not found:
        raise ValueError(f"expected one of {OURS} among the peers, got {list(document['peers'])}")
    return found[0]


def time(seconds: float) -> str:
    """Microseconds with three digits.

    >>> time(0.0001234), time(0.0123456), time(5.4e-7)
    ('123', '12346', '0.540')
    """
    microseconds = 1e6 * seconds
    digits = max(0, 3 - len(str(int(microseconds)))) if microseconds >= 1 else 3
    return f"{microseconds:.{digits}f}"


def source(document: dict[str, Any], compared: bool = False) -> str:
    """Where the figures of a document come from; the file has driver and versions.

    Args:
        document: the results.
        compared: whether they stand below the name of the device and are compared with those of
            peers, so that the clock matters.

    >>> document = {"device": {"name": "NVIDIA H200"}, "date": "2026-11-28", "file": "a.json"}
    >>> source(document | {"versions": {"jax": "0.11.2", "commit": "5ffe8b21e6aa"}})
    'H200, 2026-11-28, commit 5ffe8b21 (`a.json`).'
    """
    commit = document["versions"].get("commit")
    parts = ["Measured" if compared else f"{device_title(document)},", document["date"]]
    at = f", commit {commit[:8]}" if commit else ""
    file = f" (`{document['file']}`)" if "file" in document else ""
    clock = document.get("method", {}).get("clock", "")
    old = " The clock counted host work, which slows down JAX." if clock.startswith(_OLD) else ""
    return f"{' '.join(parts)}{at}{file}.{old if compared else ''}"


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
