"""Weights and layers that the decoders share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

Parameters = dict[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


class Sizes(Protocol):
    """The sizes that every decoder's configuration has."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...


class GroupedHeads(Sizes, Protocol):
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def grouped_head_shapes(c: GroupedHeads) -> Shapes:
    """The matrices of attention with grouped heads."""
    return {
        "query": (c.width, c.heads, c.head_dim),
        "key": (c.width, c.kv_heads, c.head_dim),
        "value": (c.width, c.kv_heads, c.head_dim),
        "out": (c.heads * c.head_dim, c.width),
    }


def gated_shapes(c: Sizes) -> Shapes:
    """The matrices of ``gated``."""
    return {"gate": (c.width, c.hidden), "up": (c.width, c.hidden), "down": (c.hidden, c.width)}


def initialize(key: jax.Array, c: Sizes, shapes: Shapes) -> tuple[jax.Array, Parameters]:
    """The embedding ``[vocabulary, width]``, and the weights of the layers."""
    embedding = jax.random.normal(key, (c.vocabulary, c.width)) / c.width**0.5
    return embedding, _weights(jax.random.fold_in(key, 1), c.layers, shapes)


def _weights(key: jax.Array, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> Parameters:
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
    """Normalize the last dim: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * weight


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``[B, T, D]`` times ``[D, heads, head_dim]``: ``[B, T, heads, head_dim]``."""
    return jnp.einsum("btd,dnh->btnh", x, weight)


def gated(x: jax.Array, layer: Parameters, activation) -> jax.Array:
    """A gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    return (activation(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
