"""Host cost: dispatch, the time to the first result, and the number of compiled kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from programs import inputs as cell_inputs
from programs import jax_programs
from programs.cells import Cell, functions
from programs.peers import Peer
from user_functions import in_jax

from jax_memeff import Mask
from jax_memeff._call.functions import state as function_state
from jax_memeff._call.offsets import Position
from jax_memeff._call.options import Divisors
from jax_memeff._cuda import block_mask as block_masks
from jax_memeff.codegen.launch import BlockMask
from measuring.timing import Failure, Timing, first_line, measure

_ROUNDS = 7
_BATCH_SECONDS = 0.05

_COPY_BYTES = 1 << 29

_MASK_FUNCTIONS = ("documents", "window")
_BLOCK_MASK_LENGTH = 16384
_BLOCK_MASKS_AT_ONCE = 16
"""In one program, because the host needs more time to launch one than the device to compute it."""

# The device finishes such a call before the host can launch the next one.
_CELL = Cell("host", 1, 128, 128, 8, 8, 64, 64, dtype="bfloat16")


class _JittedCall:
    """A jitted function called as a user calls it, once per launch."""

    calls = 1

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._function = jax.jit(function)
        self._arguments = arguments
        self._results = self._function(*arguments)

    def launch(self) -> None:
        self._results = self._function(*self._arguments)

    def wait(self) -> None:
        jax.block_until_ready(self._results)


def copy_rate() -> float:
    """The device's memory bandwidth: bytes read and written per second by a negation."""
    # Only a GPU is measured. Elsewhere a fraction of the bytes tests the harness in little time.
    copied = _COPY_BYTES if jax.default_backend() == "gpu" else _COPY_BYTES >> 6
    array = jnp.ones(copied // 4, jnp.float32)
    timing = measure(
        {"copy": _JittedCall(jnp.negative, array)}, rounds=_ROUNDS, batch_seconds=_BATCH_SECONDS
    )["copy"]
    if isinstance(timing, Failure):
        raise RuntimeError(timing.reason)
    return 2 * copied / timing.seconds


def dispatch(peers: Sequence[Peer]) -> dict[str, Any]:
    """Microseconds of host time per jitted call at T = 128, and of a bare ``x + 1``."""
    inputs = cell_inputs.make(_CELL)
    rows: dict[str, Any] = {"cell": _CELL.name, "unit": "us"}
    for direction, backward in (("forward", False), ("forward_backward", True)):
        programs: dict[str, _JittedCall] = {"bare": _JittedCall(lambda x: x + 1, jnp.zeros(()))}
        outcomes: dict[str, Timing | Failure] = {}
        for peer in peers:
            if peer.framework != "jax":
                continue
            try:
                function = jax_programs.one_call(peer.attention(_CELL), backward)
                adapted = cell_inputs.adapt(inputs, peer, _CELL)
                programs[peer.name] = _JittedCall(function, adapted)
            except Exception as error:
                outcomes[peer.name] = Failure(first_line(error))
        outcomes |= measure(programs, rounds=_ROUNDS, batch_seconds=_BATCH_SECONDS)
        rows[direction] = {
            name: {"error": outcome.reason}
            if isinstance(outcome, Failure)
            else {"us": 1e6 * outcome.seconds, "spread": outcome.spread}
            for name, outcome in outcomes.items()
        }
    return rows


def _script(
    name: str, implementation: str, cache: str, *arguments: str, archive: Path | None = None
) -> dict[str, Any]:
    """The report of a fresh process, in which only jax-memeff's own cache can be warm."""
    environment = {
        **os.environ,
        "JAX_MEMEFF_CACHE_DIR": cache,
        **({} if archive is None else {"JAX_MEMEFF_KERNELS": str(archive)}),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, str(Path(__file__).parents[1] / name), implementation, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines()
    if result.returncode != 0 or not lines:
        return {"error": (result.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]}
    return json.loads(lines[-1])


def _implementation() -> str:
    return "cuda" if jax.default_backend() in ("gpu", "cuda") else "xla"


def first_result(peers: Sequence[Peer]) -> dict[str, Any]:
    """Seconds to the first forward+backward of a fresh process: with an empty cache, with a filled
    one, and with an archive of kernels and an empty cache.
    """
    implementation = _implementation()
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as unused:
        found = {
            state: _script("first_result.py", implementation, cache) for state in ("cold", "warm")
        }
        if implementation == "cuda":
            archive = Path(unused) / "kernels.zip"
            build = [sys.executable, "-m", "jax_memeff", "build", "--models", "llama"]
            subprocess.run([*build, "--output", str(archive)], check=True, capture_output=True)
            with tempfile.TemporaryDirectory() as empty:
                found["archive"] = _script(
                    "first_result.py", implementation, empty, archive=archive
                )
                compiled = sum(path.is_file() for path in Path(empty).rglob("*"))
                found["archive"]["kernels_compiled"] = compiled
        return found


def kernel_count(peers: Sequence[Peer]) -> dict[str, Any]:
    """The number of kernels compiled for 200 random shapes of one feature set."""
    with tempfile.TemporaryDirectory() as cache:
        return _script("kernel_count.py", _implementation(), cache, "200")


def function_compile(peers: Sequence[Peer]) -> dict[str, Any]:
    """Kernels and seconds for 20 functions in fresh processes, with an empty and a filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        return {
            state: _script("function_compile.py", _implementation(), cache)
            for state in ("cold", "warm")
        }


def block_mask(peers: Sequence[Peer]) -> dict[str, Any]:
    """Device seconds for the block masks of a mask function in both directions, by cell. Programs
    hold those of functions without arrays as constants.
    """
    rows: dict[str, Any] = {}
    for cell in functions():
        if cell.function not in _MASK_FUNCTIONS or cell.query_length < _BLOCK_MASK_LENGTH:
            continue
        mask = in_jax.arguments(cell, cell_inputs.make(cell))["mask"]
        if not mask.captured:
            continue
        positions = [jnp.int32(place) for place in range(_BLOCK_MASKS_AT_ONCE)]
        outcome = measure(
            {"both": _JittedCall(functools.partial(_block_masks, cell), mask, positions)},
            rounds=_ROUNDS,
            batch_seconds=_BATCH_SECONDS,
        )["both"]
        rows[cell.name] = (
            {"error": outcome.reason}
            if isinstance(outcome, Failure)
            else {
                "seconds": outcome.seconds / _BLOCK_MASKS_AT_ONCE,
                "spread": outcome.spread,
            }
        )
    return rows


def _block_masks(cell: Cell, mask: Mask, positions: Sequence[jax.Array]) -> list[jax.Array]:
    """The block masks of both directions, with a typical tile size, which hardly matters. Other
    positions of row 0 and column 0, and barriers, make XLA compute them one after the other.
    """
    scores = (cell.batch, cell.heads, cell.query_length, cell.key_length)
    own = mask.canonical(cell.batch, cell.query_length, cell.key_length)
    own = dataclasses.replace(own, captured=tuple(array[None] for array in own.captured))
    state = function_state(cell.batch, cell.heads)
    found: list[jax.Array] = []
    for given in positions:
        position, found = jax.lax.optimization_barrier((given, found))
        found += [
            block_masks.lines(
                own,
                state,
                Position(position, position),
                BlockMask(lines, 128, 128),
                scores,
                Divisors(),
            )
            for lines in ("queries", "keys")
        ]
    return found


ROWS: dict[str, Callable[[Sequence[Peer]], dict[str, Any]]] = {
    "dispatch": dispatch,
    "first_result": first_result,
    "kernel_count": kernel_count,
    "block_mask": block_mask,
    "function_compile": function_compile,
}


def rows(names: str) -> list[str]:
    """The names of a comma-separated list of rows; ``all`` is every one.

    >>> rows("dispatch"), rows("")
    (['dispatch'], [])
    """
    selected = list(ROWS) if names == "all" else [name for name in names.split(",") if name]
    if unknown := [name for name in selected if name not in ROWS]:
        raise ValueError(
            f"unknown host rows {unknown}: expected 'all' or some of {', '.join(ROWS)}"
        )
    return selected
