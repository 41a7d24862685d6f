"""The layers for Equinox and Haiku on docs/clients equal those that they replace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from pages import adapter

from jax_memeff import Mask

CAUSAL = np.tri(7, dtype=bool)
PER_HEAD = np.stack([CAUSAL, ~CAUSAL.T | np.eye(7, dtype=bool)] * 2)


@pytest.fixture
def equinox():
    return pytest.importorskip("equinox", reason="needs the extra clients")


def equinox_layers(equinox, **arguments):
    """Equinox's layer and the adapter's, which makes the same parameters from the same key."""
    classes = equinox.nn.MultiheadAttention, adapter("equinox.md").MultiheadAttention
    return [layer(4, 12, key=jax.random.key(0), **arguments) for layer in classes]


@pytest.mark.parametrize("mask", [None, CAUSAL, PER_HEAD], ids=["none", "causal", "per head"])
def test_equinox(equinox, mask, assert_close):
    x = normal(0, 3, 7, 12)

    def result(layer, x):
        return jax.vmap(lambda x: layer(x, x, x, mask))(x)

    def loss(layer, x):
        return jnp.sum(result(layer, x) ** 3)

    theirs, ours = equinox_layers(equinox, use_query_bias=True, qk_size=5, vo_size=6)
    run = equinox.filter_jit(
        lambda layer, x: (result(layer, x), equinox.filter_grad(loss)(layer, x))
    )
    assert_close(*(jax.tree.leaves(run(layer, x)) for layer in (ours, theirs)), tolerance=2e-5)


def test_equinox_rotary_heads_masks_and_dropout(equinox, assert_close):
    x = normal(1, 7, 12)
    theirs, ours = equinox_layers(equinox, dropout_p=0.5, qk_size=4)
    rotary = equinox.nn.RotaryPositionalEmbedding(4)

    def process_heads(query, key, value):
        turned = jax.vmap(rotary, in_axes=1, out_axes=1)
        return turned(query), turned(key), value

    run = functools.partial(ours, x, x, x, process_heads=process_heads)
    want = theirs(x, x, x, CAUSAL, inference=True, process_heads=process_heads)
    assert_close(run(Mask.causal(), inference=True), want)
    assert_close(run(is_causal=True, inference=True), want)
    dropped = run(is_causal=True, key=jax.random.key(1))
    assert not np.allclose(dropped, want)
    assert_close(run(is_causal=True, key=jax.random.key(1)), dropped)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_haiku(batch, assert_close):
    haiku = pytest.importorskip("haiku", reason="needs the extra clients")
    x = normal(2, *batch, 7, 12)
    mask = np.broadcast_to(CAUSAL, (*batch, 1, 7, 7))

    def outputs(layer):
        @haiku.without_apply_rng
        @haiku.transform
        def model(x):
            return layer(
                4, 5, w_init=haiku.initializers.VarianceScaling(), value_size=6, with_bias=False
            )(x, x, x, mask)

        def loss(parameters, x):
            out = model.apply(parameters, x)
            return jnp.sum(out**3), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(model.init(jax.random.key(0), x), x)

    ours = outputs(adapter("haiku.md").MultiHeadAttention)
    theirs = outputs(haiku.MultiHeadAttention)
    assert list(ours[0][0]) == [
        f"multi_head_attention/{name}" for name in ("key", "linear", "query", "value")
    ]
    assert_close(ours, theirs, tolerance=2e-5)
