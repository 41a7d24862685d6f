"""The launcher's number of splits, from the CTAs that it launches on 132 multiprocessors."""

from __future__ import annotations

import handlers
import jax
import jax.numpy as jnp
import pytest

import jax_memeff


def attention(query, key, value):
    return jax_memeff.dot_product_attention(query, key, value, implementation="cuda")


@pytest.fixture
def launched(monkeypatch):
    """Launches a decode step, and returns its CTAs."""
    from jax_memeff.codegen.toolchain import compile as compiler

    found = compiler.Compiled(b"code", (), (), (), "", 0.0, True)
    monkeypatch.setattr(compiler, "compile", lambda spec, arch: found)

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
