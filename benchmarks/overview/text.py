"""Groups of cells in Markdown: the index of all, the table of one, all losses, and the extract of
the README.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reporting.markdown_table import table
from reporting.results import DIRECTIONS, time

from overview.comparison import DENSE, FEATURES, RATES, Group, Result, mean

EXTRACT = {
    "H200": (
        *("main grid", "small problems", "grouped heads", "packed sequences"),
        *("bias, dropout, both", "float32", "head dims above 256", "few queries, long keys"),
    ),
    "H100": ("functions of scores and masks", "decode steps of a server"),
    "H200 with sm_80 kernels": ("main grid", "bias, dropout, both"),
}
"""The rows of the README, by device. Those of CPUs follow."""
LEGEND = (
    "A *ratio* is the time of the fastest peer divided by ours; a **bold** one is a loss. Times "
    "are µs of a call. Above each table stand the mean ratios to each peer, forward and then "
    "forward + backward, and the numbers of its cells."
)


def page(group: Group) -> str:
    """The name of the page with the table of a group."""
    if group.architecture != "hopper":
        return group.architecture
    return "dense" if group.name in DENSE else "features" if group.name in FEATURES else "serving"


def heading(group: Group) -> str:
    return f"{group.device}: {group.title}"


def link(group: Group) -> str:
    """A link from docs/benchmarks.md to the table of a group."""
    anchor = re.sub(r"[^\w\- ]", "", heading(group).lower()).replace(" ", "-")
    return f"[{group.title}](benchmarks/{page(group)}.md#{anchor})"


def counted(groups: Sequence[Group]) -> str:
    """How many figures there are, and how many are losses. Those of CPUs are counted apart."""
    parts = []
    for kind, is_cpu in (("GPUs", False), ("CPUs", True)):
        results = [r for g in groups if (g.architecture == "cpu") == is_cpu for r in g.compared()]
        if results:
            what = "" if parts else " jax-memeff is slower than the fastest peer"
            parts.append(f"on {kind}{what} in {_slower(results)}")
    dates = sorted({date for group in groups for date in group.dates})
    period = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "never"
    text = f"{' figures, '.join(parts)} (measured {period})."
    return text[:1].upper() + text[1:]


def index(groups: Sequence[Group]) -> str:
    """A table for each device, with a row for each group."""
    parts = []
    for device in dict.fromkeys(group.device for group in groups):
        lines = []
        for group in (g for g in groups if g.device == device):
            results = group.compared()
            least = min(results, key=lambda result: result.ratio)
            cell = f"{least.name}, {DIRECTIONS[least.direction]}: {least.peer}"
            lines.append([link(group), *_means(group), _slower(results), ratio(least)])
            lines[-1].append(cell if least.is_slower else "")
        header = [device, *DIRECTIONS.values(), "slower", "lowest", "in cell: fastest peer"]
        parts.append(table(header, lines, text=(0, 5)))
    return "\n\n".join(parts)


def losses(groups: Sequence[Group]) -> str:
    """A table for each device, with a row for each figure below 1, the lowest first."""
    parts = []
    for device in dict.fromkeys(group.device for group in groups):
        own = [r for group in groups if group.device == device for r in group.compared()]
        lines = [
            [result.name, DIRECTIONS[result.direction], f"{result.ratio:.2f}", result.peer]
            for result in sorted(own, key=lambda result: result.ratio)
            if result.is_slower
        ]
        header = ["cell", "direction", "ratio", "fastest peer"]
        parts.append(f"## {device}: {_slower(own)} figures")
        parts += [table(header, lines, text=(0, 1, 3))] if lines else []
    return "\n\n".join(parts)


def section(group: Group) -> str:
    """The heading and the table of a group: all its cells, also those that no peer computes.

    If the same peer is the fastest in every cell, the header names it.
    """
    directions = [d for d in DIRECTIONS if any(r.direction == d for r in group.results)]
    cells: dict[str, dict[str, Result]] = {}
    for result in group.results:
        cells.setdefault(result.name, {})[result.direction] = result
    fastest = {result.peer for result in group.compared()}
    is_named = len(fastest) > 1
    lines = [
        [name, *(figure for d in directions for figure in _figures(found.get(d), is_named))]
        for name, found in cells.items()
    ]
    header = [f"{group.title}, TFLOP/s" if group.name in RATES else group.title]
    for direction in directions:
        peer = "fastest peer" if is_named or not fastest else min(fastest)
        header += [f"{DIRECTIONS[direction]}: ours", peer, "ratio"]
    parts = [f"## {heading(group)}", _peers(group, directions), table(header, lines)]
    return "\n\n".join([*filter(None, parts), "\n".join(group.sources)])


def extract(groups: Sequence[Group]) -> str:
    """The Markdown of the README: how many figures there are, the rows of EXTRACT, and CPUs.

    Raises ``ValueError`` if one of them was not measured.
    """
    found = {(group.device, group.title): group for group in groups}
    wanted = [(device, title) for device, titles in EXTRACT.items() for title in titles]
    wanted += [(group.device, group.title) for group in groups if group.architecture == "cpu"]
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"expected results for {missing}, got those for {sorted(found)}")
    header = ["speed of jax-memeff / its fastest peer"]
    for title in DIRECTIONS.values():
        header += [f"{title}: mean", "minimum"]
    lines = []
    for device, title in wanted:
        group = found[device, title]
        line = [f"{title} ({device})"]
        for direction in DIRECTIONS:
            results = group.compared(direction)
            least = min((result.ratio for result in results), default=None)
            line += ["", ""] if least is None else [f"{mean(results):.2f}", f"{least:.2f}"]
        peers = dict.fromkeys(label for result in group.compared() for label in result.peers)
        lines.append([*line, _slower(group.compared()), ", ".join(peers)])
    return f"{counted(groups)}\n\n{table([*header, 'slower', 'peers'], lines)}"


def _figures(result: Result | None, is_named: bool) -> list[str]:
    if result is None:
        return ["", "", ""]
    own = "failed" if result.seconds is None else _figure(result, result.seconds)
    if not result.peers:
        return [own, "none", ""]
    peer = f" {result.peer}" if is_named else ""
    return [own, f"{_figure(result, result.peers[result.peer])}{peer}", ratio(result)]


def _figure(result: Result, seconds: float) -> str:
    """
    >>> _figure(Result("", "forward", 1e-3, {}, flops=6.25e11), 1e-3)
    '625'
    """
    return time(seconds) if result.flops is None else f"{result.flops / seconds / 1e12:.3g}"


def ratio(result: Result) -> str:
    """The ratio as all tables print it: a loss is bold."""
    return f"**{result.ratio:.2f}**" if result.is_slower else f"{result.ratio:.2f}"


def _means(group: Group) -> list[str]:
    found = [group.compared(direction) for direction in DIRECTIONS]
    return [f"{mean(results):.2f}" if results else "" for results in found]


def _slower(results: Sequence[Result]) -> str:
    return f"{sum(result.is_slower for result in results)} of {len(results)}"


def _peers(group: Group, directions: Sequence[str]) -> str:
    """The mean ratio to each peer, and the number of cells in which it has a figure."""
    parts = []
    for label in dict.fromkeys(label for result in group.results for label in result.peers):
        own = [
            [
                Result(r.name, d, r.seconds, {label: r.peers[label]})
                for r in group.compared(d)
                if label in r.peers
            ]
            for d in directions
        ]
        figures = " and ".join(f"{mean(r):.2f} ({len(r)})" if r else "none" for r in own)
        parts.append(f"{label} {figures}")
    return f"Mean ratios (cells): {', '.join(parts)}." if parts else ""
