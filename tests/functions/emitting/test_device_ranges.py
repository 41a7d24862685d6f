"""The ranges that kernels compute: they hold for every element, and decide common masks."""

from __future__ import annotations

import os

import compiled_programs
import compiled_ranges
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import VMAP, Case
from random_programs import captured_arrays, dims_of, programs
from test_random_programs import decoded

from jax_memeff._functions.trace import traced_mask_function

COUNT = int(os.environ.get("JAX_MEMEFF_PROGRAMS", "100"))
BATCH = 100
BOXES = 24


def assert_holds(case: Case, bounds: list[np.ndarray], found, ends: np.ndarray) -> int:
    """Every element lies in the range of its box; returns the number of decided bools."""
    decided = 0
    for index, value in enumerate(case.program.values):
        element = decoded(case.program, found, index)
        low, high = (np.repeat(bounds[index][:, end], np.diff(ends)) for end in (0, 1))
        with np.errstate(invalid="ignore"):  # NaN bounds claim nothing
            assert not ((element < low) | (element > high)).any(), value
        if value.dtype == "float32":
            claims = ~np.isnan(low) | ~np.isnan(high)
            assert not (np.isnan(element) & claims).any(), value
        if value.dtype == "bool":
            decided += (bounds[index][:, 0] == bounds[index][:, 1]).sum()
    return int(decided)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(max(1, COUNT // BATCH)))
def test_elements_of_random_programs_lie_within_ranges(seed):
    """With infinities, NaN, the largest integers, and reads in and out of bounds."""
    arrays = captured_arrays()
    drawn = [
        Case(program, True, [arrays[key] for key in dims_of(program)])
        for program in programs(min(COUNT, BATCH), seed)
    ]
    places = compiled_ranges.boxes(BOXES, seed)
    parts = [compiled_ranges.elements(box) for box in places]
    ends = np.cumsum([0, *map(len, parts)])
    evaluated = compiled_programs.evaluate(drawn, np.concatenate(parts))
    bounds = compiled_ranges.evaluate(drawn, places)
    decided = [
        assert_holds(case, own, found, ends)
        for case, own, found in zip(drawn, bounds, evaluated, strict=True)
    ]
    assert sum(decided) > 1000


ROWS, COLUMNS = 8, 16
SHAPE = 96, 128
doc = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 5, max(SHAPE)), jnp.int32))
first = jnp.array([70, 3])
prefix = jnp.array([7, 40])
window = jnp.array([3, 20, 1000])
parents = (-1, 0, 0, 1, 2)
tree = np.eye(5, dtype=bool)
for token in range(1, 5):
    tree[token] |= tree[parents[token]]
tree = jnp.asarray(tree)
blocks = jnp.asarray(np.random.default_rng(1).integers(0, 2, (3, 12, 8)), bool)
place = jnp.arange(max(SHAPE), dtype=jnp.float32)


def drafted(b, h, q, k):
    return (k < first[b]) | tree[q - first[b], jnp.maximum(k - first[b], 0)]


FUNCTIONS = {
    "causal": (lambda b, h, q, k: q >= k, 0),
    "a drafted tree": (drafted, 0),
    "prefix": (lambda b, h, q, k: (k < prefix[b]) | (k <= q), 0),
    "window of a head": (lambda b, h, q, k: jnp.abs(q - k) <= window[h], 0),
    "sinks and a window": (lambda b, h, q, k: (k < 4) | ((q - k < 20) & (k <= q)), 6),
    "table of blocks": (lambda b, h, q, k: blocks[h, q // ROWS, k // COLUMNS], 0),
    "two dimensions": (
        lambda b, h, q, k: (jnp.abs(q // 16 - k // 16) <= 1) & (jnp.abs(q % 16 - k % 16) <= 20),
        0,
    ),
    "distance": (lambda b, h, q, k: jnp.sqrt(jnp.square(0.5 * q - 0.5 * k) + 1.0) < 12.0, 0),
    "look-ahead": (lambda b, h, q, k: k // 4 <= q // 4, 0),
    "dilated": (lambda b, h, q, k: (q - k) % 3 == 0, 0),
    "documents": (lambda b, h, q, k: (doc[q] == doc[k]) & (k <= q), 0),
}
"""Functions, and how many tiles more than needed are undecided."""


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranges_decide_tiles_of_common_masks(name):
    function, missed = FUNCTIONS[name]
    program, arrays = traced_mask_function(function)
    case = Case(program, True, [np.stack([np.asarray(x)] * VMAP) for x in arrays])
    tiles = [
        (batch, head, head, q, q + ROWS - 1, k, k + COLUMNS - 1)
        for batch in range(2)
        for head in range(3)
        for q in range(0, SHAPE[0], ROWS)
        for k in range(0, SHAPE[1], COLUMNS)
    ]
    places = np.array(tiles, compiled_ranges.BOX)
    (bounds,) = compiled_ranges.evaluate([case], places)
    every, some = bounds[program.results[0]].T
    parts = [compiled_ranges.elements(box) for box in places]
    (found,) = compiled_programs.evaluate([case], np.concatenate(parts))
    valid = decoded(program, found, program.results[0]).reshape(len(places), ROWS * COLUMNS)
    is_decided = every == some
    np.testing.assert_array_equal(valid[is_decided], np.repeat(every[is_decided, None], 128, 1))
    is_uniform = valid.all(1) | ~valid.any(1)
    assert (is_uniform & ~is_decided).sum() == missed
    assert is_decided.any() or not is_uniform.any()
