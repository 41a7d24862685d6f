"""Times each step of a fresh process up to its first forward+backward; prints a JSON line.

``python benchmarks/first_result.py cuda|xla``; ``host_cost.py`` runs it with an empty cache and
then with a filled one.
"""

import time

_start = time.perf_counter()

# The imports are timed too, so the clock starts before them.
import cProfile
import json
import pstats
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_memeff
import jax_memeff.codegen

_imported = time.perf_counter()

_PACKAGE = Path(jax_memeff.__file__).parent
_CODEGEN = Path(jax_memeff.codegen.__file__).parent


def _generates_code(filename: str) -> bool:
    return not {_PACKAGE / "_cuda", _CODEGEN}.isdisjoint(Path(filename).parents)


def _code_generation_seconds(profile: cProfile.Profile) -> float:
    """Wall time in ``_cuda`` and ``codegen``, and in everything that they call.

    This is the cumulative time of all calls from a function outside of them to one inside.
    """
    # The type stubs of Python lack `stats`, and only it has the callers.
    return sum(
        cumulative
        for (filename, _, _), (*_, callers) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        if _generates_code(filename)
        for (caller, _, _), (_, _, _, cumulative) in callers.items()
        if not _generates_code(caller)
    )


def main() -> None:
    implementation: Any = sys.argv[1]

    def loss(query, key, value):
        out = jax_memeff.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        return out.astype(jnp.float32).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 2048, 32, 128), (2, 2048, 8, 128), (2, 2048, 8, 128))  # of Llama 3 8B
    operands = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    jax.block_until_ready(operands)
    ready = time.perf_counter()

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    with cProfile.Profile() as profile:
        lowered = function.lower(*operands)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    jax.block_until_ready(compiled(*operands))
    done = time.perf_counter()
    seconds = {
        "import": _imported - _start,
        "backend_and_inputs": ready - _imported,
        "trace_and_lower": lowered_at - ready,
        "of_which_code_generation": _code_generation_seconds(profile),
        "xla_compile_and_load": compiled_at - lowered_at,
        "first_run": done - compiled_at,
        "total": done - _start,
    }
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
