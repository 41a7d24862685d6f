"""vmap of packed sequences and of packed projections equals separate calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from arrays import normal
from test_vmap import SIZE, B, H, N, T, gradients_of, names_of, one_by_one, run

import jax_memeff
from jax_memeff import Mask, Offsets

TOKENS = {
    "query": normal(14, SIZE, 9, 4, 8),
    "key": normal(15, SIZE, 8, 2, 8),
    "value": normal(16, SIZE, 8, 2, 8),
    "bias": normal(17, SIZE, 2, 1, 5, 6),
    "starts": jnp.array([[0, 4, 8], [1, 6, 7], [3, 3, 5]]),
    "segments": jnp.array([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 2, 2]]),
    "row": jnp.array([1, 0, 3]),
    "dropout_key": jax.random.split(jax.random.key(18), SIZE),
}


def packed(arrays: dict[str, Any]) -> Any:
    attention: Any = jax_memeff.varlen_attention
    return attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["starts"],
        arrays["starts"],
        5,
        6,
        arrays["bias"],
        Mask.segments(arrays["segments"], arrays["segments"][:8]),
        is_causal=True,
        offsets=Offsets(query=arrays["row"], key=jnp.array([0, 2])),
        dropout_rate=0.25,
        dropout_key=arrays["dropout_key"],
        return_residual=True,
    )


every_packed_gradient = gradients_of(packed)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "names", [("query",), ("bias",), ("starts",), ("row",), tuple(TOKENS)], ids="-".join
)
def test_packed_sequences(names, assert_close):
    arrays = {name: x if name in names else x[0] for name, x in TOKENS.items()}
    axes = {name: 0 if name in names else None for name in TOKENS}
    vmapped = jax.vmap(gradients_of(packed), in_axes=(axes,))
    assert "scan" not in names_of(vmapped, arrays)
    assert_close(run(vmapped, arrays), one_by_one(every_packed_gradient, names, arrays), 1e-5)


def test_packed_projections(assert_close):
    qkv, bias = normal(19, SIZE, B, T, 3, N, H), normal(20, SIZE, N, T, T)

    def attend(arrays: Any) -> Any:
        attention: Any = jax_memeff.dot_product_attention_packed
        return attention(arrays["qkv"], arrays["bias"], return_residual=True)

    arrays = {"qkv": qkv, "bias": bias}
    vmapped = jax.vmap(attend, ({"qkv": 0, "bias": 0},))
    assert "scan" not in names_of(vmapped, arrays)
    assert_close(run(vmapped, arrays), one_by_one(attend, ("qkv", "bias"), arrays))


def test_nested_vmap_of_a_function_with_an_array():
    """Only the outer vmap maps the array, so several sequences have a common gradient."""
    starts, slopes = jnp.array([0, 4, 8]), normal(19, 2, 4)

    def one(slopes, query):
        return jax_memeff.varlen_attention(
            query,
            TOKENS["key"][0],
            TOKENS["value"][0],
            starts,
            starts,
            5,
            6,
            score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q),
        )

    mapped = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    found = mapped(slopes, TOKENS["query"])
    for i in range(2):
        for j in range(SIZE):
            expected = one(slopes[i], TOKENS["query"][j])
            assert jnp.allclose(found[i, j], expected, atol=1e-6)
