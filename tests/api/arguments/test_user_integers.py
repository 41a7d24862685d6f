"""Integers of any size and dtype keep their value, or raise an error with the range."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, Offsets
from jax_memeff._call.mask import tiles
from jax_memeff._call.mask.arguments import segment_ids
from jax_memeff._call.offsets import MOST_POSITION

IDS = {
    "beyond_int32": np.array([0, 2**32, 1, 2**31, 2**31 - 1, -1]),
    "wrap_to_valid": np.array([5, 5 - 2**32, 5 + 2**32, 5 + 2**33, -(2**63), 2**63 - 1]),
    "hashes": np.random.default_rng(0).choice(2**62, 6) | np.array([0, 1, 0, 1, 0, 1]),
    "unsigned": np.array([0, 2**31, 2**31 - 1, 2**32 - 1, 1, 7], np.uint32),
    "unsigned_64": np.array([0, 2**63, 2**64 - 1, 2**32, 2**31, 1], np.uint64),
    "small": np.array([-128, 127, 0, -1, 5, 5], np.int8),
    "int32": np.array([-(2**31), 2**31 - 1, 0, -1, 5, 5], np.int32),
}


def by_definition(query_ids, key_ids):
    """The valid elements bool[T, S], computed with Python's integers."""
    pairs = itertools.product(query_ids.tolist(), key_ids.tolist())
    shape = len(query_ids), len(key_ids)
    return np.array([a == b and a >= 0 for a, b in pairs]).reshape(shape)


def valid(mask, rows, columns):
    return np.asarray(mask.as_array(1, 1, rows, columns))[0, 0]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("where", ["host", "query_on_device", "keys_on_device", "device"])
@pytest.mark.parametrize(("a", "b"), [*zip(IDS, IDS, strict=True), ("unsigned", "wrap_to_valid")])
def test_segment_ids_compare_as_numbers(a, b, where, x64):
    query_ids, key_ids = IDS[a], np.concatenate([IDS[b][::-1], IDS[a][:3].astype(IDS[b].dtype)])
    expected = by_definition(query_ids, key_ids)
    assert expected.any()
    given = [
        jnp.asarray(ids) if where in (name, "device") else ids
        for name, ids in (("query_on_device", query_ids), ("keys_on_device", key_ids))
    ]
    assert [x.dtype for x in given] == [query_ids.dtype, key_ids.dtype]
    sizes = len(query_ids), len(key_ids)
    np.testing.assert_array_equal(valid(Mask.segments(*given), *sizes), expected)
    direct = Mask(segment_ids=((given[0], given[1]),))  # type: ignore[arg-type]
    np.testing.assert_array_equal(valid(direct, *sizes), expected)
    traced = jax.jit(lambda *ids: Mask.segments(*ids).as_array(1, 1, *sizes)[0, 0])
    np.testing.assert_array_equal(traced(*given), expected)


def test_large_ids_survive_the_way_into_jit():
    """Without x64 jax wraps 64-bit arguments, so ids must become small before they enter jit."""
    ids = np.array([0, 2**32, 2**33 + 1, -(2**32) + 5])
    traced = jax.jit(lambda mask: mask.as_array(1, 1, 4, 4)[0, 0])(Mask.segments(ids, ids))
    np.testing.assert_array_equal(traced, by_definition(ids, ids))


def test_ids_that_fit_cost_one_pair_and_skip_what_they_did():
    assert len(segment_ids(np.array([2**40]), np.array([3]))) == 1
    assert len(segment_ids(np.array([3], np.int64), jnp.array([3]))) == 1
    assert len(segment_ids(jnp.array([3], "uint16"), jnp.array([3], "int8"))) == 1
    ids = np.repeat(np.arange(4) * 2**40, 4)
    mask = Mask.segments(ids, ids).canonical(1, 16, 16)
    for row, col in itertools.product(range(0, 16, 4), repeat=2):
        found = tiles.may_attend(mask, (16, 16), (row, col), (4, 4), None)
        assert found is not None and bool(found) == (row == col)


@pytest.mark.quick
def test_attention_of_hashed_ids(assert_close):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
    ids = np.array([7, 7 + 2**32, 7, 7 + 2**32])
    small = np.array([0, 1, 0, 1])
    assert_close(
        jax_memeff.dot_product_attention(query, key, value, mask=Mask.segments(ids, ids)),
        jax_memeff.dot_product_attention(query, key, value, mask=Mask.segments(small, small)),
        1e-6,
    )
    starts = np.array([0, 4])
    assert_close(
        jax_memeff.varlen_attention(
            query[0], key[0], value[0], starts, starts, 4, 4, mask=Mask.segments(ids, ids)
        ),
        jax_memeff.dot_product_attention(query, key, value, mask=Mask.segments(small, small))[0],
        1e-6,
    )


