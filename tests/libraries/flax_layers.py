"""Attention layers of Flax and ours, and what their tests share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_memeff.flax

BATCH, ROWS, COLUMNS, HEADS, FEATURES = 2, 5, 7, 4, 32
OURS = jax_memeff.flax


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(0, BATCH, ROWS, FEATURES)
MEMORY = normal(1, BATCH, COLUMNS, FEATURES)


def boolean(seed: int, *shape: int) -> jax.Array:
    """A random mask in which the first key of every row is valid."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6).at[..., 0].set(True)


def assert_close(got, expected, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    compare = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(compare, got, expected)


def scrambled(tree):
    """Random values for every array, so that nothing agrees only because it is 0 or 1."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [
        jax.device_put(np.asarray(leaf) + 0.1 * np.asarray(normal(9 + i, *leaf.shape)))
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, leaves)


def gradients(function, *operands):
    def scalar(*operands):
        out = function(*operands)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    argnums = tuple(range(len(operands)))
    # These programs run once, so they are not optimized.
    options: Any = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.grad(scalar, argnums, has_aux=True), compiler_options=options)(*operands)


def quickly(function, *operands):
    options: Any = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options)(*operands)


def nnx_layer(api, **settings):
    rngs = nnx.Rngs(0)
    return api.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs, **settings)


@functools.cache
def linen_variables(num_kv_heads: int = HEADS):
    layer = OURS.linen.MultiHeadAttention(HEADS, num_kv_heads=num_kv_heads)
    return scrambled(quickly(layer.init, jax.random.key(0), X))


def apply(api: str, layer: Any, x: jax.Array, **arguments: Any) -> Any:
    """A layer of either API, with fixed parameters."""
    if api == "nnx":
        return layer(x, **arguments)
    return layer.apply(linen_variables(layer.num_kv_heads or HEADS), x, **arguments)


def make(api: str, **settings: Any) -> Any:
    if api == "nnx":
        return nnx_layer(OURS.nnx, **settings)
    return OURS.linen.MultiHeadAttention(HEADS, **settings)
