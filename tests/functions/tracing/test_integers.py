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


def assert_same(*functions):
    """The programs of functions give the numbers that the functions give in JAX.

    JAX compiles all functions in one program, because XLA takes 20 ms for each program.
    """
    arguments = SCORES, BATCH, HEAD, QUERY, KEY
    everywhere = [jax.vmap(function, (0, None, None, None, None)) for function in functions]
    want = jax.jit(lambda *arguments: [function(*arguments) for function in everywhere])(*arguments)
    for function, numbers in zip(functions, want, strict=True):
        program, arrays = traced_score_function(function)
        np.testing.assert_array_equal(evaluate(program, *arguments, arrays), numbers)


def conversions(dtype, number):
    """Functions that convert a number: alone, among scalars, and as an element of arrays."""
    table = jax.device_put(np.stack([number, number]))
    converted = jax.jit(lambda x: x.astype(dtype))

    def filled(s, b, h, q, k):
        return converted(table.at[q].get(mode="fill")).astype(jnp.float32)

    def other(q):
        return q.astype(table.dtype)

    return [
        filled,
        lambda s, b, h, q, k: converted(number).astype(jnp.float32) + q,
        lambda s, b, h, q, k: converted(table[q - 3]).astype(jnp.float32),
        lambda s, b, h, q, k: converted(jnp.stack([other(q), number]))[1].astype(jnp.float32),
    ]


@pytest.mark.rotating(3)
@pytest.mark.quick("int8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_beyond_an_integer_type_become_its_limits(dtype):
    of_numbers = [function for number in SCORES for function in conversions(dtype, number)]
    assert_same(lambda s, b, h, q, k: s.astype(dtype).astype(jnp.float32), *of_numbers)


@pytest.mark.rotating(3)
@pytest.mark.quick("uint8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_beyond_an_integer_type_wrap_around(dtype):
    numbers = [np.int32(number) for number in (300, -5, 70000, -40000)]
    numbers += [np.int8(-100), np.uint8(200)]
    assert_same(*(function for number in numbers for function in conversions(dtype, number)))


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
