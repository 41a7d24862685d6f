"""The benchmark harness as modules, and its results on a CPU."""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """Imports a module of the harness, a folder of scripts that is not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture(scope="module")
def document():
    """The command's results for small cells and two peers that run on the CPU."""
    return json.loads(_results())


@functools.cache
def _results() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, str(BENCHMARKS / "attention.py"), "--cells", "tiny"]
        command += ["--peers", "memeff_xla,jax_xla,torch_flash", "--host", "dispatch"]
        command += ["--rounds", "3", "--batch-ms", "2", "--output", str(path)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return path.read_text()
