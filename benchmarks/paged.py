"""Times the calls of an inference server: ``python benchmarks/paged.py --help``.

Each step of ``server/steps.py`` is timed with keys in pages of several kinds, and compared with
calls of ours and of others on contiguous keys. README.md in this folder explains the timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from measuring import documents, host_cost, measurement
from measuring.timing import Failure, Timing, first_line, measure
from programs import jax_programs, precompile, torch_programs
from programs.peers import OURS, PEERS
from rich.console import Console
from rich.progress import Progress
from server import calls, flash_mla, host_time, table
from server.calls import CALLS, Tokens
from server.steps import SETS, Step, steps

_LAUNCH_SECONDS = 4e-3
_ASSUMED_BYTES_PER_SECOND = 4e12
_ASSUMED_FLOPS = 500e12
_CALLS = (2, 64)


def calls_per_launch(step: Step) -> int:
    """The number of calls in one jit or CUDA graph, so that a launch takes about 4 ms."""
    least, most = _CALLS
    if jax.default_backend() == "cpu":
        return least
    seconds = max(step.key_value_bytes / _ASSUMED_BYTES_PER_SECOND, step.flops / _ASSUMED_FLOPS)
    return min(most, max(least, round(_LAUNCH_SECONDS / seconds)))


def _is_jax(name: str) -> bool:
    return name in CALLS or (name in PEERS and PEERS[name].framework == "jax")


def _function(name: str, step: Step, implementation: str) -> Any:
    if name in CALLS:
        attention = CALLS[name].function(step, implementation)
        return lambda arrays: (attention(arrays),)
    return jax_programs.one_call(PEERS[name].attention(step.cell), backward=False)


def _arrays(name: str, step: Step, tokens: Tokens) -> Any:
    if name == flash_mla.NAME:
        name = "pages64"
    return CALLS[name].arrays(step, tokens) if name in CALLS else calls.contiguous(step, tokens)


def _torch_program(name: str, step: Step, arrays: Any) -> torch_programs.TorchProgram:
    number = calls_per_launch(step)
    if name == flash_mla.NAME:
        return flash_mla.program(step, arrays, number)
    return torch_programs.of_cell(PEERS[name], step.cell, arrays, number, backward=False)


def _precompile(name: str, step: Step, implementation: str) -> None:
    """Compile the kernels of a call, in a process without the GPU."""
    arrays = jax.eval_shape(lambda: _arrays(name, step, calls.make(step)))
    precompile.lower(_function(name, step, implementation), arrays)


class Compilation:
    """Compiles the programs of all calls before anything is timed."""

    def __init__(self, selected: list[Step], implementation: str, progress: Progress):
        processes = precompile.Processes()
        for step in selected:
            for name in step.calls:
                if name in CALLS or name in OURS:
                    processes.submit(_precompile, name, step, implementation)
            if "fa4" in step.calls:  # it has a disk cache if its variable is set
                processes.submit(precompile.compile_peer, "fa4", step.cell, False)
        processes.wait(progress)
        self._futures: dict[tuple[Step, str], Future] = {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for step in selected:
                for name in filter(_is_jax, step.calls):
                    self._futures[step, name] = pool.submit(
                        self._compile, name, step, implementation
                    )
            futures = list(self._futures.values())
            for future in progress.track(futures, description="compiling programs"):
                future.exception()

    @staticmethod
    def _compile(name: str, step: Step, implementation: str) -> tuple[Any, Any]:
        arrays = jax.eval_shape(lambda: _arrays(name, step, calls.make(step)))
        function = _function(name, step, implementation)
        return jax_programs.compile_calls(function, arrays, calls_per_launch(step))

    def program(self, name: str, step: Step, arrays: Any) -> jax_programs.JaxProgram:
        """The program; raises the error that its compilation raised."""
        compiled, results = self._futures.pop((step, name)).result()
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), [results] * calls_per_launch(step)
        )
        return jax_programs.JaxProgram(compiled, arrays, zeros)


def measure_step(
    step: Step, compilation: Compilation, rounds: int, batch_seconds: float
) -> dict[str, dict[str, Any]]:
    """The records of all calls of a step, by name."""
    tokens = jax.block_until_ready(calls.make(step))
    programs: dict[str, Any] = {}
    outcomes: dict[str, Timing | Failure] = {}
    for name in step.calls:
        try:
            arrays = jax.block_until_ready(_arrays(name, step, tokens))
            programs[name] = (
                compilation.program(name, step, arrays)
                if _is_jax(name)
                else _torch_program(name, step, arrays)
            )
        except Exception as error:
            outcomes[name] = Failure(first_line(error))
    outcomes |= measure(programs, rounds=rounds, batch_seconds=batch_seconds)
    records: dict[str, dict[str, Any]] = {}
    for name in step.calls:
        outcome = outcomes[name]
        records[name] = outcome.record()
        if isinstance(outcome, Failure):
            continue
        call = CALLS.get(name)
        size = call.key_value_bytes(step) if call else step.key_value_bytes
        records[name]["bytes_per_second"] = size / outcome.seconds
        if call is None or call.is_whole:
            records[name]["tflops"] = step.flops / outcome.seconds / 1e12
        if _is_jax(name):
            compiled = programs[name].compiled
            records[name] |= jax_programs.facts(compiled, calls_per_launch(step))
    _add_differences(step, programs, records)
    return records


def _add_differences(step: Step, programs: dict[str, Any], records: dict[str, Any]) -> None:
    """Adds the relative Frobenius distance to the results of the first call of the step."""
    timed = [name for name, record in records.items() if "seconds" in record]
    for name in timed[1:]:
        rows, call = slice(None), CALLS.get(name)
        if call is not None:
            if call.is_tree:  # its queries differ
                continue
            rows = call.rows(step)
        reference, result = (
            programs[x].results()[0].reshape(-1, step.heads, step.value_dim)
            for x in (timed[0], name)
        )
        records[name]["difference"] = float(jax_programs.distance(result, reference[rows]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps",
        default="decode,prompts,ragged,latent",
        help=f"some of {', '.join(SETS)}, or nothing",
    )
    parser.add_argument("--implementation", default="cuda", choices=("cuda", "xla"))
    parser.add_argument("--no-host", action="store_true", help="without the host time of a step")
    measurement.add_options(parser, "paged", "call")
    options = parser.parse_args()
    try:
        options.steps = steps(options.steps) if options.steps else []
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    # By default JAX reserves three quarters of the device's memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = _arguments()
    document: dict[str, Any] = {
        **measurement.head(options),
        "labels": {
            **{name: call.label for name, call in CALLS.items()},
            **{name: peer.label for name, peer in PEERS.items()},
            flash_mla.NAME: flash_mla.LABEL,
        },
        "steps": [],
        "host": {},
    }
    device = document["device"]
    path = options.output or documents.default_path(str(device["name"]), "paged")
    device["copy_bytes_per_second"] = host_cost.copy_rate()
    console = Console()
    if not options.no_host:
        document["host"] = host_time.measure_all(options.implementation)
        console.print(f"host, us: {json.dumps(document['host'])}", markup=False)
    with Progress(console=console) as progress:
        compilation = Compilation(options.steps, options.implementation, progress)
        for step in progress.track(options.steps, description="measuring"):
            records = measure_step(step, compilation, options.rounds, options.batch_ms / 1e3)
            console.print(f"{step.name}: {table.line(records)}", soft_wrap=True, markup=False)
            entry = {"name": step.name, **dataclasses.asdict(step)}
            document["steps"].append(entry | {"results": records})
            documents.write(path, document)
            gc.collect()
            torch_programs.free_memory()
    documents.write(path, document)
    console.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
