"""The table of functions: their speed relative to the plain call and to FlexAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUPS = ("functions", "gallery")
_PLAIN, _DETERMINISTIC, _FLEX = "memeff_plain", "memeff_deterministic", "flex"
_OURS = ("memeff_cuda", "memeff_xla")
_MISSING = "n/a"
_DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
_RATIOS = {
    "forward": ("of plain", "of FlexAttention"),
    "forward_backward": ("of plain", "of FlexAttention", "deterministic, of plain"),
}


def rows(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header, and a row for each cell of functions: TFLOP/s and relative speeds.

    >>> results = {"memeff_cuda": {"seconds": 2.0, "tflops": 300.0}, "flex": {"error": "no"}}
    >>> results["memeff_plain"] = {"seconds": 1.5}
    >>> cell = {"group": "functions", "name": "alibi", "results": {"forward": results}}
    >>> header, found = rows({"cells": [cell]})
    >>> header[:4]
    ['', 'forward, TFLOP/s', 'of plain', 'of FlexAttention']
    >>> found
    [['alibi', '300', '0.75', 'n/a', 'n/a', 'n/a', 'n/a', 'n/a']]
    """
    header = [""]
    for direction, title in _DIRECTIONS.items():
        header += [f"{title}, TFLOP/s", *_RATIOS[direction]]
    found = []
    for cell in document["cells"]:
        if cell["group"] in GROUPS:
            row = [cell["name"]]
            for direction in _DIRECTIONS:
                row += _figures(cell["results"].get(direction, {}), direction)
            found.append(row)
    return header, found


def of_plain(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header, and a row for each cell of functions: speeds relative to the plain call.

    >>> results = {"memeff_cuda": {"seconds": 2.0}, "memeff_plain": {"seconds": 1.5}}
    >>> cell = {"group": "functions", "name": "alibi", "results": {"forward": results}}
    >>> of_plain({"cells": [cell]})[1]
    [['alibi', '0.75', 'n/a', 'n/a']]
    """
    found = []
    for cell in document["cells"]:
        if cell["group"] in GROUPS:
            row = [cell["name"]]
            for name, direction in (
                (None, "forward"),
                (None, "forward_backward"),
                (_DETERMINISTIC, "forward_backward"),
            ):
                results = cell["results"].get(direction, {})
                record = _own(results) if name is None else results.get(name, {})
                row.append(_speed(record, results.get(_PLAIN, {})))
            found.append(row)
    return ["function", *_DIRECTIONS.values(), "deterministic"], found


def _figures(results: Mapping[str, Any], direction: str) -> list[str]:
    own = _own(results)
    speeds = {
        "of plain": _speed(own, results.get(_PLAIN, {})),
        "of FlexAttention": _speed(own, results.get(_FLEX, {})),
        "deterministic, of plain": _speed(results.get(_DETERMINISTIC, {}), results.get(_PLAIN, {})),
    }
    rate = f"{own['tflops']:.3g}" if "tflops" in own else _MISSING
    return [rate, *(speeds[name] for name in _RATIOS[direction])]


def _speed(record: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if "seconds" not in record or "seconds" not in other:
        return _MISSING
    return f"{other['seconds'] / record['seconds']:.2f}"


def block_masks(document: Mapping[str, Any]) -> list[str]:
    """The time of block masks relative to a forward and backward, one line per cell.

    >>> both = {"forward_backward": {"memeff_cuda": {"seconds": 8e-3}}}
    >>> host = {"block_mask": {"documents": {"seconds": 2e-4}}}
    >>> block_masks({"cells": [{"name": "documents", "results": both}], "host": host})
    ['documents: 0.20 ms, 2.5% of forward + backward']
    """
    measured = document["host"].get("block_mask", {})
    lines = []
    for cell in document["cells"]:
        record = measured.get(cell["name"], {})
        both = _own(cell["results"].get("forward_backward", {}))
        if "seconds" in record and "seconds" in both:
            share = record["seconds"] / both["seconds"]
            milliseconds = 1e3 * record["seconds"]
            lines.append(
                f"{cell['name']}: {milliseconds:.2f} ms, {share:.1%} of forward + backward"
            )
    return lines


def compilation(document: Mapping[str, Any]) -> list[str]:
    """A line on the number of sources that the functions compile, if they were counted.

    >>> cold = {"functions": 2, "sources": {"a": 2, "b": 2}, "slowest": "a", "seconds": 9.0}
    >>> cold |= {"seconds_of_slowest": 5.0, "sources_of_new_lengths": 0}
    >>> warm = cold | {"sources": {"a": 0, "b": 0}, "seconds": 1.0}
    >>> rows = {"function_compile": {"cold": cold, "warm": warm}}
    >>> compilation({"host": rows})  # doctest: +ELLIPSIS
    ['2 functions compile 4 sources, ... (a: 5.0 s); 0 of new lengths; 0 in 1.0 s with ... cache']
    """
    rows = document["host"].get("function_compile", {})
    if "sources" not in rows.get("cold", {}) or "sources" not in rows.get("warm", {}):
        return []
    cold, warm = rows["cold"], rows["warm"]
    return [
        f"{cold['functions']} functions compile {sum(cold['sources'].values())} sources, at most "
        f"{max(cold['sources'].values())} each, in {cold['seconds']:.1f} s ({cold['slowest']}: "
        f"{cold['seconds_of_slowest']:.1f} s); {cold['sources_of_new_lengths']} of new lengths; "
        f"{sum(warm['sources'].values())} in {warm['seconds']:.1f} s with a filled cache"
    ]


def _own(results: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((results[name] for name in _OURS if name in results), {})


def text(document: Mapping[str, Any]) -> str:
    """The table in columns of equal width, and block masks; empty without cells of functions."""
    header, found = rows(document)
    if not found:
        return ""
    lines = [header, *found]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    lines = [f"block masks of {line}" for line in block_masks(document)]
    return "\n".join([*table, *lines, *compilation(document)])
