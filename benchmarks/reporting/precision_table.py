"""The table of errors that ``precision.py`` measures."""

from __future__ import annotations

from typing import Any

from programs.peers import OURS

from reporting.markdown_table import table
from reporting.results import source


def text(document: dict[str, Any]) -> str:
    """A row for each cell: our error, and that of the peer with the smallest one.

    >>> def errors(norm, largest):
    ...     return {"out": {"frobenius": norm, "largest": largest}}
    >>> results = {"memeff_cuda": errors(2.1e-3, 0.0012), "fa4": errors(2e-3, 0.001)}
    >>> results["other"] = {"error": "refused"}
    >>> head = {"date": "today", "versions": {}}
    >>> print(text(head | {"precision": [{"name": "hd64", "results": results}]}))
    |relative Frobenius norm: ours / best peer's|out|largest: out|
    |---|---:|---:|
    |hd64|2.1e-3 / 2.0e-3|1.2e-3 / 1.0e-3|
    <BLANKLINE>
    Measured today.
    """
    rows, names = [], []
    norms = ("frobenius", "largest")
    for cell in document["precision"]:
        found = {peer: record for peer, record in cell["results"].items() if "error" not in record}
        own = next(found[peer] for peer in found if peer in OURS)
        others = [record for peer, record in found.items() if peer not in OURS]
        names = list(own)
        figures = [
            " / ".join(map(_error, (own[name][norm], *_least(others, name, norm))))
            for norm in norms
            for name in names
        ]
        rows.append([cell["name"], *figures])
    header = ["relative Frobenius norm: ours / best peer's", *names]
    header += [f"largest: {name}" for name in names]
    return f"{table(header, rows)}\n\n{source(document)}"


def _least(records: list[dict[str, Any]], name: str, norm: str) -> list[float]:
    return [min(record[name][norm] for record in records)] if records else []


def _error(value: float) -> str:
    """Two digits and a short exponent.

    >>> _error(0.00211)
    '2.1e-3'
    """
    return f"{value:.1e}".replace("e-0", "e-")
