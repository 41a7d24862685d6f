"""The ring over several processes with one device each, through ``jax.distributed``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from several_devices import at, sizes

SCRIPT = Path(__file__).parent / "ring_process.py"
SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 600
"""A guard against hangs only: a busy machine may take minutes."""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_together(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], seconds: float = SECONDS
) -> list[tuple[int, str, str]]:
    """The return code, stdout and stderr of each of several concurrent processes.

    No process or pipe is left behind, whatever is raised.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            # On exit the process is killed first, then its pipes are closed and its end is awaited.
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=seconds) for process in processes]
        return [
            (process.returncode, *output)
            for process, output in zip(processes, outputs, strict=True)
        ]


@pytest.mark.rotating(3)
@at("devices", cpu=2, cuda=[2, 4])
def test_a_ring_of_processes_equals_one_device(devices):
    platform = "cpu" if devices[0].platform == "cpu" else "cuda"
    address, count = free_address(), str(len(devices))
    env = {
        **os.environ,
        "JAX_PLATFORMS": platform,
        "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, SUPPORT / "devices"))),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    commands = [
        [sys.executable, str(SCRIPT), address, count, str(index), platform]
        for index in range(len(devices))
    ]
    for code, output, messages in run_together(commands, env):
        assert code == 0, messages
        result = json.loads(output.splitlines()[-1])
        assert result["devices"] == len(devices) and result["arrays"] == 7
        assert result["error"] <= sizes(devices).tolerance


def test_processes_that_hang_leave_nothing_behind():
    hang = [sys.executable, "-c", "import time; print('started', flush=True); time.sleep(600)"]
    before = set(psutil.Process().children())
    descriptors = psutil.Process().num_fds()
    with pytest.raises(subprocess.TimeoutExpired):
        run_together([hang, hang], os.environ, seconds=0.5)
    assert set(psutil.Process().children()) <= before
    assert psutil.Process().num_fds() <= descriptors
