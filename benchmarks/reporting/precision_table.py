"""The table of errors that ``precision.py`` measures."""

from __future__ import annotations

from typing import Any

from programs.peers import OURS

from reporting.markdown_table import table

_DTYPES = ("bfloat16", "float16", "float32", "float64")


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
            columns = list(by_cell[0][0])
            figures = (
                max(min(r[name]["frobenius"] for r in records) for records in by_cell)
                for name in columns
            )
            name = labels[0] if len(labels) == 1 else f"best of {', '.join(labels)}"
            rows.append([dtype, name, *(f"{figure:.1e}" for figure in figures)])
    return table(["relative Frobenius error", "", *columns], rows)


def _dtype(cell: str) -> str:
    """The dtype in the name of a cell, which bfloat16 has not."""
    return next((part for part in cell.split() if part in _DTYPES), "bfloat16")
