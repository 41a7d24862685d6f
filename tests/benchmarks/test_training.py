"""Training steps of whole models: they learn, and differ in their attention only."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from harness import BENCHMARKS, modules

__all__ = ["modules"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The document of the command on a CPU, for the tiny models."""
    path = tmp_path_factory.mktemp("training") / "training.json"
    command = [sys.executable, str(BENCHMARKS / "training.py"), "--output", str(path)]
    command += ["--attentions", "memeff,jax_xla,jax_cudnn", "--rounds", "3", "--batch-ms", "20"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_steps_of_all_implementations_compute_the_same(results):
    assert [model["name"] for model in results["training"]] == ["tiny-Llama", "tiny-DiT"]
    for model in results["training"]:
        ours, theirs = (model["results"][name] for name in ("memeff", "jax_xla"))
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-4)
        assert ours["losses"][-1] < ours["losses"][0]
        tokens = model["batch"] * model["length"]
        assert ours["tokens_per_second"] == pytest.approx(tokens / ours["seconds"])
        assert "error" in model["results"]["jax_cudnn"]  # cuDNN needs a GPU
    assert {"date", "device", "versions", "method"} < set(results)


def test_the_table_has_tokens_per_second(results, modules):
    report = modules("report")
    for model in results["training"]:
        tokens = model["batch"] * model["length"]
        model["results"]["memeff"]["seconds"] = tokens / 1.5e6
        model["results"]["jax_xla"]["seconds"] = tokens / 2e6
    text = report.training([results])
    assert "|tiny-Llama|1,500,000|2,000,000 jax.nn XLA|**0.75**|" in text
    assert " threads: tokens per second|ours|" in text
    assert text.endswith("unmeasured there.")  # the device is a CPU
    results["device"]["platform"] = "gpu"
    assert "unmeasured" not in report.training([results])
    assert "unmeasured" in report.training([])


def test_models_have_the_parameters_that_their_names_promise(modules):
    training = modules("training")
    shapes = {
        name: training.jax.eval_shape(lambda own=model: training.parameters(own))
        for name, model in training.MODELS.items()
    }
    counts = {
        name: sum(leaf.size for leaf in training.jax.tree.leaves(own))
        for name, own in shapes.items()
    }
    # DiT-XL/2 has 675 million, some of them in the embedding of the condition.
    assert 0.95 < counts["DiT-style"] / 670e6 < 1.05
    # A layer of Llama 3 8B has 218 million.
    assert 0.99 < (counts["Llama-style"] - 2 * 32000 * 4096) / (8 * 218.1e6) < 1.01
    heads = training.MODELS["Llama-style"]
    assert (heads.head_dim, heads.heads, heads.key_heads) == (128, 32, 8)


@pytest.mark.parametrize("name", ["Llama-style", "DiT-style"])
def test_a_step_of_a_large_model_keeps_its_shapes(modules, name):
    """Only its types are computed."""
    training = modules("training")
    model, shapes = training.MODELS[name], training.jax.eval_shape
    state = shapes(lambda: training.initial(model))
    given = shapes(lambda: training.batch(model))
    for attention in (training.ATTENTIONS[peer] for peer in ("memeff", "jax_xla")):
        own = functools.partial(training.step, model, attention)
        after, loss = shapes(own, state, given)
        assert after == state and loss.dtype == "float32"


def test_a_failing_step_leaves_a_state_for_the_others(modules):
    training = modules("training")
    trainer = training.Trainer(training.MODELS["tiny-DiT"])
    program = training.Program(trainer, training.ATTENTIONS["jax_xla"])
    first = float(program.launch())

    def fail(state, given):
        training.jax.tree.map(lambda leaf: leaf.delete(), state)
        raise RuntimeError("out of memory")

    broken = training.Program(trainer, training.ATTENTIONS["jax_xla"])
    broken.compiled = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.launch()
    assert float(program.launch()) == first
