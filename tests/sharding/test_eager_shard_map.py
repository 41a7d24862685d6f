"""``jax.shard_map`` outside of ``jax.jit``, which JAX evaluates operation by operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sharding_case import T, projections

import jax_memeff
from jax_memeff import dot_product_attention, ring_attention

MESH = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
QUERY, KEY, VALUE = (jnp.asarray(x) for x in projections())
BATCH, ROWS = P("data"), P(None, "data")
causal = functools.partial(dot_product_attention, is_causal=True)
ring = functools.partial(ring_attention, axis_name="data", is_causal=True)


def sharded(function, spec=BATCH):
    return jax.shard_map(function, mesh=MESH, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize("disabled", [False, True], ids=["jit", "disable_jit"])
@pytest.mark.parametrize(
    "function, spec",
    [(causal, BATCH), (jax.vmap(causal), BATCH), (ring, ROWS)],
    ids=["call", "vmap", "ring"],
)
def test_equals_one_device(assert_close, function, spec, disabled):
    with jax.disable_jit(disabled):
        got = sharded(function, spec)(QUERY, KEY, VALUE)
    assert_close(got, causal(QUERY, KEY, VALUE), 1e-6)


@pytest.mark.parametrize("function, spec", [(causal, BATCH), (ring, ROWS)], ids=["call", "ring"])
def test_gradients_inside_and_outside(assert_close, function, spec):
    def loss(function, query):
        return jnp.sum(function(query, KEY, VALUE) ** 2)

    def gradient(query, key, value):
        return jax.grad(lambda query: jnp.sum(function(query, key, value) ** 2))(query)

    want = jax.grad(functools.partial(loss, causal))(QUERY)
    assert_close(sharded(gradient, spec)(QUERY, KEY, VALUE), want, 1e-5)
    assert_close(jax.grad(functools.partial(loss, sharded(function, spec)))(QUERY), want, 1e-5)


def test_only_other_operations_are_differentiated(assert_close):
    """JAX then evaluates the custom_vjp itself, below its trace for derivatives."""

    def gradient(query, key, value):
        return jax.grad(lambda x: jnp.sum(x * causal(query, key, value)[..., :1]))(query)

    want = np.broadcast_to(causal(QUERY, KEY, VALUE)[..., :1], QUERY.shape)
    assert_close(sharded(gradient)(QUERY, KEY, VALUE), want, 1e-6)


def test_packed_sequences():
    starts = jnp.array([0, 5, T])

    def packed(query, key, value):
        return jax_memeff.varlen_attention(query[0], key[0], value[0], starts, starts, T, T)[None]

    got = sharded(packed)(QUERY[:2], KEY[:2], VALUE[:2])
    np.testing.assert_allclose(got[1], packed(QUERY[1:2], KEY[1:2], VALUE[1:2])[0], 1e-6, 1e-6)
