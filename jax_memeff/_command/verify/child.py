"""The process of ``verify`` that owns the GPU; the parent may have to kill it.

``python -m jax_memeff._command.verify.child PIPE LOG``: PIPE is a file descriptor, LOG a file. Each
phase is announced by a line of JSON in both, and the log is on the disk before the phase begins.
Empty lines in the pipe are a heartbeat. Standard input has one line: the ``cases``, and whether
their programs are compiled ``together``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_memeff._command.cases.case import Case

HEARTBEAT_SECONDS = 1.0

_TOGETHER = 32
"""Cases whose programs are compiled before the first of them runs: all of a run by default."""

Say = Callable[..., None]

_DISTRIBUTIONS = (
    *("jax-memeff", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "cuda-core"),
    *("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cutlass"),
)


class Channel:
    """Lines to the parent, and to the log."""

    def __init__(self, pipe: int, log: int):
        self._pipe, self._log = pipe, log
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, phase: str, **fields: Any) -> None:
        line = json.dumps({"phase": phase, **fields}).encode() + b"\n"
        os.write(self._log, line)
        os.fsync(self._log)
        self._write(line)

    def _beat(self) -> None:
        while True:
            self._write(b"\n")
            time.sleep(HEARTBEAT_SECONDS)

    def _write(self, line: bytes) -> None:
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._pipe, line) :]
            except BrokenPipeError:  # the parent was killed, so nobody would kill this process
                os._exit(1)


def main(arguments: Sequence[str], backend: str = "cuda") -> None:
    """Run the cases of standard input on the first device of ``backend``.

    The process ends after a case that failed, because errors of CUDA stay with their process.
    """
    log = os.open(arguments[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    say = Channel(int(arguments[0]), log).say
    say("starting", pid=os.getpid())
    try:
        device = _device(backend)
        say("trying")
        _launch_trivial(device)
        say("ready", machine=_machine(device))
    except Exception as error:  # the driver, the plugin and XLA may raise anything
        say("broken", text=_text(error))
        return
    given = json.loads(sys.stdin.readline())
    cases = [Case.of_json(fields) for fields in given["cases"]]
    size = _TOGETHER if given["together"] else 1
    for first in range(0, len(cases), size):
        if not _run(cases[first : first + size], say):
            return


def _device(backend: str) -> Any:
    import jax

    return jax.local_devices(backend=backend)[0]


def _launch_trivial(device: Any) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    with jax.default_device(device):
        found = np.asarray(jnp.arange(1000) + 1)
    if not np.array_equal(found, np.arange(1, 1001)):
        raise RuntimeError("1 + 1 is not 2 on this GPU")


def _machine(device: Any) -> dict[str, Any]:
    """The device, the architecture of its kernels, and versions."""
    from jax_memeff import config
    from jax_memeff.codegen import arch as architectures
    from jax_memeff.codegen.toolchain import nvrtc

    archs = config.archs()
    if not archs:
        archs = (architectures.of_capability(*map(int, device.compute_capability.split("."))),)
    versions = {"Python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    toolchain = nvrtc.versions()
    return {
        "name": device.device_kind,
        "platform": device.platform,
        "arch": archs[0],
        "versions": versions,
        "toolchain": toolchain,
    }


def _run(cases: Sequence[Case], say: Say) -> bool:
    """Compile the programs of all cases, then run each case; returns whether none failed."""
    from jax_memeff._command.verify import checks

    of_one = {"case": cases[0].name} if len(cases) == 1 else {}
    compiled = _compiled(cases, functools.partial(say, **of_one))
    for case in cases:
        programs, own = compiled.pop(case), functools.partial(say, case=case.name)
        if isinstance(programs, Exception):
            outcome = _without_programs(programs)
        else:
            try:
                outcome = checks.check(case, programs, own)
            except Exception as error:  # the driver, XLA and the user's functions raise anything
                outcome = {"state": "failed", "text": [_text(error)]}
        own("done", outcome=outcome)
        if outcome["state"] == "failed":
            return False
    return True


def _without_programs(error: Exception) -> dict[str, Any]:
    """The outcome of a case with programs that do not compile."""
    from jax_memeff.errors import UnsupportedError

    if isinstance(error, UnsupportedError):
        return {"state": "no kernel", "text": [" ".join(str(error).split())]}
    return {"state": "failed", "text": [_text(error)]}


def _compiled(cases: Sequence[Case], say: Say) -> dict[Case, Mapping[Any, Any] | Exception]:
    """The programs of each case, or why it has none: NVRTC compiles in processes, XLA in threads.

    Only the main thread traces.
    """
    from jax_memeff._command.verify import checks

    _compile_kernels(cases, say)
    found: dict[Case, Any] = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        say("compiling", what=f"the programs of {len(cases)} cases")
        for case in cases:
            try:
                found[case] = {
                    key: threads.submit(checks.compile_program, key, program)
                    for key, program in checks.lowered(case).items()
                }
            except Exception as error:  # CompileError, and whatever functions of the user raise
                found[case] = error
    for case, futures in found.items():
        if isinstance(futures, Exception):
            continue
        try:
            found[case] = {key: future.result() for key, future in futures.items()}
        except Exception as error:  # whatever XLA raises
            found[case] = error
    return found


def _compile_kernels(cases: Sequence[Case], say: Say) -> None:
    """Compile the kernels of all cases, so that lowering finds them in the cache.

    What goes wrong here goes wrong again in the lowering, which says so.
    """
    from jax_memeff._command import models
    from jax_memeff._command.cases import programs
    from jax_memeff._command.cases.arrays import Arrays
    from jax_memeff.codegen.toolchain import parallel
    from jax_memeff.errors import CompileError

    say("compiling", what="choosing kernels")
    jobs: dict[Any, None] = {}
    for case in cases:
        with contextlib.suppress(Exception):
            program = programs.complete(case, "cuda")
            jobs |= dict.fromkeys(models.of_program(program, [Arrays.draw(case).given()]))
    say("compiling", what=f"{len(jobs)} kernels")
    with contextlib.suppress(CompileError):
        parallel.compile_many(jobs)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # taking down a client after an error of CUDA may hang
