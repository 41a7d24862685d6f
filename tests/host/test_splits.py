"""The launcher's number of key splits and of CTAs that share a KV block, from the CTAs that it
launches on 132 multiprocessors.
"""

from __future__ import annotations

import handlers
import jax
import jax.numpy as jnp
import pytest

import jax_memeff


def attention(query, key, value):
    return jax_memeff.dot_product_attention(query, key, value, implementation="cuda")


def loss(query, key, value):
    out = jax_memeff.dot_product_attention(query, key, value, is_causal=True, implementation="cuda")
    return out.sum()


@pytest.fixture
def nothing_compiled(monkeypatch):
    handlers.compile_nothing(monkeypatch)


@pytest.fixture
def launched(monkeypatch, nothing_compiled):
    """Launches a decode step, and returns its CTAs."""

    def launch(batch, heads, key_heads, keys):
        shapes = ((1, heads), (keys, key_heads), (keys, key_heads))
        operands = (jax.ShapeDtypeStruct((batch, *own, 128), jnp.bfloat16) for own in shapes)
        ((error, blocks),) = handlers.run(
            handlers.record(monkeypatch, "sm_90a", attention, *operands)
        )
        assert error == ""
        return blocks

    return launch


@pytest.mark.parametrize(
    ("dims", "tiles", "splits"),
    [
        ((4, 32, 8, 65536), 32, 4),  # 5 splits leave 28 multiprocessors with two CTAs
        ((1, 64, 8, 131072), 8, 16),
        ((8, 32, 8, 16384), 64, 2),
        ((16, 32, 8, 8192), 128, 1),
        ((24, 32, 8, 8192), 192, 1),
        ((20, 32, 8, 8192), 160, 3),
    ],
    ids=str,
)
def test_few_multiprocessors_have_more_work_than_others(dims, tiles, splits, launched):
    batch, heads = dims[:2]
    combine = batch * heads if splits > 1 else 0
    assert launched(*dims) == tiles * splits + combine


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("dims", "kv_blocks", "splits"),
    [
        ((8, 32, 4, 1024), 256, 4),  # of the heads of a group
        ((1, 12, 2, 1024), 16, 8),  # two of heads, times four of Q blocks
        ((1, 6, 2, 1024), 16, 8),  # of Q blocks, because 8 and 3 have no common divisor
        ((1, 8, 8, 1024), 64, 2),  # of Q blocks
        ((8, 32, 32, 1024), 2048, 1),
    ],
    ids=str,
)
def test_ctas_share_a_kv_block_of_a_causal_backward(dims, kv_blocks, splits, monkeypatch):
    batch, heads, key_heads, length = dims
    operands = (
        jax.ShapeDtypeStruct((batch, length, own, 128), jnp.bfloat16)
        for own in (heads, key_heads, key_heads)
    )
    gradients = jax.grad(loss, (0, 1, 2))
    *_, (error, blocks) = handlers.run(handlers.record(monkeypatch, "sm_90a", gradients, *operands))
    assert error == ""
    rows = batch * heads * length // 64  # of the kernels before and after
    assert blocks == 2 * rows + kv_blocks * splits
