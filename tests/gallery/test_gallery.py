"""Every function of the gallery against dense JAX: results, all gradients, and their precision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gallery_definitions as definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gallery import scores, windows
from gallery.catalog import ENTRIES, Shape
from gallery_case import compare

import jax_memeff
from jax_memeff import Mask

FOLDER = Path(__file__).parent
CPU, GPU = Shape(2, 4, 64), Shape(2, 4, 256)

names = pytest.mark.parametrize("name", ENTRIES)


def check(name: str, shape: Shape, head_dim: int, implementation: Any) -> None:
    """Compares float32 by a tolerance, and 16 bits by twice the error of dense JAX against
    float64.
    """
    for dtype in ("float32", "bfloat16", "float16"):
        for result, error in compare(name, shape, head_dim, implementation, dtype).items():
            assert error.ours <= error.limit, (dtype, result, error)


@pytest.mark.rotating(3)
@names
def test_results_and_gradients(name):
    check(name, CPU, 16, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@names
def test_results_and_gradients_in_kernels(name, head_dim):
    check(name, GPU, head_dim, "cuda")


def test_there_are_fourteen_and_each_has_a_definition():
    assert len(ENTRIES) >= 14
    assert set(ENTRIES) == {*definitions.SCORES, *definitions.MASKS}


@pytest.mark.rotating(3)
@names
def test_masks_are_their_definition(name):
    entry = ENTRIES[name]
    arguments = entry.arguments(CPU)
    mask = entry.call(*arguments).get("mask")
    if mask is None:
        assert name in definitions.SCORES
        return
    sizes = (CPU.batch, CPU.heads, entry.rows or CPU.length, CPU.length)
    want = definitions.MASKS[name](definitions.Index.of(*sizes), *map(np.asarray, arguments))
    want = np.broadcast_to(want, sizes)
    assert 0 < want.mean() < 1
    np.testing.assert_array_equal(jax.jit(lambda: mask.as_array(*sizes))(), want)


def test_errors_become_a_table(tmp_path):
    """The command measures errors, and the report of the benchmarks has a table of them."""
    results = tmp_path / "errors.json"
    small = ("--implementation", "xla", "--head-dims", "8", "--functions", "alibi")
    commands = (
        (FOLDER / "gallery_errors.py", *small, "--output", results),
        (FOLDER.parents[1] / "benchmarks" / "report.py", results),
    )
    for command in commands:
        done = subprocess.run(
            [sys.executable, *map(str, command)], check=True, capture_output=True, text=True
        )
    row = next(line for line in done.stdout.splitlines() if line.startswith("|alibi|"))
    ratios = [float(cell) for cell in row.split("|")[2:-1]]
    assert len(ratios) == 6 and all(0 <= ratio < 20 for ratio in ratios)


def test_layers_with_other_windows_run_in_one_scan():
    """Gemma's layers: five local ones and a global one, each with its own window."""
    lefts = jnp.array([8, 8, 8, 8, 8, 2**30], jnp.int32)
    x = jax.random.normal(jax.random.key(2), (1, 64, 2, 16))

    def layer(x, left):
        mask = windows.local_or_global(left)
        return x + jax_memeff.dot_product_attention(x, x, x, mask=mask), None

    scanned = jax.jit(lambda x: jax.lax.scan(layer, x, lefts)[0])(x)
    for left in lefts.tolist():
        window = (left, 0)
        x = x + jax.nn.dot_product_attention(x, x, x, local_window_size=window, is_causal=True)
    np.testing.assert_allclose(scanned, x, rtol=1e-5, atol=1e-5)


def test_equal_arguments_and_functions():
    """The docstrings name arguments of the call that do the same."""
    x = jax.random.normal(jax.random.key(3), (2, 64, 4, 16))
    call = jax_memeff.dot_product_attention
    np.testing.assert_allclose(
        call(x, x, x, score_mod=scores.soft_cap(2.0)), call(x, x, x, logits_soft_cap=2.0), rtol=1e-6
    )
    ids = ENTRIES["documents"].arguments(CPU)[0]
    pairs = (
        (ENTRIES["sliding_window"].make(8), Mask.window(8, 0)),
        (ENTRIES["documents"].make(ids), Mask.segments(ids, ids)),
    )
    for ours, same in pairs:
        np.testing.assert_array_equal(ours.as_array(2, 4, 64, 64), same.as_array(2, 4, 64, 64))
