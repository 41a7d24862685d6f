"""The Llama example: packed documents, and the losses of jax.nn, however a mesh divides them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

SCRIPT = Path(__file__).parents[2] / "examples" / "train_llama.py"


@pytest.fixture(scope="module")
def example():
    """The example as a module. It is a script and not part of a package."""
    return importlib.import_module("train_llama")


def mesh_of(*sizes):
    names, types = ("data", "sequence", "tensor"), (AxisType.Auto,) * 3
    return jax.make_mesh(sizes, names, types, devices=jax.devices()[: math.prod(sizes)])


@pytest.fixture(scope="module")
def of_one_device(example):
    return example.train(short(example), mesh_of(1, 1, 1), seed=0)


def short(example):
    return dataclasses.replace(example.PRESETS["tiny"], steps=3)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 1)], ids=str)
def test_losses_are_those_of_one_device(example, of_one_device, sizes):
    """The first is also that of jax.nn; the later ones depend on every gradient."""
    divided = example.train(short(example), mesh_of(*sizes), seed=0)
    np.testing.assert_allclose(divided["losses"], of_one_device["losses"], rtol=1e-5)
    np.testing.assert_allclose(divided["losses"][0], divided["jax_nn_loss"], rtol=1e-5)
    assert divided["losses"][-1] < divided["losses"][0]


def test_gradients_are_those_of_jax_nn(example):
    preset = example.PRESETS["tiny"]
    weights = example.initial_weights(preset, seed=0)
    batch = next(example.packed_documents(preset.batch, preset.context, seed=1))
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(example.mean_loss, preset=preset, attention=attention)))(
            weights, batch
        )
        for attention in (example.sharded_attention(mesh_of(1, 1, 1)), example.dense_attention)
    )
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


@pytest.mark.quick
def test_documents_are_packed(example):
    batch = next(example.packed_documents(4, 4096, seed=0))
    assert {x.shape for x in batch.values()} == {(4, 4096)}
    begins = np.diff(batch["documents"], axis=1) > 0
    assert begins.any(axis=1).all()  # every row has several documents
    steps = np.diff(batch["positions"], axis=1)
    assert (steps[~begins] == 1).all() and (batch["positions"][:, 1:][begins] == 0).all()
    assert (batch["has_target"][:, :-1] == ~begins).all()
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("sequence", [1, 2])
def test_the_preset_for_gpus_has_kernels(example, sequence, monkeypatch, fake_compiler):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")
    sizes = {"layers": 2, "width": 256, "heads": 2, "key_heads": 1}
    preset = dataclasses.replace(example.PRESETS["gpu"], **sizes)
    attention = example.sharded_attention(mesh_of(1, sequence, 1))
    weights = example.initial_weights(preset, seed=0)
    batch = next(example.packed_documents(preset.batch, preset.context, seed=0))
    loss = functools.partial(example.mean_loss, preset=preset, attention=attention)
    traced = jax.jit(jax.grad(loss)).trace(weights, batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_memeff_") >= 4 * sequence


def test_the_command_says_what_it_compares():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--preset", "tiny", "--steps", "2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss of the first batch: " in done.stdout and ", with jax.nn " in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["losses"]) == 2 and result["tokens_per_second"] > 0


def test_a_difference_is_an_error(example, monkeypatch, capsys):
    result = {"jax_nn_loss": 5.0, "losses": [5.1, 4.0], "tokens_per_second": 1.0}
    monkeypatch.setattr(example, "train", lambda *_: result)
    assert example.main(["--preset", "tiny", "--tensor", "2"]) == 1
    assert "expected a first loss within 1e-05 of that of jax.nn, got" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tensor", "3"], "divide a batch of 4, and --tensor to divide 2 key heads, got 3 x 1"),
        (["--tensor", "4"], "divide a batch of 4, and --tensor to divide 2 key heads, got 4 x 1"),
        (["--sequence", "16"], "expected --tensor x --sequence to divide 8 devices"),
        (["--sequence", "0"], "expected --tensor, --sequence and --steps of at least 1"),
        (["--steps", "0"], "expected --tensor, --sequence and --steps of at least 1"),
    ],
)
def test_bad_arguments_are_refused(example, arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        example.main(["--preset", "tiny", *arguments])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
