"""The overview in Markdown: a table of groups, and a table of the cells that are slower; and its
extract for the README.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from reporting import plots
from reporting.markdown_table import table

from overview.comparison import DIRECTIONS, Row, mean

EXTRACT = {
    "NVIDIA H200": (
        *("main grid", "small problems", "grouped heads", "packed sequences"),
        *("bias, dropout, both", "float32", "head dims above 256", "few queries, long keys"),
    ),
    "NVIDIA H100 80GB HBM3": ("functions of scores and masks", "steps of a server"),
    "NVIDIA H200 with kernels for compute_80": ("main grid", "bias, dropout, both"),
    "Intel(R) Xeon(R) Processor on 2 threads": ("plain JAX on a CPU",),
}
"""The rows of the README, by device. Those of all head dims are one row."""
ALTERNATIVE = "A point for each cell: the time of its fastest peer over ours"


def text(rows: Sequence[Row], picture: str) -> str:
    """The Markdown of the overview in docs/benchmarks.md.

    Args:
        rows: as :func:`overview.rows` returns them.
        picture: the path of the picture, relative to the page.
    """
    parts = [_counted(rows), f"![{ALTERNATIVE}]({picture})", _groups(rows), _peers(rows)]
    if any(cell.is_slower for row in rows for cell in row.cells):
        parts += ["### Where a peer is faster", _losses(rows)]
    return "\n\n".join(parts)


def extract(rows: Sequence[Row]) -> str:
    """The Markdown of the README: how many figures there are in all, and the rows of EXTRACT.

    Raises ``ValueError`` if one of them was not measured.
    """
    merged: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.device, row.title.partition(", head dim ")[0]
        before = merged.get(key)
        peers = dict.fromkeys((*(before.peers if before else ()), *row.peers))
        cells = (*(before.cells if before else ()), *row.cells)
        merged[key] = dataclasses.replace(row, title=key[1], peers=tuple(peers), cells=cells)
    wanted = [(device, title) for device, titles in EXTRACT.items() for title in titles]
    if missing := [key for key in wanted if key not in merged]:
        raise ValueError(f"expected results for {missing}, got those for {sorted(merged)}")
    header = ["speed of jax-memeff / its fastest peer"]
    for direction in DIRECTIONS:
        header += [f"{plots.TITLES[direction].lower()}: mean", "least"]
    lines = []
    for row in map(merged.__getitem__, wanted):
        line = [_named(row.title, row, rows)]
        for direction in DIRECTIONS:
            own = row.of(direction)
            least = min((cell.ratio for cell in own), default=None)
            line += ["", ""] if least is None else [f"{mean(own):.2f}", f"{least:.2f}"]
        slower = sum(cell.is_slower for cell in row.cells)
        lines.append([*line, f"{slower} of {len(row.cells)}", ", ".join(row.peers)])
    return f"{_counted(rows)}\n\n{table([*header, 'slower', 'peers'], lines)}"


def _counted(rows: Sequence[Row]) -> str:
    """How many figures there are, from which devices and when, and how many are losses."""
    cells = [cell for row in rows for cell in row.cells]
    slower = sum(cell.is_slower for cell in cells)
    dates = sorted({row.date for row in rows})
    period = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "never"
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    return (
        f"{devices}, measured {period}: {len(cells)} figures, each compared with the fastest peer "
        f"of its cell. jax-memeff is as fast or faster in {len(cells) - slower}, and slower "
        f"in {slower}. Ratios above 1 mean that jax-memeff is faster."
    )


def _groups(rows: Sequence[Row]) -> str:
    header = ["speed of jax-memeff / fastest peer"]
    for direction in DIRECTIONS:
        header += [f"{plots.TITLES[direction].lower()}: geometric mean", "minimum", "slower cells"]
    lines = []
    for row in rows:
        line = [_named(row.title, row, rows)]
        for direction in DIRECTIONS:
            own = row.of(direction)
            if own:
                count = sum(cell.is_slower for cell in own)
                least = min(cell.ratio for cell in own)
                line += [f"{mean(own):.2f}", f"{least:.2f}", f"{count} of {len(own)}"]
            else:
                line += ["", "", ""]
        lines.append([*line, row.date])
    return table([*header, "measured"], lines)


def _named(name: str, row: Row, rows: Sequence[Row]) -> str:
    """The name with the device of its row, if there are several devices."""
    several = len({row.device for row in rows}) > 1
    return f"{name} ({row.device})" if several else name


def _peers(rows: Sequence[Row]) -> str:
    """A line for each set of peers, because not every peer was measured in every group."""
    titles: dict[frozenset[str], list[str]] = {}
    for row in rows:
        titles.setdefault(frozenset(row.peers), []).append(_named(row.title, row, rows))
    lines = [f"- {', '.join(sorted(peers))}: {'; '.join(own)}" for peers, own in titles.items()]
    return "\n".join(["These peers have figures:\n", *lines])


def _losses(rows: Sequence[Row]) -> str:
    """The slowest first."""
    found = [(cell, row) for row in rows for cell in row.cells if cell.is_slower]
    lines = [
        [
            _named(cell.name, row, rows),
            plots.TITLES[cell.direction].lower(),
            f"{cell.ratio:.2f}",
            cell.peer,
            row.date,
        ]
        for cell, row in sorted(found, key=lambda pair: pair[0].ratio)
    ]
    return table(
        ["cell", "direction", "speed of jax-memeff / peer", "fastest peer", "measured"], lines
    )
