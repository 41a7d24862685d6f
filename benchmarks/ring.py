"""Times ring attention against one of its devices: ``python benchmarks/ring.py --help``.

The problem is causal attention over a sequence that is sharded over n devices, in the zigzag
layout, which balances the work. It is compared with one device on its *share*: attention over the
whole sequence with one n-th of the heads. The share has as many pairs of query and key as one
device of the ring, and operands of the same size, but no transfers and no merging. The FLOPs of
both are ``Cell.flops`` of the share.

README.md in this folder explains the timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import DIRECTIONS
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measuring import documents, machine, measurement
from measuring.timing import Failure, Timing, measure
from programs.cells import Cell
from programs.inputs import Inputs
from programs.jax_programs import JaxProgram, distance, one_call, program_of
from rich.console import Console

import jax_memeff

SHARE, RING = "share", "ring"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of the ring, and the call of one device on its share."""

    cell: Cell
    mesh: Mesh
    implementation: Any

    @property
    def share(self) -> Cell:
        """The same cell with one n-th of the heads.

        Raises ``ValueError`` if the heads cannot be divided.
        """
        devices, cell = self.mesh.size, self.cell
        if cell.heads % devices or cell.key_heads % devices:
            raise ValueError(
                f"expected numbers of heads that {devices} devices can share, got {cell.heads} and "
                f"{cell.key_heads}"
            )
        return dataclasses.replace(
            cell, heads=cell.heads // devices, key_heads=cell.key_heads // devices
        )

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(None, *self.mesh.axis_names))

    def inputs(self) -> tuple[Inputs, Inputs]:
        """Standard normal arrays of the ring, in zigzag order, and of the share."""
        cell = self.cell

        @functools.partial(jax.jit, static_argnums=(1, 2), out_shardings=self.sharding)
        def normal(key: jax.Array, heads: int, dim: int) -> jax.Array:
            shape = (cell.batch, cell.query_length, heads, dim)
            return jax.random.normal(key, shape).astype(cell.dtype)

        keys = jax.random.split(jax.random.key(0), 4)
        ring = Inputs(
            query=normal(keys[0], cell.heads, cell.head_dim),
            key=normal(keys[1], cell.key_heads, cell.head_dim),
            value=normal(keys[2], cell.key_heads, cell.value_dim),
            cotangent=normal(keys[3], cell.heads, cell.value_dim),
        )
        return ring, jax.tree.map(self.part, ring)

    def part(self, array: jax.Array) -> jax.Array:
        """The heads of the share, in natural order, on the first device."""
        heads = array[:, :, : array.shape[2] // self.mesh.size]
        gathered = jax.device_put(heads, self.mesh.devices.flat[0])
        return jax_memeff.unzigzag(gathered, 1, self.mesh.size)

    def attention(self, inputs: Inputs, is_ring: bool) -> jax.Array:
        operands = inputs.query, inputs.key, inputs.value
        arguments: Any = {"is_causal": True, "implementation": self.implementation}
        if not is_ring:
            return jax_memeff.dot_product_attention(*operands, **arguments)
        (axis,) = self.mesh.axis_names
        ring = functools.partial(
            jax_memeff.ring_attention, axis_name=axis, layout="zigzag", **arguments
        )
        spec = self.sharding.spec
        return jax.shard_map(ring, mesh=self.mesh, in_specs=spec, out_specs=spec)(*operands)

    def program(self, name: str, inputs: Inputs, backward: bool, options: Any) -> JaxProgram:
        """One call, whose results are donated to the next."""
        call = one_call(functools.partial(self.attention, is_ring=name != SHARE), backward)
        sharding = inputs.query.sharding
        results = [
            jnp.zeros(result.shape, result.dtype, device=sharding)
            for result in jax.eval_shape(call, inputs)
        ]
        compiled = jax.jit(
            program_of(lambda inputs: list(call(inputs))),
            donate_argnums=1,
            keep_unused=True,
            out_shardings=sharding,
            compiler_options=options,
        )
        compiled = compiled.lower((inputs,), [results]).compile()
        return JaxProgram(compiled, inputs, [results])


# The name of an instruction, its operation, and the name of its first operand.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][a-z\-]*)\((?:%?([\w.\-]+))?")
_LAUNCHING = frozenset(("while", "conditional", "call", "custom-call"))


def transfers(hlo: str) -> dict[str, int]:
    """The transfers between devices in a compiled program, and the number that is *overlapped*.

    A transfer is overlapped if kernels or loops are between its start and its end.

    >>> transfers('''
    ... %body (p: f32[8]) -> f32[8] {
    ...   %start.1 = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p)
    ...   %loop = f32[8]{0} while(%p), condition=%c, body=%b
    ...   %done.1 = f32[8]{0} collective-permute-done(%start.1)
    ...   ROOT %alone = f32[8]{0} collective-permute(%done.1)
    ... }''')
    {'transfers': 2, 'overlapped': 1}
    """
    launched, launched_at_start = 0, {}
    found = {"transfers": 0, "overlapped": 0}
    for name, operation, operand in map(
        re.Match.groups, filter(None, map(_INSTRUCTION.match, hlo.splitlines()))
    ):
        launched += operation in _LAUNCHING
        if operation == "collective-permute-start":
            launched_at_start[name] = launched
        elif operation == "collective-permute-done":
            found["transfers"] += 1
            found["overlapped"] += launched > launched_at_start[operand]
        elif operation == "collective-permute":
            found["transfers"] += 1
    return found


def records(
    problem: Problem, backward: bool, programs: dict[str, JaxProgram], rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """The results of one direction, by program."""
    outcomes = measure(programs, rounds=rounds, batch_seconds=seconds)
    found: dict[str, dict[str, Any]] = {}
    for name, program in programs.items():
        outcome = outcomes[name]
        if isinstance(outcome, Failure):
            found[name] = {"error": outcome.reason}
            continue
        found[name] = {
            "seconds": outcome.seconds,
            "spread": outcome.spread,
            "samples": outcome.samples,
            "calls_per_batch": outcome.launches,
            "tflops_per_device": problem.share.flops(backward) / outcome.seconds / 1e12,
            "temporary_bytes": program.compiled.memory_analysis().temp_size_in_bytes,
        }
        share = outcomes[SHARE]
        if name != SHARE and isinstance(share, Timing):
            pairs = zip(program.results(), programs[SHARE].results(), strict=True)
            found[name] |= {
                "of_one_device": share.seconds / outcome.seconds,
                "difference": max(float(distance(problem.part(x), y)) for x, y in pairs),
                **transfers(program.compiled.as_text()),
            }
    return found


def _compiler_options(text: str) -> dict[str, Any]:
    """The options in ``NAME=VALUE,...``.

    >>> _compiler_options("xla_some_limit=4,xla_some_pass=true")
    {'xla_some_limit': 4, 'xla_some_pass': True}
    """
    values = {"true": True, "false": False}
    pairs = (pair.split("=", 1) for pair in text.split(",") if pair)
    return {
        name: values[value] if value in values else int(value) if value.isdigit() else value
        for name, value in pairs
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, help="default: all")
    parser.add_argument("--tokens", type=int, default=131072, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", choices=("cuda", "xla"), default="cuda")
    parser.add_argument(
        "--compiler-options",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="XLA options; may be repeated: the ring is timed without and with each",
    )
    parser.add_argument("--output", type=Path, help="default: results/<device>-ring.json")
    parser.add_argument("--rounds", type=int, default=5, help="batches of each program")
    parser.add_argument("--batch-ms", type=float, default=300.0, help="length of a batch")
    parser.add_argument("--commit", help="our commit, if the checkout has no git")
    return parser.parse_args()


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = _arguments()
    devices = jax.devices()[: options.devices]
    key_heads, dim = options.key_heads or options.heads, options.head_dim
    length = options.tokens
    cell = Cell(
        *("ring", 1, length, length, options.heads, key_heads, dim, dim),
        dtype=options.dtype,
        causal=True,
    )
    problem = Problem(cell, Mesh(np.array(devices), ("ring",)), options.implementation)
    document = {
        **machine.facts(options.commit),
        "method": {
            "rounds": options.rounds,
            "batch_ms": options.batch_ms,
            "clock": measurement.CLOCK,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        },
        "ring": {"name": cell.name, **vars(cell), "devices": len(devices), "results": {}},
    }
    compiler_options: dict[str, Any] = {SHARE: None, RING: None}
    for text in options.compiler_options:
        compiler_options[f"{RING}, {text}"] = _compiler_options(text)
    ring, share = problem.inputs()
    console = Console()
    with ThreadPoolExecutor() as pool:
        futures = {
            (direction, name): pool.submit(
                *(problem.program, name, share if name == SHARE else ring, backward), given
            )
            for direction, backward in DIRECTIONS.items()
            for name, given in compiler_options.items()
        }
        programs = {key: future.result() for key, future in futures.items()}
    path = options.output or documents.default_path(str(document["device"]["name"]), "ring")
    for direction, backward in DIRECTIONS.items():
        chosen = {name: programs[direction, name] for name in compiler_options}
        found = records(problem, backward, chosen, options.rounds, options.batch_ms / 1e3)
        document["ring"]["results"][direction] = found
        for name, record in found.items():
            figures = {k: v for k, v in record.items() if k not in ("samples", "calls_per_batch")}
            console.print(f"{direction}, {name}: {json.dumps(figures)}", soft_wrap=True)
        documents.write(path, document)
    console.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
