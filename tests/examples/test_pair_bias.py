"""The example of a learned pair bias: it learns, it needs the pairs, and it saves memory."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import jax_memeff

SCRIPT = Path(__file__).parents[2] / "examples" / "pair_bias.py"


@pytest.fixture(scope="module")
def example():
    """The example as a module. It is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location("pair_bias", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module while it executes.
    sys.modules["pair_bias"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pair_bias"]


def losses(example, attention: str, steps: int) -> np.ndarray:
    preset = example.PRESETS["tiny"]
    trainer = example.Trainer(preset, attention, seed=0, steps=preset.steps)
    return np.array([float(trainer.step(index)) for index in range(steps)])


def test_losses_equal_those_of_jax_nn_and_need_the_pairs(example, monkeypatch):
    memeff, reference = losses(example, "memeff", 60), losses(example, "jax", 10)
    np.testing.assert_allclose(memeff[:10], reference, rtol=1e-3)

    def without_pairs(query, key, value, bias):
        return jax_memeff.dot_product_attention(query, key, value) + 0 * bias.sum()

    monkeypatch.setitem(example.ATTENTIONS, "blind", without_pairs)
    blind = losses(example, "blind", 60)
    assert memeff[-10:].mean() < 0.7 < 0.8 < blind[-10:].mean()


@pytest.mark.rotating(3)
def test_the_small_form_leaves_its_files(example, tmp_path, capsys):
    """It runs to the end, reaches its target, and needs a fraction of jax.nn's memory."""
    output = tmp_path / "out"
    assert example.main(["--preset", "tiny", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    results = json.loads((output / "results.json").read_text())
    assert len(results["losses"]) == summary["steps"] == example.PRESETS["tiny"].steps
    assert summary["final_loss"] == results["final_loss"] <= example.TARGET
    needed = {name: sizes[-1] for name, sizes in results["gradient_bytes"].items()}
    assert needed["memeff"] < needed["jax"] / 5
    assert (output / "pair_bias.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "MiB for the gradients" in printed.replace("\n", " ")


def test_bad_arguments_are_refused(example, capsys):
    with pytest.raises(SystemExit) as error:
        example.parse(["--steps", "0"])
    assert error.value.code == 2
    assert "--steps: expected at least 1, got 0" in capsys.readouterr().err
