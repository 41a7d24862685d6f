"""The parent of ``verify``: starts the child that owns the GPU, kills it at a limit, and reports.

Nothing here imports JAX or opens CUDA. Errors of CUDA stay with a process, so each case that fails
ends its child; the next child launches a trivial kernel before it goes on. The report is Markdown
for an issue, and a document that ``benchmarks/`` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jax_memeff._command.cases.case import Case
from jax_memeff._command.verify.chosen import on_gpu

_SAFE_PATH = ("-P",) if sys.flags.safe_path else ()
CHILD = (sys.executable, *_SAFE_PATH, "-m", "jax_memeff._command.verify.child")

LIMITS = {
    "starting": 300.0,
    "trying": 60.0,
    "compiling": 1800.0,
    "drawing": 300.0,
    "comparing": 900.0,
}
"""Seconds that a phase may take. That of ``launching`` is the user's."""
SILENCE = 60.0
"""Seconds without a heartbeat after which a child counts as stuck."""
_DYING = 60.0
"""Seconds that the driver may take to end the kernels of a process that was killed."""

_SMI_SECONDS = 30
_MPS = "nvidia-cuda-mps"  # the first 15 letters are what /proc shows

Note = Callable[[str], None]


class BusyError(Exception):
    """A kernel that fails here would harm other programs; the message says which."""


@dataclasses.dataclass
class Record:
    """What a run found out."""

    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    outcomes: dict[Case, dict[str, Any]] = dataclasses.field(default_factory=dict)
    broken: str = ""
    """Why the run ended before its last case."""
    is_interrupted: bool = False
    together: bool = True
    """Whether a child compiles the programs of several cases at a time, until that ends a child: if
    each case is compiled alone, the next child shows which one it was.
    """

    @property
    def has_passed(self) -> bool:
        """Whether nothing failed, and something passed: a case may have no kernel on a GPU."""
        states = {outcome["state"] for outcome in self.outcomes.values()}
        return not self.broken and "failed" not in states and "passed" in states


def require_idle() -> str:
    """Raise if a kernel that fails could end other programs on the GPU.

    Returns a warning if nobody can know that, else "".

    Raises:
        BusyError: MPS runs, or other processes compute on the GPU.
    """
    advice = "pass --even-if-busy if you accept that"
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ or any(
        _text_of(file).startswith(_MPS) for file in Path("/proc").glob("[0-9]*/comm")
    ):
        raise BusyError(
            "MPS shares the GPU: a kernel that fails ends the kernels of all its clients. Stop it "
            f"(echo quit | nvidia-cuda-mps-control) and unset CUDA_MPS_PIPE_DIRECTORY, or {advice}"
        )
    query = ("--query-compute-apps=pid,process_name", "--format=csv,noheader", *_chosen_gpu())
    if (found := _smi(*query)) is None:
        return (
            "nvidia-smi is not there or fails, so it is unknown whether other processes compute on "
            "the GPU; a kernel that hangs stops them, too"
        )
    if others := [line for line in found.splitlines() if line.strip()]:
        raise BusyError(
            f"other processes compute on the GPU: {'; '.join(others)}. A kernel that hangs stops "
            f"them, too: end them, choose another GPU in CUDA_VISIBLE_DEVICES, or {advice}"
        )
    return ""


def driver() -> str:
    """The version of the driver, "" if nvidia-smi does not tell it."""
    output = _smi("--query-gpu=driver_version", "--format=csv,noheader", *_chosen_gpu())
    return (output or "").split("\n")[0].strip()


def _smi(*arguments: str) -> str | None:
    """What nvidia-smi prints, None without it or if it fails."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    try:
        done = subprocess.run(
            (program, *arguments), capture_output=True, text=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpu() -> str:
    """The GPU that a child sees: the first one of CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()


def _chosen_gpu() -> tuple[str, ...]:
    return (f"--id={_gpu()}",) if _gpu() else ()


