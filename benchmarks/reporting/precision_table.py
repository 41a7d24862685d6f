"""The tables of errors that ``precision.py`` measures."""

from __future__ import annotations

import math
from typing import Any

from programs.peers import OURS

from reporting.markdown_table import table

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_OF_EVERY_PEER = ("out", "dq", "dk", "dv")
_RESULTS = (*_OF_EVERY_PEER, "lse", "dbias")
_LARGER = 1.01
"""A larger error is printed in bold. Where CTAs add in any order, errors vary by less than that."""


def text(document: dict[str, Any]) -> str:
    """Two rows for each dtype: this library's largest error in any cell, and that of its peers.

    The peers' error in a cell is that of the most precise of them. The document has every figure.

    >>> def errors(size):
    ...     return {"out": {"frobenius": size, "largest": 1.0}}
    >>> first = {"memeff_cuda": errors(2e-3), "fa4": errors(4e-3), "jax_cudnn": errors(1e-3)}
    >>> second = {"memeff_cuda": errors(3e-3), "fa4": errors(3e-3), "jax_cudnn": {"error": "no"}}
    >>> cells = [{"name": "hd64 T96", "results": first}, {"name": "hd80 T96", "results": second}]
    >>> peers = {"memeff_cuda": "we", "fa4": "FA4", "jax_cudnn": "cuDNN"}
    >>> print(text({"peers": peers, "precision": cells}))
    |relative Frobenius error||out|
    |---|---:|---:|
    |bfloat16|we|3.0e-03|
    |bfloat16|best of FA4, cuDNN|3.0e-03|
    """
    columns: list[str] = []
    rows = []
    for dtype in _DTYPES:
        cells = [c["results"] for c in document["precision"] if _dtype(c["name"]) == dtype]
        for of_peers in (False, True):
            labels, errors = [], []
            for peer, label in document["peers"].items():
                records = [cell.get(peer, {"error": ""}) for cell in cells]
                if (peer not in OURS) == of_peers and any("error" not in r for r in records):
                    labels.append(label)
                    errors.append(records)
            if not labels:
                continue
            by_cell = [
                [r for r in records if "error" not in r] for records in zip(*errors, strict=True)
            ]
            by_cell = [records for records in by_cell if records]
            columns = [name for name in _OF_EVERY_PEER if name in by_cell[0][0]]
            figures = (
                max(min(r[name]["frobenius"] for r in records) for records in by_cell)
                for name in columns
            )
            name = labels[0] if len(labels) == 1 else f"best of {', '.join(labels)}"
            rows.append([dtype, name, *(f"{figure:.1e}" for figure in figures)])
    return table(["relative Frobenius error", "", *columns], rows)


def comparison(today: dict[str, Any], other: dict[str, Any]) -> str:
    """This library's errors in two documents, beside each other, in each cell that both have, and
    how many are larger today. Those are bold.

    >>> def document(error):
    ...     results = {"memeff_cuda": {"out": {"frobenius": error}, "lse": {"frobenius": 1e-7}}}
    ...     cells = [{"name": "hd64 T96", "results": results}]
    ...     return {"peers": {"memeff_cuda": "we"}, "precision": cells}
    >>> print(comparison(document(3e-3), document(2e-3)))
    |relative Frobenius error|out|dq|dk|dv|lse|dbias|
    |---|---:|---:|---:|---:|---:|---:|
    |hd64 T96|**3.00e-03 / 2.00e-03**||||1.00e-07 / 1.00e-07||
    <BLANKLINE>
    Larger by more than 1 %: 1 of 2 errors. The largest ratio is 1.500, that of out in hd64 T96.
    """
    ours, theirs = (_errors(document) for document in (today, other))
    rows, ratios = [], []
    for cell in ours:
        if cell not in theirs:
            continue
        new, old = ours[cell], theirs[cell]
        if failure := new.get("error") or old.get("error"):
            rows.append([cell, failure, *[""] * (len(_RESULTS) - 1)])
            if "error" in new:
                ratios.append((math.inf, f"all results in {cell}"))
            continue
        row = [cell]
        for name in _RESULTS:
            if name not in new or name not in old:
                row.append("")
                continue
            errors = new[name]["frobenius"], old[name]["frobenius"]
            ratio = math.inf if math.isnan(errors[0]) else errors[0] / errors[1]
            ratios.append((ratio, f"{name} in {cell}"))
            text = " / ".join(f"{error:.2e}" for error in errors)
            row.append(f"**{text}**" if ratio > _LARGER else text)
        rows.append(row)
    if not ratios:
        raise ValueError(f"expected cells that both files have, got {[*ours]} and {[*theirs]}")
    largest, where = max(ratios)
    larger = sum(ratio > _LARGER for ratio, _ in ratios)
    return (
        f"{table(['relative Frobenius error', *_RESULTS], rows)}\n\n"
        f"Larger by more than 1 %: {larger} of {len(ratios)} errors. "
        f"The largest ratio is {largest:.3f}, that of {where}."
    )


def _errors(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """This library's record of each cell."""
    (peer,) = [name for name in document["peers"] if name in OURS]
    return {cell["name"]: cell["results"][peer] for cell in document["precision"]}


def _dtype(cell: str) -> str:
    """The dtype in the name of a cell, which bfloat16 has not."""
    return next((part for part in cell.split() if part in _DTYPES), "bfloat16")
