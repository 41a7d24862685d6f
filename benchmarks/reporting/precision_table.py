"""The table of errors that ``precision.py`` measures."""

from __future__ import annotations

from typing import Any

from reporting.markdown_table import table


def text(document: dict[str, Any]) -> str:
    """A row for each cell and peer, and the reasons for missing figures.

    >>> errors = {"out": {"frobenius": 2.1e-3, "largest": 0.0012}}
    >>> results = {"ours": errors, "other": {"error": "refused"}}
    >>> document = {"peers": {"ours": "we", "other": "they"}}
    >>> print(text(document | {"precision": [{"name": "hd64", "results": results}]}))
    | error: relative Frobenius norm, largest |  | out |
    | --- | ---: | ---: |
    | hd64 | we | 2.1e-03, 1.2e-03 |
    <BLANKLINE>
    No figure, because:
    <BLANKLINE>
    - they, hd64: `refused`
    """
    rows, reasons, names = [], [], []
    for cell in document["precision"]:
        for peer, record in cell["results"].items():
            label = document["peers"][peer]
            if "error" in record:
                reasons.append(f"- {label}, {cell['name']}: `{record['error']}`")
                continue
            names = list(record)
            figures = [f"{x['frobenius']:.1e}, {x['largest']:.1e}" for x in record.values()]
            rows.append([cell["name"], label, *figures])
    parts = [table(["error: relative Frobenius norm, largest", "", *names], rows)]
    if reasons:
        parts.append("No figure, because:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)
