"""DeepSeek's multi-head latent attention: training, and decoding over pages of latent vectors.

"DeepSeek-V2", https://arxiv.org/abs/2405.04434, section 2.1. A token's keys and values are linear
functions of one latent vector, and the part of the key with rotary positions is shared by all
heads. Training expands them to heads, because that takes fewer operations. Decoding instead
multiplies the query by the key's matrix and the output by the value's, so that a cache holds only
the latent vector: 576 numbers per token in DeepSeek-V3, instead of 40,960.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from decoders.layers import Parameters, gated, gated_shapes, initialize, project, rms_norm
from jax_memeff import append_to_pages, dot_product_attention, paged_attention
from jax_memeff.flax import rotary_embedding


class Config(NamedTuple):
    vocabulary: int = 256
    width: int = 256
    hidden: int = 512
    layers: int = 2
    heads: int = 4
    latent_dim: int = 128
    plain_dim: int = 64
    rotary_dim: int = 32
    value_dim: int = 64

    @property
    def scale(self) -> float:
        """The scale of both forms, although the head dim of decoding is ``latent_dim +
        rotary_dim``.
        """
        return (self.plain_dim + self.rotary_dim) ** -0.5


def parameters(key: jax.Array, config: Config) -> tuple[jax.Array, Parameters]:
    """The embedding ``[vocabulary, width]``, and the weights of the layers."""
    c = config
    shapes = {
        "query": (c.width, c.heads, c.plain_dim + c.rotary_dim),
        "latent": (c.width, c.latent_dim),
        "rotary_key": (c.width, 1, c.rotary_dim),
        "plain_key": (c.latent_dim, c.heads, c.plain_dim),
        "value": (c.latent_dim, c.heads, c.value_dim),
        "out": (c.heads * c.value_dim, c.width),
        **gated_shapes(c),
        "latent_norm": (c.latent_dim,),
        **dict.fromkeys(("before", "before_mlp"), (c.width,)),
    }
    return initialize(key, c, shapes)


def projections(y, w: Parameters, position, config: Config):
    """The plain and the rotary part of the query, the latent vector, and the rotary key."""
    query = project(y, w["query"])
    plain, rotary = jnp.split(query, [config.plain_dim], axis=-1)
    latent = rms_norm(y @ w["latent"], w["latent_norm"])[:, :, None]  # [B, T, 1, latent_dim]
    rotary_key = project(y, w["rotary_key"])  # [B, T, 1, rotary_dim]
    return (
        plain,
        rotary_embedding(rotary, position),
        latent,
        rotary_embedding(rotary_key, position),
    )


def attention(query, key, value, config: Config) -> jax.Array:
    """Attention for training; the head dim of values differs from that of query and key."""
    return dot_product_attention(query, key, value, is_causal=True, scale=config.scale)


def logits(
    embedding: jax.Array, layers: Parameters, tokens: jax.Array, config: Config
) -> jax.Array:
    """``[B, T, vocabulary]`` for tokens ``[B, T]``."""
    position = jnp.arange(tokens.shape[1])

    @jax.checkpoint
    def layer(x, w):
        y = rms_norm(x, w["before"])
        plain, rotary, latent, rotary_key = projections(y, w, position, config)
        plain_key, value = (project(latent[:, :, 0], w[name]) for name in ("plain_key", "value"))
        rotary_key = jnp.broadcast_to(rotary_key, rotary.shape)
        query = jnp.concatenate([plain, rotary], -1)
        key = jnp.concatenate([plain_key, rotary_key], -1)
        y = attention(query, key, value, config)
        return _finish(x, y, w), None

    x, _ = jax.lax.scan(layer, embedding[tokens], layers)
    return rms_norm(x, jnp.ones(config.width)) @ embedding.T


def decode(
    embedding: jax.Array,
    layers: Parameters,
    pools: jax.Array,
    tokens: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """The logits ``[B, T, vocabulary]`` of T new tokens, and the pools with these tokens.

    Args:
        embedding, layers: the parameters.
        pools: ``[layers, pages, page_size, 1, latent_dim + rotary_dim]``.
        tokens: ``[B, T]``, the last tokens of each sequence.
        table, lengths: as in ``paged_attention``; the lengths include the new tokens.
        config: that of the parameters.
    """
    position = lengths[:, None] - tokens.shape[1] + jnp.arange(tokens.shape[1])

    def layer(x, own):
        w, pool = own
        y = rms_norm(x, w["before"])
        plain, rotary, latent, rotary_key = projections(y, w, position, config)
        stored = jnp.concatenate([latent, rotary_key], -1)
        pool, _ = append_to_pages(pool, None, stored, None, table, lengths)
        in_latent = jnp.einsum("btnh,rnh->btnr", plain, w["plain_key"])
        query = jnp.concatenate([in_latent, rotary], -1)
        y = paged_attention(
            query, pool, None, table, lengths, value_dim=config.latent_dim, scale=config.scale
        )
        y = jnp.einsum("btnr,rnh->btnh", y, w["value"])
        return _finish(x, y, w), pool

    x, pools = jax.lax.scan(layer, embedding[tokens], (layers, pools))
    return rms_norm(x, jnp.ones(config.width)) @ embedding.T, pools


def _finish(x: jax.Array, y: jax.Array, w: Parameters) -> jax.Array:
    x = x + y.reshape(*y.shape[:2], -1) @ w["out"]
    return x + gated(rms_norm(x, w["before_mlp"]), w, jax.nn.silu)
