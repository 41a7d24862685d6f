"""The memory of a learned table's gradient on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff


def temporary_bytes(length: int, heads: int = 4, head_dim: int = 64) -> int:
    """The temporary memory of all gradients, including that of ``table[h, q - k + length]``."""

    def loss(operands, table):
        def learned(score, b, h, q, k):
            return score + table[h, q - k + length]

        out = jax_memeff.dot_product_attention(*operands, score_mod=learned)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    x = jnp.ones((1, length, heads, head_dim), jnp.bfloat16)
    table = jnp.zeros((heads, 2 * length))
    program = jax.jit(jax.grad(loss, (0, 1))).lower((x, x, x), table).compile()
    memory = program.memory_analysis()
    assert memory is not None
    (_, _, _), found = program((x, x, x), table)
    assert np.isfinite(found).all()
    return memory.temp_size_in_bytes


@pytest.mark.gpu
def test_the_gradient_of_a_table_needs_no_buffer_of_all_scores():
    short, long = temporary_bytes(8192), temporary_bytes(32768)
    print(f"temporary bytes: {short} at T 8192, {long} at T 32768")
    scores = 32768 * 32768  # of a single head, one byte each
    assert long < scores / 4
    assert long < 4.2 * short
