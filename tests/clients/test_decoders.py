"""The decoders of examples/decoders: logits and gradients equal those with dense attention.

Each model is one jitted program: a ``scan`` over rematerialized layers, on eight devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import deepseek, gemma, gpt_oss
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SMALL = {"vocabulary": 32, "width": 32, "hidden": 48, "head_dim": 16}
CONFIGS = {
    gemma: gemma.Config(**SMALL, window=5, layers=6),
    gpt_oss: gpt_oss.Config(**SMALL, window=128, layers=2, heads=4, kv_heads=2),
    deepseek: deepseek.Config(
        vocabulary=32, width=32, hidden=48, latent_dim=16, plain_dim=12, rotary_dim=8, value_dim=10
    ),
}
LENGTHS = {gemma: 19, gpt_oss: 140, deepseek: 21}


def dense(query, key, value, *, left=None, scale=None, soft_cap=None, sinks=None):
    """Attention by definition, with all scores in memory."""
    length, heads, dim = query.shape[1:]
    key, value = (jnp.repeat(each, heads // each.shape[2], axis=2) for each in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * (dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    valid = distance >= 0
    if left is not None:
        valid &= distance <= left
    exponentials = jnp.where(valid, jnp.exp(scores), 0)
    total = exponentials.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks)[:, None, None]
    return jnp.einsum("bnts,bsnh->btnh", exponentials / total, value)


DENSE = {
    gemma: lambda q, k, v, left, config: dense(q, k, v, left=left, soft_cap=config.soft_cap),
    gpt_oss: lambda q, k, v, sinks, left: dense(q, k, v, left=left, sinks=sinks),
    deepseek: lambda q, k, v, config: dense(q, k, v, scale=config.scale),
}


def tokens_of(model, batch=8):
    config = CONFIGS[model]
    return np.random.default_rng(1).integers(config.vocabulary, size=(batch, LENGTHS[model]))


def outputs(model, tokens):
    """The gradients of a loss, and the logits."""
    config = CONFIGS[model]

    def loss(weights, tokens):
        out = model.logits(*weights, tokens, config)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(out[:, :-1]), tokens[:, 1:, None], -1)
        return -chosen.mean(), out

    weights = model.parameters(jax.random.key(0), config)
    return jax.jit(jax.grad(loss, has_aux=True))(weights, tokens)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("model", CONFIGS, ids=lambda model: model.__name__.split(".")[-1])
def test_logits_and_gradients_on_eight_devices(model, monkeypatch, assert_close):
    tokens = tokens_of(model)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("batch",))
    got = outputs(model, jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("batch"))))
    assert len(got[1].sharding.device_set) == 8
    monkeypatch.setattr(model, "attention", DENSE[model])
    assert_close(jax.device_get(got), outputs(model, jnp.asarray(tokens)), tolerance=5e-5)


def test_latent_decoding_gives_the_logits_of_training(assert_close):
    """A prompt, then one token at a time, over pages that hold only latent vectors."""
    config, tokens = CONFIGS[deepseek], tokens_of(deepseek, batch=2)
    weights = deepseek.parameters(jax.random.key(0), config)
    expected = jax.jit(functools.partial(deepseek.logits, config=config))(*weights, tokens)
    step = jax.jit(functools.partial(deepseek.decode, config=config))
    pools = jnp.zeros((config.layers, 4, 16, 1, config.latent_dim + config.rotary_dim))
    table, found, first = jnp.array([[2, 0], [1, 3]]), [], 0
    for count in (18, 1, 1, 1):
        new = tokens[:, first : first + count]
        first += count
        out, pools = step(*weights, pools, new, table, jnp.full(2, first))
        found.append(out)
    assert_close(jnp.concatenate(found, 1), expected, tolerance=5e-5)


def bfloat16(model, config):
    """The types of the parameters, in bfloat16."""
    weights = jax.eval_shape(lambda key: model.parameters(key, config), jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), weights)


@pytest.mark.parametrize("model", CONFIGS, ids=lambda model: model.__name__.split(".")[-1])
def test_each_layer_has_kernels(model, monkeypatch, fake_compiler):
    """One forward and one backward serve all layers of the scan, whatever their windows."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")
    config = model.Config()

    def loss(weights, tokens):
        return model.logits(*weights, tokens, config).astype(jnp.float32).sum()

    tokens = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    traced = jax.jit(jax.grad(loss)).trace(bfloat16(model, config), tokens)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The forward runs twice, because the layers are rematerialized.
    assert text.count("custom_call @jax_memeff_forward") == 2
    assert text.count("custom_call @jax_memeff_backward") == 1


def test_latent_decoding_has_a_kernel(monkeypatch, fake_compiler):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
    config = deepseek.Config(heads=16, latent_dim=512, rotary_dim=64)
    pools = jax.ShapeDtypeStruct((config.layers, 64, 64, 1, 576), jnp.bfloat16)
    shapes = ((4, 1), (4, 8), (4,))
    tokens, table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    step = jax.jit(functools.partial(deepseek.decode, config=config))
    traced = step.trace(*bfloat16(deepseek, config), pools, tokens, table, lengths)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_memeff_forward") == 1
    assert any("latent" in spec.kernel.stem for spec, _ in fake_compiler)
