"""Query, key and value in one array: the call is the same, and so are its bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

import jax_memeff
from jax_memeff import Mask, Offsets

B, T, N, H = 2, 37, 4, 16
QKV = normal(0, B, T, 3, N, H)
BIAS = normal(1, 1, N, T, T)
DROPOUT: Any = {"dropout_rate": 0.3, "dropout_key": jax.random.key(2)}


def separate(qkv, *arguments, **features):
    query, key, value = (qkv[..., index, :, :] for index in range(3))
    return jax_memeff.dot_product_attention(query, key, value, *arguments, **features)


def loss(attention, qkv, bias, **features):
    out, lse = attention(qkv, bias, return_residual=True, **features)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), out


@pytest.mark.rotating(3)
@pytest.mark.quick("lengths")
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"is_causal": True, "logits_soft_cap": 2.0, "scale": 0.3},
        {"query_seq_lengths": np.array([5, T]), "key_value_seq_lengths": np.array([T, 9])},
        {"mask": Mask.window(9, None, "bottom_right"), "local_window_size": 12, **DROPOUT},
        {"mask": np.tri(T, dtype=bool), "offsets": Offsets(query=16, key=16), **DROPOUT},
    ],
    ids=["plain", "causal", "lengths", "window_dropout", "boolean_offsets"],
)
def test_is_the_call_with_three_arrays(features):
    packed, expected = (
        jax.value_and_grad(
            lambda qkv, bias, attention=attention: loss(attention, qkv, bias, **features),
            (0, 1),
            has_aux=True,
        )(QKV, BIAS)
        for attention in (jax_memeff.dot_product_attention_packed, separate)
    )
    jax.tree.map(np.testing.assert_array_equal, packed, expected)


def test_without_the_batch_dim():
    out, lse = jax_memeff.dot_product_attention_packed(QKV[0], return_residual=True)
    expected = separate(QKV[0], return_residual=True)
    assert out.shape == (T, N, H) and lse.shape == (T, N)
    jax.tree.map(np.testing.assert_array_equal, (out, lse), expected)
    out = jax_memeff.dot_product_attention_packed(QKV[0], key_value_seq_lengths=7)
    np.testing.assert_array_equal(out, separate(QKV[0], key_value_seq_lengths=7))


@pytest.mark.parametrize("argnums", [0, 1])
def test_one_gradient_alone(argnums):
    """Only the bias or only the projections are differentiated."""
    packed, expected = (
        jax.grad(lambda *x, attention=attention: loss(attention, *x)[0], argnums)(QKV, BIAS)
        for attention in (jax_memeff.dot_product_attention_packed, separate)
    )
    np.testing.assert_array_equal(packed, expected)


def test_under_jit_vmap_and_checkpoint(assert_close):
    def gradient(qkv, attention):
        return jax.grad(lambda x: loss(attention, x, BIAS, is_causal=True, **DROPOUT)[0])(qkv)

    def checkpointed(*arguments, **features):
        return jax.checkpoint(
            lambda *x: jax_memeff.dot_product_attention_packed(*x, **features), static_argnums=()
        )(*arguments)

    stacked = jnp.stack([QKV, QKV[::-1]])
    packed = jax_memeff.dot_product_attention_packed
    batched = jax.jit(jax.vmap(lambda x: gradient(x, packed)))(stacked)
    for got, qkv in zip(batched, stacked, strict=True):
        assert_close(got, gradient(qkv, separate))
    assert_close(gradient(QKV, checkpointed), gradient(QKV, separate))


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 8), (2, 0, 3, 2, 8), (2, 5, 3, 0, 8)])
def test_zero_sizes(shape):
    def run(qkv):
        return jax_memeff.dot_product_attention_packed(qkv)

    out, transpose = jax.vjp(run, jnp.ones(shape))
    assert out.shape == (*shape[:2], *shape[3:])
    (gradient,) = transpose(out)
    assert gradient.shape == shape and (gradient == 0).all()
