"""Block masks agree with the elements of each tile."""

from __future__ import annotations

import dataclasses
import functools

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_case import Case
from jax.sharding import AxisType

from jax_memeff import Mask, dot_product_attention
from jax_memeff._call import functions
from jax_memeff._call.mask import block_mask
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.options import Divisors
from jax_memeff._call.sequences import Sequences
from jax_memeff._cuda import block_mask as block_masks
from jax_memeff.codegen.launch import BlockMask

B, N, T, S = 2, 3, 300, 270
QUERY, KEY = 64, 48
NONE, ALL, SOME = 0, 1, 2


def drawn(block=None, **features):
    return Case(B=B, N=N, T=T, S=S, block=block, **features).element_mask(np.random.default_rng(0))


def tiles_of(mask):
    """Whether any and whether all elements of each tile are valid: [B, N, Q blocks, KV blocks]."""
    rows, columns = -(-T // QUERY), -(-S // KEY)
    valid = np.asarray(mask.as_array(B, N, T, S))
    padding = (0, 0), (0, 0), (0, rows * QUERY - T), (0, columns * KEY - S)
    shape = B, N, rows, QUERY, columns, KEY
    some = np.pad(valid, padding).reshape(shape).any((3, 5))
    every = np.pad(valid, padding, constant_values=True).reshape(shape).all((3, 5))
    return some, every


def map_of(mask, tile):
    """The ranges and the classes of tiles of a block mask, [B, N, rows of blocks, ...]."""
    found = jax.jit(
        lambda mask: block_masks.lines(mask, None, None, tile, (B, N, T, S), Divisors())
    )(mask)
    count = -(-S // KEY) if tile.lines == "queries" else -(-T // QUERY)
    assert found.shape[3] % 8 == 0 and found.shape[3] > 8 + count
    found = np.broadcast_to(np.asarray(found), (B, N, *found.shape[2:]))
    ranges = np.ascontiguousarray(found[..., :8]).view(np.int32)
    return ranges, found[..., 8 : 8 + count]


@pytest.mark.parametrize(
    ("mask", "exact"),
    [
        (drawn(segments=1), True),
        (drawn(segments=2, block=96), False),
        (drawn(boolean=("BNTS",), block=64), True),
        (drawn(boolean=("1N1S", "B1T1"), block=64), True),
        (drawn(boolean=("B1T1",), segments=2, block=128), False),
        (drawn(boolean=("1NTS",)) & Mask.boolean(jnp.zeros((1, 1, 1, 1), bool)), True),
    ],
    ids=["segments", "two segments", "boolean", "two booleans", "both", "nothing"],
)
def test_tiles_with_a_valid_element_are_computed(mask, exact):
    """With unsorted ids a tile without valid elements may stay, but none with some is skipped."""
    some, every = tiles_of(mask)
    _, by_query = map_of(mask, BlockMask("queries", QUERY, KEY))
    np.testing.assert_array_equal((by_query != NONE) & some, some)
    if exact:
        np.testing.assert_array_equal(by_query != NONE, some)
    np.testing.assert_array_equal(by_query == ALL, every & some)
    ranges, by_key = map_of(mask, BlockMask("keys", QUERY, KEY))
    np.testing.assert_array_equal(by_key, by_query.swapaxes(2, 3))
    index, computed = np.arange(by_key.shape[3]), by_key != NONE
    np.testing.assert_array_equal(ranges[..., 0], np.where(computed, index, len(index)).min(3))
    np.testing.assert_array_equal(ranges[..., 1], np.where(computed, index + 1, 0).max(3))


@pytest.mark.quick
@pytest.mark.parametrize("parts", [2, 3])
def test_each_consumer_has_two_bits(parts):
    """The bits of a consumer are those of a tile with only its rows.

    Some parts of the last Q block have no rows.
    """
    mask = drawn(boolean=("BNTS",), block=64)
    _, whole = map_of(mask, BlockMask("queries", parts * QUERY, KEY, parts))
    _, of_parts = map_of(mask, BlockMask("queries", QUERY, KEY))
    bits = np.stack([whole >> 2 * part & 3 for part in range(parts)], 3)
    bits = bits.reshape(B, N, -1, whole.shape[3])
    count = of_parts.shape[2]
    np.testing.assert_array_equal(bits[:, :, :count], of_parts)
    assert bits.shape[2] > count
    assert (bits[:, :, count:] == NONE).all()
    assert {NONE, ALL, SOME} == set(np.unique(of_parts))


@pytest.mark.quick
def test_disjoint_ids_skip_tiles():
    """The ids are unsorted, and some are negative."""
    query = np.repeat([5, 1, 9, 2, 5], QUERY)[:T]
    key = np.repeat([2, 9, -1, 5, 7, 1], KEY)[:S]
    key[5:9] = -3
    _, tiles = map_of(Mask.segments(query[None], key[None]), BlockMask("queries", QUERY, KEY))
    expected = query[::QUERY, None] == key[::KEY]
    some = np.where(key[::KEY] == 2, SOME, ALL)
    np.testing.assert_array_equal(tiles[0, 0], np.where(expected, some, NONE))


@pytest.mark.parametrize("divisor", [1, 3])
def test_block_masks_of_broadcast_masks_have_the_whole_batch(divisor):
    """One mask has two of 12 batch indices; another mask and the ids have all."""
    batch = 12
    case = Case(B=batch, N=N, T=T, S=S, block=64, segments=1, boolean=("BNTS", "B11S"))
    mask = case.element_mask(np.random.default_rng(0))
    first, second = mask.booleans
    tile = BlockMask("queries", QUERY, KEY)
    expanded = first[np.arange(batch) // divisor % 2]

    @functools.partial(jax.jit, static_argnums=1)
    def lines(mask, shared):
        return block_masks.lines(mask, None, None, tile, (batch, N, T, S), shared)

    for others in ((), (second,)):
        found, expected = (
            lines(dataclasses.replace(mask, booleans=(array, *others)), shared)
            for array, shared in (
                (first[:2], Divisors((("mask.booleans.0", divisor),))),
                (expanded, Divisors()),
            )
        )
        np.testing.assert_array_equal(found, expected)


STARTS, LENGTHS = np.array([3, 40, 40, 300, 520]), np.array([30, 0, 260, 200])
LONGEST = 260


def packed_tiles(mask, tile):
    """The tiles that kernels read for packed sequences whose rows and columns are the same
    tokens.
    """
    starts, lengths = jnp.asarray(STARTS), jnp.asarray(LENGTHS)
    sequences = Sequences(starts, starts, lengths, lengths, LONGEST, LONGEST)
    scores = len(LENGTHS), N, LONGEST, LONGEST
    canonical = mask.canonical(len(LENGTHS), LONGEST, LONGEST, tokens=(517, 517))
    canonical = compiled(canonical, Frame.of(canonical, (LONGEST, LONGEST)))
    state = functions.state(len(LENGTHS), N)

    @jax.jit
    def lines():
        return block_masks.lines(canonical, state, None, tile, scores, Divisors(), sequences)

    count = -(-LONGEST // (tile.key if tile.lines == "queries" else tile.query))
    found = np.asarray(lines())[..., 8 : 8 + count]
    found = found if tile.lines == "queries" else found.swapaxes(2, 3)
    return np.broadcast_to(found, (len(LENGTHS), N, *found.shape[2:]))


IDS = np.sort(np.random.default_rng(3).integers(0, 9, 517)).astype(np.int32)
PACKED_MASKS = {
    "segments": Mask.segments(IDS, IDS),
    "boolean": Mask.boolean(np.random.default_rng(4).random((1, N, LONGEST, 1)) < 0.02),
    "function": Mask.function(lambda b, h, q, k: (q // 50 == k // 50) | (k < 9 * b * h)),
    "lists": Mask.kv_blocks(np.array([[1, -1], [0, 2], [1, 1], [9, 0], [4, 0]]), block_size=64),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("by_bounds", [False, True])
@pytest.mark.parametrize("rows", ["queries", "keys"])
@pytest.mark.parametrize("name", PACKED_MASKS)
def test_packed_sequences(name, rows, by_bounds, monkeypatch):
    """The tiles of a sequence begin at its start; those beyond its end are never read."""
    if by_bounds:
        monkeypatch.setattr(block_mask, "_MOST_EVALUATIONS", 0)
    found = packed_tiles(PACKED_MASKS[name], BlockMask(rows, QUERY, KEY))
    for index, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=False)):
        if name == "segments":
            own = IDS[start : start + length]
            valid = np.broadcast_to(own[:, None] == own, (N, length, length))
        else:
            mask = PACKED_MASKS[name]
            valid = mask.as_array(len(LENGTHS), N, LONGEST, LONGEST)[index, :, :length, :length]
        for row, column in np.ndindex(-(-length // QUERY), -(-length // KEY)):
            part = np.asarray(valid)[
                :, row * QUERY : (row + 1) * QUERY, column * KEY : (column + 1) * KEY
            ]
            levels = found[index, :, row, column]
            assert (levels[part.any((1, 2))] != NONE).all()
            assert part[levels == ALL].all()
            if name == "function" and not by_bounds:
                assert (levels[~part.any((1, 2))] == NONE).all()


def test_a_block_mask_of_many_sequences_is_small(monkeypatch):
    monkeypatch.setattr(block_masks, "_MOST_TILES_OF_SEQUENCES", 100)
    tile = BlockMask("queries", QUERY, KEY)
    assert (packed_tiles(PACKED_MASKS["function"], tile) == SOME).all()
    assert (packed_tiles(PACKED_MASKS["segments"], BlockMask("queries", 96, 96)) != SOME).any()


WINDOW = Mask.function(lambda b, h, q, k: (q - k < 100) & (k <= q)).canonical(B, T, S)
OF_HEADS = Mask.function(lambda b, h, q, k: q - k < 100 * h).canonical(B, T, S)


@pytest.fixture
def no_cached_masks():
    block_masks.constant_lines.cache_clear()
    yield
    block_masks.constant_lines.cache_clear()


@pytest.mark.parametrize("rows", ["queries", "keys"])
def test_a_constant_block_mask_equals_a_computed_one(rows):
    tile, scores = BlockMask(rows, QUERY, KEY), (B, N, T, S)
    state = functions.state(B, N)
    computed = jax.jit(lambda: block_masks.lines(WINDOW, state, None, tile, scores, Divisors()))()
    np.testing.assert_array_equal(block_masks.constant_lines(WINDOW, tile, scores), computed)
    assert block_masks.constant_lines(OF_HEADS, tile, scores) is None


@pytest.mark.usefixtures("no_cached_masks")
def test_the_devices_of_a_mesh_do_not_compute_a_constant_block_mask(monkeypatch):
    """They may be those of other processes."""
    computed = []

    def on_devices(array):
        computed.append(array.devices())
        return np.asarray(array)

    monkeypatch.setattr(jax, "device_get", on_devices)
    first, second, *_ = jax.devices("cpu")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=[second])
    with jax.set_mesh(mesh):
        block_masks.constant_lines(WINDOW, BlockMask("queries", QUERY, KEY), (B, N, T, S))
    assert computed == [{first}]


@pytest.mark.usefixtures("no_cached_masks")
def test_large_block_masks_are_computed(monkeypatch):
    monkeypatch.setattr(block_masks, "_MOST_CONSTANT_BYTES", 10)
    tile = BlockMask("queries", QUERY, KEY)
    assert block_masks.constant_lines(WINDOW, tile, (B, N, T, S)) is None


@pytest.mark.usefixtures("no_cached_masks")
def test_without_the_cpu_block_masks_are_computed(monkeypatch):
    def no_cpu(backend):
        raise RuntimeError(f"unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_cpu)
    tile = BlockMask("queries", QUERY, KEY)
    assert block_masks.constant_lines(WINDOW, tile, (B, N, T, S)) is None


@pytest.mark.usefixtures("hopper", "fake_compiler")
def test_calls_compute_no_block_mask_of_positions():
    def reductions(function):
        def call(query, key, value):
            mask = Mask.function(function)
            return dot_product_attention(query, key, value, mask=mask, implementation="cuda")

        return cuda_programs.lower(call, *cuda_programs.shapes(T=4096, S=4096, N=32)).count(
            "stablehlo.reduce"
        )

    firsts = jnp.arange(2)
    assert reductions(lambda b, h, q, k: q - k < 9) == 0
    assert reductions(lambda b, h, q, k: q - k < firsts[b]) > 0
    assert reductions(lambda b, h, q, k: q - k < 9 * h) > 0
