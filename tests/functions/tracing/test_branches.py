"""Branches of ``lax.cond`` and ``lax.switch`` that are not taken have derivatives of 0.

Programs compute all branches, and outside of its domain the derivative of one may be NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_memeff import dot_product_attention
from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_score_function

TABLE = jnp.array([1.0, -1.0, 0.0, -3.0, 0.5])


def logarithm(table):
    return lambda s, b, h, q, k: lax.cond(q > k, lambda: s * jnp.log(1.0 * (q - k)), lambda: s)


def operand(table):
    return lambda s, b, h, q, k: lax.cond(
        table[k] > 0, lambda x: s + jnp.sqrt(x), lambda x: s * x, table[k]
    )


def read_inside(table):
    return lambda s, b, h, q, k: lax.cond(
        table[k] > 0, lambda: s + jnp.sqrt(table[k]), lambda: s * table[q]
    )


def switch(table):
    def function(s, b, h, q, k):
        far = 1.0 * (q - k)
        branches = [lambda x: 2 * x, lambda x: x / (far - 1), lambda x: x * jnp.sqrt(far)]
        return lax.switch((q - k) // 2, branches, s)

    return function


def nested(table):
    def inner(x, k):
        return lax.cond(table[k] > 0, lambda: jnp.sqrt(table[k]) * x, lambda: x)

    return lambda s, b, h, q, k: lax.cond(
        q > k, lambda x: inner(x, k) * jnp.log(1.0 * (q - k)), lambda x: x, s
    )


FUNCTIONS = [logarithm, operand, read_inside, switch, nested]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("make", FUNCTIONS)
def test_derivatives_are_those_of_the_branch_taken(make, assert_close):
    scores = jnp.asarray(np.random.default_rng(0).normal(size=25), jnp.float32)
    rows, columns = (x.ravel().astype(np.int32) for x in np.indices((5, 5)))
    program, arrays = traced_score_function(make(TABLE))
    zero = np.zeros(25, np.int32)

    def found(scores, arrays):
        return evaluate(program, scores, zero, zero, rows, columns, arrays).sum()

    by_score, by_arrays = jax.grad(found, (0, 1))(scores, arrays)

    # Not the gradient of jax.vmap, which makes a select of a branch before it is differentiated.
    def expected(score, row, column):
        return jax.grad(lambda s, table: make(table)(s, 0, 0, row, column), (0, 1))(score, TABLE)

    scores_, tables = jax.vmap(expected)(scores, rows, columns)
    assert np.isfinite(scores_).all()
    assert_close(by_score, scores_, 1e-5)
    if arrays:
        assert_close(by_arrays[0], tables.sum(0), 1e-5)


def test_gradients_of_a_call_are_finite():
    query, table = jnp.ones((1, 5, 1, 4)), TABLE

    def loss(query, table):
        out = dot_product_attention(query, query, query, score_mod=nested(table))
        return (out**2).sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(query, table):
        assert np.isfinite(gradient).all()
