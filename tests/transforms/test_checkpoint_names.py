"""If a policy of ``jax.checkpoint`` saves the user's own name, there is one forward and one
copy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_memeff
import jax_memeff.flax

B, T, N, H, LAYERS = 2, 32, 4, 16, 3
NAMED: Any = {"residual_checkpoint_name": "context"}
POLICY = jax.checkpoint_policies.save_only_these_names("context")
STARTS = np.array([0, T, 2 * T])


def varlen(query, key, value, **arguments):
    attention: Any = jax_memeff.varlen_attention
    tokens = (x.reshape(B * T, N, H) for x in (query, key, value))
    out = attention(*tokens, STARTS, STARTS, T, T, **arguments)
    return out.reshape(query.shape)


def packed(query, key, value, **arguments):
    qkv = jnp.stack([query, key, value], axis=2)
    return jax_memeff.dot_product_attention_packed(qkv, **arguments)


def ring(query, key, value, **arguments):
    local = functools.partial(jax_memeff.ring_attention, axis_name="ring", **arguments)
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=devices)
    spec = P(None, "ring")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(query, key, value)


ENTRIES = {
    "dot_product_attention": jax_memeff.dot_product_attention,
    "varlen_attention": varlen,
    "dot_product_attention_packed": packed,
    "ring_attention": ring,
    "flax.attention_fn": jax_memeff.flax.attention_fn,
}
X = normal(0, B, T, N * H)
WEIGHTS = normal(1, LAYERS, N * H, N * H) / 8


def block(attention, x, weight):
    """A layer in which the policy saves no other arrays."""
    heads = x.reshape(B, T, N, H)
    out = attention(jnp.sin(heads), jnp.cos(heads), heads)
    return jnp.tanh(out.reshape(B, T, N * H) @ weight)


def network(attention, policy):
    layer = jax.checkpoint(functools.partial(block, attention), policy=policy)

    def loss(x, weights):
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0])

    return loss


def forwards(function, *operands) -> int:
    return str(jax.make_jaxpr(function)(*operands)).count("attention_fwd[")


def saved_bytes(loss) -> int:
    """The bytes of the arrays that the forward passes to the backward, from their shapes."""
    vjp = jax.eval_shape(lambda *operands: jax.vjp(loss, *operands)[1], X, WEIGHTS)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))


@pytest.mark.rotating(3)
@pytest.mark.quick("dot_product_attention")
@pytest.mark.parametrize("entry", ENTRIES)
def test_one_forward_and_one_copy(entry, assert_close):
    attention = functools.partial(ENTRIES[entry], **NAMED)
    named, recomputed = network(attention, POLICY), network(attention, None)
    once = forwards(named, X, WEIGHTS)
    assert once > 0
    assert forwards(jax.grad(named), X, WEIGHTS) == once
    assert forwards(jax.grad(recomputed), X, WEIGHTS) == 2 * once
    # One output and one logsumexp for each layer, and a few integers of the ring's schedule.
    residual = LAYERS * B * T * N * (H + 1) * 4
    assert abs(saved_bytes(named) - saved_bytes(recomputed) - residual) <= 128
    gradients = [jax.jit(jax.grad(loss, (0, 1)))(X, WEIGHTS) for loss in (named, recomputed)]
    assert_close(*gradients, 1e-6)


def test_a_name_outside_of_the_call_is_not_enough():
    """This is why the argument exists: the policy saves a copy, and the forward still runs
    again.
    """

    def attention(query, key, value):
        out = jax_memeff.dot_product_attention(query, key, value)
        return checkpoint_name(out, "context")

    outside = network(attention, POLICY)
    assert forwards(jax.grad(outside), X, WEIGHTS) == 2


def test_a_chosen_name_replaces_the_default_names():
    attention = functools.partial(jax_memeff.dot_product_attention, **NAMED)
    policy = jax.checkpoint_policies.save_only_these_names("jax_memeff_out", "jax_memeff_lse")
    assert forwards(jax.grad(network(attention, policy)), X, WEIGHTS) == 2
    default = network(jax_memeff.dot_product_attention, policy)
    assert forwards(jax.grad(default), X, WEIGHTS) == 1


def test_the_name_in_forward_mode():
    attention = functools.partial(jax_memeff.dot_product_attention, **NAMED)
    with jax_memeff.forward_mode():
        assert forwards(jax.grad(network(attention, POLICY)), X, WEIGHTS) == 1


def test_a_kernel_that_is_not_launched_again(monkeypatch, fake_compiler):
    jax.clear_caches()
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
    attention = functools.partial(jax_memeff.dot_product_attention, **NAMED)
    step = jax.jit(jax.grad(network(attention, POLICY)))
    text = step.trace(X, WEIGHTS).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_memeff_forward") == 1
    assert text.count("custom_call @jax_memeff_backward") == 1


@pytest.mark.parametrize("name", ["", 3, ("context", "lse")])
def test_bad_names_raise(name):
    query = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match="residual_checkpoint_name must be None or a name"):
        jax_memeff.dot_product_attention(query, query, query, residual_checkpoint_name=name)
