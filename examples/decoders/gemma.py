"""Gemma 3's attention: local and global layers in one scan, normalized queries and keys.

Five layers with a sliding window are followed by one without ("Gemma 3 Technical Report",
https://arxiv.org/abs/2503.19786, section 2.1). All of them run the same program, because the bound
of the window is traced. The soft cap is that of Gemma 2, which Gemma 3 replaces by the norms.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoders.layers import (
    Parameters,
    gated,
    gated_shapes,
    grouped_head_shapes,
    initialize,
    project,
    rms_norm,
)
from jax_memeff import Mask, dot_product_attention
from jax_memeff.flax import rotary_embedding

UNBOUNDED = 2**30
"""A left bound that no sequence reaches: the window of a global layer."""


class Config(NamedTuple):
    vocabulary: int = 256
    width: int = 256
    hidden: int = 512
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 512
    soft_cap: float | None = 50.0


def parameters(key: jax.Array, config: Config) -> tuple[jax.Array, Parameters]:
    """The embedding ``[vocabulary, width]``, and the weights of the layers."""
    c = config
    shapes = {
        **grouped_head_shapes(c),
        **gated_shapes(c),
        **dict.fromkeys(("query_norm", "key_norm"), (c.head_dim,)),
        **dict.fromkeys(("before", "after", "before_mlp", "after_mlp"), (c.width,)),
    }
    return initialize(key, c, shapes)


def attention(query, key, value, left: jax.Array, config: Config) -> jax.Array:
    """``left`` is a traced number, so one kernel serves layers with different windows."""
    return dot_product_attention(
        query, key, value, mask=Mask.window(left, 0), logits_soft_cap=config.soft_cap
    )


def logits(
    embedding: jax.Array, layers: Parameters, tokens: jax.Array, config: Config
) -> jax.Array:
    """``[B, T, vocabulary]`` for tokens ``[B, T]``."""
    position = jnp.arange(tokens.shape[1])
    is_global = np.arange(config.layers) % 6 == 5
    left = jnp.asarray(np.where(is_global, UNBOUNDED, config.window - 1))
    base = jnp.asarray(np.where(is_global, 1e6, 1e4), jnp.float32)

    @jax.checkpoint
    def layer(x, own):
        w, left, base = own
        y = rms_norm(x, w["before"])
        query = rms_norm(project(y, w["query"]), w["query_norm"])
        key = rms_norm(project(y, w["key"]), w["key_norm"])
        query, key = (rotary_embedding(each, position, base) for each in (query, key))
        y = attention(query, key, project(y, w["value"]), left, config)
        x = x + rms_norm(y.reshape(*y.shape[:2], -1) @ w["out"], w["after"])
        y = gated(rms_norm(x, w["before_mlp"]), w, jax.nn.gelu)
        return x + rms_norm(y, w["after_mlp"]), None

    x = embedding[tokens] * config.width**0.5
    x, _ = jax.lax.scan(layer, x, (layers, left, base))
    return rms_norm(x, jnp.ones(config.width)) @ embedding.T
