"""Counts the sources that 20 functions compile, and the time; prints one line of JSON.

``python benchmarks/function_compile.py cuda|xla``. A source contains the kernels of one direction.
Each function is lowered for a forward and backward, and again for another length. Nothing runs, so
no GPU is needed if ``JAX_MEMEFF_ARCHS`` is set.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from programs import compiled_kernels

import jax_memeff

# Like the examples, the benchmarks are scripts and not a package.
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from gallery import scores
from gallery.catalog import ENTRIES, Shape

_BATCH, _HEADS, _HEAD_DIM = 4, 16, 128
_LENGTHS = (4096, 8192)

Call = Callable[..., dict[str, Any]]
"""Maps arrays and static numbers to arguments of ``dot_product_attention``."""


def functions() -> Iterator[tuple[str, Call, Any]]:
    """Names, calls, and the gallery entries whose examples supply the arguments of the calls."""
    for name, entry in ENTRIES.items():
        if entry.has_kernels:
            yield name, entry.call, entry

    def same(cap: float) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, q, k: score}

    def capped_alibi(slopes: jax.Array) -> dict[str, Any]:
        alibi, cap = scores.alibi(slopes), scores.soft_cap(2.0)
        return {"score_mod": lambda s, b, h, q, k: alibi(cap(s, b, h, q, k), b, h, q, k)}

    yield "identity", same, ENTRIES["soft_cap"]
    yield "capped_alibi", capped_alibi, ENTRIES["alibi"]


def lower(call: Call, entry: Any, length: int, implementation: Any) -> None:
    """Compiles the kernels of a forward and a backward with gradients of all float arrays."""
    arguments = entry.arguments(Shape(_BATCH, _HEADS, length))
    arrays = {i: x for i, x in enumerate(arguments) if isinstance(x, jax.Array)}
    floats = {i: x for i, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {i: x for i, x in arrays.items() if i not in floats}
    static = {i: x for i, x in enumerate(arguments) if i not in arrays}

    def loss(operands, floats, others):
        found = static | floats | others
        out = jax_memeff.dot_product_attention(
            *operands, **call(*(found[i] for i in sorted(found))), implementation=implementation
        )
        return out.astype(jnp.float32).sum()

    query = jax.ShapeDtypeStruct((_BATCH, entry.rows or length, _HEADS, _HEAD_DIM), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((_BATCH, length, _HEADS, _HEAD_DIM), jnp.bfloat16)
    platform = "cuda" if implementation == "cuda" else "cpu"
    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    gradients.trace((query, key, key), floats, others).lower(lowering_platforms=(platform,))


def main() -> None:
    implementation: Any = sys.argv[1]
    compiled = compiled_kernels.record()
    seconds, sources = {}, {}
    for name, call, entry in functions():
        before, start = len(compiled), time.perf_counter()
        lower(call, entry, _LENGTHS[0], implementation)
        seconds[name] = time.perf_counter() - start
        sources[name] = len(compiled) - before
    before = len(compiled)
    for _, call, entry in functions():
        lower(call, entry, _LENGTHS[1], implementation)
    slowest = max(seconds, key=lambda name: seconds[name])
    print(
        json.dumps(
            {
                "functions": len(seconds),
                "sources": sources,
                "slowest": slowest,
                "seconds_of_slowest": seconds[slowest],
                "seconds": sum(seconds.values()),
                "sources_of_new_lengths": len(compiled) - before,
            }
        )
    )


if __name__ == "__main__":
    main()
