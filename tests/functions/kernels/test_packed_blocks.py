"""Kernels read the block mask of packed sequences within its bounds."""

from __future__ import annotations

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask

LENGTHS = (70, 0, 3, 120)
LONGEST = 128
"""One tile of the last sequence lies beyond it, and beyond the longest one that the call allows."""


def gradients(arch: str, seed: int, head_dim: int) -> Any:
    """The seed decides whether an inaccessible page lies before or behind each buffer."""
    emulator.configure(arch, seed=seed, multiprocessors=2)
    starts = np.cumsum((2, *LENGTHS)).astype(np.int32)
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal((200, heads, head_dim)) for heads in (4, 2, 2)]
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in drawn)

    def loss(query, key, value):
        out = jax_memeff.varlen_attention(
            query,
            key,
            value,
            starts,
            starts,
            LONGEST,
            LONGEST,
            mask=Mask.causal() | Mask.function(lambda b, h, q, k: k < 9 * b),
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)
    return jax.tree.map(np.asarray, found)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("call", [("sm_90a", 64), ("sm_80", 64)], ids=str)
def test_tiles_beyond_the_longest_sequence(call, machine):
    arch, head_dim = call
    one, other = (
        machine.submit(gradients, arch, seed, head_dim).result(timeout=600) for seed in (0, 1)
    )
    for ours, theirs in zip(one, other, strict=True):
        assert np.isfinite(np.float32(ours)).all()
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=2e-2, atol=1e-2)


TOKENS = 80
"""No sequence has them if all are empty."""

MASKS_OF_EMPTY = {
    "function": lambda: Mask.function(lambda b, h, q, k: (q - k) % 5 < 3),
    "segments": lambda: Mask.segments(*np.zeros((2, TOKENS), np.int32)),
}


def of_empty(arch: str, mask: str, longest: tuple[int, int]) -> Any:
    """Output, logsumexp and gradients. Runs in the process of ``machine``."""
    emulator.configure(arch, multiprocessors=2)
    operand = jnp.ones((TOKENS, 2, 64), jnp.bfloat16)
    starts = [np.array([3, 3, 3]) if size == 0 else np.array([3, 9, 70]) for size in longest]

    def attention(*operands: Any) -> Any:
        varlen_attention: Any = jax_memeff.varlen_attention
        return varlen_attention(
            *operands, *starts, *longest, mask=MASKS_OF_EMPTY[mask](), return_residual=True
        )

    def run(*operands: Any) -> Any:
        found, pullback = jax.vjp(attention, *operands)
        return found, pullback(jax.tree.map(jnp.ones_like, found))

    return jax.tree.map(np.asarray, jax.jit(run)(operand, operand, operand))


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "call",
    [
        ("sm_90a", "function", (0, 70)),
        ("sm_90a", "segments", (70, 0)),
        ("sm_80", "function", (0, 0)),
    ],
    ids=str,
)
def test_all_sequences_are_empty(call, machine):
    (out, lse), gradients = machine.submit(of_empty, *call).result(timeout=600)
    assert not np.float32(out).any() and (lse == -np.inf).all()
    for gradient in gradients:
        assert not np.float32(gradient).any()
