"""A call by this library and by ``jax.nn``: time, memory, and difference from the definition."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jax_memeff._command.bench import reference
from jax_memeff._command.cases import programs, timing
from jax_memeff._command.cases.arrays import Arrays
from jax_memeff._command.cases.case import Case
from jax_memeff._cuda import named_functions
from jax_memeff.codegen.toolchain import progress

Direction = Literal["forward", "forward + backward"]

OURS = "jax-memeff"
XLA, CUDNN = "jax.nn xla", "jax.nn cudnn"

_SECONDS = 10.0
"""How long all paths of a direction are timed, unless three rounds take longer."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50
_LARGEST_DIFFERENCE = 0.05
"""Several times that of bfloat16."""
_SHARE = 0.9
"""The share of the memory that is available that a path may take."""


@dataclasses.dataclass
class Figure:
    """Time, memory and difference of a path in one direction."""

    path: str
    direction: Direction
    samples: list[float] = dataclasses.field(default_factory=list)
    """Seconds of a call, one for each round; those of one round belong together."""
    temporary_bytes: int | None = None
    """Memory besides operands and results, as XLA plans it."""
    difference: float | None = None
    """The largest one from the definition in float32, relative to the largest element."""
    reason: str = ""
    """Why there are no samples."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def is_right(self) -> bool:
        """Whether the results are those of attention, as far as anybody compared them."""
        return self.difference is None or self.difference <= _LARGEST_DIFFERENCE


def measure(case: Case, *, backward: bool) -> list[Figure]:
    """The figures of all paths on the first device, by direction.

    Raises:
        ValueError, UnsupportedError: the arrays do not fit into memory, or a name is that of no
            score or mask function.
    """
    named_functions.require(case.score_function or None, case.mask_function or None)
    device = jax.local_devices()[0]
    _require_memory(case, device, backward)
    drawn = Arrays.draw(case, as_in_models=True).padded
    arrays = jax.device_put({name: x for name, x in drawn.items() if name != "dlse"}, device)
    del drawn
    directions: list[Direction] = ["forward", *(["forward + backward"] if backward else [])]
    found = []
    for direction in directions:
        found += _measured(case, direction, arrays, device)
    return found


def ratio(ours: Figure, peer: Figure) -> float:
    """How many times as fast ours is: the median of the rounds, because clocks drift."""
    return statistics.median(
        theirs / own for own, theirs in zip(ours.samples, peer.samples, strict=True)
    )


def _measured(case: Case, direction: Direction, arrays: Any, device: Any) -> list[Figure]:
    gradients = direction != "forward"
    expected = None
    if not case.dropout:
        with progress.line(f"attention by its definition, {direction}"):
            expected = jax.jit(reference.program(case, gradients))(arrays)
            jax.block_until_ready(expected)
    found: list[Figure] = []
    launches: dict[str, Callable[[], Any]] = {}
    for path in (OURS, *([CUDNN] if device.platform != "cpu" else []), XLA):
        figure = Figure(path, direction)
        found.append(figure)
        with progress.line(f"compiling {path}, {direction}"):
            program = _compiled(case, figure, arrays, device)
        if program is not None:
            with progress.line(f"running {path}, {direction}"):
                _try(case, figure, program, arrays, expected)
            if not figure.reason:
                launches[path] = functools.partial(program, arrays)
    with progress.line(f"timing {direction}"):
        samples = timing.interleaved(
            launches, seconds=_SECONDS, least=_LEAST_ROUNDS, most=_MOST_ROUNDS
        )
    for figure in found:
        figure.samples = samples.get(figure.path, [])
    return found


def _compiled(case: Case, figure: Figure, arrays: Any, device: Any) -> Any:
    """The program of a path, or None and the reason why it has none."""
    gradients = figure.direction != "forward"
    available = _available_bytes(device)
    if figure.path == OURS:
        implementation = "xla" if device.platform == "cpu" else "cuda"
        program = programs.trained(case, implementation, gradients)
    else:
        if lacking := programs.jax_nn_lacks(case):
            figure.reason = f"jax.nn has no {' and no '.join(lacking)}"
            return None
        scores = 4 * case.B * case.N * case.T * case.S
        if figure.path == XLA and available is not None and scores > _SHARE * available:
            figure.reason = f"its scores take {_size(scores)}, {_size(available)} are available"
            return None
        implementation = "xla" if figure.path == XLA else "cudnn"
        program = programs.of_jax_nn(case, implementation, gradients)
    try:
        compiled = jax.jit(program).lower(arrays).compile()
    except Exception as error:  # whatever jax.nn, XLA and functions of the user raise
        figure.reason = _first_line(error)
        return None
    memory = compiled.memory_analysis()
    if memory is not None:
        figure.temporary_bytes = memory.temp_size_in_bytes
        # The results of a launch live until the next one has returned its own.
        needed = memory.temp_size_in_bytes + 2 * memory.output_size_in_bytes
        if available is not None and needed > _SHARE * available:
            figure.reason = f"it takes {_size(needed)}, {_size(available)} are available"
            return None
    return compiled


def _try(case: Case, figure: Figure, program: Any, arrays: Any, expected: Any) -> None:
    try:
        results = jax.block_until_ready(program(arrays))
        if expected is not None:
            figure.difference = reference.difference(case, results, expected)
    except jax.errors.JaxRuntimeError as error:
        figure.reason = _first_line(error)


def _require_memory(case: Case, device: Any, backward: bool) -> None:
    element = 4 if case.dtype == "float32" else 2
    of_bias = 4 if "float32" in (case.dtype, case.bias_dtype) else 2
    rows = case.B * case.T * case.N * (case.H + case.value_dim)
    columns = case.B * case.S * case.K * (case.H + case.value_dim)
    bias = math.prod(getattr(case, dim) for dim in case.bias.replace("1", "")) if case.bias else 0
    needed = (element * (rows + columns) + of_bias * bias) * (2 if backward else 1)
    needed += case.B * case.T * case.S if case.boolean else 0
    needed += 4 * case.B * case.T * case.keys_of_row if case.keys else 0
    places = (_available_bytes(device), _host_bytes())  # the host draws them
    available = min((size for size in places if size is not None), default=None)
    if available is not None and needed > _SHARE * available:
        raise ValueError(
            f"the arrays of this call take {_size(needed)}, and {_size(available)} of memory are "
            "available: pass a smaller --batch, --seq or --heads"
        )


def _available_bytes(device: Any) -> int | None:
    """Memory that a program may take on the device; None if nobody says."""
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_bytes() -> int | None:
    found = [
        1024 * int(line.split()[1])
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    group = Path("/sys/fs/cgroup")  # the limit of a container
    limit, used = (_lines(group / f"memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        found.append(int(limit[0]) - int(used[0]))
    return min(found, default=None)


def _lines(file: Path) -> Sequence[str]:
    with contextlib.suppress(OSError):
        return file.read_text().splitlines()
    return ()


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"[:300]
