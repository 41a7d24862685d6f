"""The training example: same losses as jax.nn, and a command line that leaves its files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example():
    """The example as a module. It is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module while it executes.
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_gpt"]


@pytest.fixture(scope="module")
def text(example):
    return example.standard_library_text()


def first_losses(
    example, text, attention: str, steps: int, dropout: float = 0.0, **sizes
) -> np.ndarray:
    preset = dataclasses.replace(example.PRESETS["tiny"], **sizes)
    trainer = example.Trainer(preset, attention, seed=0, steps=steps, dropout=dropout)
    stream = example.batches(text[0], preset.batch, preset.context, seed=0)
    return np.array([float(trainer.step(index, next(stream))) for index in range(steps)])


def test_first_losses_equal_those_of_jax_nn(example, text):
    # On a GPU the two round differently: jax.nn uses TF32 products, and we use 3xTF32.
    tolerance = 1e-3 if jax.default_backend() == "cpu" else 1e-2
    memeff, reference = (first_losses(example, text, name, 20) for name in ("memeff", "jax"))
    np.testing.assert_allclose(memeff, reference, rtol=tolerance)
    assert reference[-1] < reference[0]


@pytest.mark.gpu
def test_first_losses_equal_those_of_jax_nn_in_bfloat16(example, text):
    sizes = {"width": 128, "context": 512, "dtype": "bfloat16"}
    memeff, reference = (
        first_losses(example, text, name, 20, **sizes) for name in ("memeff", "jax")
    )
    np.testing.assert_allclose(memeff, reference, rtol=1e-2)
    assert reference[-1] < reference[0]


def test_dropout_changes_the_losses_reproducibly(example, text):
    def run(dropout):
        return first_losses(example, text, "memeff", 3, dropout, layers=1, context=32)

    first, second, plain = run(0.25), run(0.25), run(0.0)
    np.testing.assert_array_equal(first, second)
    assert first[0] != plain[0]
    np.testing.assert_allclose(first, plain, rtol=0.1)


def test_unigram_entropy(example):
    assert example.unigram_entropy(np.frombuffer(b"aaaa", np.uint8)) == 0
    everything = np.arange(256, dtype=np.uint8)
    assert example.unigram_entropy(everything) == pytest.approx(math.log(256))
    # 1/2, 1/4, 1/4: one and a half bits.
    entropy = example.unigram_entropy(np.frombuffer(b"aabc", np.uint8))
    assert entropy == pytest.approx(1.5 * math.log(2))


@pytest.mark.quick
def test_text_is_split_by_file_and_deterministic(example, text):
    again = example.standard_library_text()
    for part, repeated in zip(text, again, strict=True):
        np.testing.assert_array_equal(part, repeated)
    train, validation = text
    assert train.size > validation.size > 100_000
    source = Path(json.__file__).read_bytes()
    assert (source in train.tobytes()) != (source in validation.tobytes())


def test_batches_are_windows_of_the_text(example, text):
    preset = example.PRESETS["tiny"]
    first, second = (
        next(example.batches(text[0], preset.batch, preset.context, seed)) for seed in (0, 0)
    )
    np.testing.assert_array_equal(first, second)
    assert first.shape == (preset.batch, preset.context + 1)
    assert bytes(first[0].tolist()) in text[0].tobytes()
    windows = list(
        example.validation_batches(text[1], preset.batch, preset.context, preset.validation_windows)
    )
    assert sum(len(window) for window in windows) == preset.validation_windows
    assert bytes(windows[-1][-1].tolist()) == text[1][-preset.context - 1 :].tobytes()


def test_command_line_leaves_its_files(example, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--preset", "tiny", "--steps", "4", "--dropout", "0.1", "--seed", "3"]
    example.main([*arguments, "--output", str(output)])
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    losses = json.loads((output / "losses.json").read_text())
    assert len(losses["losses"]) == summary["steps"] == 4
    assert summary["final_validation_loss"] == losses["validation"][-1][1]
    assert summary["seed"] == 3 and summary["attention"] == "memeff"
    assert summary["tokens_per_second"] > 0
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (output / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    assert "unigram entropy" in printed and "target missed" in printed
    assert "4 steps, expected time: after a few steps" in printed


def test_the_default_says_how_long_it_takes(example, tmp_path, monkeypatch, capsys):
    """The first lines say it, before anything is compiled."""

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        example.main(["--preset", "cpu", "--output", str(tmp_path)])
    assert "expected time: under two minutes on two idle CPU cores" in capsys.readouterr().out


def test_the_remaining_time_and_the_first_curve_come_early(example, tmp_path, monkeypatch, capsys):
    """After a sixth of the steps there are losses, and a curve of them."""
    saved = []
    monkeypatch.setattr(
        example, "plot", lambda result, title, path: saved.append((len(result["losses"]), path))
    )
    monkeypatch.setitem(
        example.PRESETS, "tiny", dataclasses.replace(example.PRESETS["tiny"], layers=1, context=16)
    )
    example.main(["--preset", "tiny", "--steps", "12", "--output", str(tmp_path)])
    assert [count for count, _ in saved] == [2, 4, 6, 8, 10, 12, 12]
    assert {path for _, path in saved} == {tmp_path / "loss.png"}
    assert len(json.loads((tmp_path / "losses.json").read_text())["losses"]) == 12
    assert "seconds more at this rate" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--attention", "jax", "--dropout", "0.1"], "jax.nn's attention has no dropout"),
    ],
)
def test_bad_arguments_are_refused(example, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        example.parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
