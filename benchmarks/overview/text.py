"""The overview in Markdown: a table of groups, and a table of the cells that are slower."""

from __future__ import annotations

from collections.abc import Sequence

from reporting import plots
from reporting.markdown_table import table

from overview.comparison import DIRECTIONS, Row, mean

ALTERNATIVE = "A point for each cell: the time of its fastest peer over ours"


def text(rows: Sequence[Row], picture: str) -> str:
    """The Markdown of the overview in docs/benchmarks.md.

    Args:
        rows: as :func:`overview.rows` returns them.
        picture: the path of the picture, relative to the page.
    """
    cells = [cell for row in rows for cell in row.cells]
    slower = [cell for cell in cells if cell.is_slower]
    dates = sorted({row.date for row in rows})
    period = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "never"
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    first = (
        f"{devices}, measured {period}: {len(cells)} figures, each compared with the fastest peer "
        f"of its cell. jax-memeff is as fast or faster in {len(cells) - len(slower)}, and slower "
        f"in {len(slower)}. Ratios above 1 mean that jax-memeff is faster."
    )
    parts = [first, f"![{ALTERNATIVE}]({picture})", _groups(rows), _peers(rows)]
    if slower:
        parts += ["### Where a peer is faster", _losses(rows)]
    return "\n\n".join(parts)


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