def test_a_flax_module_takes_hashed_ids(assert_close):
    from flax import nnx

    from jax_memeff.flax.nnx import MultiHeadAttention

    layer = MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 4, 8))
    ids = np.array([[7, 7 + 2**32, 7, 7 + 2**32]])
    assert_close(layer(x, segment_ids=ids), layer(x, segment_ids=ids // 2**32), 1e-6)


ATTENTION: Any = jax_memeff.dot_product_attention
ZEROS = jnp.zeros((2, 5, 4, 8))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (Offsets(query=2**31 - 1), r"offsets\.query must be in \[0, 536870912\], got 2147483647"),
        (Offsets(query=np.int64(2**40)), r"offsets\.query must be in.*got 1099511627776"),
        (Offsets(key=2**70), r"offsets\.key must be an array of numbers.*got dtype object"),
        (Offsets(key=np.uint64(2**63)), r"offsets\.key must be in.*got 9223372036854775808"),
        (Offsets(batch=2**31), r"offsets\.batch must be in \[0, 2147483647\], got 2147483648"),
        (Offsets(head=np.int64(2**32)), r"offsets\.head must be in"),
        (Offsets(num_heads=0), r"offsets\.num_heads must be at least.*0 \+ 4, got 0"),
        (Offsets(head=2), r"offsets\.num_heads must be at least.*2 \+ 4, got 4"),
        (Offsets(head=5, num_heads=8), r"offsets\.num_heads must be at least.*5 \+ 4, got 8"),
        (Offsets(batch=2**29, num_heads=8), r"must be at most 4294967296, got 4294967312"),
        (Offsets(query=True), r"offsets\.query must be an int"),
    ],
)
def test_offsets_out_of_range(offsets, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ATTENTION(ZEROS, ZEROS, ZEROS, offsets=offsets)


@pytest.mark.parametrize("wrap", [int, np.int64, jnp.int32])
@pytest.mark.parametrize(
    ("query", "key"), [(MOST_POSITION, MOST_POSITION), (MOST_POSITION, 0), (0, MOST_POSITION)]
)
def test_the_farthest_offsets_are_exact(query, key, wrap):
    """Windows as large as the distance are exact, too."""
    position = Offsets(query=wrap(query), key=wrap(key)).position()
    t, s = np.arange(5)[:, None] + query, np.arange(6)[None] + key
    for left, right in ((None, 0), (query - key, None), (2, key - query + 1), (2**62, 2**62)):
        got = Mask.window(left, right).as_array(1, 1, 5, 6, position)[0, 0]
        expected = np.ones((5, 6), bool)
        if left is not None:
            expected &= s >= t - left
        if right is not None:
            expected &= s <= t + right
        np.testing.assert_array_equal(got, expected)


def test_device_offsets_are_clamped(x64):
    for value, defined in ((2**40, MOST_POSITION), (-5, 0), (2**31, MOST_POSITION)):
        position = jax.jit(lambda x: Offsets(query=x, key=x).position())(jnp.int64(value))
        assert position.query == position.key == defined
        assert position.query.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_device_lengths_and_starts_are_clamped_before_they_are_cast(dtype, x64):
    most = np.iinfo(dtype).max
    lengths = jnp.array([most, 2, min(most, 2**32 + 1)], dtype)
    mask = Mask.lengths(key=lengths).canonical(3, 1, 7)
    np.testing.assert_array_equal(mask.key_lengths, [7, 2, 7])  # type: ignore[arg-type]
    query = jnp.ones((5, 1, 4))
    starts = jnp.array([0, 3, most], dtype)
    out = jax_memeff.varlen_attention(query, query, query, starts, starts, 5, 5)
    np.testing.assert_array_equal(out, jnp.ones((5, 1, 4)))


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([{"query": [9, 9]}, {"query": [8, 100]}], r"query lengths must be in \[0, 5\], got 9 at"),
        ([{"query": [5, 9]}, {"query": [5, 5]}], r"query lengths must be in \[0, 5\], got 9 at"),
        ([{"key": [5, 5]}, {"key": [5, 6]}], r"key lengths must be in \[0, 5\], got 6 at index 1"),
        ([{"key": [6, 5]}, {"key": jnp.array([1, 1])}], r"key lengths must be in.*got 6 at"),
        ([{"key": jnp.array([1, 1])}, {"key": [5, -1]}], r"key lengths must be in.*got -1 at"),
        ([{"query": [5, 5]}, {"key": [6, 5]}], r"key lengths must be in.*got 6 at"),
        ([{"query": [1, 1]}, {}, {"query": [1, 2, 3]}], r"query lengths must have shape \[B\]"),
        ([{"key": [2**40, 1]}], r"key lengths must be in \[0, 5\], got 2147483647 at index 0"),
    ],
)
def test_a_conjunction_hides_no_length(masks, message):
    mask = Mask()
    for lengths in masks:
        mask &= Mask.lengths(**lengths)
    with pytest.raises(ValueError, match=message):
        ATTENTION(ZEROS, ZEROS, ZEROS, mask=mask & Mask.causal())
    with pytest.raises(ValueError, match=message):
        ATTENTION(ZEROS, ZEROS, ZEROS, mask=mask, query_seq_lengths=[2, 2])


