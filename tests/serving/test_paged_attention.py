"""``paged_attention`` against attention by its definition, one sequence at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest

import jax_memeff
from jax_memeff import Mask

TOLERANCE: Any = {"rtol": 1e-5, "atol": 1e-5}


def ragged(case, **arguments):
    def attention(starts, *arrays):
        return paging.paged_attention(
            *arrays, query_starts=starts, return_residual=True, **arguments
        )

    # One program compiles faster than its operations one by one.
    found = jax.jit(attention)(case.starts, *case.arguments)
    return [np.asarray(x, np.float64) for x in found]


def check(case, found, **arguments):
    for got, expected in zip(found, paging.answer(case, **arguments), strict=True):
        np.testing.assert_allclose(got, expected, **TOLERANCE)


@pytest.mark.quick
def test_prompts_chunks_and_steps_in_one_call():
    rng = np.random.default_rng(0)
    case = paging.paging(
        rng, lengths=[37, 0, 16, 1, 17, 15, 130], counts=[37, 0, 5, 1, 1, 15, 3], gap=4
    )
    check(case, ragged(case))
    check(case, ragged(case, max_query_length=40))


def test_queries_in_front_of_the_first_token_give_nothing():
    rng = np.random.default_rng(1)
    case = paging.paging(rng, lengths=[2, 0, 40, 5, 3], counts=[5] * 5)
    query = case.query.reshape(5, 5, *case.query.shape[1:])
    attention = functools.partial(paging.paged_attention, return_residual=True)
    out, lse = jax.jit(attention)(query, *case.arguments[1:])
    assert out.shape == query.shape
    check(case, [np.asarray(x).reshape(25, *x.shape[2:]) for x in (out, lse)])
    check(case, ragged(case))


def test_one_new_token():
    rng = np.random.default_rng(2)
    case = paging.paging(rng, lengths=[1, 16, 17, 100], counts=[1] * 4, max_pages=9)
    out = paging.paged_attention(case.query[:, None], *case.arguments[1:])
    np.testing.assert_allclose(out[:, 0], paging.answer(case)[0], **TOLERANCE)


SLOPES = jnp.linspace(0.1, 0.5, 4)
SINKS = np.array([0.5, -1, 2, 0], np.float32)
FEATURES = {
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "not_causal": ({"is_causal": False}, {"valid": lambda b, h, q, k: k >= 0}),
    "window": (
        {"local_window_size": (6, 0)},
        {"valid": lambda b, h, q, k: (k <= q) & (k >= q - 6)},
    ),
    "window_alone": (
        {"local_window_size": (6, 3), "is_causal": False},
        {"valid": lambda b, h, q, k: (k <= q + 3) & (k >= q - 6)},
    ),
    "cap": (
        {"logits_soft_cap": 1.5},
        {"modified": lambda s, b, h, q, k: 1.5 * np.tanh(s / 1.5)},
    ),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
    "alibi": (
        {"score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (k - q)},
        {"modified": lambda s, b, h, q, k: s + np.asarray(SLOPES)[h] * (k - q)},
    ),
    "alibi_in_window": (
        {
            "score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
            "mask": Mask.window(9, 2, "bottom_right"),
        },
        {
            "modified": lambda s, b, h, q, k: s + np.asarray(SLOPES)[h] * (k - q),
            "valid": lambda b, h, q, k: (k <= q) & (k >= q - 9),
        },
    ),
    "function": (
        {"mask": Mask.function(lambda b, h, q, k: (k + q + b) % 3 != 0), "is_causal": False},
        {"valid": lambda b, h, q, k: (k + q + b + 0 * h) % 3 != 0},
    ),
    "or": (
        {
            "mask": Mask.window(4, 0, "bottom_right") | Mask.function(lambda b, h, q, k: k < 3),
            "is_causal": False,
        },
        {"valid": lambda b, h, q, k: ((k <= q) & (k >= q - 4)) | (k < 3)},
    ),
    "excluded_window": (
        {"mask": ~Mask.window(4, 0)},
        {"valid": lambda b, h, q, k: (k <= q) & ~((k <= q) & (k >= q - 4))},
    ),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", FEATURES)
def test_features_count_positions_in_the_sequence(name):
    rng = np.random.default_rng(3)
    case = paging.paging(rng, lengths=[37, 3, 16, 21], counts=[7, 5, 16, 1], gap=1)
    arguments, expected = FEATURES[name]
    check(case, ragged(case, **arguments), **expected)


def test_traced_window():
    rng = np.random.default_rng(4)
    case = paging.paging(rng, lengths=[37, 3, 16], counts=[7, 5, 16])

    @jax.jit
    def windowed(left):
        return paging.paged_attention(
            *case.arguments,
            query_starts=case.starts,
            mask=Mask.window(left, None),
            return_residual=True,
        )

    check(case, windowed(5), valid=lambda b, h, q, k: (k <= q) & (k >= q - 5))


@pytest.mark.parametrize("under_or", [False, True])
def test_rows_of_a_boolean_mask_are_the_queries(under_or):
    rng = np.random.default_rng(5)
    case = paging.paging(rng, lengths=[37, 3, 16], counts=[5, 5, 5], max_pages=4)
    boolean = rng.random((3, 1, 5, 64)) < 0.6
    boolean[..., 0] = True
    mask = Mask.boolean(boolean)
    if under_or:
        mask |= Mask.function(lambda b, h, q, k: k == 1)

    def valid(b, h, q, k):
        row = q - (case.lengths[b] - 5)
        own = boolean[b, 0][row, k]
        return (own | (k == 1) if under_or else own) & (k <= q)

    check(case, ragged(case, mask=mask, max_query_length=5), valid=valid)


def test_a_tree_of_speculative_tokens():
    """Each token sees the context, its ancestors and itself."""
    rng = np.random.default_rng(6)
    parents = [-1, 0, 0, 1, 2]
    sees = np.zeros((5, 5), bool)
    for token, parent in enumerate(parents):
        sees[token] = sees[parent] if parent >= 0 else False
        sees[token, token] = True
    case = paging.paging(rng, lengths=[37, 5, 21], counts=[5, 5, 5])
    first, tree = jnp.asarray(case.lengths - 5), jnp.asarray(sees)
    mask = Mask.function(
        lambda b, h, q, k: (k < first[b]) | tree[q - first[b], jnp.maximum(k - first[b], 0)]
    )

    def valid(b, h, q, k):
        start = case.lengths[b] - 5
        return (k < start) | sees[q - start, np.maximum(k - start, 0)]

    check(case, ragged(case, mask=mask), valid=valid)


def test_listed_blocks_of_keys():
    """Sparse decoding: each head of a sequence reads some pages of it."""
    rng = np.random.default_rng(14)
    case = paging.paging(rng, lengths=[100, 37], counts=[1, 1], max_pages=7)
    lists = np.stack([rng.permutation(7)[:3] for _ in range(8)]).reshape(2, 4, 1, 3)
    lists[..., 0] = 0
    mask = Mask.kv_blocks(lists, block_size=(1, 16))

    def listed(b, h, q, k):
        blocks = lists[b, :, 0]  # [heads, 3]
        return (k[..., None] // 16 == blocks[:, None, None]).any(-1) & (k <= q)

    check(case, ragged(case, mask=mask, max_query_length=1), valid=listed)


@pytest.mark.rotating(5)
@pytest.mark.parametrize("condition", ["listed", "under_or", "excluded", "boolean_under_or"])
@pytest.mark.parametrize("rows", [16, 8, 5])
def test_rows_of_lists_are_the_queries(rows, condition):
    """In a sequence with fewer tokens than queries the valid queries are last, inside a Q block."""
    rng = np.random.default_rng(15)
    count = 32
    case = paging.paging(rng, lengths=[16, 40, 5, 0, 64], counts=[count] * 5, max_pages=4)
    lists = rng.integers(-1, 4, (5, 4, -(-count // rows), 2))
    lists[0, :, 0], lists[0, :, -1] = -1, 0
    blocks = (lists[..., None] == np.arange(4)).any(-2)
    whole = np.repeat(np.repeat(blocks, rows, 2)[:, :, :count], 16, 3)
    mask = (
        Mask.boolean(whole)
        if "boolean" in condition
        else Mask.kv_blocks(lists, block_size=(rows, 16))
    )
    if "under_or" in condition:
        mask |= Mask.function(lambda b, h, q, k: k == 1)
    if condition == "excluded":
        mask = ~mask

    def valid(b, h, q, k):
        own = whole[b][h, q - (case.lengths[b] - count), k]
        own = own | (k == 1) if "under_or" in condition else own
        return (k <= q) & (~own if condition == "excluded" else own)

    check(case, ragged(case, mask=mask, max_query_length=count), valid=valid)
    for invariant in (False, True):
        out = paging.paged_attention(
            case.query.reshape(5, count, *case.query.shape[1:]),
            *case.arguments[1:],
            mask=mask,
            batch_invariant=invariant,
        )
        expected = paging.answer(case, valid=valid)[0]
        np.testing.assert_allclose(np.asarray(out).reshape(expected.shape), expected, **TOLERANCE)


def test_common_pages():
    """Two sequences share the pages of a common prefix."""
    rng = np.random.default_rng(7)
    case = paging.paging(rng, lengths=[40, 45], counts=[1, 4])
    case.table[1, :2] = case.table[0, :2]
    for own in (case.keys, case.values):
        own[1][:32] = own[0][:32]
    check(case, ragged(case))


def test_pages_that_the_pool_does_not_have_are_masked():
    rng = np.random.default_rng(8)
    case = paging.paging(rng, lengths=[40, 45, 20], counts=[3, 4, 20])
    case.table[0, 1], case.table[1, 0], case.table[2, 0] = -1, len(case.key_pages), 2**31 - 1

    def valid(b, h, q, k):
        place = [1, 0, 0][b]
        return (k <= q) & (k // 16 != place)

    check(case, ragged(case), valid=valid)


def test_lengths_beyond_the_table_are_clamped():
    rng = np.random.default_rng(9)
    case = paging.paging(rng, lengths=[32, 16], counts=[3, 4], max_pages=2)
    query, *pools, table, lengths = case.arguments
    for length in (33, 10**6, 2**31 - 1):
        device = jnp.asarray(lengths).at[0].set(length)
        out = paging.paged_attention(query, *pools, table, device, query_starts=case.starts)
        np.testing.assert_allclose(out, paging.answer(case)[0], **TOLERANCE)


@pytest.mark.parametrize("invariant", [False, True])
def test_lengths_of_a_step_are_clamped_to_the_users_table(invariant):
    """``batch_invariant`` pads the table, and the window must not end in the padding."""
    rng = np.random.default_rng(17)
    case = paging.paging(rng, lengths=[32, 16], counts=[1, 1], max_pages=2)
    query, *pools, table, lengths = case.arguments
    step = functools.partial(
        paging.paged_attention, local_window_size=(4, 0), batch_invariant=invariant
    )
    device = jnp.asarray(lengths).at[0].set(35)
    out = jax.jit(step)(query[:, None], *pools, table, device)
    expected = paging.answer(case, valid=lambda b, h, q, k: (k <= q) & (k >= q - 4))[0]
    np.testing.assert_allclose(out[:, 0], expected, **TOLERANCE)


def test_latent_values_are_columns_of_the_keys():
    rng = np.random.default_rng(10)
    case = paging.paging(rng, lengths=[40, 5], counts=[3, 5], heads=(16, 1), dims=(24, 16))
    query, key_pages, _, table, lengths = case.arguments
    out = paging.paged_attention(
        query, key_pages, None, table, lengths, query_starts=case.starts, value_dim=16
    )
    case.values[:] = [key[..., :16] for key in case.keys]
    assert out.shape == (8, 16, 16)
    np.testing.assert_allclose(out, paging.answer(case)[0], **TOLERANCE)


@pytest.mark.parametrize("per_page", [False, True])
def test_float8_pool(per_page):
    rng = np.random.default_rng(11)
    case = paging.paging(rng, lengths=[40, 5], counts=[3, 5])
    pages, _, k, _ = case.key_pages.shape
    scales = [rng.uniform(0.5, 2, (pages, k) if per_page else (k,)) for _ in range(2)]
    scales = [scale.astype(np.float32) for scale in scales]
    float8 = [jnp.asarray(x).astype(jnp.float8_e4m3fn) for x in case.arguments[1:3]]
    for pool, scale, own in zip(float8, scales, (case.keys, case.values), strict=True):
        whole = np.asarray(pool.astype(jnp.float32)) * (
            scale[:, None, :, None] if per_page else scale[:, None]
        )
        for b, length in enumerate(case.lengths):
            rows = whole[case.table[b, : -(-length // 16)]].reshape(-1, *whole.shape[2:])
            own[b] = rows[:length]
    found = paging.paged_attention(
        case.query,
        *float8,
        case.table,
        case.lengths,
        query_starts=case.starts,
        key_scale=scales[0],
        value_scale=scales[1],
        return_residual=True,
    )
    check(case, found)


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_scales_do_not_reach_pages_that_the_pool_does_not_have(wrong):
    rng = np.random.default_rng(16)
    case = paging.paging(rng, lengths=[40, 5], counts=[3, 5])
    case.table[1, 0] = -1
    float8 = [jnp.asarray(x).astype(jnp.float8_e4m3fn) for x in case.arguments[1:3]]
    scale = np.array([1, wrong], np.float32)
    out, lse = paging.paged_attention(
        case.query,
        *float8,
        case.table,
        case.lengths,
        query_starts=case.starts,
        key_scale=scale,
        value_scale=scale,
        return_residual=True,
    )
    assert jnp.isfinite(out[:3, :2]).all() and jnp.isnan(out[:3, 2:]).all()
    assert not out[3:].any() and (lse[3:] == -jnp.inf).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype):
    rng = np.random.default_rng(12)
    case = paging.paging(rng, lengths=[40, 5], counts=[3, 5], dtype=jnp.dtype(dtype))
    out = paging.paged_attention(*case.arguments, query_starts=case.starts)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        out.astype(jnp.float32), paging.answer(case)[0], rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("shape", ["batch", "tokens", "pages", "table"])
def test_empty(shape):
    b, tokens, pages, columns = (
        0 if shape == x else 2 for x in ("batch", "tokens", "pages", "table")
    )
    pool = jnp.zeros((pages, 16, 1, 8))
    table, lengths = jnp.zeros((b, columns), jnp.int32), jnp.full(b, 2)
    out, lse = paging.paged_attention(
        jnp.ones((b, tokens, 2, 8)), pool, pool, table, lengths, return_residual=True
    )
    assert out.shape == (b, tokens, 2, 8) and lse.shape == (b, tokens, 2)
    if shape in ("pages", "table"):
        assert not out.any() and (lse == -jnp.inf).all()


def test_a_table_without_pages_has_no_token_for_a_sink():
    pool, sinks = jnp.zeros((2, 16, 1, 8)), jnp.ones(2)
    lengths, table = jnp.array([3, 0]), jnp.zeros((2, 0), jnp.int32)
    _, lse = paging.paged_attention(
        jnp.ones((2, 1, 2, 8)), pool, pool, table, lengths, sinks=sinks, return_residual=True
    )
    assert (lse == -jnp.inf).all()


def test_it_has_no_derivative():
    rng = np.random.default_rng(13)
    case = paging.paging(rng, lengths=[40], counts=[1])
    query, *others = map(jnp.asarray, case.arguments)
    attention = functools.partial(paging.paged_attention, query_starts=case.starts)
    with pytest.raises(jax_memeff.UnsupportedError, match=r"no derivative.*\n.*varlen_attention"):
        jax.grad(lambda query: attention(query, *others).sum())(query)
    with (
        jax_memeff.forward_mode(),
        pytest.raises(jax_memeff.UnsupportedError, match="varlen_attention"),
    ):
        jax.jvp(lambda query: attention(query, *others), [query], [query])
    # It may be part of a differentiated function if its arguments are not differentiated.
    assert jax.grad(lambda x: x * attention(query, *others).sum())(1.0).shape == ()
