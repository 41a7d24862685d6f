"""Prints the errors of the gallery's functions: ``python tests/gallery/gallery_errors.py``.

Each function is a row, with the largest ratio of the error of jax-memeff to that of dense JAX in
the same precision, both against float64, in the output and the gradients of query, key and value,
and in the gradients of the arrays that the function reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
sys.path += [str(_TESTS / "support"), str(_TESTS.parent / "examples")]

import gallery_case  # noqa: E402
from gallery.catalog import ENTRIES, Shape  # noqa: E402

DTYPES = ("bfloat16", "float16", "float32")
_CPU, _GPU = Shape(2, 4, 64), Shape(2, 4, 256)


def measure(job: tuple[str, int, str], implementation: Any) -> dict[str, Any]:
    """The errors of an entry, head dim and dtype; of one that fails, the reason."""
    name, head_dim, dtype = job
    record: dict[str, Any] = {"function": name, "head_dim": head_dim, "dtype": dtype}
    shape = _GPU if implementation == "cuda" else _CPU
    try:
        found = gallery_case.compare(name, shape, head_dim, implementation, dtype)
    except Exception as error:
        return record | {"failure": f"{type(error).__name__}: {error}"[:300]}
    return record | {"errors": {result: list(error) for result, error in found.items()}}


def table(records: Iterable[dict[str, Any]]) -> str:
    """A row for each function; the cells are the largest ratios over head dims and results.

    >>> errors = {"out": [2e-3, 1e-3, 4e-3], "argument 0": [3e-3, 2e-3, 8e-3]}
    >>> record = {"function": "alibi", "head_dim": 64, "dtype": "float16", "errors": errors}
    >>> print(table([record]).splitlines()[-1])
    | alibi | n/a | n/a | 2.00 | 1.50 | n/a | n/a |
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
    lines = [header, ["---", *["---:"] * len(places)]]
    for name, row in ratios.items():
        lines.append([name, *(f"{row[x]:.2f}" if x in row else "n/a" for x in places)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def failures(records: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each result beyond its limit, and for each call that raised."""
    lines = []
    for record in records:
        own = "{function}, head dim {head_dim}, {dtype}".format(**record)
        if "failure" in record:
            lines.append(f"{own}: {record['failure']}")
        for result, (ours, dense, limit) in record.get("errors", {}).items():
            if not ours <= limit:
                lines.append(f"{own}, {result}: {ours:.2e}, dense JAX {dense:.2e}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--implementation", choices=("cuda", "xla"), default="cuda")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--functions", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a file for the errors, as JSON")
    options = parser.parse_args()
    jobs = list(itertools.product(options.functions, options.head_dims, DTYPES))
    implementations = itertools.repeat(options.implementation)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn) as pool:
        records = list(pool.map(measure, jobs, implementations))
    if options.output:
        options.output.write_text(json.dumps(records) + "\n")
    print(table(records))
    found = failures(records)
    print(f"{len(jobs)} calls, {len(found)} failures", *found, sep="\n")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
