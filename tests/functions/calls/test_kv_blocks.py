"""``Mask.kv_blocks``: listed blocks are valid, and others are not, in every kind of call."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import primitives_of

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention
from jax_memeff._call.mask import block_mask
from jax_memeff._call.mask.bounds import Captured
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff.codegen import strategy

B, T, S, N, K, H = 2, 40, 56, 4, 2, 8
ROWS, COLUMNS = 16, 8
Q_BLOCKS, KV_BLOCKS, MOST = math.ceil(T / ROWS), math.ceil(S / COLUMNS), 5


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr("jax_memeff._blockwise.tiles.LONGEST_BLOCK", 16)


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


QUERY, KEY, VALUE = drawn(0, B, T, N, H), drawn(1, B, S, K, H), drawn(2, B, S, K, H)


def lists(seed: int = 0, batch: int = B, heads: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Indices and counts, including hostile ones: far out of range, negative and repeated."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(-1, KV_BLOCKS + 1, (batch, heads, Q_BLOCKS, MOST))
    counts = rng.integers(-1, MOST + 2, indices.shape[:-1])
    indices[0, 0, 0] = [2**31 - 1, -(2**31), 1, 1, KV_BLOCKS]
    counts[0, 0, 0] = 2**31 - 1
    return indices.astype(np.int32), counts.astype(np.int32)


def expected(indices: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """The valid elements bool[B, N, T, S], one by one."""
    valid = np.zeros((B, N, Q_BLOCKS * ROWS, KV_BLOCKS * COLUMNS), bool)
    for b, h, block in np.ndindex(B, N, Q_BLOCKS):
        own = b % indices.shape[0], h % indices.shape[1], block
        count = indices.shape[3] if counts is None else counts[own]
        for index in indices[own][: max(count, 0)]:
            if 0 <= index < KV_BLOCKS:
                row, column = block * ROWS, index * COLUMNS
                valid[b, h, row : row + ROWS, column : column + COLUMNS] = True
    return valid[:, :, :T, :S]


def blocks(indices: Any, counts: Any = None) -> Mask:
    return Mask.kv_blocks(indices, counts, block_size=(ROWS, COLUMNS))


@jax.jit
def gradients(mask: Any, *qkv: jax.Array, **arguments: Any) -> Any:
    def loss(*qkv):
        out, lse = dot_product_attention(*qkv, mask=mask, return_residual=True, **arguments)
        lse = jnp.where(jnp.isinf(lse), 0, lse)
        return jnp.sum(out * out) + jnp.sum(jnp.sin(lse)), (out, lse)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*(qkv or (QUERY, KEY, VALUE)))


as_array = jax.jit(lambda mask: mask.as_array(B, N, T, S))


@pytest.mark.quick("all of them")
@pytest.mark.parametrize(
    ("batch", "heads", "has_counts"),
    [(B, N, True), (1, N, True), (B, 1, False), (1, 1, False)],
    ids=["all of them", "no batch", "no heads", "neither"],
)
def test_the_elements_of_listed_blocks(batch, heads, has_counts, assert_close):
    indices, counts = lists(0, batch, heads)
    valid = expected(indices, counts if has_counts else None)
    assert valid.any() and not valid.all((2, 3)).any()

    @jax.jit
    def attend(indices, counts):
        return gradients(blocks(indices, counts if has_counts else None))

    mask = blocks(indices, counts if has_counts else None)
    np.testing.assert_array_equal(as_array(mask), valid)
    assert_close(attend(indices, counts), gradients(jnp.asarray(valid)), 1e-6)


def test_combined_masks(assert_close):
    """Masks under `&`, `|` and `~`, of two block sizes, and without batch and heads."""
    indices, counts = lists(1)
    valid = jnp.asarray(expected(indices, counts))
    others = Mask.kv_blocks(np.array([[0, 2], [1, -1]]), block_size=20)
    dense_others = as_array(others)
    for mask, want in (
        (blocks(indices, counts) & Mask.causal(), valid & as_array(Mask.causal())),
        (blocks(indices, counts) | Mask.causal(), valid | as_array(Mask.causal())),
        (~blocks(indices, counts), ~valid),
        (blocks(indices, counts) & others, valid & dense_others),
    ):
        np.testing.assert_array_equal(as_array(mask), want)
        assert_close(gradients(mask), gradients(want), 1e-6)


def test_blocks_are_those_of_the_arrays(assert_close):
    """Offsets shift windows and functions, but not lists."""
    indices, counts = lists(2)
    offsets = Offsets(query=7, key=3, batch=5, head=2, num_heads=9)
    got = gradients(blocks(indices, counts) & Mask.causal(), offsets=offsets)
    want = gradients(Mask.boolean(expected(indices, counts)) & Mask.causal(), offsets=offsets)
    assert_close(got, want, 1e-6)


def test_vmap(assert_close):
    """A vmap over the lists, over the call alone, and over both."""
    indices, counts = (jnp.stack(x) for x in zip(lists(0), lists(1), lists(2), strict=True))
    queries = drawn(7, 3, B, T, N, H)

    def attend(query, indices, counts):
        return gradients(blocks(indices, counts), query, KEY, VALUE)

    for axes in ((0, 0, 0), (None, 0, 0), (0, None, None)):
        given = (queries, indices, counts)
        own = [x if axis == 0 else x[1] for x, axis in zip(given, axes, strict=True)]
        want = [
            attend(*(x[i] if axis == 0 else x for x, axis in zip(own, axes, strict=True)))
            for i in range(3)
        ]
        want = jax.tree.map(lambda *x: jnp.stack(x), *want)
        assert_close(jax.jit(jax.vmap(attend, axes))(*own), want, 1e-6)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("a", None, "b"), P("a", "b")], ids=["heads", "rows"])
def test_sharded(axis_type, spec, assert_close):
    """Lists are sharded over the batch and over heads; shards of rows cut a block."""
    indices, counts = lists(3)
    want = gradients(blocks(indices, counts))
    mesh = jax.make_mesh((2, 2), ("a", "b"), (axis_type,) * 2, devices=jax.devices("cpu")[:4])
    of_keys = P("a", None, spec[2]) if len(spec) == 3 else P("a")
    of_lists = P("a", "b") if len(spec) == 3 else P("a")
    query, key, value, indices, counts = (
        jax.device_put(x, NamedSharding(mesh, own))
        for x, own in (
            (QUERY, spec),
            (KEY, of_keys),
            (VALUE, of_keys),
            (indices, of_lists),
            (counts, of_lists),
        )
    )

    @jax.jit
    def attend(indices, counts, *qkv):
        return gradients(blocks(indices, counts), *qkv)

    got = jax.tree.map(np.asarray, attend(indices, counts, query, key, value))
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_ring(method, assert_close):
    """Every device has the lists of the whole sequence."""
    indices, counts = lists(4)
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def local(indices, counts, *qkv):
        mask = blocks(indices, counts)
        return jax_memeff.ring_attention(*qkv, mask=mask, axis_name="ring", method=method)

    rows = P(None, "ring")
    specs = P(), P(), rows, rows, rows
    ring = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows)
    got = jax.jit(ring)(indices, counts, QUERY, KEY, VALUE)
    want = jax.jit(dot_product_attention)(QUERY, KEY, VALUE, mask=expected(indices, counts))
    assert_close(got, want, 1e-6)


def test_packed_sequences(assert_close):
    """Blocks count from the start of each sequence."""
    indices, counts = lists(5)
    lengths = [(T, S), (23, 30)]
    starts_q, starts_k = (np.cumsum([0, *x]) for x in zip(*lengths, strict=True))
    query = jnp.concatenate([QUERY[b, :rows] for b, (rows, _) in enumerate(lengths)])
    key, value = (
        jnp.concatenate([x[b, :columns] for b, (_, columns) in enumerate(lengths)])
        for x in (KEY, VALUE)
    )
    packed = jax.jit(jax_memeff.varlen_attention, static_argnums=(5, 6))
    got = packed(query, key, value, starts_q, starts_k, T, S, mask=blocks(indices, counts))
    rows, columns = map(np.array, zip(*lengths, strict=True))
    valid = expected(indices, counts) & as_array(Mask.lengths(rows, columns))
    want = jax.jit(dot_product_attention)(QUERY, KEY, VALUE, mask=valid)
    want = jnp.concatenate([want[b, :rows] for b, (rows, _) in enumerate(lengths)])
    assert_close(got, want, 1e-6)


def test_memory_is_that_of_the_blocks():
    """Neither forward nor backward has an array of the size of the scores."""
    length, size = 2048, 64
    query = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, 1, length // size, 4), jnp.int32)

    def loss(query, indices):
        mask = Mask.kv_blocks(indices, block_size=size)
        return jnp.sum(dot_product_attention(query, query, query, mask=mask))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(query, indices)
    sizes = [x.aval.size for e in primitives_of(jaxpr.jaxpr) for x in e.outvars]
    assert max(sizes) < length * length


@pytest.mark.parametrize(
    ("tile", "kinds"),
    [((16, 8), {0, 1}), ((8, 8), {0, 1}), ((16, 4), {0, 1}), ((12, 8), {0, 1, 2})],
    ids=str,
)
def test_tiles_that_divide_blocks_need_no_test_of_elements(tile, kinds, monkeypatch):
    """Bounds alone decide that they are skipped or whole."""
    monkeypatch.setattr(block_mask, "_MOST_EVALUATIONS", 0)
    indices, counts = lists(6)
    mask = blocks(indices, counts).canonical(B, 32, S)
    mask = compiled(mask, Frame.of(mask, (32, S)))
    own = block_mask.Indices(jnp.arange(B), jnp.arange(N), jnp.zeros(1, int), jnp.zeros(1, int))
    tiling = block_mask.Tiling((32, S), tile)
    captured = [Captured(x, None) for x in mask.captured]
    found = jax.jit(lambda: block_mask.of_function(mask.functions[0], own, captured, tiling))()
    assert set(np.unique(found)) == kinds
    if 2 not in kinds:
        valid = expected(indices, counts)[:, :, : 32 : tile[0], :: tile[1]]
        np.testing.assert_array_equal(found == 1, valid)


def kernels_with_nan(arch: str | None, query_rows: strategy.QueryRows | None, head_dim: int) -> Any:
    """Results and gradients if no list contains the middle KV block, whose values are NaN."""
    if arch is not None:
        emulator.configure(arch)
    size, length = 128, 300
    rng = np.random.default_rng(8)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, length, heads, head_dim)), jnp.bfloat16)
        for heads in (N, K, K)
    )
    value = value.at[:, size : 2 * size].set(jnp.nan)
    listed = jnp.array([[[[0, 2], [2, -1], [0, 0]], [[2, 2], [9, 0], [-1, 7]]]] * 2)
    mask = Mask.kv_blocks(jnp.repeat(listed, N // K, 1), block_size=size)
    forward = strategy.Strategy(query_rows=query_rows)
    with strategy.using(forward=forward, backward=strategy.PLAIN):
        found = gradients(mask, query, key, value)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), found)


def check_kernels_with_nan(found: Any) -> None:
    (_, (out, lse)), (_, dkey, dvalue) = found
    assert all(np.isfinite(x).all() for x in (out, *found[1]))
    assert (dkey[:, 128:256] == 0).all() and (dvalue[:, 128:256] == 0).all()
    assert (out[:, 256:, 2:] == 0).all() and (lse[:, 256:, 2:] == 0).all()  # no keys
    assert (out[:, :256] != 0).any(3).all()


@pytest.mark.rotating(5)
@pytest.mark.parametrize(
    ("arch", "query_rows", "head_dim"),
    [
        ("sm_90a", None, 64),
        ("sm_90a", None, 128),
        ("sm_80", None, 128),
        ("sm_90a", "64", 128),
        ("sm_80", "16", 128),
    ],
)
def test_kernels_load_no_block_that_is_not_listed(arch, query_rows, head_dim, machine):
    """Kernels that split the keys are tested, too: a split may have no block."""
    found = machine.submit(kernels_with_nan, arch, query_rows, head_dim).result(timeout=600)
    check_kernels_with_nan(found)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("query_rows", [None, "16"])
def test_kernels_on_a_gpu_load_no_block_that_is_not_listed(query_rows, head_dim):
    check_kernels_with_nan(kernels_with_nan(None, query_rows, head_dim))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: blocks(np.zeros((3, 2), np.float32)), TypeError, "KV block indices"),
        (lambda: blocks(np.zeros(3, int)), ValueError, "must have shape .B, N, Q blocks, n."),
        (lambda: blocks(*(np.zeros((3, 2), int),) * 2), ValueError, r"shape \(3,\), got \(3, 2\)"),
        (lambda: Mask.kv_blocks(np.zeros((3, 2), int), block_size=0), ValueError, "at least 1"),
        (lambda: Mask.kv_blocks(np.zeros((3, 2), int), block_size=2**31), ValueError, "at most"),
        (
            lambda: Mask.kv_blocks(np.zeros((3, 2), int), block_size=cast(Any, 2.0)),
            TypeError,
            "static int",
        ),
        (
            lambda: Mask.kv_blocks(np.zeros((3, 2), int), block_size=cast(Any, (2,))),
            ValueError,
            "rows, col",
        ),
    ],
    ids=["floats", "rank", "counts", "size 0", "size beyond int32", "float size", "one size"],
)
def test_bad_lists(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "shape", [(B, N, Q_BLOCKS + 1, 2), (B, K, Q_BLOCKS, 2), (3, N, Q_BLOCKS, 2)]
)
def test_lists_that_do_not_fit_the_call(shape):
    text = r"shape \[2 or 1, 4 or 1, 3, n\], where 3 Q blocks of 16 rows cover 40 rows, got shape"
    mask = functools.partial(blocks, np.zeros(shape, int))
    for given in (mask(), ~mask()):
        with pytest.raises(ValueError, match=text):
            jax.jit(dot_product_attention)(QUERY, KEY, VALUE, mask=given)
