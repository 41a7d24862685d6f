"""``Mask.keys`` in paged calls: a list for each new token, of positions in its sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import primitives_of
from paging import Paging
from test_pool_memory import FUSED

import jax_memeff
from jax_memeff import Mask, Offsets

UNOPTIMISED = {"xla_backend_optimization_level": 0}
COUNT = 7
check: Any = jax_memeff.check
SINKS = np.array([0.3, -1, 2, 0], np.float32)


def drawn(rng: Any, case: Paging, key_heads: int, count: int = COUNT) -> np.ndarray:
    """Lists [tokens, key heads, count] with repeats, holes, and positions beyond the lengths."""
    longest = int(case.lengths.max(initial=0)) + 9
    return rng.integers(-3, longest, (len(case.query), key_heads, count)).astype(np.int32)


def listed(case: Paging, lists: np.ndarray) -> Any:
    """``paging.answer``'s function of valid elements: of lists, and causal."""

    def valid(b: int, h: Any, q: Any, k: Any) -> np.ndarray:
        heads, rows, columns = h.size, q.ravel(), k.ravel()
        found = np.zeros((heads, rows.size, columns.size), bool)
        for head, row in np.ndindex(heads, rows.size):
            token = case.starts[b + 1] - case.lengths[b] + rows[row]
            own = lists[token, head * lists.shape[1] // heads]
            found[head, row] = np.isin(columns, own)
        return found & (k <= q)

    return valid


@functools.partial(
    jax.jit,
    static_argnames=("longest", "value_dim", "batch_invariant"),
    compiler_options=UNOPTIMISED,
)
def attention(query, key_pages, value_pages, table, lengths, starts, lists, longest, **given):
    return paging.paged_attention(
        query,
        key_pages,
        value_pages,
        table,
        lengths,
        query_starts=starts,
        max_query_length=longest,
        mask=Mask.keys(lists),
        sinks=SINKS,
        return_residual=True,
        **given,
    )


@pytest.mark.quick
@pytest.mark.parametrize("key_heads", [1, 2])
def test_random_ragged_batches(key_heads):
    """Prompts, chunks and steps, 150 of them in one program."""
    rng = np.random.default_rng(key_heads)
    batch, tokens, page_size, max_pages = 4, 32, 16, 3
    for index in range(150):
        lengths = rng.integers(0, page_size * max_pages + 1, batch)
        counts = np.minimum(rng.integers(0, 16, batch), lengths)
        while counts.sum() > tokens:
            counts //= 2
        gap = tokens - int(counts.sum())
        case = paging.paging(rng, lengths, counts, max_pages=max_pages, pages=12, gap=gap)
        lists = drawn(rng, case, key_heads)
        found = attention(*case.arguments, case.starts, lists, longest=16)
        want = paging.answer(case, valid=listed(case, lists), sinks=SINKS.astype(np.float64))
        for got, exact in zip(found, want, strict=True):
            np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5, err_msg=str(index))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("scales", [("none", "none"), ("heads", "pages"), ("pages", "heads")])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_float8_pools(key_heads, scales):
    rng = np.random.default_rng(3)
    case = paging.paging(rng, [40, 3, 17], [5, 3, 1], max_pages=3, pages=9)
    case = paging.quantized(case, scales, rng)
    lists = drawn(rng, case, key_heads)
    found = attention(*case.arguments, case.starts, lists, longest=5, **case.scales)
    want = paging.answer(case, valid=listed(case, lists), sinks=SINKS.astype(np.float64))
    for got, exact in zip(found, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_latent_values(dtype):
    rng = np.random.default_rng(4)
    case = paging.paging(
        rng,
        [40, 3, 33],
        [2, 2, 2],
        max_pages=3,
        pages=9,
        heads=(4, 1),
        dims=(24, 16),
        is_latent=True,
    )
    if dtype == "float8_e4m3fn":
        case = paging.quantized(case, ("heads", "none"), rng)
    query = jnp.asarray(case.query, "float32" if dtype == "float8_e4m3fn" else dtype)
    pool = jnp.asarray(case.key_pages, dtype)
    lists = drawn(rng, case, 1)
    found = attention(
        query,
        pool,
        None,
        case.table,
        case.lengths,
        case.starts,
        lists,
        longest=2,
        value_dim=16,
        **case.scales,
    )
    want = paging.answer(case, valid=listed(case, lists), sinks=SINKS.astype(np.float64))
    tolerance = 0.05 if dtype == "bfloat16" else 2e-5
    for got, exact in zip(found, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), exact, rtol=tolerance, atol=tolerance
        )


