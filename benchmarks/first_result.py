"""Times each step of a fresh process up to its first forward+backward; prints a JSON line.

``python benchmarks/first_result.py cuda|xla``; ``host_cost.py`` runs it with an empty cache and
then with a filled one.
"""

import time

_start = time.perf_counter()

# The imports are timed too, so the clock starts before them.
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_memeff

_imported = time.perf_counter()

_cuda: Any = importlib.import_module("jax_memeff._cuda")


class TimedLowering:
    """Replaces the module ``jax_memeff._cuda.lowering``; ``seconds`` is the time of all its calls.

    This includes the import of the module, which imports the code generator. A profiler would
    double the time of everything that is written in Python.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        _cuda.lowering = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            module = importlib.import_module(f"{_cuda.__name__}.lowering")
            _cuda.lowering = self  # the first import replaced it by the module
            try:
                return getattr(module, name)(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


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
    code_generation = TimedLowering()
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
        "of_which_code_generation": code_generation.seconds,
        "xla_compile_and_load": compiled_at - lowered_at,
        "first_run": done - compiled_at,
        "first_call": done - ready,
        "total": done - _start,
    }
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
