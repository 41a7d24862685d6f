"""The process of ``verify`` that owns the GPU; the parent may have to kill it.

``python -m jax_memeff._command.verify.child PIPE LOG``: PIPE is a file descriptor, LOG a file. Each
phase is announced by a line of JSON in both, and the log is on the disk before the phase begins.
Empty lines in the pipe are a heartbeat. Standard input has the cases, as a list in one line.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jax_memeff._command.cases.case import Case

HEARTBEAT_SECONDS = 1.0

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
    found = [Case.of_json(fields) for fields in json.loads(sys.stdin.readline())]
    _compile_kernels(found, say)
    for case in found:
        outcome = _outcome(case, functools.partial(say, case=case.name))
        say("done", case=case.name, outcome=outcome)
        if outcome["state"] == "failed":
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


def _compile_kernels(cases: Sequence[Case], say: Any) -> None:
    """Compile the kernels of all cases in parallel processes, so that each case finds its own.

    What goes wrong here goes wrong again in a case, whose outcome then says so.
    """
    from jax_memeff._command import models
    from jax_memeff._command.cases import programs
    from jax_memeff._command.cases.arrays import Arrays
    from jax_memeff.codegen.toolchain import parallel
    from jax_memeff.errors import CompileError, UnsupportedError

    say("compiling", what="choosing kernels")
    jobs: dict[Any, None] = {}
    for case in cases:
        try:
            program = programs.complete(case, "cuda")
            jobs |= dict.fromkeys(models.of_program(program, [Arrays.draw(case).given()]))
        except (UnsupportedError, ValueError):
            continue
    say("compiling", what=f"{len(jobs)} kernels")
    try:
        parallel.compile_many(jobs)
    except CompileError as error:
        say("compiling", what=_text(error))


def _outcome(case: Case, say: Any) -> dict[str, Any]:
    from jax_memeff._command.verify import checks

    try:
        return checks.check(case, say)
    except Exception as error:  # the driver, XLA and the user's functions may raise anything
        return {"state": "failed", "text": [_text(error)]}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # taking down a client after an error of CUDA may hang
