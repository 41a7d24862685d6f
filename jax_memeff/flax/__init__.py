"""Attention for Flax modules, linen and nnx. Needs the ``flax`` extra."""

from jax_memeff.flax.attention import attention_fn

__all__ = ["attention_fn"]
