"""gpt-oss's attention: every other layer has a window of 128, and each head has a sink.

"gpt-oss-120b & gpt-oss-20b Model Card", https://arxiv.org/abs/2508.10925, section 2.2. The
feed-forward layers are dense here; a mixture of experts does not change the attention.
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


class Config(NamedTuple):
    vocabulary: int = 256
    width: int = 256
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 64
    window: int = 128


def parameters(key: jax.Array, config: Config) -> tuple[jax.Array, Parameters]:
    """The embedding ``[vocabulary, width]``, and the weights of the layers."""
    c = config
    shapes = {
        **grouped_head_shapes(c),
        **gated_shapes(c),
        "sinks": (c.heads,),
        **dict.fromkeys(("before", "before_mlp"), (c.width,)),
    }
    return initialize(key, c, shapes)


def attention(query, key, value, sinks, left: jax.Array) -> jax.Array:
    """``sinks`` are logits without a value, one for each head; they are learned."""
    return dot_product_attention(query, key, value, mask=Mask.window(left, 0), sinks=sinks)


def logits(
    embedding: jax.Array, layers: Parameters, tokens: jax.Array, config: Config
) -> jax.Array:
    """``[B, T, vocabulary]`` for tokens ``[B, T]``."""
    position = jnp.arange(tokens.shape[1])
    is_local = np.arange(config.layers) % 2 == 0
    left = jnp.asarray(np.where(is_local, config.window - 1, UNBOUNDED))

    @jax.checkpoint
    def layer(x, own):
        w, left = own
        y = rms_norm(x, w["before"])
        query, key = (
            rotary_embedding(project(y, w[name]), position, 150_000.0) for name in ("query", "key")
        )
        y = attention(query, key, project(y, w["value"]), w["sinks"], left)
        x = x + y.reshape(*y.shape[:2], -1) @ w["out"]
        return x + gated(rms_norm(x, w["before_mlp"]), w, jax.nn.silu), None

    x, _ = jax.lax.scan(layer, embedding[tokens], (layers, left))
    return rms_norm(x, jnp.ones(config.width)) @ embedding.T
