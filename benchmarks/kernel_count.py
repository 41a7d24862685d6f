"""Counts the kernels compiled for random shapes; prints one line of JSON.

``python benchmarks/kernel_count.py cuda|xla SHAPES``. Programs are lowered only, so with
``JAX_MEMEFF_ARCHS`` set it needs no GPU.
"""

import itertools
import json
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
from programs import compiled_kernels

import jax_memeff

_HEAD_DIM = 128


def _random_shapes(count: int):
    """Random tuples (B, T, S, N, K), from a fixed seed."""
    draw = random.Random(0)
    for _ in range(count):
        key_heads = draw.choice((1, 2, 4, 8))
        heads = key_heads * draw.choice((1, 2, 3, 4))
        yield draw.randint(1, 16), draw.randint(1, 8192), draw.randint(1, 8192), heads, key_heads


def main() -> None:
    implementation: Any = sys.argv[1]
    count = int(sys.argv[2])
    compiled = compiled_kernels.record()

    def loss(query, key, value):
        out = jax_memeff.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        return out.astype(jnp.float32).sum()

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    platform = "cuda" if implementation == "cuda" else "cpu"
    for batch, rows, columns, heads, key_heads in _random_shapes(count):
        query = jax.ShapeDtypeStruct((batch, rows, heads, _HEAD_DIM), jnp.bfloat16)
        key = jax.ShapeDtypeStruct((batch, columns, key_heads, _HEAD_DIM), jnp.bfloat16)
        function.trace(query, key, key).lower(lowering_platforms=(platform,))
    if implementation == "cuda" and not compiled:
        raise RuntimeError(
            "expected at least one kernel to be compiled, counted none: the cache directory of "
            "this process must be empty, and jax_memeff must compile through compile_source"
        )
    print(json.dumps({"shapes": count, "kernels": sorted(itertools.chain(*compiled))}))


if __name__ == "__main__":
    main()
