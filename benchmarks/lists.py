"""Times lists of keys (``Mask.keys``): ``python benchmarks/lists.py --help``.

The peer of latent attention is FlashMLA's sparse prefill, which has no backward. Grouped heads have
no peer, and are timed together with the call without a mask. README.md in this folder explains the
timing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from attention import DIRECTIONS, calls_per_launch
from measuring import documents, measurement
from measuring.timing import first_line, measure
from programs import jax_programs, precompile, torch_programs
from programs.inputs import Inputs
from programs.list_cells import SETS, ListCell
from programs.peers import PEERS
from rich.console import Console
from rich.progress import Progress
from server import flash_mla

LARGEST_DIFFERENCE = 5e-3
"""Of two outputs in bfloat16, as a relative Frobenius norm."""


def _function(cell: ListCell, backward: bool, implementation: str) -> Callable[[Inputs], Any]:
    return jax_programs.one_call(cell.attention(implementation), backward)


def _precompile(cell: ListCell, backward: bool) -> None:
    """Compile the kernels of a call, in a process without the GPU."""
    lists = jax.ShapeDtypeStruct((1, 1, cell.query_length, cell.keys), jnp.int32)
    precompile.lower(_function(cell, backward, "cuda"), jax.eval_shape(cell.inputs, lists))


def program(name: str, cell: ListCell, inputs: Inputs, backward: bool) -> Any:
    """Calls of an implementation: ``memeff_cuda``, ``memeff_xla`` or ``flash_mla``."""
    calls = calls_per_launch(cell.flops(backward), jax.default_backend())
    if name == flash_mla.NAME:
        (lists,) = jax.tree.leaves(inputs.mask)
        return flash_mla.sparse_prefill(inputs.query, inputs.key, lists, calls)
    function = _function(cell, backward, name.removeprefix("memeff_"))
    compiled, results = jax_programs.compile_calls(function, inputs, calls)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), [results] * calls)
    return jax_programs.JaxProgram(compiled, inputs, zeros)


def _difference(ours: Any, other: Any) -> float:
    for timed in (ours, other):
        timed.launch()
        timed.wait()
    return float(jax_programs.distance(other.results()[0], ours.results()[0]))


def measure_direction(
    arrays: Mapping[ListCell, Inputs], direction: str, options: argparse.Namespace
) -> dict[ListCell, dict[str, dict[str, Any]]]:
    """The records of cells that are timed together, by name of the implementation.

    If the outputs of ours and of the peer differ, neither has a figure.
    """
    backward, own = DIRECTIONS[direction], f"memeff_{options.implementation}"
    records: dict[ListCell, dict[str, dict[str, Any]]] = {}
    programs: dict[str, Any] = {}
    for cell, inputs in arrays.items():
        names = (own, flash_mla.NAME) if cell.is_latent and not backward else (own,)
        records[cell] = {name: {} for name in names}
        made: dict[str, Any] = {}
        for name in names:
            try:
                made[name] = program(name, cell, inputs, backward)
            except Exception as error:
                records[cell][name]["error"] = first_line(error)
        if len(made) == 2:
            difference = _difference(*made.values())
            records[cell][flash_mla.NAME]["difference"] = difference
            if not difference <= LARGEST_DIFFERENCE:
                reason = f"outputs differ by {difference:.2g}, expected {LARGEST_DIFFERENCE:g}"
                records[cell] = {name: {"error": reason} for name in made}
                continue
        programs |= {f"{cell.name}: {name}": each for name, each in made.items()}
    seed, seconds = f"{next(iter(arrays)).name}, {direction}", options.batch_ms / 1e3
    outcomes = measure(programs, rounds=options.rounds, batch_seconds=seconds, seed=seed)
    for cell, found in records.items():
        for name, record in found.items():
            if (key := f"{cell.name}: {name}") in outcomes:
                record |= outcomes[key].record()
            if "seconds" in record:
                record["tflops"] = cell.flops(backward) / record["seconds"] / 1e12
    return records


def main() -> None:
    # By default JAX reserves three quarters of the device's memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", default="lists", choices=SETS)
    parser.add_argument("--implementation", default="cuda", choices=("cuda", "xla"))
    measurement.add_options(parser, "lists", "program")
    options = parser.parse_args()
    own = PEERS[f"memeff_{options.implementation}"]
    document: dict[str, Any] = {
        **measurement.head(options),
        "peers": {own.name: own.label, flash_mla.NAME: flash_mla.LABEL},
        "cells": [],
    }
    path = options.output or documents.default_path(str(document["device"]["name"]), "lists")
    console = Console()
    with Progress(console=console) as progress:
        processes = precompile.Processes()
        for cell in itertools.chain(*SETS[options.cells]):
            processes.submit(_precompile, cell, cell.gradients)
        processes.wait(progress)
        for cells in progress.track(SETS[options.cells], description="measuring"):
            arrays = {cell: jax.block_until_ready(cell.inputs(cell.lists())) for cell in cells}
            results: dict[ListCell, dict[str, Any]] = {cell: {} for cell in cells}
            for direction, backward in DIRECTIONS.items():
                if backward and not cells[0].gradients:
                    continue
                for cell, records in measure_direction(arrays, direction, options).items():
                    results[cell][direction] = records
                    line = json.dumps({n: r.get("tflops", r) for n, r in records.items()})
                    text = f"{cell.name}, {direction}, TFLOP/s: {line}"
                    console.print(text, soft_wrap=True, markup=False)
                gc.collect()
                torch_programs.free_memory()
            for cell, found in results.items():
                flops = {direction: cell.flops(DIRECTIONS[direction]) for direction in found}
                entry = {"name": cell.name, **vars(cell), "flops": flops, "results": found}
                document["cells"].append(entry)
            documents.write(path, document)
    console.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