def _text_of(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""


def run(cases: Sequence[Case], log: Path, limit: float, note: Note) -> Record:
    """Run all cases, in as many children as it takes.

    Args:
        cases: those of the run; a GPU without bfloat16 gets them in float16.
        log: a file to which each phase is written before it begins.
        limit: seconds that a launch may take.
        note: gets a line for each case.
    """
    record = Record()
    waiting = list(cases)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as programs:
        try:
            while waiting and not record.broken:
                with _child(log, programs) as child:
                    _follow(child, waiting, record, limit, note)
                    child.append_to(log)
                if child.survived:
                    record.broken = (
                        f"process {child.process.pid} does not end although it was killed: the "
                        "GPU needs a reset (nvidia-smi --gpu-reset, or a reboot)"
                    )
        except KeyboardInterrupt:  # the child has ended
            record.is_interrupted = True
            record.broken = f"interrupted before {waiting[0].name} was done"
    return record


class _Child:
    """A process, and the lines that it sends."""

    def __init__(self, log: Path, programs: str, output: IO[bytes]):
        reader, writer = os.pipe()
        self._reader, self._output, self._rest = reader, output, b""
        self.ended: dict[str, Any] | None = None
        self.survived = False
        try:
            self.process = subprocess.Popen(
                [*CHILD, str(writer), str(log)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
                start_new_session=True,  # its compilers end with it
                env=_environment(programs),
            )
        finally:
            os.close(writer)

    def lines(self) -> Iterator[bytes | None]:
        """Lines as they come, and None about once a second; ends when the child has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=0.2):
                    if not (more := os.read(self._reader, 1 << 16)):
                        return
                    *whole, self._rest = (self._rest + more).split(b"\n")
                    yield from whole
                yield None

    def give(self, cases: Sequence[Case], together: bool) -> None:
        assert self.process.stdin is not None
        fields = [dataclasses.asdict(case) for case in cases]
        text = json.dumps({"cases": fields, "together": together})
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which the pipe shows
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(_DYING)
        except subprocess.TimeoutExpired:
            self.survived = True

    def last_lines(self) -> str:
        """The end of what it printed."""
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").splitlines()[-8:])

    def append_to(self, log: Path) -> None:
        """Write to the log how it ended."""
        if self.ended is not None:
            with open(log, "a") as file:
                file.write(json.dumps(self.ended) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        self.kill()
        os.close(self._reader)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


@contextlib.contextmanager
def _child(log: Path, programs: str) -> Iterator[_Child]:
    with tempfile.TemporaryFile() as output:
        child = _Child(log, programs, output)
        try:
            yield child
        finally:
            child.close()


def _environment(programs: str) -> Mapping[str, str]:
    """One GPU, numbered as nvidia-smi does; a CPU for functions of the user; memory as needed.

    XLA's programs stay in the directory ``programs``: a child after one that failed compiles the
    same. OpenBLAS gets one thread: the threads of small products wait for each other most of the
    time, and the oracle took forty times as long.
    """
    return {
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": _gpu(),
        "JAX_COMPILATION_CACHE_DIR": programs,
        "JAX_MEMEFF_PROGRESS": "0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cuda,cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _follow(child: _Child, waiting: list[Case], record: Record, limit: float, note: Note) -> None:
    """Read what a child does until it ends or is killed, and take its cases from ``waiting``."""
    limits = {**LIMITS, "launching": limit}
    phase: dict[str, Any] = {"phase": "starting"}
    since = heard = time.monotonic()
    reason = ""
    for line in child.lines():
        now = time.monotonic()
        if line is not None:
            heard = now
        if line:
            phase, since = json.loads(line), now
            if phase["phase"] == "ready":
                record.machine = phase["machine"]
                waiting[:] = on_gpu(waiting, phase["machine"]["arch"])
                child.give(waiting, record.together)
            elif phase["phase"] == "broken":
                break
            elif phase["phase"] == "compiling" and "case" not in phase:
                note(f"compiling {phase['what']}")
            elif phase["phase"] == "done":
                _finish(waiting, record, phase["outcome"], note)
                if not waiting or phase["outcome"]["state"] == "failed":
                    return
        allowed = limits.get(phase["phase"], LIMITS["starting"])
        if now - since > allowed:
            reason = f"did not end within {allowed:g} s, and was killed"
        elif now - heard > SILENCE:
            reason = f"sent no heartbeat for {SILENCE:g} s, and was killed"
        if reason:
            break
    child.kill()
    what = f"{phase['phase']} {phase.get('what', '')}".strip()
    text = phase.get("text") or f"{what}: {reason or _ended(child.process.returncode)}"
    child.ended = {"phase": "ended", "case": phase.get("case"), "text": text}
    if phase["phase"] in ("starting", "trying", "broken"):
        first = "python -m jax_memeff doctor says what is missing"
        later = "a trivial kernel fails after a case that failed, so the GPU needs a reset "
        later += "(nvidia-smi --gpu-reset, or a reboot)"
        said = child.last_lines().rpartition("\n")[2]  # the message of a traceback
        record.broken = f"{later if record.machine else first}: {text}{f': {said}' * bool(said)}"
    elif phase["phase"] == "compiling" and "case" not in phase and record.together:
        record.together = False
        note(f"{text}; each case is compiled alone from now on")
    else:
        outcome = {"state": "failed", "text": [text, child.last_lines()]}
        _finish(waiting, record, outcome, note)


def _finish(waiting: list[Case], record: Record, outcome: dict[str, Any], note: Note) -> None:
    case = waiting.pop(0)
    record.outcomes[case] = outcome
    note(f"{outcome['state']:9} {case.name}")


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with status {code}"


_PEERS = {"memeff_cuda": "jax-memeff", "jax_cudnn": "jax.nn cuDNN", "jax_xla": "jax.nn XLA"}
_DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}


def markdown(record: Record, driver: str, seconds: float) -> str:
    """The whole report."""
    states = [outcome["state"] for outcome in record.outcomes.values()]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in ("passed", "failed", "no kernel")
    )
    machine = record.machine
    facts = {
        "GPU": f"{machine.get('name', 'unknown')}, kernels for {machine.get('arch', 'none')}",
        **machine.get("toolchain", {}),
        "driver": driver or "unknown",
        "versions": ", ".join(f"{k} {v}" for k, v in machine.get("versions", {}).items()),
        "date": f"{_today()}, {seconds:.0f} s",
    }
    parts = [f"### jax_memeff verify: {counts}", _table(["", ""], [list(x) for x in facts.items()])]
    if record.broken:
        parts.append(f"**Stopped**: {record.broken}")
    header = ["case", "state", "largest error / allowed", "blockwise path"]
    header += [f"ms, {title}" for title in _DIRECTIONS.values()]
    rows = [_row(case, outcome) for case, outcome in record.outcomes.items()]
    if rows:
        parts.append(_table(header, rows))
    for case, outcome in record.outcomes.items():
        if outcome["state"] != "passed":
            text = "\n".join(outcome["text"])
            parts.append(f"`{case.name}`: {outcome['state']}\n\n```\n{text}\n```")
    return "\n\n".join(parts)


def document(record: Record, driver: str) -> dict[str, Any]:
    """The results in the form of ``benchmarks/results``."""
    machine = record.machine
    measured = {
        peer
        for outcome in record.outcomes.values()
        for times in outcome.get("seconds", {}).values()
        for peer in times
    }
    peers = {name: label for name, label in _PEERS.items() if name in measured}
    cells = [_cell(case, outcome, peers) for case, outcome in record.outcomes.items()]
    return {
        "date": _today(),
        "device": {
            "name": machine.get("name"),
            "platform": machine.get("platform"),
            "driver": driver or None,
        },
        "versions": machine.get("versions", {}),
        "toolchain": machine.get("toolchain", {}),
        "method": {"clock": "host clock, batches of launches"},
        "peers": peers,
        "broken": record.broken,
        "cells": cells,
    }


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _row(case: Case, outcome: dict[str, Any]) -> list[str]:
    errors = outcome.get("errors", {})
    row = [f"`{case.name}`", outcome["state"]]
    row += [_worst(errors.get(path, [])) for path in ("kernels", "blockwise")]
    for direction in _DIRECTIONS:
        times = outcome.get("seconds", {}).get(direction, {})
        ours = [f"{1e3 * statistics.median(x):.3g}" for p, x in times.items() if p == "memeff_cuda"]
        peers = [
            f"{_PEERS[p]} {1e3 * statistics.median(x):.3g}"
            for p, x in times.items()
            if p != "memeff_cuda"
        ]
        row.append(", ".join(ours + peers))
    return row


def _worst(errors: list[Any]) -> str:
    """The result that is the nearest to its limit."""
    if not errors:
        return ""
    name, error, allowed = max(errors, key=lambda x: x[1] / x[2] if x[2] else x[1])
    return f"{name} {error:.2g} / {allowed:.2g}"


def _cell(case: Case, outcome: dict[str, Any], peers: Iterable[str]) -> dict[str, Any]:
    """The results of a case; a direction that was timed has a record for each of ``peers``."""
    results = {}
    for direction, times in outcome.get("seconds", {}).items():
        medians = {peer: statistics.median(samples) for peer, samples in times.items()}
        results[direction] = {
            peer: _measured(case, direction, times[peer], medians[peer], min(medians.values()))
            if peer in medians
            else {"error": "not timed"}
            for peer in peers
        }
    return {
        "name": case.name,
        "group": "verify",
        "state": outcome["state"],
        "text": outcome["text"],
        "errors": outcome.get("errors", {}),
        "results": results,
    }


def _measured(
    case: Case, direction: str, samples: list[float], seconds: float, best: float
) -> dict[str, Any]:
    pairs = case.B * case.N * case.T * case.keys_of_row * (0.5 if case.causal else 1.0)
    flops = 2.0 * pairs * (case.H + case.value_dim) * (1.0 if direction == "forward" else 3.5)
    element = 4 if case.dtype == "float32" else 2
    moved = element * case.B * case.S * case.K * (case.H + case.value_dim)
    return {
        "seconds": seconds,
        "samples": samples,
        "spread": (max(samples) - min(samples)) / seconds,
        "tflops": flops / seconds / 1e12,
        "bytes_per_second": moved / seconds,
        "ratio_to_best": best / seconds,
    }


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
