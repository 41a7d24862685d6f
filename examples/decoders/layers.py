"""What the decoders have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

Parameters = dict[str, jax.Array]


def initialize(key: jax.Array, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> Parameters:
    """Random weights ``[layers, *shape]`` by name: ones for vectors, normal for matrices.

    The variance of a matrix is the inverse of its first dim, the number of inputs.
    """
    parameters = {}
    for name, shape in shapes.items():
        key, own = jax.random.split(key)
        shape = (layers, *shape)
        if len(shape) == 2:
            parameters[name] = jnp.ones(shape)
        else:
            parameters[name] = jax.random.normal(own, shape) / math.sqrt(shape[1])
    return parameters


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; over the last dim."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * weight


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``[B, T, D]`` times ``[D, heads, head_dim]``: ``[B, T, heads, head_dim]``."""
    return jnp.einsum("btd,dnh->btnh", x, weight)


def gated(x: jax.Array, layer: Parameters, activation) -> jax.Array:
    """A gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    return (activation(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
