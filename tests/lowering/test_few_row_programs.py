"""CUDA programs of calls with few queries and head dims above 256."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_programs import attention_calls, lower, types_of

import jax_memeff
from jax_memeff import Mask

attention: Any = jax_memeff.dot_product_attention


def arrays(batch=2, rows=1, columns=4096, heads=16, key_heads=1, dims=(576, 512)):
    sizes = (rows, heads, dims[0]), (columns, key_heads, dims[0]), (columns, key_heads, dims[1])
    return [jax.ShapeDtypeStruct((batch, *size), jnp.bfloat16) for size in sizes]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("sizes", "given", "query"),
    [
        ({}, {}, "32x16x1x576"),  # parts of 256 keys
        ({"rows": 4, "key_heads": 2, "batch": 1}, {}, "16x32x2x576"),
        ({"columns": 4099}, {}, "2x16x1x576"),  # a prime
        ({"batch": 200}, {}, "200x16x1x576"),
        ({}, {"mask": Mask.causal("bottom_right")}, "32x16x1x576"),
        ({"heads": 1}, {}, "32x1x1x576"),
        ({"rows": 2}, {"mask": Mask.causal("bottom_right")}, "2x2x16x576"),
        ({}, {"bias": np.zeros((1, 16, 1, 1), np.float32)}, "2x1x16x576"),
        ({"rows": 100}, {}, "2x100x16x576"),
        ({"dims": (256, 256)}, {}, "2x1x16x256"),
    ],
)
def test_the_heads_of_a_key_head_are_rows_and_parts_of_the_keys_a_batch(
    sizes, given, query, fake_compiler
):
    (call,) = attention_calls(lower(lambda *x: attention(*x, **given), *arrays(**sizes)))
    assert types_of(call)[0][0] == f"{query}xbf16"


def test_a_vmap_that_shares_keys_keeps_the_call_whole(fake_compiler, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
    query, key, value = arrays()
    queries = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    mapped = jax.vmap(attention, (0, None, None))
    (call,) = attention_calls(lower(mapped, queries, key, value))
    assert types_of(call)[0][:2] == ["6x1x16x576xbf16", "2x4096x1x576xbf16"]


@pytest.mark.usefixtures("hopper")
def test_a_symbolic_batch_is_refused():
    (batch,) = jax.export.symbolic_shape("b")
    query, key, value = (jax.ShapeDtypeStruct((batch, n, 1, 320), jnp.bfloat16) for n in (1, 9, 9))
    with pytest.raises(jax_memeff.UnsupportedError, match="programs for CUDA need static sizes"):
        jax.export.export(jax.jit(attention), platforms=["cuda"])(query, key, value)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"columns": 0}, {"rows": 0}])
def test_empty_calls_stay_whole(sizes, fake_compiler):
    lower(attention, *arrays(**sizes))
