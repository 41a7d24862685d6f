"""Attention for Flax modules, linen and nnx. Needs the ``flax`` extra."""

from jax_memeff.flax import linen, nnx
from jax_memeff.flax.attention import attention_fn
from jax_memeff.flax.heads import rotary_embedding
from jax_memeff.flax.pages import Pages

__all__ = ["Pages", "attention_fn", "linen", "nnx", "rotary_embedding"]
