"""Measures the errors of the gallery's functions: ``python tests/gallery/gallery_errors.py``.

Measures the errors of jax-memeff and of dense JAX in the same precision against float64, in the
output and in all gradients. ``benchmarks/report.py`` prints the table of a results file.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / folder) for folder in ("tests/support", "examples", "benchmarks")]

import gallery_case  # noqa: E402
from gallery.catalog import ENTRIES, Shape  # noqa: E402
from user_functions import errors  # noqa: E402

_CPU, _GPU = Shape(2, 4, 64), Shape(2, 4, 256)


def measure(job: tuple[str, int, str], implementation: Any) -> dict[str, Any]:
    """The errors of an entry for a head dim and dtype, or the reason if it fails."""
    name, head_dim, dtype = job
    record: dict[str, Any] = {"function": name, "head_dim": head_dim, "dtype": dtype}
    shape = _GPU if implementation == "cuda" else _CPU
    try:
        found = gallery_case.compare(name, shape, head_dim, implementation, dtype)
    except Exception as error:
        return record | {"failure": f"{type(error).__name__}: {error}"[:300]}
    return record | {"errors": {result: list(error) for result, error in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--implementation", choices=("cuda", "xla"), default="cuda")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--functions", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--commit", help="our commit, if the checkout has no git")
    parser.add_argument("--output", type=Path, required=True, help="a results file, in JSON")
    options = parser.parse_args()
    jobs = list(itertools.product(options.functions, options.head_dims, errors.DTYPES))
    implementations = itertools.repeat(options.implementation)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn) as pool:
        records = list(pool.map(measure, jobs, implementations))
    from measuring import documents, machine

    document = {
        **machine.facts(options.commit),
        "gallery_errors": records,
    }
    documents.write(options.output, document)
    for line in itertools.chain(*errors.rows(records)[1:]):
        print(*line, sep="  ")
    found = errors.failures(records)
    print(f"{len(jobs)} calls, {len(found)} failures", *found, sep="\n")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
