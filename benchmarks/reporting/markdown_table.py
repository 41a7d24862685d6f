"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def table(
    header: Iterable[str], rows: Iterable[Iterable[str]], text: Collection[int] = (0,)
) -> str:
    """A table whose columns of text are aligned to the left, and those of numbers to the right.

    >>> print(table(["cell", "ratio"], [["T512", "1.10"]]))
    |cell|ratio|
    |---|---:|
    |T512|1.10|
    """
    header = list(header)
    alignment = ["---" if column in text else "---:" for column in range(len(header))]
    return "\n".join(f"|{'|'.join(row)}|" for row in [header, alignment, *map(list, rows)])
