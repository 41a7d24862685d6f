"""Bounds of mask functions decide most tiles, and never wrongly."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import primitives_of
from random_programs import captured_arrays, dims_of, programs

from jax_memeff._call.mask import block_mask
from jax_memeff._call.mask.block_mask import ALL, NONE, SOME, Indices, Tiling
from jax_memeff._call.mask.bounds import Captured, evaluate, of_values
from jax_memeff._call.mask.ranges import Range
from jax_memeff._functions.trace import traced_mask_function

COUNT = int(os.environ.get("JAX_MEMEFF_PROGRAMS", "48"))
TILE, TILES = 16, 6
LENGTH = TILE * TILES - 5
BATCH, HEADS = 2, 3


def inputs_of_tiles(rng, has_score):
    """The ranges of the inputs in each tile, and the inputs at each element of it."""
    first = np.arange(TILES, dtype=np.int32) * TILE
    last = np.minimum(first + TILE, LENGTH) - 1
    elements = np.minimum(first[:, None] + np.arange(TILE, dtype=np.int32), LENGTH - 1)
    batch, head = np.arange(BATCH, dtype=np.int32), np.arange(HEADS, dtype=np.int32)
    ranges = {
        "batch": Range.exact(batch[:, None, None, None]),
        "head": Range.exact(head[:, None, None]),
        "query": Range(first[:, None], last[:, None], TILE - 1),
        "key": Range(first, last, TILE - 1),
    }
    points = {
        "batch": batch.reshape(-1, 1, 1, 1, 1, 1),
        "head": head.reshape(-1, 1, 1, 1, 1),
        "query": elements.reshape(TILES, 1, TILE, 1),
        "key": elements.reshape(1, TILES, 1, TILE),
    }
    if has_score:
        shape = BATCH, HEADS, TILES, TILES, TILE, TILE
        points["score"] = rng.normal(size=shape).astype("f4")
        score = points["score"]
        ranges["score"] = Range(score.min((4, 5)), score.max((4, 5)))
    return ranges, points


def of_tiles_and_elements(program, ranges, points, arrays):
    """The bounds of every value in each tile, and the value at its elements."""
    batch = np.arange(BATCH, dtype=np.int32)

    @jax.jit
    def run(bounds, points, arrays):
        def of(inputs, index):
            captured = [Captured(x, None if x.shape[0] == 1 else index) for x in arrays]
            return of_values(program, inputs, captured)

        inputs = {
            name: Range.exact(low) if ranges[name].is_exact else Range(low, high, TILE - 1)
            for name, (low, high) in bounds.items()
        }
        tiles = of(inputs, batch.reshape(-1, 1, 1, 1))
        exact = {name: Range.exact(x) for name, x in points.items()}
        elements = of(exact, batch.reshape(-1, 1, 1, 1, 1, 1))
        return [x[:2] for x in tiles], [x.low for x in elements]

    return run({name: x[:2] for name, x in ranges.items()}, points, arrays)


def may_end_xla(program):
    """Whether XLA might divide by 0, or INT32_MIN by -1, which can end the process on a CPU."""
    divisors = (
        program.values[value.args[1]]
        for value in program.values
        if value.op in ("div", "rem") and value.dtype != "float32"
    )
    return any(
        value.op != "size" and (value.op != "constant" or value.param("value") <= 0)
        for value in divisors
    )


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(COUNT // 8))
def test_elements_lie_within_bounds(seed):
    """Every value of random programs, with infinities, NaN, and sums that overflow."""
    rng = np.random.default_rng(seed)
    known = captured_arrays()
    for program in programs(8, seed):
        if may_end_xla(program):
            continue
        ranges, points = inputs_of_tiles(rng, True)
        arrays = [known[dims] for dims in dims_of(program)]
        with np.errstate(invalid="ignore"):  # JAX converts constants, NaN included, in NumPy
            tiles, elements = of_tiles_and_elements(program, ranges, points, arrays)
        for value, (low, high), element in zip(program.values, tiles, elements, strict=True):
            low, high = (np.asarray(x)[(..., *[None] * 2 * (np.ndim(x) > 0))] for x in (low, high))
            # A NaN bound bounds nothing.
            with np.errstate(invalid="ignore"):
                below, above = element < low, element > high
            assert not (below | above).any(), value
            if value.dtype == "float32":
                is_nan = np.isnan(element)
                claims = ~np.isnan(low) | ~np.isnan(high)
                assert not (is_nan & claims & (value.op != "score")).any(), value


doc = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 5, LENGTH), jnp.int32))
window = jnp.array([3, 20, 1000])
prefix = jnp.array([7, 40])
blocks = jnp.asarray(np.random.default_rng(1).integers(0, 2, (HEADS, 12, 6)), bool)
tree = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
place = jnp.arange(LENGTH, dtype=jnp.float32)
FUNCTIONS = {
    "causal": (lambda b, h, q, k: q >= k, 0),
    "documents": (lambda b, h, q, k: (doc[q] == doc[k]) & (k <= q), 0),
    "window of a head": (lambda b, h, q, k: jnp.abs(q - k) <= window[h], 0),
    "prefix": (lambda b, h, q, k: (k < prefix[b]) | (k <= q), 0),
    "global and local": (lambda b, h, q, k: (k < 2) | (q < 2) | (jnp.abs(q - k) < 9), 0),
    "blocks": (lambda b, h, q, k: blocks[h, q // 8, k // TILE], 0),
    "two dimensions": (
        lambda b, h, q, k: (
            (jnp.abs(q // TILE - k // TILE) <= 1) & (jnp.abs(q % TILE - k % TILE) <= 20)
        ),
        0,
    ),
    "array of elements": (lambda b, h, q, k: tree[q, k], 0),
    "distance": (
        lambda b, h, q, k: jnp.sqrt(jnp.square(place[q] - place[k]) + 1.0) < 20.0,
        0,
    ),
    "look-ahead": (lambda b, h, q, k: k // 4 <= q // 4, 0),
}
"""Functions, and how many tiles stay undecided although they need no test."""


@functools.cache
def levels(name):
    """The block mask from bounds alone, and the one from the elements."""
    function, _ = FUNCTIONS[name]
    program, arrays = traced_mask_function(function)
    ranges, points = inputs_of_tiles(None, False)

    @jax.jit
    def evaluated(arrays):
        captured = [Captured(x[None], None) for x in arrays]
        exact = {name: Range.exact(x) for name, x in points.items()}
        found = evaluate(program, ranges, captured)
        return found.low, found.high, evaluate(program, exact, captured).low

    low, high, valid = map(np.asarray, evaluated(arrays))
    shape = BATCH, HEADS, TILES, TILES
    valid = np.broadcast_to(valid, (*shape, TILE, TILE))
    some, every = valid.any((4, 5)), valid.all((4, 5))
    by_bounds = np.where(high, np.where(low, ALL, SOME), NONE)
    by_elements = np.where(some, np.where(every, ALL, SOME), NONE)
    return np.broadcast_to(by_bounds, shape), by_elements


@pytest.mark.quick("documents")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_decide_tiles_of_common_masks(name):
    by_bounds, by_elements = levels(name)
    decided = by_bounds != SOME
    np.testing.assert_array_equal(by_bounds[decided], by_elements[decided])
    assert (by_elements[~decided] != SOME).sum() == FUNCTIONS[name][1]
    assert decided.any() or (by_elements == SOME).all()


@pytest.mark.parametrize("name", ["documents", "window of a head", "prefix", "distance"])
def test_parts_of_tiles_decide_what_elements_decide(name, monkeypatch):
    """Several tile sizes, positions per batch index; elements, parts, and whole tiles."""
    program, arrays = traced_mask_function(FUNCTIONS[name][0])
    indices = Indices(
        jnp.arange(BATCH, dtype=jnp.int32),
        jnp.arange(HEADS, dtype=jnp.int32),
        jnp.array([0, 9], jnp.int32),
        jnp.array([4], jnp.int32),
    )
    captured = [
        Captured(jnp.stack([x, x[::-1]]), jnp.array([1, 0]) if index == 0 else None)
        for index, x in enumerate(arrays)
    ]
    tiling = Tiling((70, 66), (12, 16))

    def levels_of(parts):
        monkeypatch.setattr(block_mask, "_MOST_EVALUATIONS", parts * BATCH * HEADS * 6 * 5)
        return jax.jit(lambda: block_mask.of_function(program, indices, captured, tiling))()

    elements, parts, tiles = (np.asarray(levels_of(count)) for count in (12 * 16, 16, 1))
    assert {NONE, ALL, SOME} & set(np.unique(elements)) >= {SOME}
    for coarser, finer in ((parts, elements), (tiles, parts)):
        decided = coarser != SOME
        np.testing.assert_array_equal(coarser[decided], finer[decided])
    assert ((tiles != SOME).sum() <= (parts != SOME).sum()) and (parts != SOME).any()


def test_no_loop_waits_for_the_device():
    program, _ = traced_mask_function(lambda b, h, q, k: (q ^ k) % 3 == 0)
    one, first = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    tiling = Tiling((2**17, 2**17), (128, 128))
    jaxpr = jax.make_jaxpr(
        lambda: block_mask.of_function(program, Indices(one, one, first, first), [], tiling)
    )()
    assert not {e.primitive.name for e in primitives_of(jaxpr.jaxpr)} & {"while", "cond", "scan"}
