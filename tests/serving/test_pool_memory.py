"""A paged call reads its pools where they are: it needs the same memory for a pool of any size."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from paging import paged_attention

FUSED: Any = (
    {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ["XLA_FLAGS"] else {}
)
"""The option with which XLA compiles like users' programs, if tests/conftest.py has changed it."""


def temporary_bytes(pages: int, pool: Any, *, heads: int, dim: int, **given: Any) -> int:
    """What XLA allocates for a call of two decode steps, besides arguments and results."""
    is_latent = "value_dim" in given
    pools = [jax.ShapeDtypeStruct((pages, 16, heads, dim), pool)] * (1 if is_latent else 2)
    dtype = jnp.bfloat16 if pool == jnp.float8_e4m3fn else pool
    program = jax.jit(functools.partial(paged_attention, implementation="xla", **given)).lower(
        jax.ShapeDtypeStruct((2, 1, 8, dim), dtype),
        *pools,
        *[None] * is_latent,
        jax.ShapeDtypeStruct((2, 8), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    memory: Any = program.compile(FUSED).memory_analysis()
    return memory.temp_size_in_bytes


ONE_HEAD = {"heads": 1, "dim": 64}
LATENT = {"heads": 1, "dim": 80, "value_dim": 64}


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        *[(dtype, ONE_HEAD) for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn")],
        *[(dtype, LATENT) for dtype in ("float32", "bfloat16", "float8_e4m3fn")],
        ("float32", {"heads": 2, "dim": 64}),
        ("bfloat16", {"heads": 8, "dim": 32, "local_window_size": (20, 0)}),
    ],
    ids=str,
)
def test_temporaries_do_not_grow_with_the_pool(dtype, sizes):
    """With one key head, XLA once chose another layout of the pool for the loops, and copied it."""
    of_small, of_large = (temporary_bytes(pages, jnp.dtype(dtype), **sizes) for pages in (16, 4096))
    assert of_small == of_large
