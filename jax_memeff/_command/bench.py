"""``python -m jax_memeff bench``: the user's call on this machine, compared with ``jax.nn``.

A call by this library and by ``jax.nn``: time, memory, and difference from the definition, and the
table, the advice and the document of these figures. The definition is computed in float32, in plain
JAX, for a part of the call: the first sequence, and the query heads of its first key head. No
gradient of the part depends on the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.markup import escape
from rich.table import Table

from jax_memeff._command import tables
from jax_memeff._command.cases import programs
from jax_memeff._command.cases.arrays import Arrays
from jax_memeff._command.cases.case import Case
from jax_memeff._command.cases.programs import Given, Program, mask_function, score_function
from jax_memeff._cuda import named_functions
from jax_memeff.codegen.toolchain import progress

_ROWS = 128
"""Rows whose scores are in memory at a time."""

_HIGHEST = jax.lax.Precision.HIGHEST


def program_of_part(case: Case, gradients: bool) -> Program:
    """Maps the arrays of a case to the part of ``out`` and, on request, of the gradients of query,
    key and value: float32[T or S, heads, H or Hv].
    """

    def run(arrays: Given) -> dict[str, jax.Array]:
        inputs = _part(case, {name: arrays[name] for name in ("query", "key", "value")})
        key, value = inputs["key"][:, 0], inputs["value"][:, 0]

        def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            def head(n: jax.Array) -> jax.Array:
                row = jax.checkpoint(_row(case, arrays, key, value, n))
                rows = (query[:, n], jnp.arange(case.T))
                return jax.lax.map(lambda x: row(*x), rows, batch_size=_ROWS)

            return jnp.swapaxes(jax.lax.map(head, jnp.arange(case.N // case.K)), 0, 1)

        if not gradients:
            return {"out": attention(inputs["query"], key, value)}
        out, transpose = jax.vjp(attention, inputs["query"], key, value)
        dquery, dkey, dvalue = transpose(_part(case, {"dout": arrays["dout"]})["dout"])
        return {"out": out, "query": dquery, "key": dkey[:, None], "value": dvalue[:, None]}

    return run


def largest_difference(case: Case, results: Given, reference: Given) -> float:
    """The largest difference of an element, relative to the largest element of its array."""
    part = _part(case, {name: results[name] for name in reference})
    differences = [
        float(jnp.abs(part[name] - expected).max() / jnp.abs(expected).max())
        for name, expected in reference.items()
    ]
    return float(np.max(differences))  # NaN stays NaN


def _part(case: Case, arrays: Given) -> dict[str, jax.Array]:
    heads = {"key": 1, "value": 1}
    return {
        name: x[0, :, : heads.get(name, case.N // case.K)].astype(jnp.float32)
        for name, x in arrays.items()
    }


def _row(
    case: Case, arrays: Given, key: jax.Array, value: jax.Array, n: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    columns = jnp.arange(case.S)

    def row(query: jax.Array, t: jax.Array) -> jax.Array:
        scores = jnp.matmul(key, query, precision=_HIGHEST) * case.H**-0.5
        if case.soft_cap:
            scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
        if function := score_function(case, arrays.get("captured")):
            scores = jax.vmap(function, (0, None, None, None, 0))(scores, 0, n, t, columns)
        if case.bias:
            scores = scores + _row_of(arrays["bias"], n, t).astype(jnp.float32)
        valid = jnp.full(case.S, True)
        if case.causal:
            valid &= columns <= t
        if case.window:
            valid &= (columns >= t - case.window[0]) & (columns <= t + case.window[1])
        if case.segments:
            valid &= arrays["query_ids"][0, t] == arrays["key_ids"][0]
        if case.boolean:
            valid &= _row_of(arrays["boolean"], n, t)
        if function := mask_function(case):
            valid &= jax.vmap(function, (None, None, None, 0))(0, n, t, columns)
        scores = jnp.where(valid, scores, -jnp.inf)
        largest = jax.lax.stop_gradient(jnp.max(scores))
        terms = jnp.exp(scores - jnp.where(largest > -jnp.inf, largest, 0))
        return jnp.matmul(terms, value, precision=_HIGHEST) / jnp.maximum(terms.sum(), 1e-30)

    return row


def _row_of(array: jax.Array, n: jax.Array, t: jax.Array) -> jax.Array:
    """The row of an array that broadcasts to [B, N, T, S]."""
    _, heads, rows, _ = array.shape
    return array[0, n if heads > 1 else 0, t if rows > 1 else 0]


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
    figures = []
    for direction in directions:
        figures += _measured(case, direction, arrays, device)
    return figures


def ratio(ours: Figure, peer: Figure) -> float:
    """How many times as fast ours is: the median of the rounds, because clocks drift."""
    return statistics.median(
        theirs / mine for mine, theirs in zip(ours.samples, peer.samples, strict=True)
    )


def _measured(case: Case, direction: Direction, arrays: Any, device: Any) -> list[Figure]:
    gradients = direction != "forward"
    expected = None
    if not case.dropout:
        with progress.line(f"attention by its definition, {direction}"):
            expected = jax.jit(program_of_part(case, gradients))(arrays)
            jax.block_until_ready(expected)
    figures: list[Figure] = []
    launches: dict[str, Callable[[], Any]] = {}
    for path in (OURS, *([CUDNN] if device.platform != "cpu" else []), XLA):
        figure = Figure(path, direction)
        figures.append(figure)
        with progress.line(f"compiling {path}, {direction}"):
            program = _compiled(case, figure, arrays, device)
        if program is not None:
            with progress.line(f"running {path}, {direction}"):
                _try(case, figure, program, arrays, expected)
            if not figure.reason:
                launches[path] = functools.partial(program, arrays)
    with progress.line(f"timing {direction}"):
        samples = programs.interleaved(
            launches, seconds=_SECONDS, least=_LEAST_ROUNDS, most=_MOST_ROUNDS
        )
    for figure in figures:
        figure.samples = samples.get(figure.path, [])
    return figures


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
            figure.difference = largest_difference(case, results, expected)
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
    limits_in_bytes = [
        1024 * int(line.split()[1])
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    group = Path("/sys/fs/cgroup")  # the limit of a container
    limit, used = (_lines(group / f"memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        limits_in_bytes.append(int(limit[0]) - int(used[0]))
    return min(limits_in_bytes, default=None)


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


_EQUAL = 0.03
"""Speeds that differ by less count as equal."""


def title(case: Case) -> str:
    """The call and the device."""
    device = jax.local_devices()[0]
    path = "kernels" if device.platform != "cpu" else "the path in plain JAX"
    return f"{case.name} on {device.device_kind}; jax-memeff runs {path} there"


def table(figures: Sequence[Figure]) -> Table:
    """A row for each path and direction."""
    rows = tables.new_table(
        "path", "direction", "ms", "speedup of jax-memeff", "temporary MiB", "difference", "note"
    )
    ours = {figure.direction: figure for figure in figures if figure.path == OURS}
    for figure in figures:
        our_figure = ours[figure.direction]
        is_compared = figure is not our_figure and figure.samples and our_figure.samples
        rows.add_row(
            figure.path,
            figure.direction,
            f"{1e3 * figure.seconds:.4g}" if figure.samples else "",
            f"{ratio(our_figure, figure):.2f}" if is_compared else "",
            "" if figure.temporary_bytes is None else f"{figure.temporary_bytes / 2**20:.1f}",
            "" if figure.difference is None else f"{figure.difference:.1e}",
            escape(figure.reason),
        )
    return rows


def advice(figures: Sequence[Figure]) -> list[str]:
    """A line for each direction: how this library compares with the fastest path of ``jax.nn``."""
    directions = dict.fromkeys(figure.direction for figure in figures)
    return [
        f"{direction}: {_advice([f for f in figures if f.direction == direction])}"
        for direction in directions
    ]


def _advice(figures: Sequence[Figure]) -> str:
    (ours,) = (figure for figure in figures if figure.path == OURS)
    others = [figure for figure in figures if figure.path != OURS]
    peers = [figure for figure in others if figure.samples and figure.is_right]
    if not ours.samples:
        return f"jax-memeff cannot run this call: {ours.reason}"
    if not ours.is_right:
        return (
            f"the results of jax-memeff are wrong, they differ by {ours.difference:.1e}: python -m "
            "jax_memeff verify tells more"
        )
    if not peers:
        reasons = dict.fromkeys(
            figure.reason or f"the results of {figure.path} differ by {figure.difference:.1e}"
            for figure in others
        )
        return f"only jax-memeff can run this call here: {'; '.join(reasons)}"
    peer = min(peers, key=lambda figure: figure.seconds)
    speed, memory = ratio(ours, peer), _memory(ours, peer)
    if abs(math.log(speed)) < _EQUAL:
        return f"jax-memeff is as fast as {peer.path}{memory}"
    if speed > 1:
        return f"jax-memeff is {speed:.3g} x as fast as {peer.path}{memory}"
    return f"jax.nn is faster here: {peer.path} is {1 / speed:.3g} x as fast as jax-memeff{memory}"


def _memory(ours: Figure, peer: Figure) -> str:
    if not ours.temporary_bytes or not peer.temporary_bytes:
        return ""
    share = ours.temporary_bytes / peer.temporary_bytes
    return f"; jax-memeff takes {share:.2g} x its temporary memory"


def document(case: Case, figures: Sequence[Figure]) -> dict[str, Any]:
    """The call, the machine and the figures, for JSON."""
    device = jax.local_devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": {"name": device.device_kind, "platform": device.platform},
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax-memeff", "jax", "jaxlib")
        },
        "call": dataclasses.asdict(case),
        "figures": [_record(figure) for figure in figures],
        "advice": advice(figures),
    }


def _record(figure: Figure) -> dict[str, Any]:
    record = dataclasses.asdict(figure)
    if figure.difference is not None and not math.isfinite(figure.difference):
        record["difference"] = None  # JSON has no NaN
    record["seconds"] = figure.seconds if figure.samples else None
    return record | {"is_right": figure.is_right}
