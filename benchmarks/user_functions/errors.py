"""The table of errors that ``tests/gallery/gallery_errors.py`` measures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")
_MISSING = "n/a"


def rows(records: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header, and a row for each function: the largest ratios over head dims and results.

    A ratio is the error of jax-memeff over that of dense JAX in the same precision. Results are the
    output and the gradients of query, key and value, and, in columns of their own, the gradients of
    the arrays that the function reads.

    >>> errors = {"out": [2e-3, 1e-3, 4e-3], "argument 0": [3e-3, 2e-3, 8e-3]}
    >>> record = {"function": "alibi", "head_dim": 64, "dtype": "float16", "errors": errors}
    >>> header, found = rows([record])
    >>> header[3:5], found
    (['float16', 'float16, captured'], [['alibi', 'n/a', 'n/a', '2.00', '1.50', 'n/a', 'n/a']])
    """
    ratios: dict[str, dict[tuple[str, bool], float]] = {}
    for record in records:
        row = ratios.setdefault(record["function"], {})
        for result, (ours, dense, _) in record.get("errors", {}).items():
            place = record["dtype"], result.startswith("argument")
            row[place] = max(row.get(place, 0.0), ours / dense if dense else float(ours > 0))
    places = list(itertools.product(DTYPES, (False, True)))
    header = ["error / that of dense JAX"]
    header += [f"{dtype}{', captured' if own else ''}" for dtype, own in places]
    found = [
        [name, *(f"{row[x]:.2f}" if x in row else _MISSING for x in places)]
        for name, row in ratios.items()
    ]
    return header, found


def failures(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each result beyond its limit, and for each call that raised.

    >>> record = {"function": "alibi", "head_dim": 64, "dtype": "float16"}
    >>> failures([record | {"errors": {"out": [5e-3, 1e-3, 2e-3]}}])
    ['alibi, head dim 64, float16, out: 5.00e-03, dense JAX 1.00e-03']
    """
    lines = []
    for record in records:
        own = "{function}, head dim {head_dim}, {dtype}".format(**record)
        if "failure" in record:
            lines.append(f"{own}: {record['failure']}")
        for result, (ours, dense, limit) in record.get("errors", {}).items():
            if not ours <= limit:
                lines.append(f"{own}, {result}: {ours:.2e}, dense JAX {dense:.2e}")
    return lines
