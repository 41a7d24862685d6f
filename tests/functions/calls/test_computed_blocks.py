"""``Mask.blocks``: a mask whose block mask is computed once, in every kind of call."""

from __future__ import annotations

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention
from jax_memeff._call import functions
from jax_memeff._call.mask import block_mask
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.options import Divisors
from jax_memeff._cuda import block_mask as block_masks
from jax_memeff.codegen import strategy
from jax_memeff.codegen.launch import BlockMask

B, T, S, N, K, H = 2, 256, 330, 4, 2, 8


def drawn(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


QUERY, KEY, VALUE = drawn(0, B, T, N, H), drawn(1, B, S, K, H), drawn(2, B, S, K, H)
IDS = np.sort(np.random.default_rng(3).integers(0, 4, (B, S)))
ALLOWED = np.random.default_rng(4).random((1, N, T, S)) < 0.7
PREFIX = jnp.array([100, 7])
MASKS = {
    "function": Mask.function(lambda b, h, q, k: (k < PREFIX[b]) | (q // 70 == k // 70 + h)),
    "or": Mask.causal() & (Mask.window(30, None) | Mask.segments(IDS[:, :T], IDS)),
    "segments": Mask.segments(IDS[:, :T], IDS) & Mask.lengths(key=np.array([300, 20])),
    "boolean": Mask.boolean(ALLOWED) & Mask.window(80, 20, "bottom_right"),
    "lists": Mask.kv_blocks(np.array([[0], [2], [1]]), block_size=(100, 90)),
    "all": (
        Mask.function(lambda b, h, q, k: q + 90 > k)
        & Mask.segments(IDS[:, :T], IDS)
        & Mask.kv_blocks(np.arange(B * 2).reshape(B, 1, 2, 1) % 3, block_size=150)
    ),
}


@jax.jit
def gradients(mask: Any, *qkv: jax.Array) -> Any:
    def loss(*qkv):
        out = dot_product_attention(*qkv, mask=mask)
        return jnp.sum(out * out), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*(qkv or (QUERY, KEY, VALUE)))


@jax.jit
def with_blocks(mask: Mask) -> Mask:
    return mask.blocks(QUERY, KEY)


as_array = jax.jit(lambda mask: mask.as_array(B, N, T, S))


def tiles(mask: Mask, tile: BlockMask, offsets: Offsets | None = None) -> np.ndarray:
    """The class of each tile of scores that a kernel reads, [B, N, Q blocks, KV blocks]."""

    @jax.jit
    def lines(mask):
        canonical = mask.canonical(B, T, S)
        canonical = compiled(canonical, Frame.of(canonical, (T, S), offsets))
        position = None if offsets is None else offsets.position()
        state, scores = functions.state(B, N, offsets), (B, N, T, S)
        return block_masks.lines(canonical, state, position, tile, scores, Divisors())

    found = np.asarray(lines(mask))[..., 8 : 8 + -(-S // tile.key)]
    return np.broadcast_to(found, (B, N, *found.shape[2:]))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", MASKS)
def test_the_results_of_the_mask(name, assert_close):
    mask = MASKS[name]
    blocked = with_blocks(mask)
    assert blocked.block_masks[0].shape[2:] == (4, 6)
    np.testing.assert_array_equal(as_array(blocked), as_array(mask))
    assert_close(gradients(blocked), gradients(mask), 1e-6)


@pytest.mark.rotating(3)
@pytest.mark.quick("function-128-128")
@pytest.mark.parametrize(("query", "key"), [(64, 64), (128, 128), (64, 96), (32, 16), (192, 80)])
@pytest.mark.parametrize("name", MASKS)
def test_kernels_read_the_same_tiles(name, query, key, monkeypatch):
    """Tiles that are multiples of a block are equal; others may have more partial tiles."""
    mask, tile = MASKS[name], BlockMask("queries", query, key)
    offsets = Offsets(query=33, key=5) if name == "function" else None
    blocked = jax.jit(lambda mask: mask.blocks(QUERY, KEY, offsets))(mask)
    want = tiles(mask, tile, offsets)
    for part in ("of_ids", "of_booleans", "of_function", "of_windows"):
        monkeypatch.setattr(block_mask, part, None)  # not computed again
    got = tiles(blocked, tile, offsets)
    assert (want[got == block_mask.NONE] == block_mask.NONE).all()
    assert (want[got == block_mask.ALL] == block_mask.ALL).all()
    if query % 64 == key % 64 == 0:
        np.testing.assert_array_equal(got, want)


def test_what_is_added_to_a_block_mask():
    """Windows need no block mask. Block masks of other masks are computed and combined with it."""
    tile = BlockMask("queries", 64, 64)
    function = MASKS["function"]
    blocked = with_blocks(function)
    assert not (blocked & Mask.causal() & Mask.lengths(key=np.array([3, 4]))).beyond_block_masks
    assert not (blocked & with_blocks(MASKS["segments"])).beyond_block_masks
    for other in (MASKS["segments"], Mask.boolean(ALLOWED), ~Mask.causal()):
        both = blocked & other
        assert both.beyond_block_masks and (other & blocked).beyond_block_masks
        np.testing.assert_array_equal(tiles(both, tile), tiles(function & other, tile))
        again = with_blocks(both)
        assert len(again.block_masks) == 1 and not again.beyond_block_masks
        np.testing.assert_array_equal(tiles(again, tile), tiles(function & other, tile))
    assert Mask.causal().blocks(QUERY, KEY) == Mask.causal()
    assert not (~blocked).block_masks and not (blocked | Mask.causal()).block_masks


def test_traced_windows_and_lengths(assert_close):
    """A traced bottom-right window ends at the lengths of its own mask."""
    lengths = Mask.lengths(np.array([200, 90]), np.array([330, 50]))

    def attend(left):
        mask = Mask.window(left, 4, "bottom_right") & lengths
        return gradients(mask.blocks(QUERY, KEY) & Mask.lengths(key=np.array([60, 60])))

    got = jax.jit(attend)(9)
    want = gradients(
        Mask.boolean(as_array(Mask.window(9, 4, "bottom_right") & lengths))
        & Mask.lengths(key=np.array([60, 60]))
    )
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("T, S", [(0, 130), (130, 0)])
def test_segments_without_rows_or_columns(T, S):
    mask = Mask.segments(jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))
    query, key = jnp.ones((B, T, N, H)), jnp.ones((B, S, N, H))
    blocked = mask.blocks(query, key)
    assert blocked.block_masks[0].shape == (B, 1, -(-T // 64), -(-S // 64))
    assert not dot_product_attention(query, key, key, mask=blocked).any()


def test_layers_of_a_scan(assert_close):
    """The block mask is computed before the loop."""
    mask = MASKS["function"]
    blocked = mask.blocks(QUERY, QUERY)

    def layers(mask):
        def layer(x, _):
            return dot_product_attention(x, x, x, mask=mask), None

        return jax.lax.scan(jax.checkpoint(layer), QUERY, None, length=3)[0]

    assert_close(jax.jit(layers)(blocked), jax.jit(layers)(mask), 1e-6)


def test_vmap(assert_close):
    """One mask for all calls, or one for each."""
    queries = drawn(5, 3, B, T, N, H)
    prefixes = jnp.array([[100, 7], [3, 200], [0, 40]])

    def masked(prefix):
        return Mask.function(lambda b, h, q, k: k <= q + prefix[b])

    def attend(query, prefix):
        return gradients(masked(prefix).blocks(query, KEY), query, KEY, VALUE)

    each = [gradients(masked(p), q, KEY, VALUE) for q, p in zip(queries, prefixes, strict=True)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    assert_close(jax.jit(jax.vmap(attend))(queries, prefixes), want, 1e-6)
    mask = with_blocks(MASKS["function"])
    want = [gradients(MASKS["function"], query, KEY, VALUE) for query in queries]
    want = jax.tree.map(lambda *x: jnp.stack(x), *want)
    got = jax.vmap(lambda query: gradients(mask, query, KEY, VALUE))(queries)
    assert_close(got, want, 1e-6)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "spec", [P("a", None, "b"), P(None, ("a", "b")), P(None, "a")], ids=["heads", "rows", "2 rows"]
)
def test_sharded(axis_type, spec, assert_close):
    mesh = jax.make_mesh((2, 2), ("a", "b"), (axis_type,) * 2, devices=jax.devices("cpu")[:4])
    mask = Mask.function(lambda b, h, q, k: (q // 70 == k // 70 + h % 2) | (k < 30 * b + 9))
    of_keys = P(spec[0], None, *spec[2:])
    blocked = with_blocks(mask)
    query, key, value = (
        jax.device_put(x, NamedSharding(mesh, own))
        for x, own in ((QUERY, spec), (KEY, of_keys), (VALUE, of_keys))
    )
    got = jax.tree.map(np.asarray, gradients(blocked, query, key, value))
    assert_close(got, gradients(mask), 1e-6)


def test_packed_sequences_and_rings_compute_their_own(assert_close):
    mask = MASKS["function"]
    starts = np.array([0, 200, T])
    blocked = mask.blocks(QUERY, KEY[:, :T])
    query, key, value = QUERY[0], KEY[0, :T], VALUE[0, :T]
    for given in (blocked & Mask.causal(), Mask.causal() & blocked):
        got, want = (
            jax_memeff.varlen_attention(query, key, value, starts, starts, 200, 200, mask=own)
            for own in (given, mask & Mask.causal())
        )
        assert_close(got, want, 1e-6)
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    rows = P(None, "ring")

    def local(mask, *qkv):
        return jax_memeff.ring_attention(*qkv, mask=mask, axis_name="ring")

    ring = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), *[rows] * 3), out_specs=rows))
    got, want = (ring(own, QUERY, KEY, VALUE) for own in (with_blocks(mask), mask))
    assert_close(got, want, 1e-6)


def test_arrays_of_other_sizes():
    blocked = MASKS["function"].blocks(QUERY, KEY)
    text = r"shape \(2, 4, 4, 6\) for arrays of other sizes; .* 300 columns needs \[2 or 1, 4 or 1"
    with pytest.raises(ValueError, match=text):
        dot_product_attention(QUERY, KEY[:, :300], VALUE[:, :300], mask=blocked)
    with pytest.raises(ValueError, match=r"query and key must have shapes \[B, T, N, H\]"):
        Mask.causal().blocks(QUERY[0, 0], KEY)


def kernels(arch: str | None) -> Any:
    """Gradients with a mask, with its block mask, and with an empty block mask."""
    if arch is not None:
        emulator.configure(arch)
    qkv = (
        drawn(6, B, 200, 2, 64, dtype=jnp.bfloat16),
        *drawn(7, 2, B, 200, 1, 64, dtype=jnp.bfloat16),
    )
    mask = Mask.function(lambda b, h, q, k: (k // 50 <= q // 50) & (k >= 64 * h))
    blocked = mask.blocks(qkv[0], qkv[1])
    nothing = jax.tree.map(jnp.zeros_like, blocked.block_masks)
    none = jax.tree.unflatten(
        jax.tree.structure(blocked), [*jax.tree.leaves(blocked)[:-1], *nothing]
    )
    with strategy.using(forward=strategy.PLAIN, backward=strategy.PLAIN):
        found = [gradients(own, *qkv) for own in (mask, blocked, none)]
    return jax.tree.map(lambda x: np.asarray(x, np.float32), found)


def check_kernels(found: Any) -> None:
    mask, blocked, none = found
    jax.tree.map(np.testing.assert_array_equal, mask[0], blocked[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-2, 1e-2), mask[1], blocked[1])
    assert (mask[0][1] != 0).any()
    assert all((x == 0).all() for x in jax.tree.leaves(none))


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_kernels_read_the_given_block_mask(arch, machine):
    check_kernels(machine.submit(kernels, arch).result(timeout=600))


@pytest.mark.gpu
def test_kernels_on_a_gpu_read_the_given_block_mask():
    check_kernels(kernels(None))
