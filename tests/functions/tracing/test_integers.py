"""Integers of users' functions behave as in JAX: conversions, quotients, shifts and reductions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_score_function

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]
SCORES = np.array([300.0, -1.0, -3e9, 3e9, np.inf, -np.inf, np.nan, 1.5], np.float32)
BATCH, HEAD, QUERY, KEY = (np.int32(x) for x in (1, 2, 3, 4))


def assert_same(function):
    """The program of a function gives the numbers that the function gives in JAX."""
    program, arrays = traced_score_function(function)
    found = evaluate(program, SCORES, BATCH, HEAD, QUERY, KEY, arrays)
    everywhere = jax.jit(jax.vmap(function, (0, None, None, None, None)))
    np.testing.assert_array_equal(found, everywhere(SCORES, BATCH, HEAD, QUERY, KEY))


def assert_converted(dtype, number):
    """A number becomes ``dtype`` as in JAX: alone, among scalars, and as an element of arrays."""
    table = jnp.stack([number, number])
    converted = jax.jit(lambda x: x.astype(dtype))

    def filled(s, b, h, q, k):
        return converted(table.at[q].get(mode="fill")).astype(jnp.float32)

    def other(q):
        return q.astype(table.dtype)

    assert_same(filled)
    assert_same(lambda s, b, h, q, k: converted(number).astype(jnp.float32) + q)
    assert_same(lambda s, b, h, q, k: converted(table[q - 3]).astype(jnp.float32))
    assert_same(
        lambda s, b, h, q, k: converted(jnp.stack([other(q), number]))[1].astype(jnp.float32)
    )


@pytest.mark.quick("int8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_beyond_an_integer_type_become_its_limits(dtype):
    assert_same(lambda s, b, h, q, k: s.astype(dtype).astype(jnp.float32))
    for number in SCORES:
        assert_converted(dtype, number)


@pytest.mark.quick("uint8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_beyond_an_integer_type_wrap_around(dtype):
    for number in (300, -5, 70000, -40000):
        assert_converted(dtype, np.int32(number))
    for number in (np.int8(-100), np.uint8(200)):
        assert_converted(dtype, number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_of_negated_integers(dtype):
    least = jnp.asarray(np.iinfo(dtype).min, dtype)

    def quotient(a, b):
        return lax.div(-a, -b).astype(jnp.float32)

    assert_same(lambda s, b, h, q, k: quotient(q.astype(dtype), b.astype(dtype)))
    assert_same(lambda s, b, h, q, k: quotient(least + (q - 3).astype(dtype), h.astype(dtype)))


def test_reductions_of_nothing():
    def nothing(q, k):
        return jnp.stack([q, k])[:0]

    assert_same(lambda s, b, h, q, k: jnp.max(nothing(s, s), initial=0.5))
    assert_same(lambda s, b, h, q, k: jnp.min(nothing(s, s), initial=0.5))
    assert_same(lambda s, b, h, q, k: jnp.max(nothing(q, k), initial=-7).astype(jnp.float32))
    assert_same(lambda s, b, h, q, k: jnp.min(nothing(q, k).astype("uint8"), initial=7) + s)
    assert_same(lambda s, b, h, q, k: jnp.max(nothing(q > 1, k > 1), initial=True) + s)
    assert_same(lambda s, b, h, q, k: jnp.sum(nothing(s, s)) + jnp.prod(nothing(q, k)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_an_arithmetic_shift_is_the_highest_bit(dtype):
    def shifted(s, b, h, q, k):
        return lax.shift_right_arithmetic(-q.astype(dtype), h.astype(dtype)).astype(jnp.float32)

    assert_same(shifted)
