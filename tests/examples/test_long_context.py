"""The ring attention example: its files, its check, and the work that it draws."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context.py"


@pytest.fixture(scope="module")
def example():
    """The example as a module. It is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location("long_context", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module while it executes.
    sys.modules["long_context"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["long_context"]


@pytest.mark.rotating(3)
def test_command_line_leaves_its_files(tmp_path, example):
    output = tmp_path / "out"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--preset", "tiny", "--output", str(output)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((output / "result.json").read_text())
    assert result == json.loads(run.stdout.splitlines()[-1])
    assert result["devices"] == example.HOST_DEVICES
    for layout in example.LAYOUTS:
        assert 0 < result["errors"][layout] < 1e-5
        assert len(result["seconds"][layout]) == len(result["lengths"])
    assert (output / "long_context.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_difference_is_an_error(tmp_path, example, monkeypatch, capsys):
    result = {
        "devices": 2,
        "platform": "cpu",
        "lengths": [256, 512],
        "errors": {"contiguous": 1e-7, "zigzag": float("nan")},
        "seconds": {"contiguous": [1.0, 2.0], "zigzag": [1.0, 2.0]},
    }
    monkeypatch.setattr(example, "measure", lambda *_: result)
    monkeypatch.setattr(example.jax.config, "update", lambda *_: None)
    assert example.main(["--preset", "tiny", "--output", str(tmp_path)]) == 1
    assert "expected errors of at most 1e-05, got {'zigzag': nan}" in capsys.readouterr().out


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_work_is_all_of_the_causal_scores_and_equal_in_zigzag(example, devices):
    contiguous, zigzag = (example.work(layout, devices) for layout in example.LAYOUTS)
    length = 64 * devices
    causal = length * (length + 1) / 2 / 64**2
    for share in (contiguous, zigzag):
        np.testing.assert_allclose(share.sum(), causal)
    np.testing.assert_allclose(zigzag, np.full_like(zigzag, zigzag[0, 0]), atol=0.01)
    assert contiguous.max(0).sum() > zigzag.max(0).sum() or devices == 1
