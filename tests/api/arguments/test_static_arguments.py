"""Static arguments: their types and range, and errors for traced values."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bad_input import attention, good

import jax_memeff

TRACED = {
    "logits_soft_cap": "logits_soft_cap must be a static number, got a traced value",
    "dropout_rate": "dropout_rate must be a static number, got a traced value",
    "local_window_size": r"an int or \(left, right\) of.*got a traced value; use mask=Mask.window",
    "is_causal": "is_causal must be True or False, got a traced value",
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_static_argument(name):
    values = {"local_window_size": 3, "is_causal": True}

    @jax.jit
    def call(value):
        return attention(**good(), **{name: value})

    with pytest.raises(TypeError, match=TRACED[name]):
        call(values.get(name, 0.5))


def test_a_list_of_traced_values():
    with pytest.raises(TypeError, match=r"query_seq_lengths must be an array, got a list with tra"):
        jax.jit(lambda n: attention(**good(), query_seq_lengths=[n, n]))(3)


def test_numbers_of_any_type_are_static_numbers(assert_close):
    expected = attention(**good(), scale=0.5, logits_soft_cap=3.0)
    for number in (np.float64, np.float32, np.asarray, jnp.float32, jnp.bfloat16, Fraction):
        got = attention(**good(), scale=number(0.5), logits_soft_cap=number(3))
        assert_close(got, expected)


@pytest.mark.parametrize("scale", [1.2e-38, -1.2e-38, 8.5e37, -8.5e37, 0, 0.0])
def test_scales_at_the_ends_of_the_range(scale):
    """If scores are finite, so are the results; keys with equal scores get equal weights."""
    query, key = jnp.full((1, 1, 1, 1), 0.5), jnp.array([1.0, -1.0]).reshape(1, 2, 1, 1)
    value = jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
    out, lse = attention(query, key, value, scale=scale, return_residual=True)
    expected = 4 if abs(scale) < 1 else 3 if scale > 0 else 5
    np.testing.assert_allclose(out.item(), expected)
    np.testing.assert_allclose(lse.item(), abs(scale) / 2 if abs(scale) > 1 else np.log(2), 1e-6)


@pytest.mark.parametrize("cap", [1.2e-38, 1e-30, 1e30, 1e31])
def test_soft_caps_at_the_ends_of_the_range(cap):
    query, key = jnp.full((1, 1, 1, 1), 0.5), jnp.array([1.0, -1.0]).reshape(1, 2, 1, 1)
    out, gradient = jax.value_and_grad(
        lambda query: attention(query, key, 1 + key, scale=1.0, logits_soft_cap=cap).sum()
    )(query)
    probability = 1 / (1 + np.exp(-1.0)) if cap > 1 else 0.5
    np.testing.assert_allclose(out, 2 * probability, 1e-6)
    slope = 4 * probability * (1 - probability) if cap > 1 else 0
    np.testing.assert_allclose(gradient.item(), slope, 1e-5)


def test_float64_takes_what_float64_holds(x64):
    query = jnp.ones((1, 1, 1, 1), jnp.float64)
    for scale in (1e39, 1e-300, -1e300):
        _, lse = attention(query, query, query, scale=scale, return_residual=True)
        np.testing.assert_allclose(lse.item(), scale, 1e-12)
    with pytest.raises(ValueError, match=r"scale must be 0 or .*float64, got 1e\+308"):
        attention(query, query, query, scale=1e308)


def test_cuda_asked_for_on_the_cpu():
    with pytest.raises(jax_memeff.UnsupportedError, match=r"needs a CUDA device, got.*cpu"):
        attention(**good(), implementation="cuda")


def test_offsets_are_equal_if_their_numbers_are():
    rows = jax_memeff.Offsets(query=jnp.array([1, 2]))
    assert rows == jax_memeff.Offsets(query=np.array([1, 2]))
    assert rows != jax_memeff.Offsets(query=jnp.array([1, 3])) and rows != jax_memeff.Offsets()
    assert jax_memeff.Offsets(query=jnp.int32(3)) == jax_memeff.Offsets(query=3) != 3
    assert hash(jax_memeff.Offsets(query=3)) == hash(jax_memeff.Offsets(query=np.int64(3)))
    for value in (rows, jax_memeff.Offsets(query=jnp.int32(3))):
        with pytest.raises(TypeError, match="cannot hash Offsets that hold arrays"):
            hash(value)
