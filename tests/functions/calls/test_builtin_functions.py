"""Score functions that equal an argument of the call: kernels need no function for them."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_memeff
from jax_memeff._call.scaling import Scaling
from jax_memeff._functions.trace import traced_score_function

CAP = jnp.float32(20.0)


@jax.custom_jvp
def straight_through(s):
    return 30 * jnp.tanh(s / 30)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


@jax.custom_jvp
def undefined_at_0(s):
    return 30 * jnp.tanh(s / 30)


undefined_at_0.defjvp(
    lambda primals, tangents: (
        undefined_at_0(*primals),
        (1 - jnp.tanh(primals[0] / 30) ** 2) * (primals[0] / primals[0]) * tangents[0],
    )
)


def keys_of(score_mod, **arguments):
    """The features of a traced call that show which kernels it uses."""
    shape = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.float32)
    text = str(
        jax.make_jaxpr(
            lambda x: jax_memeff.dot_product_attention(x, x, x, score_mod=score_mod, **arguments)
        )(shape)
    )
    return "score_function=None" in text, [cap for cap in (20.0, 30.0) if f"cap={cap}" in text]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, q, k: s, (True, [])),
        (lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), (True, [30.0])),
        (lambda s, b, h, q, k: jnp.tanh(s / 30.0) * 30.0, (True, [30.0])),
        (lambda s, b, h, q, k: 30 * jnp.tanh(s / 20), (False, [])),
        (lambda s, b, h, q, k: 30 * jnp.tanh(k / 30), (False, [])),
        (lambda s, b, h, q, k: -30 * jnp.tanh(s / -30), (False, [])),
        (lambda s, b, h, q, k: CAP * jnp.tanh(s / CAP), (False, [])),  # an array, which may change
        (lambda s, b, h, q, k: s + 0.0 * k, (False, [])),
        # The derivatives differ from those of the argument.
        (lambda s, b, h, q, k: jax.lax.stop_gradient(s), (False, [])),
        (lambda s, b, h, q, k: straight_through(s), (False, [])),
        (lambda s, b, h, q, k: undefined_at_0(s), (False, [])),
        (lambda s, b, h, q, k: 30 * jnp.tanh(jax.lax.stop_gradient(s) / 30), (False, [])),
    ],
)
def test_identity_and_soft_cap_are_recognised(function, expected):
    assert keys_of(function) == expected


def test_a_soft_cap_before_a_function_is_part_of_it():
    def alibi(s, b, h, q, k):
        return s + 0.5 * (k - q)

    def capped(s, b, h, q, k):
        return 30 * jnp.tanh(s / 30)

    assert keys_of(alibi, logits_soft_cap=20.0) == (False, [])
    assert keys_of(capped, logits_soft_cap=20.0) == (False, [])
    assert keys_of(lambda s, b, h, q, k: s, logits_soft_cap=20.0) == (True, [20.0])


def test_results_and_gradients_are_those_of_the_argument():
    query = jax.random.normal(jax.random.key(0), (2, 40, 2, 16))

    def loss(x, **arguments):
        return (jax_memeff.dot_product_attention(x, x, x, **arguments) ** 2).sum()

    own = jax.grad(loss)(query, score_mod=lambda s, b, h, q, k: 2 * jnp.tanh(s / 2))
    assert (own == jax.grad(loss)(query, logits_soft_cap=2.0)).all()
    assert (own != jax.grad(loss)(query)).any()


def test_soft_caps_before_a_function_have_one_structure():
    """Their derivatives have no product with the cap and quotient by it."""
    slopes = jnp.arange(4.0)

    def alibi(s, b, h, q, k):
        return s + slopes[h] * (k - q)

    programs = [
        traced_score_function(alibi, before=Scaling(1.0, cap).before_function())[0]
        for cap in (20.0, 50.0)
    ]
    assert programs[0].structure == programs[1].structure
    assert [program.literals for program in programs] == [(20.0,), (50.0,)]
    plain, _ = traced_score_function(alibi)
    more = Counter(value.op for value in programs[0].values)
    more.subtract(value.op for value in plain.values)
    assert +more == Counter({"div": 1, "tanh": 1, "mul": 2, "sub": 1, "literal": 1})


@pytest.mark.parametrize("arguments", [{}, {"scale": jnp.float32(0.5)}, {"logits_soft_cap": 2.0}])
def test_the_signature_is_checked_in_every_call(arguments):
    x = jnp.ones((1, 8, 2, 4))

    def call(arguments):
        score_mod: Any = lambda q, k: q - k  # noqa: E731
        return jax_memeff.dot_product_attention(x, x, x, score_mod=score_mod, **arguments)

    traced = jax.jit(call) if "scale" in arguments else call
    with pytest.raises(TypeError, match=r"score_mod must take \(score, batch, head, query, key\)"):
        traced(arguments)
