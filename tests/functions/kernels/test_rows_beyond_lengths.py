"""Values that a score function reads for rows beyond the query length reach no result."""

from __future__ import annotations

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask

HEADS = 2


def results(arch: str, dtype: str, head_dim: int, rows: int, columns: int, filler: float) -> Any:
    """Output, logsumexp and gradients; the array holds ``filler`` for rows beyond the length."""
    emulator.configure(arch, multiprocessors=2)
    rng = np.random.default_rng(4)
    shapes = {"query": rows, "key": columns, "value": columns, "dout": rows}
    drawn = {
        name: rng.standard_normal((1, length, HEADS, head_dim)).astype(jnp.dtype(dtype))
        for name, length in shapes.items()
    }
    dout = drawn.pop("dout")
    length = rows // 2 + 1
    bias = rng.standard_normal(rows).astype(np.float32)
    bias[length:] = filler

    def attention(arrays: Any, bias: Any) -> Any:
        return jax_memeff.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            score_mod=lambda s, b, h, q, k: s + bias[q] * (k % 3),
            mask=Mask.lengths(np.array([length])),
            return_residual=True,
        )

    def run(arrays: Any, bias: Any) -> Any:
        (out, lse), pullback = jax.vjp(attention, arrays, bias)
        return out, lse, pullback((dout, jnp.zeros_like(lse)))

    out, lse, (gradients, of_bias) = jax.tree.map(np.asarray, jax.jit(run)(drawn, bias))
    assert not out[:, length:].any() and (lse[:, length:] == -np.inf).all()
    return out, lse[:, :length], gradients, of_bias


@pytest.mark.rotating(5)
@pytest.mark.parametrize(
    "call",
    [
        ("sm_80", "bfloat16", 264, 40, 48),
        ("sm_80", "bfloat16", 64, 40, 48),
        ("sm_80", "bfloat16", 64, 4, 300),
        ("sm_90a", "bfloat16", 64, 150, 48),
    ],
    ids=str,
)
def test_nan_beyond_the_query_length(call, machine):
    want, found = (
        machine.submit(results, *call, filler).result(timeout=600) for filler in (1.0, np.nan)
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=1e-2, atol=1e-3)
