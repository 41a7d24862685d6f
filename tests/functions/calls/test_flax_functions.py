"""Functions of scores and masks in the Flax modules, with and without a cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_memeff.flax.linen
import jax_memeff.flax.nnx
from jax_memeff import Mask, dot_product_attention
from jax_memeff.flax import attention_fn

SLOPES = jnp.array([0.5, -0.25, 0.1, 1.0])


def alibi(s, b, h, q, k):
    return s + SLOPES[h] * (q - k) * (b + 1)


def test_attention_fn_counts_all_batch_dims():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 3, 5, 4, 8))
    got = functools.partial(attention_fn, score_mod=alibi)(query, key, value)
    flat = (x.reshape(6, 5, 4, 8) for x in (query, key, value))
    want = dot_product_attention(*flat, score_mod=alibi)
    np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-6)


MASKS = {
    "none": Mask(),
    "function": Mask.function(lambda b, h, q, k: q - k != 3 + h),
    "expression": ~Mask.window(4, -2) | Mask.function(lambda b, h, q, k: k == b),
    "bottom_right": ~Mask.window(4, -2, "bottom_right"),
}


@pytest.mark.parametrize("name", MASKS)
def test_decoding_counts_rows_in_the_cache(name):
    layer = jax_memeff.flax.nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 9, 32))
    whole = layer(x, is_causal=True, score_mod=alibi, mask=MASKS[name])
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True, score_mod=alibi, mask=MASKS[name]))
    parts = [step(layer, x[:, :3])] + [step(layer, x[:, i : i + 2]) for i in range(3, 9, 2)]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)


def test_linen_passes_it_on():
    layer = jax_memeff.flax.linen.MultiHeadAttention(num_heads=4)
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    variables = layer.init(jax.random.key(2), x)
    plain, changed = (jnp.asarray(layer.apply(variables, x, score_mod=f)) for f in (None, alibi))
    assert float(jnp.abs(plain - changed).max()) > 1e-3
    same = layer.apply(variables, x, score_mod=lambda s, b, h, q, k: s)
    np.testing.assert_array_equal(plain, same)
