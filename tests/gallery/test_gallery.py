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
from gallery import lists, scores, windows
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


@pytest.mark.rotating(5)
@names
def test_results_and_gradients(name):
    check(name, CPU, 16, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.has_kernels])
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


@pytest.mark.rotating(3)
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


def test_a_lightning_indexer():
    """The highest scores by the definition, in NumPy; rows with fewer keys have all of theirs.

    Keys whose products are all negative have the same score.
    """
    rng = np.random.default_rng(4)
    query, key, weights = (rng.standard_normal(x) for x in ((2, 70, 3, 8), (2, 70, 8), (2, 70, 3)))
    products = np.maximum(np.einsum("btjd,bsd->btjs", query, key), 0)
    scores = np.einsum("btjs,btj->bts", products, weights)
    indexer = jax.jit(lists.lightning_indexer, static_argnums=3)
    found = np.asarray(indexer(*map(jnp.asarray, (query, key, weights)), 6))
    for b, t in np.ndindex(2, 70):
        chosen = [k for k in found[b, t] if k <= t]
        assert len({*chosen}) == min(t + 1, 6)
        best = np.sort(scores[b, t, : t + 1])[::-1][:6]
        np.testing.assert_allclose(np.sort(scores[b, t, chosen])[::-1], best, atol=1e-5)


def test_a_window_and_compressed_keys_in_one_softmax(assert_close):
    """Results and gradients of one softmax over all of them."""
    keys = jax.random.split(jax.random.key(5), 4)
    query, *own = jax.random.normal(keys[0], (3, 2, 40, 2, 8))
    compressed = tuple(jax.random.normal(keys[1], (2, 2, 10, 2, 8)))
    chosen = jax.random.permutation(keys[2], jnp.arange(-2, 10), independent=True)[:5]
    chosen = jnp.where(chosen < jnp.arange(40)[:, None] // 4 - 2, chosen, -1)
    chosen = jnp.broadcast_to(chosen, (2, 40, 5))

    def dense(query, own, compressed):
        key, value = (jnp.concatenate(x, 1) for x in zip(own, compressed, strict=True))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 8**-0.5
        row = jnp.arange(40)[:, None]
        near = (jnp.arange(40) <= row) & (jnp.arange(40) >= row - 7)
        listed = (chosen[..., None] == jnp.arange(10)).any(2)[:, None]
        near = jnp.broadcast_to(near, (*listed.shape[:3], 40))
        valid = jnp.concatenate([near, listed], -1)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, where=valid), value)

    def merged(query, own, compressed):
        return lists.window_and_compressed(query, own, compressed, chosen, 7)

    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(
            query, tuple(own), compressed
        )
        for f in (merged, dense)
    )
    assert_close(got, want, 1e-5)
