"""Seconds from a fresh machine to a first gradient on a CPU, step by step, as a Markdown table.

    python benchmarks/first_minutes.py dist/jax_memeff-*.whl

The environment is made for this, and the kernel cache is empty. Every step runs once: the seconds
of pip depend on the index and its cache. The second column has the CPU seconds of all threads and
processes of a step, which other programs on the machine change less. Needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from reporting.markdown_table import table

_CLOCK = """
import json, resource, time

def now():
    both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(processes) for processes in both]
    return time.perf_counter(), sum(x.ru_utime + x.ru_stime for x in used)

times = [now()]
"""
_FIRST_CALLS = """
import jax
times.append(now())
from jax_memeff import dot_product_attention
times.append(now())

def loss(query, key, value):
    return dot_product_attention(query, key, value, is_causal=True).sum()

x = jax.random.normal(jax.random.key(0), (2, 1024, 8, 64)).block_until_ready()
step = jax.jit(jax.grad(loss, (0, 1, 2)))
times.append(now())
for _ in range(2):
    jax.block_until_ready(step(x, x, x))
    times.append(now())
print(json.dumps(times))
"""
_LOWERING = """
import jax, jax.numpy as jnp
from jax_memeff import dot_product_attention

def loss(query, key, value):
    return dot_product_attention(query, key, value, is_causal=True).astype(jnp.float32).sum()

query = jax.ShapeDtypeStruct((1, 2048, 32, 128), jnp.bfloat16)
key = jax.ShapeDtypeStruct((1, 2048, 8, 128), jnp.bfloat16)
times = [now()]
traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, key)
traced.lower(lowering_platforms=("cuda",))
times.append(now())
print(json.dumps(times))
"""


class Duration(NamedTuple):
    """Seconds of the wall clock, and of all processors together."""

    wall: float
    cpu: float


def _cpu() -> float:
    """The CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _durations(times: list[list[float]]) -> list[Duration]:
    """The differences of consecutive times.

    >>> _durations([[1.0, 0.5], [3.0, 1.0]])
    [Duration(wall=2.0, cpu=0.5)]
    """
    return [Duration(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)]


def steps(requirement: str, arch: str, directory: Path) -> Iterator[tuple[str, Duration]]:
    """The name of each step, and how long it takes."""
    environment = directory / "environment"
    python = environment / "bin" / "python"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_MEMEFF_ARCHS": arch}
    variables |= {"JAX_MEMEFF_CACHE_DIR": str(directory / "cache")}
    variables.pop("PYTHONPATH", None)

    def took(*command: str | Path) -> Duration:
        times = [[time.perf_counter(), _cpu()]]
        subprocess.run(command, check=True, env=variables, stdout=subprocess.DEVNULL)
        times.append([time.perf_counter(), _cpu()])
        return _durations(times)[0]

    def parts(program: str, **more: str) -> list[Duration]:
        command = [python, "-P", "-c", _CLOCK + program]
        done = subprocess.run(
            command, check=True, env=variables | more, stdout=subprocess.PIPE, text=True
        )
        return _durations(json.loads(done.stdout))

    install = (python, "-m", "pip", "install", "--quiet")
    yield "`python -m venv`", took(sys.executable, "-m", "venv", environment)
    yield "`pip install WHEEL`", took(*install, requirement)
    imported, ready, _, first, again = parts(_FIRST_CALLS)
    yield "`import jax`", imported
    yield "`from jax_memeff import dot_product_attention`", ready
    yield "first forward and backward on the CPU, compilation included", first
    yield "the same again", again
    yield '`pip install "WHEEL[nvrtc]"` after that', took(*install, f"{requirement}[nvrtc]")
    training = f"lowering a bfloat16 training step for {arch}"
    yield f"{training}, two kernels compiled by NVRTC", parts(_LOWERING)[0]
    yield f"{training}, kernels from the cache", parts(_LOWERING)[0]
    archive = directory / "kernels.zip"
    build = (python, "-P", "-m", "jax_memeff", "build", "--models", "llama", "--arch", arch)
    yield "`python -m jax_memeff build --models llama`", took(*build, "--output", archive)
    empty = {"JAX_MEMEFF_KERNELS": str(archive), "JAX_MEMEFF_CACHE_DIR": str(directory / "empty")}
    yield f"{training}, kernels from this archive", parts(_LOWERING, **empty)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("requirement", help="what pip installs: a wheel or a clone")
    parser.add_argument("--arch", default="sm_90a", help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = []
        for name, taken in steps(options.requirement, options.arch, Path(directory)):
            print(f"{taken.wall:8.2f} {taken.cpu:8.2f} s  {name}", file=sys.stderr)
            rows.append([name, *(f"{x:.2f}" if x < 1 else f"{x:.1f}" for x in taken)])
    print(table(["step", "seconds", "CPU seconds"], rows))


if __name__ == "__main__":
    main()
