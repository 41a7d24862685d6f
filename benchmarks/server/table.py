"""The tables of docs/benchmarks.md for the calls of an inference server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measuring.documents import LARGEST_DIFFERENCE
from reporting.markdown_table import table

_MISSING = "n/a"
_HOST = {
    "bare": "`x + 1`",
    "dense": "dense decode step",
    "paged": "`paged_attention`",
    "append_and_paged": "`append_to_pages` and `paged_attention`, pools donated",
}
_CONTIGUOUS = (
    "memeff_cuda",
    "memeff_xla",
    "jax_cudnn",
    "jax_xla",
    "torch_cudnn",
    "torch_flash",
    "fa4",
)
_PAGED = ("pages64", "pages16", "invariant")
_RELATIVE = ("float8", "invariant", "tree")


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


def _rate(record: Mapping[str, Any]) -> str:
    if "bytes_per_second" not in record:
        return _MISSING
    return f"{record['bytes_per_second'] / 1e12:.3g}"


def _ratio(record: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The speed of the first relative to the other."""
    if "seconds" not in record or "seconds" not in other:
        return _MISSING
    return f"{other['seconds'] / record['seconds']:.2f}"


def _decode(document: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> list[str]:
    labels = document["labels"]
    names = [n for n in (*_CONTIGUOUS, *_PAGED) if any(n in step["results"] for step in steps)]
    rates = [
        [step["name"], *(_rate(step["results"].get(name, {})) for name in names)] for step in steps
    ]
    ratios = []
    for step in steps:
        found = step["results"]
        speeds = [_ratio(found.get(name, {}), found.get("pages64", {})) for name in _RELATIVE]
        ratios.append([step["name"], *speeds])
    copy = document["device"]["copy_bytes_per_second"] / 1e12
    return [
        "### Decode steps\n\nEach sequence has one new token. The figures are TB/s of keys and "
        "values, which are read once. Pages are in random order; peers read contiguous keys. "
        f"Negating an array reads and writes {copy:.3g} TB/s.",
        table(["TB/s", *(labels[name] for name in names)], rates),
        "Speed relative to pages of 64, in steps per second; above 1 is faster:",
        table(["", *(labels[name] for name in _RELATIVE)], ratios),
    ]


def _prompts(document: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> list[str]:
    names = list(steps[0]["results"])
    rows = [
        [step["name"], *(_tflops(step["results"].get(name, {})) for name in names)]
        for step in steps
    ]
    header = ["TFLOP/s", *(document["labels"][name] for name in names)]
    return ["### Prompts", table(header, rows)]


def _tflops(record: Mapping[str, Any]) -> str:
    return f"{record['tflops']:.3g}" if "tflops" in record else _MISSING


def _ragged(steps: list[Mapping[str, Any]]) -> list[str]:
    rows = []
    for step in steps:
        found = step["results"]
        times = [found.get(name, {}).get("seconds") for name in ("pages64", "steps", "prompts")]
        ratio = _MISSING
        if None not in times:
            ratio = f"{times[0] / (times[1] + times[2]):.2f}"
        own = [_MISSING if time is None else f"{1e6 * time:.0f}" for time in times]
        rows.append([step["name"], *own, ratio])
    header = ["µs", "one call", "steps alone", "prompts alone", "one call / sum"]
    return ["### Prompts beside decode steps", table(header, rows)]


def _latent(document: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> list[str]:
    copy, rows = document["device"]["copy_bytes_per_second"], []
    for step in steps:
        record = step["results"].get("pages64", {})
        figures = [_MISSING] * 4
        if "seconds" in record:
            rate = record["bytes_per_second"]
            figures = [f"{1e6 * record['seconds']:.0f}", f"{record['tflops']:.0f}"]
            figures += [f"{rate / 1e12:.2f}", f"{rate / copy:.2f}"]
        for name in ("float8", "invariant"):
            times = [it.get("seconds") for it in (record, step["results"].get(name, {}))]
            figures.append(_MISSING if None in times else f"{times[0] / times[1]:.2f}")
        rows.append([step["name"], *figures])
    header = [
        "",
        "µs",
        "TFLOP/s",
        "TB/s of keys",
        "fraction of the copy's rate",
        "float8, relative speed",
        "batch-invariant, relative speed",
    ]
    return [
        "### Latent attention\n\nEach sequence has one new token. Keys have 576 columns, of which "
        "512 are values. The last two columns are the speed of a call with float8 pages, and of a "
        "batch-invariant call, divided by that of this one.",
        table(header, rows),
    ]


def text(document: Mapping[str, Any]) -> str:
    """The tables of all groups of steps that were measured.

    >>> step = {"name": "B1", "group": "ragged", "results": {
    ...     "pages64": {"seconds": 3e-6}, "steps": {"seconds": 2e-6}, "prompts": {"seconds": 2e-6}}}
    >>> print(text({"steps": [step], "host": {}}))
    ### Prompts beside decode steps
    <BLANKLINE>
    | µs | one call | steps alone | prompts alone | one call / sum |
    | --- | ---: | ---: | ---: | ---: |
    | B1 | 3 | 2 | 2 | 0.75 |
    """
    parts: list[str] = []
    if steps := _of_group(document, "decode"):
        parts += _decode(document, steps)
    if steps := _of_group(document, "prompts"):
        parts += _prompts(document, steps)
    if steps := _of_group(document, "ragged"):
        parts += _ragged(steps)
    if steps := _of_group(document, "latent"):
        parts += _latent(document, steps)
    if host := document["host"]:
        times = [
            [label, f"{host[name]['us']:.1f}" if "us" in host.get(name, {}) else _MISSING]
            for name, label in _HOST.items()
        ]
        parts += ["### Host time of a step", table(["µs of a jitted call", ""], times)]
    reasons = dict.fromkeys(
        f"- {document['labels'][name]}, {step['name']}: `{record['error']}`"
        for step in document["steps"]
        for name, record in step["results"].items()
        if "error" in record
    )
    if reasons:
        parts.append("No figure, because:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)
