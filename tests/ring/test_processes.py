"""The ring over several processes, of one device each, through ``jax.distributed``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from several_devices import at, sizes

SCRIPT = Path(__file__).parent / "ring_process.py"
SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 120


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@at("devices", cpu=2, cuda=[2, 4])
def test_a_ring_of_processes_equals_one_device(devices):
    platform = "cpu" if devices[0].platform == "cpu" else "cuda"
    address, count = free_address(), str(len(devices))
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), address, count, str(index), platform],
            env={
                **os.environ,
                "JAX_PLATFORMS": platform,
                "PYTHONPATH": str(SUPPORT),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(len(devices))
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, messages) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, messages
        result = json.loads(output.splitlines()[-1])
        assert result["devices"] == len(devices) and result["arrays"] == 6
        assert result["error"] <= sizes(devices).tolerance
