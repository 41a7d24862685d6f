"""Libraries that call ``jax.nn.dot_product_attention``, under ``patch_jax_nn``."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import linen, nnx
from test_jax_nn_parity import BIAS, CASES, MASK, operands

import jax_memeff
from jax_memeff import patch_jax_nn

ORIGINAL: Any = jax.nn.dot_product_attention
X = normal(0, 2, 12, 32)


def patched(*args: Any, **kwargs: Any) -> Any:
    """Makes the call of a client."""
    return jax.nn.dot_product_attention(*args, **kwargs)


def is_ours(function, *arguments) -> bool:
    return "attention_fwd[" in str(jax.make_jaxpr(function)(*arguments))


@pytest.fixture(autouse=True)
def restores_jax_nn():
    yield
    assert jax.nn.dot_product_attention is ORIGINAL


@pytest.fixture
def said(caplog):
    """A function that returns the logged messages."""
    with caplog.at_level(logging.WARNING, "jax_memeff"):
        yield lambda: caplog.messages


# --------------------------------------------------------------------------------------- keras


@pytest.fixture(scope="module")
def keras():
    os.environ["KERAS_BACKEND"] = "jax"
    module = importlib.import_module("keras")
    assert module.backend.backend() == "jax"
    return module


def test_variables_of_keras(keras):
    """They stand for the arrays that they hold."""
    arrays = {"query": X[..., None], "bias": normal(1, 12, 12), "sinks": normal(2, 32)}
    arrays |= {"scale": np.float32(0.5), "key_value_seq_lengths": np.array([5, 12], np.int32)}

    def program(wrap):
        def call():
            key = value = X[..., None]
            mask = wrap(np.tri(12, dtype=bool))
            held = {name: wrap(x) for name, x in arrays.items()}
            return jax_memeff.dot_product_attention(key=key, value=value, mask=mask, **held)

        return str(jax.make_jaxpr(call)())

    def variable(x):
        return keras.Variable(x, dtype=str(x.dtype))

    assert program(variable) == program(jnp.asarray)


def keras_step(keras, layer, arguments):
    """Outputs, and gradients by input and weights, computed as in the trainer of keras."""
    layer.build(X.shape, X.shape)

    def loss(variables, x):
        out, _ = layer.stateless_call(variables, [], x, x, **arguments)
        return jnp.sum(out * jnp.cos(out)), out

    variables = [variable.value for variable in layer.trainable_variables]
    return jax.value_and_grad(loss, (0, 1), has_aux=True), variables


LAYERS = {
    "MultiHeadAttention": {"num_heads": 4, "key_dim": 8},
    "GroupQueryAttention": {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}
CALLS = {
    "plain": {},
    "causal": {"use_causal_mask": True},
    "mask": {"attention_mask": np.tri(12, dtype=bool)[None].repeat(2, 0)},
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_keras_layers(keras, name, arguments, said):
    layer = getattr(keras.layers, name)(**LAYERS[name])
    step, variables = keras_step(keras, layer, arguments)
    want = jax.jit(step)(variables, X)
    assert not is_ours(step, variables, X) and said() == []
    with patch_jax_nn():
        assert is_ours(step, variables, X)
        got = jax.jit(step)(variables, X)
    # An absolute tolerance, too, because the gradient of the key's bias is 0 except for rounding.
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, got, want)
    (line,) = said()
    assert "keras.src.backend.jax.nn" in line and "ignores implementation='xla'" in line
    assert not is_ours(step, variables, X)


IMAGE = normal(1, 2, 3, 4, 32)
HEADS = LAYERS["MultiHeadAttention"]
GROUPS = LAYERS["GroupQueryAttention"]
LISTED: dict[str, Any] = {
    "narrow values": ("MultiHeadAttention", {**HEADS, "value_dim": 6}, X, {}, True),
    "a window": ("GroupQueryAttention", {**GROUPS, "sliding_window": 3}, X, {}, True),
    "bfloat16": ("MultiHeadAttention", {**HEADS, "dtype": "mixed_bfloat16"}, X, {}, True),
    "dropout": ("MultiHeadAttention", {**HEADS, "dropout": 0.1}, X, {"training": False}, False),
    "dropout of groups": ("GroupQueryAttention", {**GROUPS, "dropout": 0.1}, X, {}, False),
    "scores": ("MultiHeadAttention", HEADS, X, {"return_attention_scores": True}, False),
    "scores of groups": (
        "GroupQueryAttention",
        GROUPS,
        X,
        {"return_attention_scores": True},
        False,
    ),
    "several axes": ("MultiHeadAttention", {**HEADS, "attention_axes": (1, 2)}, IMAGE, {}, False),
    "rows of an image": ("MultiHeadAttention", {**HEADS, "attention_axes": (2,)}, IMAGE, {}, False),
    "Attention": ("Attention", {}, X, {}, False),
    "AdditiveAttention": ("AdditiveAttention", {}, X, {}, False),
}
"""The list of docs/migrating/jax_nn.md: layers of Keras, and whether the patch reaches them."""


@pytest.mark.parametrize("case", LISTED)
def test_which_layers_of_keras_the_patch_reaches(keras, case):
    name, settings, inputs, arguments, reached = LISTED[case]
    layer = getattr(keras.layers, name)(**settings)
    takes_list = isinstance(layer, keras.layers.Attention)
    layer.build(*[[inputs.shape] * 2] if takes_list else [inputs.shape] * 2)
    variables = [
        [variable.value for variable in group]
        for group in (layer.trainable_variables, layer.non_trainable_variables)
    ]

    def call(variables, x):
        operands = [[x, x]] if takes_list else [x, x]
        return layer.stateless_call(*variables, *operands, **arguments)[0]

    with patch_jax_nn():
        assert is_ours(call, variables, inputs) == reached


def test_keras_flash_attention_names_cudnn(keras, monkeypatch, said, assert_close):
    """Without the patch keras swallows the error of jax.nn and falls back."""
    backend = importlib.import_module("keras.src.backend.jax.nn")
    monkeypatch.setattr(backend, "_can_use_flash_attention", lambda *_, **__: True)
    heads = X.reshape(2, 12, 4, 8)
    with patch_jax_nn():
        out = keras.ops.dot_product_attention(heads, heads, heads, flash_attention=True)
    assert_close(out, ORIGINAL(heads, heads, heads))
    assert ["cudnn" in line for line in said()] == [True]


def test_a_keras_model_trains(keras):
    def losses():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12, 32))
        hidden = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)(inputs, inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer="sgd", loss="mse")
        targets = np.ones((2, 12, 1), np.float32)
        return [model.train_on_batch(np.asarray(X), targets) for _ in range(3)]

    with patch_jax_nn():
        ours = losses()
    np.testing.assert_allclose(ours, losses(), rtol=1e-5)
    assert ours[2] < ours[0]


# ---------------------------------------------------------------------------------------- flax


def test_nnx_without_an_attention_fn(said, assert_close):
    """Without dropout nnx.MultiHeadAttention calls jax.nn."""
    layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    want = layer(X, is_causal=True)
    with patch_jax_nn():
        assert is_ours(lambda x: layer(x, is_causal=True), X)
        assert_close(layer(X, is_causal=True), want)
    (line,) = said()
    assert "flax.nnx.nn.attention" in line


@pytest.mark.parametrize(
    "settings, arguments",
    [({"dropout_rate": 0.1, "deterministic": True}, {}), ({}, {"sow_weights": True})],
    ids=["dropout", "weights"],
)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_of_nnx_the_patch_does_not_reach(settings, arguments, said):
    layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **settings)
    with patch_jax_nn():
        layer(X, **arguments)
    assert said() == []


def test_the_patch_does_not_reach_linen():
    layer = linen.MultiHeadAttention(4)
    with patch_jax_nn():
        assert not is_ours(lambda x: layer.init_with_output(jax.random.key(0), x), X)


# ----------------------------------------------------------------- the arguments of jax.nn


@functools.cache
def wanted(name):
    """The results of jax.nn."""
    function = functools.partial(ORIGINAL, **CASES[name], return_residual=True)
    return jax.jit(function)(*operands())


@pytest.mark.rotating(3)
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", CASES)
def test_every_argument_of_jax_nn(name, implementation, said, assert_close):
    arguments = {**CASES[name], "implementation": implementation, "return_residual": True}
    with patch_jax_nn():
        got = patched(*operands(), **arguments)
    # Beyond the query lengths only our results are defined.
    rows = np.arange(19) < np.reshape(arguments.get("query_seq_lengths", [19, 19]), (2, 1))
    got, want = (
        (np.where(rows[..., None, None], out, 0), np.where(rows[..., None], lse, 0))
        for out, lse in (got, wanted(name))
    )
    assert_close(got, want)
    assert ["runs on jax_memeff" in line for line in said()] == [True]


def carried(query, key, value):
    """A loop that carries both results of a call, and the gradient of the residual alone."""

    def step(carry, _):
        return patched(carry[0], key, value, return_residual=True), None

    def residual(query):
        return patched(query, key, value, return_residual=True)[1].astype(jnp.float32).sum()

    start = query, jnp.zeros(query.shape[:-1], query.dtype)
    return jax.lax.scan(step, start, length=2)[0], jax.grad(residual)(query)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_residual_is_that_of_jax_nn(dtype, assert_close):
    """It has the dtype of the query and no gradient, so a loop may carry it."""
    arrays = operands(jnp.dtype(dtype))
    want, no_gradient = jax.jit(carried)(*arrays)
    with patch_jax_nn():
        got, gradient = jax.jit(carried)(*arrays)
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    assert_close(got, want, tolerance=1e-5 if dtype == "float32" else 0.02)
    assert not gradient.any() and not no_gradient.any()


QUERY, KEY, VALUE = operands()
UNUSUAL = {
    "no batch": {"query": QUERY[0], "key": KEY[0], "value": VALUE[0], "bias": BIAS[0]},
    "ranks that differ": {"query": QUERY[:1], "key": KEY[0], "value": VALUE[0], "mask": MASK[0]},
    "bias of another dtype": {"bias": BIAS.astype(jnp.bfloat16)},
    "integer bias": {"bias": BIAS.astype(jnp.int32)},
    "lengths beyond the arrays": {"key_value_seq_lengths": np.array([99, 7], np.int32)},
    "an array as scale": {"scale": jnp.float32(0.3)},
    "numbers as flags": {"is_causal": 1, "return_residual": 0},
}


@pytest.mark.parametrize("arguments", UNUSUAL.values(), ids=UNUSUAL)
def test_what_jax_nn_takes_and_the_public_function_refuses(arguments, said, assert_close):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **arguments}
    with patch_jax_nn():
        got = patched(**arguments)
    assert_close(got, ORIGINAL(**arguments))
    assert ["runs on jax_memeff" in line for line in said()] == [True]


ONLY_JAX_NN = {
    "scale is not one finite real number": {"scale": jnp.full((1, 4, 1, 1), 0.3)},
    "real number of usual size": {"scale": 1e-40},
    "local_window_size is an array": {"local_window_size": np.array([2, 1])},
    "a side is negative": {"local_window_size": (-1, 3)},
    "query has dtype float8_e4m3fn": {
        name: x.astype(jnp.float8_e4m3fn)
        for name, x in (("query", QUERY), ("key", KEY), ("value", VALUE))
    },
}


@pytest.mark.parametrize("reason", ONLY_JAX_NN)
def test_what_only_jax_nn_takes(reason, said, monkeypatch):
    calls = []

    @functools.wraps(ORIGINAL)
    def jax_nn(*args, **kwargs):
        calls.append(kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", jax_nn)
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **ONLY_JAX_NN[reason]}
    with patch_jax_nn():
        for _ in range(2):
            patched(**arguments)
    assert len(calls) == 2
    (line,) = said()
    assert "runs on jax.nn" in line and reason in line
    monkeypatch.undo()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_a_traced_scale_and_its_gradient(dtype, said, assert_close):
    def loss(function, scale):
        return jnp.sum(function(QUERY, KEY, VALUE, scale=scale.astype(dtype)) ** 2)

    scale = jnp.float32(2.0)
    with patch_jax_nn():
        got = jax.jit(jax.value_and_grad(functools.partial(loss, patched)))(scale)
    assert_close(got, jax.value_and_grad(functools.partial(loss, ORIGINAL))(scale))
    assert ["runs on jax_memeff" in line for line in said()] == [True]


def test_a_scale_that_vmap_maps(said, assert_close):
    def call(function, scale):
        return function(QUERY, KEY, VALUE, scale=scale)

    scales = jnp.array([0.3, 2.0])
    with patch_jax_nn():
        got = jax.vmap(functools.partial(call, patched))(scales)
    assert_close(got, jax.vmap(functools.partial(call, ORIGINAL))(scales))
    assert ["runs on jax_memeff" in line for line in said()] == [True]


def test_an_argument_that_a_later_jax_adds(said, monkeypatch):
    def jax_nn(query, key, value, bias=None, mask=None, *, sinks=None, **others):
        return "theirs"

    monkeypatch.setattr(jax.nn, "dot_product_attention", jax_nn)
    with patch_jax_nn():
        assert patched(QUERY, KEY, VALUE, sinks=1) == "theirs"
        assert patched(QUERY, KEY, VALUE, sinks=None).shape == QUERY.shape
    assert "only jax.nn has the argument sinks" in said()[0]
    monkeypatch.undo()


def test_float64_runs_on_the_blockwise_path(x64):
    double = [x.astype(jnp.float64) for x in operands()]
    with patch_jax_nn():
        traced = jax.jit(lambda *x: patched(*x, implementation="cudnn")).trace(*double)
    # No kernel has float64, so lowering for CUDA would raise without this choice.
    assert "custom_call" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "arguments", [{"implementation": "fastest"}, {"mask": MASK.astype(jnp.int8)}, {"sink": 1}]
)
def test_errors_are_errors(arguments):
    for function in (ORIGINAL, patched):
        with patch_jax_nn(), pytest.raises((TypeError, ValueError)):
            function(QUERY, KEY, VALUE, **arguments)
