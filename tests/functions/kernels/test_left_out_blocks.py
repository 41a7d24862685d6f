"""A consumer of a Hopper forward leaves out KV blocks to which only the rows of others attend."""

from __future__ import annotations

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask

T = 900
BORDERS = (330, 400, 790)
"""They cross tiles of 128 and of 192 rows. Documents have up to seven KV blocks, and a ring has two
buffers, so consumers leave out more blocks than the ring holds: before those of their own rows,
behind them, and between two work tiles.
"""


def document(position: Any) -> Any:
    return sum((position >= border) * 1 for border in BORDERS)


def attended(head_dim: int, dtype: str, multiprocessors: int) -> tuple[Any, Any]:
    """Output and logsumexp of the kernel, and those of the definition."""
    emulator.configure("sm_90a", multiprocessors=multiprocessors, seed=head_dim)
    drawn = np.random.default_rng(1).standard_normal((3, 1, T, 2, head_dim))
    operands = jnp.asarray(drawn, dtype)
    mask = Mask.function(lambda b, h, q, k: document(q) == document(k))
    found = jax.jit(
        lambda *x: jax_memeff.dot_product_attention(*x, mask=mask, return_residual=True)
    )(*operands)

    query, key, value = np.asarray(operands, np.float64)[:, 0]
    scores = np.einsum("tnh,snh->tns", query, key) * head_dim**-0.5
    rows = document(np.arange(T))
    scores = np.where((rows[:, None] == rows)[:, None], scores, -np.inf)
    logsumexp = np.log(np.exp(scores).sum(-1))
    out = np.einsum("tns,snh->tnh", np.exp(scores - logsumexp[..., None]), value)
    return [np.asarray(x, np.float32)[0] for x in found], [out, logsumexp]


@pytest.mark.parametrize(
    "call",
    [(64, "bfloat16", 1), (64, "float16", 3), (128, "bfloat16", 2), (96, "float32", 1)],
    ids=str,
)
def test_documents_that_share_a_tile(call, machine):
    found, want = machine.submit(attended, *call).result(timeout=600)
    tolerance = 1e-5 if call[1] == "float32" else 1e-2
    for ours, theirs in zip(found, want, strict=True):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)
