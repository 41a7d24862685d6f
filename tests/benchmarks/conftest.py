"""The benchmark harness as modules, and its results on a CPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """Imports a module of the harness, a folder of scripts that is not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture(scope="session")
def document(tmp_path_factory):
    """The command's results for small cells and two peers that run on the CPU."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--cells", "tiny"]
    command += ["--peers", "memeff_xla,jax_xla,torch_flash", "--host", "dispatch"]
    command += ["--rounds", "2", "--batch-ms", "1", "--output", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())
