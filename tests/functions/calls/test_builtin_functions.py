"""Score functions that are an argument of their own: the kernels need no function for them."""

import jax
import jax.numpy as jnp
import pytest

import jax_memeff

CAP = jnp.float32(20.0)


def keys_of(score_mod, **arguments):
    """The numbers of a traced call that show which kernels it takes."""
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
    ],
)
def test_identity_and_soft_cap_are_recognised(function, expected):
    assert keys_of(function) == expected


def test_a_soft_cap_is_not_replaced_by_a_function():
    assert keys_of(lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), logits_soft_cap=20.0) == (
        False,
        [20.0],
    )


def test_results_and_gradients_are_those_of_the_argument():
    query = jax.random.normal(jax.random.key(0), (2, 40, 2, 16))

    def loss(x, **arguments):
        return (jax_memeff.dot_product_attention(x, x, x, **arguments) ** 2).sum()

    own = jax.grad(loss)(query, score_mod=lambda s, b, h, q, k: 2 * jnp.tanh(s / 2))
    assert (own == jax.grad(loss)(query, logits_soft_cap=2.0)).all()
    assert (own != jax.grad(loss)(query)).any()
