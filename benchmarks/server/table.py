"""The tables of an inference server's calls from pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measuring.documents import LARGEST_DIFFERENCE
from programs.peers import OURS, PEERS
from reporting.markdown_table import table
from reporting.results import device_title, time

from server import flash_mla

_MISSING = "n/a"
_HOST = {
    "bare": "`x + 1`",
    "dense": "dense decode step",
    "paged": "`paged_attention`",
    "append_and_paged": "`append_to_pages` and `paged_attention`, pools donated",
}
_WAYS = ("pages64", "pages16", "float8", "invariant", "tree")


def line(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of a step in one line.

    >>> line({"pages64": {"seconds": 1e-3, "bytes_per_second": 4e12, "tflops": 8.0}, "fa4": {}})
    'pages64 1000 us 4.00 TB/s 8.0 TFLOP/s  fa4 none'
    """
    parts = []
    for name, record in records.items():
        text = "none"
        if "seconds" in record:
            text = f"{1e6 * record['seconds']:.4g} us {record['bytes_per_second'] / 1e12:.2f} TB/s"
            text += f" {record['tflops']:.1f} TFLOP/s" if "tflops" in record else ""
        if record.get("difference", 0.0) > LARGEST_DIFFERENCE:
            text += f" (differs by {record['difference']:.2g})"
        parts.append(f"{name} {text}")
    return "  ".join(parts)


def _of_group(document: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    return [step for step in document["steps"] if step["group"] == group]


def _time(record: Mapping[str, Any]) -> str:
    return time(record["seconds"]) if "seconds" in record else _MISSING


def _ratio(record: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The speed of the first relative to the other."""
    if "seconds" not in record or "seconds" not in other:
        return _MISSING
    return f"{other['seconds'] / record['seconds']:.2f}"


def _compared(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    """The ratio to a peer, bold if the peer is faster."""
    ratio = _ratio(ours, peer)
    return f"**{ratio}**" if ratio != _MISSING and float(ratio) < 1 else ratio


def _pages(document: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> list[str]:
    labels, rows = document["labels"], []
    for step in steps:
        found = step["results"]
        peers = [r for n, r in found.items() if n in PEERS and n not in OURS and "seconds" in r]
        fastest = min(peers, key=lambda record: record["seconds"], default={})
        times = [_time(found.get(name, {})) for name in _WAYS]
        rows.append([step["name"], *times, _compared(found.get("pages64", {}), fastest)])
    return [
        "## Pages",
        "Times in µs with keys in pages in random order. The last column is the time of the "
        "fastest peer, which reads contiguous keys, divided by that with pages of 64.",
        table(["step", *(labels[name] for name in _WAYS), "ratio"], rows),
    ]


def _ragged(steps: list[Mapping[str, Any]]) -> list[str]:
    rows = []
    for step in steps:
        found = step["results"]
        records = [found.get(name, {}) for name in ("pages64", "steps", "prompts")]
        parts: Any = {"seconds": sum(r["seconds"] for r in records[1:] if "seconds" in r)}
        known = all("seconds" in record for record in records)
        ratio = _ratio(records[0], parts) if known else _MISSING
        rows.append([step["name"], *map(_time, records), ratio])
    header = ["µs", "one call", "steps alone", "prompts alone", "sum / one call"]
    return ["## Prompts and decode steps in one call", table(header, rows)]


def _latent(document: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> list[str]:
    copy, rows = document["device"]["copy_bytes_per_second"], []
    for step in steps:
        record = step["results"].get("pages64", {})
        rates = [_MISSING] * 2
        if "seconds" in record:
            rates = [f"{record['tflops']:.0f}", f"{record['bytes_per_second'] / copy:.2f}"]
        speeds = [_ratio(step["results"].get(name, {}), record) for name in ("float8", "invariant")]
        peer = _compared(record, step["results"].get(flash_mla.NAME, {}))
        rows.append([step["name"], _time(record), *rates, *speeds, peer])
    header = ["step", "µs", "TFLOP/s", "of the copy's rate", "float8", "batch-invariant", "ratio"]
    return [
        f"## {device_title(dict(document))}: latent attention",
        "Keys have 576 columns, of which 512 are values. A copy on the device moves "
        f"{copy / 1e12:.3g} TB/s. Float8 and batch-invariant are speeds relative to this call. "
        f"The last column is {flash_mla.LABEL}'s time with the same pages, divided by this one.",
        table(header, rows),
    ]


def text(document: Mapping[str, Any]) -> str:
    """The tables of all groups of steps that were measured.

    >>> step = {"name": "B1", "group": "ragged", "results": {
    ...     "pages64": {"seconds": 3e-6}, "steps": {"seconds": 2e-6}, "prompts": {"seconds": 2e-6}}}
    >>> print(text({"steps": [step], "host": {}}))
    ## Prompts and decode steps in one call
    <BLANKLINE>
    |µs|one call|steps alone|prompts alone|sum / one call|
    |---|---:|---:|---:|---:|
    |B1|3.00|2.00|2.00|1.33|
    """
    parts: list[str] = []
    if steps := _of_group(document, "decode") + _of_group(document, "prompts"):
        parts += _pages(document, steps)
    if steps := _of_group(document, "ragged"):
        parts += _ragged(steps)
    if steps := _of_group(document, "latent"):
        parts += _latent(document, steps)
    if host := document["host"]:
        times = [
            [label, f"{host[name]['us']:.1f}" if "us" in host.get(name, {}) else _MISSING]
            for name, label in _HOST.items()
        ]
        parts += ["## Host time of a step", table(["host time of a jitted call", "µs"], times)]
    reasons = dict.fromkeys(
        f"- {document['labels'][name]}, {step['name']}: `{record['error']}`"
        for step in document["steps"]
        for name, record in step["results"].items()
        if "error" in record
    )
    if reasons:
        parts.append("No figure, because:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)
