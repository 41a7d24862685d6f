"""Paged calls read pools, and write new tokens, in place: a pool of any size costs the same."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from paging import append_to_pages, paged_attention

FUSED: Any = (
    {"xla_cpu_use_fusion_emitters": True}
    if "fusion_emitters" in os.environ.get("XLA_FLAGS", "")
    else {}
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


@pytest.mark.rotating(3)
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


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", [1, 2])
def test_tokens_are_written_in_place(dtype, heads):
    def append(pools: Any, key: Any, value: Any, table: Any, lengths: Any) -> Any:
        return append_to_pages(*pools, key, value, table, lengths)

    def memory_of(pages: int) -> Any:
        new = [jax.ShapeDtypeStruct((3, 2, heads, 32), dtype)] * 2
        pool = jax.ShapeDtypeStruct((pages, 16, heads, 32), dtype)
        where = jax.ShapeDtypeStruct((3, 4), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
        program = jax.jit(append, donate_argnums=0).lower([pool] * 2, *new, *where)
        return program.compile(FUSED).memory_analysis()

    of_small, of_large = memory_of(16), memory_of(4096)
    assert of_small.temp_size_in_bytes == of_large.temp_size_in_bytes
    assert of_large.alias_size_in_bytes == 2 * 4096 * 16 * heads * 32 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_loop_of_decode_steps_copies_no_pool(dtype):
    scale = jnp.ones(1) if dtype == "float8_e4m3fn" else None

    def steps(pools: Any, new: Any, table: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            pools, lengths = carry
            where = {"key_scale": scale, "value_scale": scale}
            pools = append_to_pages(*pools, new, new, table, lengths, **where)
            out = paged_attention(new, *pools, table, lengths, **where)
            return (pools, lengths + 1), out

        return jax.lax.scan(step, (pools, jnp.full(2, 3)), length=20)

    def temporary_bytes(pages: int) -> int:
        pools = (jax.ShapeDtypeStruct((pages, 16, 1, 32), dtype),) * 2
        new = jax.ShapeDtypeStruct((2, 1, 1, 32), jnp.bfloat16)
        program = jax.jit(steps, donate_argnums=0).lower(
            pools, new, jax.ShapeDtypeStruct((2, 4), jnp.int32)
        )
        memory: Any = program.compile(FUSED).memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary_bytes(16) == temporary_bytes(4096)
