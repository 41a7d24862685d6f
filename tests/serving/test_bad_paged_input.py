"""Wrong arguments of paged calls raise errors that name them; ``check`` reads their values."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import changed, zeros
from paging import append_to_pages, paged_attention

import jax_memeff
from jax_memeff import Mask

B, T, N, K, H, PAGES, SIZE, MAX = 2, 3, 4, 2, 8, 5, 16, 2
FLOAT8 = zeros(PAGES, SIZE, K, H, dtype=jnp.float8_e4m3fn)
EVEN = Mask.function(lambda b, h, q, k: k % 2 == 0)
SCALED = {"key_pages": FLOAT8, "value_pages": FLOAT8}
WIDE = {"query": zeros(7, N, H), "query_starts": np.array([0, 3, 7])}


def good():
    return {
        "query": zeros(B, T, N, H),
        "key_pages": zeros(PAGES, SIZE, K, H),
        "value_pages": zeros(PAGES, SIZE, K, H),
        "page_table": np.array([[0, 1], [2, 99]]),
        "kv_lengths": np.array([20, 3]),
    }


CASES = {
    "query_rank": ({"query": zeros(T, N, H)}, ValueError, r"query must have shape \[B, T, N, H\]"),
    "query_batch": (
        {"query": zeros(3, T, N, H)},
        ValueError,
        "query must have the batch size of page_table, 2, got 3",
    ),
    "query_dtype": ({"query": zeros(B, T, N, H, dtype=int)}, TypeError, "query must be one of"),
    "ragged_rank": (
        {"query_starts": np.array([0, 3, 6])},
        ValueError,
        r"query must have shape \[tokens, N, H\], because query_starts is given",
    ),
    "head_dim": ({"query": zeros(B, T, N, 9)}, ValueError, "query must have the head dim of key_"),
    "heads": (
        {"query": zeros(B, T, 3, H)},
        ValueError,
        "must be a multiple of key_pages', 2, got 3",
    ),
    "pool_rank": (
        {"key_pages": zeros(80, K, H)},
        ValueError,
        r"key_pages must have shape \[pages, page_size, K, H\], got shape \(80, 2, 8\)",
    ),
    "pool_dtype": (
        {"key_pages": zeros(PAGES, SIZE, K, H, dtype=jnp.int8)},
        TypeError,
        "key_pages must be one of bfloat16.*got int8",
    ),
    "dtypes_differ": (
        {"query": zeros(B, T, N, H, dtype="bfloat16")},
        TypeError,
        r"query must have the dtype of key_pages, float32, got bfloat16; pass query.astype",
    ),
    "page_size": (
        {"key_pages": zeros(PAGES, 24, K, H)},
        ValueError,
        "key_pages must have a page size of 1, 2, 4, 8 or a multiple of 16, got 24",
    ),
    "pages_of_heads": (
        dict.fromkeys(("key_pages", "value_pages"), zeros(PAGES, K, SIZE, H)),
        ValueError,
        r"a multiple of key_pages', 16.*if pages are \[K, page_size, H\], pass jnp.swapaxes",
    ),
    "value_pages": (
        {"value_pages": zeros(4, SIZE, K, H)},
        ValueError,
        "value_pages must have the number of pages of key_pages, 5, got 4",
    ),
    "value_dtype": (
        {"value_pages": zeros(PAGES, SIZE, K, H, dtype="float16")},
        TypeError,
        "value_pages must have the dtype of key_pages, float32, got float16",
    ),
    "table_rank": (
        {"page_table": np.array([0, 1])},
        ValueError,
        r"page_table must have shape \[B, max_pages\], got shape \(2,\)",
    ),
    "table_dtype": (
        {"page_table": zeros(B, MAX)},
        TypeError,
        "page_table must be integers, got dtype float32",
    ),
    "lengths_shape": (
        {"kv_lengths": np.array([1, 2, 3])},
        ValueError,
        r"kv_lengths must have shape \[B\] = \[2\]",
    ),
    "lengths_value": (
        {"kv_lengths": np.array([1, 33])},
        ValueError,
        r"kv_lengths must be in \[0, 32\], got 33 at index 1",
    ),
    "starts_shape": (
        {**WIDE, "query_starts": np.array([0, 7])},
        ValueError,
        r"query_starts must have shape \[B \+ 1\] = \[3\], one more than page_table has rows",
    ),
    "starts_value": (
        {**WIDE, "query_starts": np.array([0, 3, 8])},
        ValueError,
        r"query_starts must be in \[0, 7\], the number of tokens, got 8 at index 2",
    ),
    "starts_order": (
        {**WIDE, "query_starts": [0, 5, 3]},
        ValueError,
        "query_starts must not decrease, got 3 after 5 at index 2",
    ),
    "starts_longest": (
        {**WIDE, "max_query_length": 3},
        ValueError,
        "max_query_length must be at least.*got 3, and sequence 1 has 4",
    ),
    "longest_alone": (
        {"max_query_length": 3},
        ValueError,
        "max_query_length must be None without query_starts, got 3",
    ),
    "longest_type": ({**WIDE, "max_query_length": 4.0}, TypeError, "max_query_length must be a st"),
    "value_dim_alone": ({"value_dim": 4}, ValueError, "value_dim must be None if value_pages"),
    "no_value_dim": ({"value_pages": None}, ValueError, "value_dim must be given if value_pages"),
    "value_dim": (
        {"value_pages": None, "value_dim": 9},
        ValueError,
        r"value_dim must be in \[1, 8\], the columns of key_pages, got 9",
    ),
    "scale_of_f32": (
        {"key_scale": np.ones(K, np.float32)},
        ValueError,
        "key_scale must be None, b",
    ),
    "scale_shape": (
        {"key_pages": FLOAT8, "value_pages": FLOAT8, "value_scale": np.ones(3, np.float32)},
        ValueError,
        r"value_scale must have shape \[K\] = \[2\] or \[pages, K\] = \[5, 2\], a number for each "
        r"key head, got shape \(3,",
    ),
    "scale_dtype": (
        {"key_pages": FLOAT8, "value_pages": FLOAT8, "key_scale": jnp.ones(K, jnp.bfloat16)},
        TypeError,
        "key_scale must be float32, got bfloat16",
    ),
    "latent_scale": (
        {"key_pages": FLOAT8, "value_pages": None, "value_dim": 4, "value_scale": np.ones(K)},
        ValueError,
        "value_scale must be None without value_pages, got an array: key_scale also",
    ),
    "mask_lengths": (
        {"mask": Mask.lengths(key=np.array([3, 3]))},
        ValueError,
        "mask must not have lengths",
    ),
    "mask_lengths_under_or": (
        {"mask": EVEN | Mask.lengths(key=np.array([3, 3]))},
        ValueError,
        "mask must not have lengths",
    ),
    "mask_lengths_under_not": (
        {"mask": EVEN & ~Mask.lengths(query=np.array([1, 1]))},
        ValueError,
        "mask must not have lengths",
    ),
    "mask_segments": (
        {"mask": ~Mask.segments(np.zeros((B, T), int), np.zeros((B, 32), int))},
        ValueError,
        "mask must not have segment ids.*pass Mask.function",
    ),
    "mask_blocks": (
        {"mask": jax.jit(EVEN.blocks)(zeros(B, T, N, H), zeros(B, 32, K, H))},
        ValueError,
        "mask must not have computed blocks.*pass the mask itself",
    ),
    "mask_shape": (
        {"mask": np.ones((T, 5), bool)},
        ValueError,
        r"mask must broadcast to \[B, N, T, S\] = \[2, 4, 3, 32\]",
    ),
    "causal": ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    "invariant": ({"batch_invariant": 1}, TypeError, "batch_invariant must be True or False"),
    "sinks": ({"sinks": zeros(3)}, ValueError, r"sinks must have shape \[N\] = \[4\], one logit"),
    "implementation": (
        {"implementation": "triton"},
        ValueError,
        "implementation must be None, 'cu",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_of_attention(name):
    change, error, message = CASES[name]
    with pytest.raises(error, match=message):
        paged_attention(**{**good(), **change})


def test_good_arguments():
    assert paged_attention(**good()).shape == (B, T, N, H)
    assert paged_attention(**{**good(), **WIDE}).shape == (7, N, H)


def good_append():
    arguments = good()
    del arguments["query"]
    return arguments | {"key": zeros(B, T, K, H), "value": zeros(B, T, K, H)}


APPEND_CASES = {
    "key_dtype": (
        {"key": zeros(B, T, K, H, dtype="bfloat16")},
        TypeError,
        r"key must have the dtype of key_pages, float32, got bfloat16; pass key.astype\(key_pages",
    ),
    "heads": (
        {"value": zeros(B, T, 3, H)},
        ValueError,
        "value must have the number of heads of key_pages, 2, got 3",
    ),
    "tokens": (
        {"value": zeros(B, 4, K, H)},
        ValueError,
        "value must have the number of tokens of key, 3, got 4",
    ),
    "batch": (
        {"key": zeros(3, T, K, H)},
        ValueError,
        "key must have the batch size of page_table, 2, got 3",
    ),
    "no_value": ({"value": None}, ValueError, "value must be given, because value_pages is"),
    "no_value_pages": ({"value_pages": None}, ValueError, "value_pages must be given, because val"),
    "float8_integers": (
        {"key_pages": FLOAT8, "value_pages": FLOAT8, "key": zeros(B, T, K, H, dtype=int)},
        TypeError,
        r"key must have a float dtype, .*_e4m3fn, got int32; pass key\.astype\('float32'\)",
    ),
    "starts": ({"query_starts": [0, 3, 6]}, ValueError, r"key must have shape \[tokens, K, H\]"),
    "scale": ({"key_scale": np.ones(K, np.float32)}, ValueError, "key_scale must be None, because"),
    "lengths": ({"kv_lengths": [1, -1]}, ValueError, r"kv_lengths must be in \[0, 32\], got -1 at"),
}


@pytest.mark.parametrize("name", APPEND_CASES)
def test_wrong_arguments_of_append(name):
    change, error, message = APPEND_CASES[name]
    with pytest.raises(error, match=message):
        append_to_pages(**{**good_append(), **change})


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_integers_of_any_width(dtype):
    given = good()
    for name in ("page_table", "kv_lengths"):
        given[name] = jnp.asarray(given[name], dtype)
    given["query"], given["value_pages"] = given["query"] + 1, given["value_pages"] + 3
    np.testing.assert_allclose(paged_attention(**given), 3)


def with_nan(array, *place):
    return changed(array, place, np.nan)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"kv_lengths": jnp.array([20, 33])},
            ValueError,
            r"kv_lengths must be in \[0, 32\], got 33",
        ),
        (
            {"page_table": jnp.array([[0, 1], [5, 0]])},
            ValueError,
            r"page_table must be in \[0, 5\).*got 5 at index \(1, 0\), and sequence 1 has 3 tokens",
        ),
        (
            {**WIDE, "query_starts": jnp.array([0, 5, 3])},
            ValueError,
            "query_starts must not decrease, got 3 after 5",
        ),
        (
            {"query": with_nan(zeros(B, T, N, H), 1, 2)},
            ValueError,
            r"query must be finite.*nan at index \(1, 2, 0, 0\)",
        ),
        (
            {**WIDE, "query": with_nan(WIDE["query"], 6)},
            ValueError,
            r"query must be finite.*nan at index \(6, 0, 0\)",
        ),
        (
            {"value_pages": with_nan(zeros(PAGES, SIZE, K, H), 1, 3)},
            ValueError,
            r"value_pages must be finite.*nan at index \(1, 3, 0, 0\)",
        ),
        (
            {**SCALED, "value_scale": jnp.array([1, jnp.inf])},
            ValueError,
            r"value_scale must be finite for pages within kv_lengths, got inf at index \(1,\)",
        ),
        (
            {**SCALED, "key_scale": with_nan(jnp.ones((PAGES, K)), 2)},
            ValueError,
            r"key_scale must be finite.*got nan at index \(2, 0\)",
        ),
        ({"bias": zeros(T, 32)}, ValueError, "bias must be None with page_table"),
        ({"query": zeros(B, T, N, 9)}, ValueError, "query must have the head dim"),
    ],
)
def test_check_reads_values(change, error, message):
    given = {**good(), **change}
    names = ("query", "key_pages", "value_pages")
    arrays = [given.pop(name) for name in names]
    with pytest.raises(error, match=message):
        jax_memeff.check(*arrays, **given)


@pytest.mark.quick
def test_check_accepts_what_is_never_read():
    given = good()
    pool = with_nan(given["key_pages"], 1, slice(4, None))
    pool = with_nan(with_nan(pool, 2, slice(3, None)), slice(3, None))
    for query in (given["query"], given["query"][:, -1:]):
        jax_memeff.check(
            query,
            pool,
            pool,
            page_table=given["page_table"],
            kv_lengths=jnp.array([20, 3]),
            batch_invariant=query.shape[1] == 1,
        )
    latent = pool.astype(jnp.bfloat16)
    jax_memeff.check(
        given["query"].astype(jnp.bfloat16),
        latent,
        None,
        page_table=given["page_table"],
        kv_lengths=given["kv_lengths"],
        value_dim=4,
    )
    float8 = jnp.nan_to_num(pool).astype(jnp.float8_e4m3fn)
    jax_memeff.check(
        given["query"],
        float8,
        float8,
        page_table=given["page_table"],
        kv_lengths=given["kv_lengths"],
        key_scale=np.ones(K, np.float32),
        value_scale=with_nan(jnp.ones((PAGES, K)), 3),
    )


def test_check_refuses_traced_tables():
    given = good()
    arrays = [given.pop(name) for name in ("query", "key_pages", "value_pages")]
    table = given.pop("page_table")
    with pytest.raises(TypeError, match="page_table must hold concrete values"):
        jax.jit(lambda table: jax_memeff.check(*arrays, page_table=table, **given))(table)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"key_pages": FLOAT8, "value_pages": FLOAT8},
            f"head_dim is {H}, and kernels read rows of float8 16 bytes at a time: pad it",
        ),
        ({"value_pages": None, "value_dim": 4}, "it reads values from a separate array"),
    ],
    ids=["float8", "latent"],
)
def test_what_kernels_do_not_have(monkeypatch, change, reason):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
    given: dict[str, Any] = {**good(), **change}
    static = ("value_dim",)
    arrays = {name: x for name, x in given.items() if name not in static and x is not None}
    for name in ("query", "key_pages", "value_pages"):
        if name in arrays and arrays[name].dtype == jnp.float32:
            arrays[name] = arrays[name].astype(jnp.bfloat16)
    others = {name: x for name, x in given.items() if name in static or x is None}
    traced = jax.jit(functools.partial(paged_attention, **others)).trace(**arrays)
    with pytest.raises(jax_memeff.UnsupportedError, match=reason) as caught:
        traced.lower(lowering_platforms=("cuda",))
    assert "pages of 16 keys" in caught.value.reasons[0]