def test_the_shortest_of_all_lengths_counts():
    a = Mask.lengths(np.array([5, 3]), np.array([4, 4])) & Mask.lengths(key=jnp.array([9, 2]))
    mask = Mask.lengths(np.array([1, 9])) & a & Mask.lengths(key=np.array([3, 9]))
    assert mask.kinds() == {"query_lengths", "key_lengths"}
    canonical = mask.canonical(2, 5, 6)
    assert canonical.query_lengths is not None and canonical.key_lengths is not None
    np.testing.assert_array_equal(canonical.query_lengths, [1, 3])
    np.testing.assert_array_equal(canonical.key_lengths, [3, 2])


def test_lengths_survive_the_way_into_jit():
    mask = Mask.lengths(key=np.array([2**32 + 3, -(2**33) + 2]))
    traced = jax.jit(lambda mask: mask.as_array(2, 1, 1, 5))(mask)
    np.testing.assert_array_equal(traced.sum((1, 2, 3)), [5, 0])


def traced(*shape, dtype=jnp.bfloat16):
    """An array of any size, which takes no memory."""
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dim", range(4))
def test_sizes_beyond_int32_raise(dim):
    shape = [1, 4, 1, 8]
    shape[dim] = 2**31
    message = r"query must have sizes of at most 2147483647, got shape \(.*2147483648.*split"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda x: ATTENTION(x, x, x, dropout_rate=0.5, dropout_key=jax.random.key(0)),
            traced(*shape),
        )
    with pytest.raises(ValueError, match="Mask.blocks: " + message):
        jax.eval_shape(lambda x: Mask.causal().blocks(x, x), traced(*shape))
    if dim:
        starts = jnp.array([0, 1])
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(
                lambda x: jax_memeff.varlen_attention(x, x, x, starts, starts, 4, 4),
                traced(*shape[1:]),
            )


@pytest.mark.parametrize(
    ("pages", "batch", "rows", "message"),
    [
        ((2**27, 16), 1, 1, "key_pages must have at most 2147483647 keys .* 134217728 pages of 16"),
        ((4, 16), 2**16, 2**15, "(query|key) must have at most 2147483647 tokens .* 65536 seq"),
    ],
)
def test_pools_and_tokens_beyond_int32_raise(pages, batch, rows, message):
    new, pool = traced(batch, rows, 1, 8), traced(*pages, 1, 8)
    table, lengths = traced(batch, 4, dtype=jnp.int32), traced(batch, dtype=jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax_memeff.paged_attention, new, pool, pool, table, lengths)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax_memeff.append_to_pages, pool, pool, new, new, table, lengths)


def test_flat_tokens_beyond_int32_raise():
    tokens, pool = traced(2**31, 1, 8), traced(4, 16, 1, 8)
    table, lengths, starts = (traced(*shape, dtype=jnp.int32) for shape in ((1, 4), (1,), (2,)))
    with pytest.raises(ValueError, match="query must have sizes of at most 2147483647"):
        jax.eval_shape(
            lambda starts, *arrays: jax_memeff.paged_attention(*arrays, query_starts=starts),
            *(starts, tokens, pool, pool, table, lengths),
        )


def test_an_empty_list_has_integers():
    query = jnp.zeros((0, 3, 1, 2))
    lengths: Any = []
    out = jax_memeff.dot_product_attention(query, query, query, key_value_seq_lengths=lengths)
    assert out.shape == query.shape
