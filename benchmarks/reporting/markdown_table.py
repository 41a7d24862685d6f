"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column is aligned to the left, and the others to the right.

    >>> print(table(["cell", "ratio"], [["T512", "1.10"]]))
    |cell|ratio|
    |---|---:|
    |T512|1.10|
    """
    header = list(header)
    alignment = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"|{'|'.join(row)}|" for row in [header, alignment, *map(list, rows)])
