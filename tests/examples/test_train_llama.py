"""The Llama example: packed documents, and the losses of jax.nn, however a mesh divides them."""

from __future__ import annotations

import functools
import importlib
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType


@pytest.fixture(scope="module")
def example():
    """The example as a module. It is a script and not part of a package."""
    return importlib.import_module("train_llama")


def mesh_of(*sizes):
    names, types = ("data", "sequence", "tensor"), (AxisType.Auto,) * 3
    return jax.make_mesh(sizes, names, types, devices=jax.devices()[: math.prod(sizes)])


@pytest.fixture(scope="module")
def of_one_device(example):
    return example.train(tiny(example), mesh_of(1, 1, 1), steps=3)


def tiny(example):
    return example.CPU._replace(
        layers=2, width=64, hidden=128, heads=4, context=256, window=48, batch=4
    )


def loss_of(example, config, mesh):
    attention = functools.partial(example.sharded_attention, mesh=mesh)
    return functools.partial(example.mean_loss, config=config, attention=attention)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 1)], ids=str)
def test_losses_are_those_of_one_device(example, of_one_device, sizes):
    """The first is also that of jax.nn; the later ones depend on every gradient."""
    expected, losses = example.train(tiny(example), mesh_of(*sizes), steps=3)
    np.testing.assert_allclose(losses, of_one_device[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_gradients_are_those_of_jax_nn(example):
    config, mesh = tiny(example), mesh_of(1, 1, 1)
    weights = example.initial_weights(config, mesh)
    batch = next(example.packed_documents(config.batch, config.context, seed=1))
    dense = functools.partial(example.mean_loss, config=config, attention=example.dense_attention)
    ours, theirs = (
        jax.jit(jax.grad(loss))(weights, batch) for loss in (loss_of(example, config, mesh), dense)
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
def test_the_sizes_for_gpus_have_kernels(example, sequence, monkeypatch, fake_compiler):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")
    sizes = {"layers": 2, "width": 256, "hidden": 640, "heads": 2, "key_heads": 1}
    config, mesh = example.GPU._replace(**sizes), mesh_of(1, sequence, 1)
    weights = example.initial_weights(config, mesh)
    batch = next(example.packed_documents(config.batch, config.context, seed=0))
    traced = jax.jit(jax.grad(loss_of(example, config, mesh))).trace(weights, batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_memeff_") >= 4 * sequence


def test_the_command_says_what_it_compares(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "CPU", tiny(example)._replace(batch=8))
    example.main(["--steps", "2"])
    said = capsys.readouterr().out
    assert "first loss with jax.nn: " in said
    assert re.search(r"step 1: loss \d\.\d+, \d+ s", said)


def test_a_difference_is_an_error(example, monkeypatch):
    monkeypatch.setattr(example, "train", lambda *_: (5.0, [5.1, 4.0]))
    with pytest.raises(AssertionError, match=r"rtol=1e-05[^x]*first loss, jax\.nn"):
        example.main(["--tensor", "2"])


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments", [["--tensor", "4"], ["--tensor", "2", "--sequence", "8"]], ids=str
)
def test_bad_arguments_are_refused(example, arguments, capsys):
    with pytest.raises(SystemExit) as error:
        example.main(arguments)
    assert error.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "must divide 8 devices, batch and key_heads of Config(" in said and "batch=8" in said
