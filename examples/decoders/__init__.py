"""Small decoders with the attention of Gemma 3, gpt-oss and DeepSeek, in plain JAX.

Each is a function of its parameters, a dictionary whose arrays begin with the layer, so that the
layers run in one ``jax.lax.scan`` under ``jax.checkpoint``.
"""
