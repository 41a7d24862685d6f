"""flaxdiff's attention over images under the context manager of docs/clients/flaxdiff.md."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from arrays import normal
from flax import linen
from pages import adapter

from jax_memeff.flax import attention_fn


def test_attention_over_an_image(assert_close):
    attention = pytest.importorskip(
        "flaxdiff.models.attention", reason="pip install --no-deps flaxdiff einops"
    )
    layer = attention.NormalAttention(query_dim=12, heads=2, dim_head=6, use_bias=False)
    image, text = normal(0, 2, 4, 5, 12), normal(1, 2, 3, 12)
    parameters = layer.init(jax.random.key(0), image, text)

    def loss(parameters, image, text):
        out = layer.apply(parameters, image, text)
        return jnp.sum(out**3), out

    def outputs():
        # Makes a new function, because JAX would reuse the program of the same function.
        return jax.jit(jax.grad(lambda *operands: loss(*operands), (0, 1, 2), has_aux=True))(
            parameters, image, text
        )

    original = linen.dot_product_attention
    theirs = outputs()
    with adapter("flaxdiff.md").memory_efficient_linen():
        assert importlib.import_module("flax.linen").dot_product_attention is attention_fn
        ours = outputs()
    assert linen.dot_product_attention is original
    assert_close(ours, theirs, tolerance=2e-5)
