"""Forward mode compared with the forward: ``python benchmarks/tangents.py``.

Prints a Markdown table. All programs of a cell alternate under the clock of ``timing.py``:

- ``forward``: output and logsumexp
- ``jvp``: these and their tangents, for tangents of query, key and value
- ``jvp in JAX``: the same, with tangents on the blockwise path
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from measuring.timing import Failure, measure

import jax_memeff
from jax_memeff._cuda import lowering

_TOKENS = 16384
_COLUMNS = 2048
"""``B * T`` and ``N * H`` of every cell, as in ``cells.py``."""


class Cell(NamedTuple):
    """The sizes of a call."""

    head_dim: int
    length: int
    causal: bool

    def arrays(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Query, key and value, and their tangents."""
        shape = _TOKENS // self.length, self.length, _COLUMNS // self.head_dim, self.head_dim
        drawn = jax.random.normal(jax.random.key(0), (6, *shape), jnp.bfloat16)
        return list(drawn[:3]), list(drawn[3:])


class Program:
    """Calls of a compiled function, one after the other."""

    calls = 1

    def __init__(self, function: Any, *arrays: Any):
        self._compiled = jax.jit(function).lower(*arrays).compile()
        self._arrays = arrays
        self._results: Any = None

    def launch(self) -> None:
        self._results = self._compiled(*self._arrays)

    def wait(self) -> None:
        jax.block_until_ready(self._results)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Programs that are lowered in this context compute tangents in plain JAX."""
    with mock.patch.object(lowering, "kernels", lambda *arguments, **static: None):
        yield


def programs(cell: Cell, in_jax: bool) -> dict[str, Program]:
    """The programs of a cell by name."""
    primals, directions = cell.arrays()

    def attention(*arrays: jax.Array) -> Any:
        function: Any = jax_memeff.dot_product_attention
        return function(*arrays, is_causal=cell.causal, return_residual=True)

    def jvp(primals: list[jax.Array], directions: list[jax.Array]) -> Any:
        with jax_memeff.forward_mode():
            return jax.jvp(attention, primals, directions)

    found = {
        "forward": Program(lambda arrays: attention(*arrays), primals),
        "jvp": Program(jvp, primals, directions),
    }
    if in_jax:
        with without_kernels():
            # A new function, because JAX keeps what it has lowered.
            plain = Program(lambda *arrays: jvp(*arrays), primals, directions)
        found["jvp in JAX"] = plain
    return found


def row(cell: Cell, in_jax: bool, rounds: int) -> str:
    """A row of the table: times in ms, and ratios to the forward."""
    timings = measure(programs(cell, in_jax), rounds=rounds, batch_seconds=0.05, seed=str(cell))
    cells = [str(cell.head_dim), str(cell.length), "causal" if cell.causal else "full"]
    forward = timings["forward"]
    for name in ("forward", "jvp", "jvp in JAX"):
        found = timings.get(name)
        if found is None or isinstance(found, Failure) or isinstance(forward, Failure):
            cells += ["" if found is None else getattr(found, "reason", "")]
        else:
            ratio = "" if name == "forward" else f" ({found.seconds / forward.seconds:.2f})"
            cells.append(f"{1e3 * found.seconds:.3f}{ratio}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The time of jax.jvp compared with that of the forward."
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--without-jax", action="store_true", help="omit the blockwise path")
    options = parser.parse_args()
    print("| head dim | T | mask | forward, ms | jvp, ms (ratio) | jvp in JAX, ms (ratio) |")
    print("|---|---|---|---|---|---|")
    for sizes in itertools.product(options.head_dims, options.lengths, (False, True)):
        print(row(Cell(*sizes), not options.without_jax, options.rounds), flush=True)


if __name__ == "__main__":
    main()
