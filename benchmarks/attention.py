"""Times attention against its peers: ``python benchmarks/attention.py --help``.

README.md in this folder explains what is timed; ``report.py`` turns the results into tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from measuring import documents, host_cost, measurement
from measuring.residency import Residency
from measuring.timing import Failure, Timing, first_line, measure
from programs import cells as cell_sets
from programs import inputs as cell_inputs
from programs import jax_programs, torch_programs
from programs import peers as all_peers
from programs.cells import Cell
from programs.peers import Peer
from programs.precompile import Precompilation
from rich.console import Console
from rich.progress import Progress
from user_functions import table as function_table

from jax_memeff.codegen import arch as archs

DIRECTIONS = {"forward": False, "forward_backward": True}

# The intended duration of a launch at the rate of a good kernel: long enough to hide the host's
# work for the next launch.
_LAUNCH_SECONDS = 4e-3
_ASSUMED_RATE = 500e12
_CALLS = (2, 64)


def calls_per_launch(flops: float, platform: str = "gpu") -> int:
    """The number of calls in one jit or CUDA graph, the same for every peer of a cell.

    A CPU has no launches to hide, and XLA takes a minute to compile 64 calls for it.

    >>> calls_per_launch(275e9), calls_per_launch(1e6), calls_per_launch(8e12)
    (7, 64, 2)
    >>> calls_per_launch(1e6, "cpu")
    2
    """
    least, most = _CALLS
    if platform == "cpu":
        return least
    return min(most, max(least, round(_LAUNCH_SECONDS * _ASSUMED_RATE / flops)))


def _missing(
    peer: Peer, cell: Cell, backward: bool, precompilation: Precompilation
) -> Failure | None:
    names = peer.missing(cell)
    if names:
        return Failure(f"has no argument for {', '.join(names)}")
    return precompilation.failure(peer, cell, backward)


class Compilation:
    """Compiles the programs of the JAX peers in threads, before anything is timed."""

    def __init__(self, cells: Sequence[Cell], peers: Sequence[Peer]):
        self._futures: dict[tuple[Cell, str, bool], Future] = {}
        # Compilation runs in C++ without holding Python's lock.
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        for cell in cells:
            arrays = jax.eval_shape(lambda cell=cell: cell_inputs.make(cell))
            for backward in DIRECTIONS.values():
                calls = calls_per_launch(cell.flops(backward), jax.default_backend())
                for peer in peers if cell.gradients or not backward else ():
                    if peer.framework == "jax" and not peer.missing(cell):
                        self._futures[cell, peer.name, backward] = self._pool.submit(
                            jax_programs.compile_program, peer, cell, arrays, calls, backward
                        )

    def wait(self, progress: Progress) -> None:
        futures = list(self._futures.values())
        for future in progress.track(futures, description="compiling"):
            future.exception()
        self._pool.shutdown()

    def program(self, peer: Peer, cell: Cell, inputs, backward: bool):
        """The program; raises the error that its compilation raised."""
        compiled, results = self._futures.pop((cell, peer.name, backward)).result()
        calls = calls_per_launch(cell.flops(backward), jax.default_backend())
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), [results] * calls)
        return jax_programs.JaxProgram(compiled, cell_inputs.adapt(inputs, peer, cell), zeros)


def _differences(programs: dict[str, Any], timed: Sequence[str], cell: Cell) -> dict[str, float]:
    """The largest relative Frobenius distance of each peer's results from the first peer's.

    It shows whether a peer computes the same function. Each peer draws dropout differently.
    """
    if cell.dropout or not timed:
        return {}
    reference = programs[timed[0]].results()
    found = {}
    for name in timed[1:]:
        is_same = cell.function in cell_sets.WITH_ARGUMENT
        if all_peers.PEERS[name].plain and not is_same:
            continue
        # If the query was scaled beforehand, its gradient is not comparable.
        compared = 1 if all_peers.PEERS[name].prescaled else len(reference)
        pairs = zip(programs[name].results()[:compared], reference, strict=False)
        found[name] = max(float(jax_programs.distance(result, ours)) for result, ours in pairs)
    return found


def measure_direction(
    cell: Cell,
    backward: bool,
    peers: Sequence[Peer],
    precompilation: Precompilation,
    compilation: Compilation,
    inputs: cell_inputs.Inputs,
    rounds: int,
    batch_seconds: float,
) -> dict[str, dict[str, Any]]:
    """The records of one cell and direction, by peer."""
    programs: dict[str, Any] = {}
    outcomes: dict[str, Timing | Failure] = {}
    calls = calls_per_launch(cell.flops(backward), jax.default_backend())
    for peer in peers:
        if failure := _missing(peer, cell, backward, precompilation):
            outcomes[peer.name] = failure
            continue
        try:
            if peer.framework == "jax":
                programs[peer.name] = compilation.program(peer, cell, inputs, backward)
            else:
                programs[peer.name] = torch_programs.of_cell(peer, cell, inputs, calls, backward)
        except Exception as error:
            outcomes[peer.name] = Failure(first_line(error))
    seed = f"{cell.name}, {backward}"
    outcomes |= measure(programs, rounds=rounds, batch_seconds=batch_seconds, seed=seed)
    timings = {name: t for name, t in outcomes.items() if isinstance(t, Timing)}
    best = min((timing.seconds for timing in timings.values()), default=None)
    records: dict[str, dict[str, Any]] = {}
    for peer in peers:
        outcome = outcomes[peer.name]
        records[peer.name] = outcome.record()
        if isinstance(outcome, Failure):
            continue
        records[peer.name] |= {
            "tflops": cell.flops(backward) / outcome.seconds / 1e12,
            "bytes_per_second": cell.key_value_bytes / outcome.seconds,
            "ratio_to_best": best / outcome.seconds if best else None,
            "dtype": peer.dtype or cell.dtype,
        }
        if peer.framework == "jax":
            records[peer.name] |= jax_programs.facts(programs[peer.name].compiled, calls)
    compared = [peer.name for peer in peers if peer.name in timings]
    try:
        for name, difference in _differences(programs, compared, cell).items():
            records[name]["difference"] = difference
    except Exception as error:
        for name in compared[1:]:
            records[name]["difference_error"] = first_line(error)
    return records


def _line(cell: Cell, records: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, record in records.items():
        figure = "none"
        if "tflops" in record:
            rate = record["tflops"] if cell.gradients else record["bytes_per_second"] / 1e12
            figure = f"{rate:.4g}"
        if not record.get("difference", 0.0) <= documents.LARGEST_DIFFERENCE:
            figure += f" [red](differs by {record['difference']:.2g})[/red]"
        parts.append(f"{name} {figure}")
    return "  ".join(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", default="main", help=f"some of {', '.join(cell_sets.SETS)}")
    parser.add_argument(
        "--peers", default="all", help=f"all, or some of {', '.join(all_peers.PEERS)}"
    )
    parser.add_argument("--host", default="", help=f"some of {', '.join(host_cost.ROWS)}")
    parser.add_argument(
        "--arch",
        help="run the kernels of another architecture, such as compute_80, as PTX, with as many "
        "CTAs on an SM as there",
    )
    measurement.add_options(parser, "<first group>", "peer")
    options = parser.parse_args()
    try:
        options.cells = cell_sets.cells(options.cells) if options.cells else []
        if options.arch:
            if not archs.is_virtual(options.arch):
                raise ValueError(
                    f"expected --arch to name PTX, such as 'compute_80', got {options.arch!r}"
                )
            archs.capability(options.arch)
        options.peers = all_peers.peers(options.peers)
        options.host = host_cost.rows(options.host)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    # By default JAX reserves three quarters of the device's memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = _arguments()
    residency = None
    if options.arch:
        os.environ["JAX_MEMEFF_ARCHS"] = options.arch
        residency = Residency(options.arch)
    document: dict[str, Any] = {
        **measurement.head(options),
        "peers": {peer.name: peer.label for peer in options.peers},
        "cells": [],
        "host": {},
    }
    kind = options.arch or (options.cells[0].group if options.cells else "host")
    path = options.output or documents.default_path(str(document["device"]["name"]), kind)
    if any(not cell.gradients for cell in options.cells):
        document["device"]["copy_bytes_per_second"] = host_cost.copy_rate()
    console = Console()
    with Progress(console=console) as progress:
        if options.cells:
            precompilation = Precompilation(options.cells, options.peers)
            precompilation.wait(progress, "jax")
            compilation = Compilation(options.cells, options.peers)
            compilation.wait(progress)
            precompilation.wait(progress, "torch")
            for cell in progress.track(options.cells, description="measuring"):
                inputs = jax.block_until_ready(cell_inputs.make(cell))
                results = {}
                for direction, backward in DIRECTIONS.items():
                    if backward and not cell.gradients:
                        continue
                    results[direction] = measure_direction(
                        cell,
                        backward,
                        options.peers,
                        precompilation,
                        compilation,
                        inputs,
                        options.rounds,
                        options.batch_ms / 1e3,
                    )
                    console.print(
                        f"{cell.name} {direction}: {_line(cell, results[direction])}",
                        soft_wrap=True,
                    )
                    gc.collect()
                    torch_programs.free_memory()
                document["cells"].append(
                    {
                        "name": cell.name,
                        **vars(cell),
                        "flops": {d: cell.flops(DIRECTIONS[d]) for d in results},
                        "results": results,
                    }
                )
                documents.write(path, document)
            if residency is not None:
                document["residency"] = residency.facts()
                documents.write(path, document)
        for row in progress.track(options.host, description="host cost"):
            document["host"][row] = host_cost.ROWS[row](options.peers)
            console.print(f"{row}: {json.dumps(document['host'][row])}", markup=False)
            documents.write(path, document)
    console.print(f"wrote {path}", soft_wrap=True)
    if table := function_table.text(document):
        console.print(table, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
