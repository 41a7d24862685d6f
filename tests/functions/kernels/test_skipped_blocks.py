"""Kernels skip the tiles of scores in which a mask function has no valid element."""

from __future__ import annotations

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask

BLOCK, BLOCKS, GROUP = 128, 3, 2
SKIPPED = 1
"""The index of a KV block to which no row attends, and of a Q block whose rows attend to
nothing.
"""
T = BLOCK * BLOCKS
HEADS = 2


def valid(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The first head skips one more tile, so the heads of a group skip different tiles."""
    of_all = (k // BLOCK != SKIPPED) & (q // BLOCK != SKIPPED)
    return of_all & ((h != 0) | (q // BLOCK != 0) | (k // BLOCK == 0))


def gradients(arch: str, head_dim: int, value_dim: int, deterministic: bool) -> tuple[Any, Any]:
    """Output and gradients with NaN in skipped rows, and the definition's with zeros there."""
    emulator.configure(arch, multiprocessors=2)
    rng = np.random.default_rng(3)
    shapes = {"query": (HEADS, head_dim), "key": (HEADS // GROUP, head_dim)}
    shapes |= {"value": (HEADS // GROUP, value_dim), "dout": (HEADS, value_dim)}
    drawn = {
        name: rng.standard_normal((1, T, *shape)).astype(jnp.bfloat16)
        for name, shape in shapes.items()
    }
    bias = rng.standard_normal((1, 1, T, T)).astype(jnp.bfloat16)
    skipped = np.arange(T) // BLOCK == SKIPPED
    clean = {name: np.where(skipped[:, None, None], 0, x) for name, x in drawn.items()}
    dirty = {name: np.where(skipped[:, None, None], np.nan, x) for name, x in drawn.items()}

    def ours(arrays: Any) -> Any:
        return jax_memeff.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            arrays["bias"],
            mask=Mask.function(valid),
            deterministic_backward=deterministic,
        )

    def defined(arrays: Any) -> Any:
        query, *keys = (arrays[name].astype(jnp.float32) for name in ("query", "key", "value"))
        key, value = (jnp.repeat(x, GROUP, 2) for x in keys)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * head_dim**-0.5
        scores += arrays["bias"].astype(jnp.float32)
        inside = valid(*np.ix_(*map(np.arange, scores.shape)))
        weights = jax.nn.softmax(jnp.where(inside, scores, -1e30), axis=-1) * inside
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    def run(attention: Any, arrays: Any) -> Any:
        dout = jnp.asarray(arrays["dout"]).astype(jnp.float32)

        def pulled(operands: Any) -> Any:
            out, pullback = jax.vjp(attention, operands)
            return out, pullback(dout.astype(out.dtype))[0]

        operands = {name: arrays[name] for name in ("query", "key", "value")} | {"bias": bias}
        return jax.tree.map(np.asarray, jax.jit(pulled)(operands))

    return run(ours, dirty), run(defined, clean)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "call",
    [("sm_80", 264, 72, True), ("sm_90a", 64, 64, False)],
    ids=str,
)
def test_skipped_tiles_are_not_read(call, machine, assert_close):
    """NaN in memory that only skipped tiles would read reaches no result."""
    found = machine.submit(gradients, *call).result(timeout=600)
    (out, own), (want_out, want) = found
    assert_close((out, own), (want_out.astype(out.dtype), want), 1e-2)