def padded_case() -> tuple[Paging, np.ndarray]:
    """Sequences of three new tokens, of which one sequence has only two, and lists [B, K, T, n]."""
    rng = np.random.default_rng(5)
    case = paging.paging(rng, [40, 2, 17, 33], [3] * 4, max_pages=3, pages=20, heads=(8, 4))
    lists = drawn(rng, case, 4).reshape(4, 3, 4, COUNT)
    return case, np.swapaxes(lists, 1, 2)


def padded(query, key_pages, value_pages, table, lengths, lists, **given):
    query = query.reshape(4, 3, *query.shape[1:]) if query.ndim == 3 else query
    return paging.paged_attention(
        query,
        key_pages,
        value_pages,
        table,
        lengths,
        mask=Mask.keys(lists),
        return_residual=True,
        **given,
    )


def test_sequences_with_the_same_number_of_tokens(assert_close):
    """Lists [B | 1, K | 1, T, n]; rows before a sequence's first token give 0."""
    case, lists = padded_case()
    for own in (lists, lists[:1], lists[:, :1]):
        whole = np.broadcast_to(own, lists.shape)
        by_token = np.swapaxes(whole, 1, 2).reshape(12, 4, COUNT)
        out, lse = jax.jit(padded, compiler_options=UNOPTIMISED)(*case.arguments, own)
        want = paging.answer(case, valid=listed(case, by_token))
        np.testing.assert_allclose(out.reshape(12, 8, 8), want[0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse.reshape(12, 8), want[1], rtol=2e-5, atol=2e-5)
        query, rows = case.query.reshape(4, 3, 8, 8)[:, 2:], own[:, :, 2:]
        step = paging.paged_attention(query, *case.arguments[1:], mask=Mask.keys(rows))
        assert_close(step, out[:, 2:], 1e-6)


def test_other_masks_and_functions(assert_close):
    """They see positions in the sequence, and offsets shift them, but not lists."""
    case, lists = padded_case()
    table = np.random.default_rng(6).standard_normal(90).astype(np.float32)
    dense = np.zeros((4, 8, 3, 48), bool)
    for b, h, t in np.ndindex(4, 8, 3):
        dense[b, h, t, [x for x in lists[b, h // 2, t] if 0 <= x < 48]] = True

    def call(mask):
        return paging.paged_attention(
            case.query.reshape(4, 3, 8, 8),
            *case.arguments[1:],
            mask=mask & Mask.window(25, 0) & Mask.function(lambda b, h, q, k: (q + k) % 4 > 0),
            score_mod=lambda s, b, h, q, k: s + jnp.asarray(table)[q - k + 20],
            offsets=Offsets(query=7, key=3),
            logits_soft_cap=3.0,
            return_residual=True,
        )

    got, want = (
        jax.jit(call, compiler_options=UNOPTIMISED)(mask)
        for mask in (Mask.keys(lists), Mask.boolean(dense))
    )
    assert_close(got, want, 1e-6)


def test_keys_that_no_list_has_are_not_read(assert_close):
    """A page may be freed if no list has its keys, or the window masks them."""
    case, lists = padded_case()
    windowed = functools.partial(padded, local_window_size=(20, 0))
    want = jax.jit(windowed)(*case.arguments, lists)
    pools = [np.array(x) for x in case.arguments[1:3]]
    for b, length in enumerate(case.lengths):
        used = set(lists[b][lists[b] > length - 24].tolist())
        for k in set(range(length)) - used:
            for pool in pools:
                pool[case.table[b, k // 16], k % 16] = np.nan
    assert_close(jax.jit(windowed)(case.query, *pools, *case.arguments[3:], lists), want, 1e-12)


def test_batch_invariant_bits():
    """A token has the same bits in a prompt, in a chunk and in a step."""
    rng = np.random.default_rng(7)
    case = paging.paging(rng, [45], [45], pages=6, max_pages=4)
    lists = drawn(rng, case, 2)
    call = functools.partial(attention, batch_invariant=True)
    whole = call(*case.arguments, case.starts, lists, longest=45)
    for first, last in ((20, 45), (44, 45)):
        starts = np.array([0, last - first])
        part = call(
            case.query[first:], *case.arguments[1:], starts, lists[first:], longest=last - first
        )
        for got, want in zip(part, whole, strict=True):
            np.testing.assert_array_equal(got, want[first:])


def test_vmap(assert_close):
    """Over lists and queries, and over everything; the pool is copied in no case."""
    cases = [padded_case()] * 2
    given = [
        jnp.stack([jnp.asarray(x) for x in own])
        for own in zip(*(c.arguments for c, _ in cases), strict=True)
    ]
    given = [jnp.nan_to_num(x) if x.dtype == jnp.float32 else x for x in given]
    given.append(jnp.stack([jnp.asarray(cases[0][1]), jnp.asarray(cases[0][1][::-1])]))
    given[0] = given[0].at[1].multiply(-1)
    one = jax.jit(padded, compiler_options=UNOPTIMISED)
    for mapped in ({0, 5}, {5}, set(range(6))):
        axes = tuple(0 if i in mapped else None for i in range(6))
        own = [x if i in mapped else x[0] for i, x in enumerate(given)]
        vmapped = jax.vmap(padded, axes)
        names = {e.primitive.name for e in primitives_of(jax.make_jaxpr(vmapped)(*own).jaxpr)}
        assert "scan" not in names
        want = [one(*(x[i] if j in mapped else x for j, x in enumerate(own))) for i in range(2)]
        got = jax.jit(vmapped, compiler_options=UNOPTIMISED)(*own)
        assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want), 1e-6)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("over", ["heads", "copies of key heads", "sequences"])
def test_sharded(over, axis_type, assert_close):
    case, lists = padded_case()
    query = case.query.reshape(4, 3, 8, 8)
    mesh = jax.make_mesh(
        (2, 4), ("x", "y"), axis_types=(axis_type,) * 2, devices=jax.devices("cpu")[:8]
    )
    of_query, pool, rows, of_lists = {
        "heads": (P(None, None, "y"), P(None, None, "y"), P(), P(None, "y")),
        "copies of key heads": (P(None, None, ("y", "x")), P(None, None, "y"), P(), P(None, "y")),
        "sequences": (P("y"), P(), P(), P("y")),
    }[over]
    specs = of_query, pool, pool, rows, rows, of_lists
    arrays = [query, *case.arguments[1:], lists]
    want = jax.jit(padded)(*arrays)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        got = jax.jit(padded)(*placed)
    assert_close(jax.tree.map(np.asarray, got), want, 1e-6)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", [1, 2])
def test_temporaries_do_not_grow_with_the_pool(dtype, heads):
    def temporary_bytes(pages: int) -> int:
        query = jax.ShapeDtypeStruct((2, 1, 8, 64), "bfloat16" if "8" in dtype[:6] else dtype)
        pool = jax.ShapeDtypeStruct((pages, 16, heads, 64), dtype)
        table, lengths = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((2, 8), (2,)))
        lists = jax.ShapeDtypeStruct((2, heads, 1, 20), jnp.int32)

        def call(query, key, value, table, lengths, lists):
            return paging.paged_attention(query, key, value, table, lengths, mask=Mask.keys(lists))

        program = jax.jit(call).lower(query, pool, pool, table, lengths, lists)
        memory: Any = program.compile(FUSED).memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary_bytes(16) == temporary_bytes(4096)


def test_bad_lists():
    case, lists = padded_case()
    call: Any = padded
    for shape in ((4, 4, 2, COUNT), (4, 8, 3, COUNT), (12, 4, COUNT)):
        with pytest.raises(ValueError, match=r"\[4 or 1, 4 or 1, 3, n\], got shape"):
            call(*case.arguments, np.zeros(shape, int))
    with pytest.raises(ValueError, match=r"\[12, 4 or 1, n\], a list for each token, got"):
        paging.paged_attention(*case.arguments, query_starts=case.starts, mask=Mask.keys(lists))
    segments = Mask.segments(np.ones(1, int), np.ones(1, int))
    with pytest.raises(ValueError, match="mask must not have segment ids"):
        paging.paged_attention(*case.arguments, query_starts=case.starts, mask=segments)
    good = dict(
        zip(("query", "key", "value", "page_table", "kv_lengths"), case.arguments, strict=True)
    )
    good |= {"query": np.nan_to_num(case.query).reshape(4, 3, 8, 8)}
    with pytest.raises(ValueError, match=r"key indices must be in \[-1, 48\), got 48 at index"):
        check(**good, mask=Mask.keys(np.full((3, 2), 48)))
