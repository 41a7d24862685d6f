"""Ring attention against one device: results, gradients, dropout bits, transfers, skipped work."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from dropout_bits import kept_by_half
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ring_case import case, compiled, natural, normal, ordered, ring_mesh
from several_devices import at, shape_of, sizes, transfers

import jax_memeff
from jax_memeff import Mask, Offsets
from jax_memeff._call.mask import Window
from jax_memeff._op import primitives
from jax_memeff._ring import attention
from jax_memeff._ring.schedule import steps

LAYOUTS = ("contiguous", "zigzag")
HOST = jax.devices("cpu")[:4]


@pytest.mark.rotating(3)
@pytest.mark.quick("boolean-zigzag-ring-cpu4")
@at(
    "name, layout, method, devices",
    cpu=[
        ("everything", "zigzag", "ring", 4),
        ("everything", "zigzag", "all_gather", 4),
        ("shared bias", "contiguous", "ring", 4),
        ("shared bias", "zigzag", "ring", 4),
        ("row bias", "zigzag", "ring", 4),
        ("boolean", "contiguous", "all_gather", 4),
        ("boolean", "zigzag", "ring", 4),
    ],
    cuda=[
        ("everything", "zigzag", "ring", 2),
        ("everything", "zigzag", "ring", 4),
        ("everything", "zigzag", "all_gather", 4),
        ("everything", "contiguous", "ring", 4),
        ("shared bias", "contiguous", "ring", 2),
        ("shared bias", "zigzag", "ring", 4),
    ],
)
def test_equals_one_device(assert_close, name, layout, method, devices):
    problem = case(name, sizes(devices))
    assert_close(problem.got(devices, layout, method), problem.want, problem.sizes.tolerance)


@at("devices", cpu=4, cuda=[4])
def test_nothing_is_gathered(devices):
    """Reads the compiled program: each transfer has the size of one device's arrays."""
    problem = case("shared bias", sizes(devices))
    text = problem.program(devices, "zigzag").as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    _, key, value, *_ = problem.by_row
    local = (key.size + value.size) // len(devices)
    bytes_of_units = {"bf16": 2, "f32": 4, "u32": 4}
    permuted = [
        math.prod(shape_of(array)) * bytes_of_units[array.split("[")[0]]
        for array in transfers(text, "collective-permute")
    ]
    # Keys and values are sent, and in the backward also their gradients in float32.
    assert set(permuted) <= {
        local * size for size in (key.dtype.itemsize, 4, key.dtype.itemsize + 4)
    }
    assert permuted


def test_keys_and_values_are_sent_as_often_as_the_window_needs():
    problem = case("shared bias", sizes(HOST))
    text = problem.program(HOST, "zigzag").as_text()
    permuted = transfers(text, "collective-permute")
    # Keys and values are sent three times in the forward and in the backward; then their gradients
    # return to their devices.
    assert len(permuted) <= 3 + 3 + 4
    assert transfers(text, "all-reduce") == ["f32[2,1,1,128]"]  # the gradient of the shared bias
    gathering = case("boolean", sizes(HOST)).program(HOST, "contiguous", "all_gather")
    gathered = gathering.as_text()
    assert set(transfers(gathered, "all-gather")) == {"f32[2,128,2,8]", "f32[2,128,2,16]"}
    assert "collective-permute" not in gathered


@pytest.mark.rotating(3)
@at(
    "layout, method, devices",
    cpu=[("contiguous", "ring", 4), ("zigzag", "ring", 4), ("zigzag", "all_gather", 4)],
    cuda=[("zigzag", "ring", 2), ("zigzag", "ring", 4), ("contiguous", "ring", 4)],
)
def test_dropout_bits_equal_those_of_one_device(layout, method, devices):
    """With equal scores and values of one column each, the output is the keep mask."""
    length, dtype = 32 * len(devices), sizes(devices).dtype
    zeros = np.zeros((1, length, 2, length), dtype)
    value = np.broadcast_to(np.eye(length, dtype=dtype)[None, :, None], zeros.shape)
    key = jax.random.key(11)
    ring = functools.partial(
        jax_memeff.ring_attention,
        axis_name="ring",
        layout=layout,
        method=method,
        is_causal=True,
        dropout_rate=0.5,
        dropout_key=key,
    )
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(devices), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    out = compiled(sharded)(*(ordered(layout, x, 1, devices) for x in (zeros, zeros, value)))
    kept = natural(layout, np.asarray(out), 1, devices)[0].transpose(1, 0, 2) > 0
    np.testing.assert_array_equal(kept, np.tril(kept_by_half(key, 1, 2, length)[0]))


@at("devices", cpu=4, cuda=[4])
def test_heads_sharded_too_and_differentiated_outside(assert_close, devices):
    """The mesh has two axes, the bias is replicated, and ``jax.grad`` is outside of shard_map."""
    dtype, dim, scale, tolerance = sizes(devices)
    draw, length = functools.partial(normal, dtype=dtype), 64 * scale
    query, key, value = (
        draw(seed, 2, length, heads, dim) for seed, heads in ((0, 4), (1, 2), (2, 2))
    )
    bias, weights = draw(3, 4, 1, length), normal(4, 2, length, 4, dim)
    arguments = {"is_causal": True, "dropout_rate": 0.3, "dropout_key": jax.random.key(5)}

    def local(query, key, value, bias):
        offsets = Offsets(head=jax.lax.axis_index("heads") * 2, num_heads=4)
        return jax_memeff.ring_attention(
            query, key, value, bias, axis_name="ring", offsets=offsets, **arguments
        )

    mesh = Mesh(np.array(devices).reshape(2, 2), ("heads", "ring"))
    spec = P(None, "ring", "heads")
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec, spec, P("heads")), out_specs=spec
    )

    def gradients(function):
        def loss(*operands):
            return jnp.sum(function(*operands) * weights)

        return compiled(jax.value_and_grad(loss, range(4)))(query, key, value, bias)

    one_device = functools.partial(jax_memeff.dot_product_attention, **arguments)
    assert_close(gradients(sharded), gradients(one_device), tolerance)


def test_float64_one_column_a_device_and_no_batch(assert_close, x64):
    """These are the smallest parts, in the precision that shows every error."""
    query, key, value = normal(0, 3, 8, 1, 4, dtype=np.float64)
    bias = normal(1, 8, 8, dtype=np.float64)

    def gradients(function):
        def loss(*operands):
            out, lse = function(*operands, return_residual=True)
            return jnp.sum(out**2) + jnp.sum(lse**3)

        return compiled(jax.grad(loss, range(4)))(query, key, value, bias)

    ring = functools.partial(jax_memeff.ring_attention, axis_name=("a", "b"), is_causal=True)
    sequence = P(("a", "b"))

    def sharded(*operands, return_residual):
        function = functools.partial(ring, return_residual=return_residual)
        mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
        return jax.shard_map(function, mesh=mesh, in_specs=sequence, out_specs=sequence)(*operands)

    one_device = functools.partial(jax_memeff.dot_product_attention, is_causal=True)
    assert_close(gradients(sharded), gradients(one_device), 1e-12)


def test_bfloat16_is_merged_in_float32():
    query, key, value = (normal(seed, 1, 128, 2, 16, dtype=jnp.bfloat16) for seed in range(3))
    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring", return_residual=True)
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(HOST), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    out, lse = compiled(sharded)(query, key, value)
    wide = (x.astype(np.float32) for x in (query, key, value))
    want, want_lse = jax_memeff.dot_product_attention(*wide, return_residual=True)
    assert out.dtype == jnp.bfloat16 and lse.dtype == np.float32
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    # Each part and their sum are rounded to bfloat16: two roundings of half a unit.
    np.testing.assert_allclose(out.astype(np.float32), want, atol=2**-8 * float(abs(want).max()))


def pairs_of_chunks(layout: str, devices: int, mask: Mask, rows: int, columns: int):
    """For each device the pairs of chunks with a valid element, by the definition of the mask."""
    chunks = devices * (2 if layout == "zigzag" else 1)
    tiles = oracle.valid_elements(mask, 1, 1, rows * chunks, columns * chunks)[0, 0]
    tiles = tiles.reshape(chunks, rows, chunks, columns).any((1, 3))
    owner = [
        min(chunk, chunks - 1 - chunk) if layout == "zigzag" else chunk for chunk in range(chunks)
    ]
    pairs = collections.defaultdict(set)
    for row, column in np.argwhere(tiles):
        pairs[owner[row]].add((row * rows, column * columns))
    return [pairs[rank] for rank in range(devices)]


@pytest.mark.quick
@pytest.mark.parametrize("layout, devices", [*itertools.product(LAYOUTS, (1, 2, 3, 5))])
@pytest.mark.parametrize(
    "left, right",
    [(None, None), (None, 0), (9, 0), (0, 0), (None, -3), (-30, None), (6, 11), (3, -5)],
)
def test_steps_are_exactly_the_products_that_are_not_masked(layout, devices, left, right):
    rows, columns = 4, 6
    mask = Mask.window(left, right)
    chunks = 2 if layout == "zigzag" else 1
    plan = steps(layout, devices, rows * chunks, columns * chunks, Window(left, right))
    for rank, expected in enumerate(pairs_of_chunks(layout, devices, mask, rows, columns)):
        done = [
            (int(step.products.first_row[rank, i]), int(step.products.first_column[rank, i]))
            for step in plan
            for i in range(step.counts[rank])
        ]
        assert len(done) == len(set(done)) and set(done) == expected
    assert all(step.counts.any() for step in plan)


def test_causal_work_is_equal_in_zigzag_layout():
    plan = steps("zigzag", 8, 64, 64, Window(None, 0))
    assert [step.count for step in plan] == [3] + [2] * 7
    contiguous = steps("contiguous", 8, 64, 64, Window(None, 0))
    assert np.sum([step.counts for step in contiguous], 0).tolist() == list(range(1, 9))


@pytest.mark.parametrize(
    "layout, mask",
    [("contiguous", Mask.causal()), ("zigzag", Mask.causal()), ("contiguous", Mask.window(9, 0))],
)
def test_kernels_run_only_for_products_that_are_not_masked(monkeypatch, layout, mask):
    """Counts the forwards that each device executes."""
    executed: collections.Counter[int] = collections.Counter()
    forward = primitives.forward

    def counted(operands, options):
        jax.debug.callback(lambda rank: executed.update([int(rank)]), jax.lax.axis_index("ring"))
        return forward(operands, options)

    monkeypatch.setattr(primitives, "forward", counted)
    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring", layout=layout, mask=mask)
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(HOST), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    x = normal(0, 1, 16 * len(HOST), 1, 4)
    jax.block_until_ready(compiled(sharded)(x, x, x))
    jax.effects_barrier()
    size = 8 if layout == "zigzag" else 16
    expected = pairs_of_chunks(layout, len(HOST), mask, size, size)
    assert [executed[rank] for rank in range(len(HOST))] == list(map(len, expected))


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"axis_name": "rings"}, "axis_name: .* got 'rings'; the axes here are: 'ring'. Call"),
        ({"layout": "striped"}, "layout must be 'contiguous' or 'zigzag', got 'striped'"),
        (
            {"method": "gather"},
            "method must be 'ring' or 'all_gather' or 'all_to_all', got 'gather'",
        ),
        (
            {"rows": 5, "layout": "zigzag"},
            "query: .* multiple of 2 positions .* 'ring', got 5; pad",
        ),
        ({"columns": 7, "layout": "zigzag"}, "key: .* multiple of 2 positions .* got 7; pad"),
        (
            {"layout": "zigzag", "dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
            "query: with dropout.* multiple of 32 positions .* 'ring', got 6; pad",
        ),
        (
            {"bias": (6, 6)},
            r"bias: .* all 4 devices of axis 'ring', 24 in natural order, got .*6, 6",
        ),
        ({"mask": np.ones((6, 6), bool)}, "mask: .* do not shard the last dim of mask over 'ring'"),
        ({"offsets": Offsets(query=16)}, r"offsets.query: expected 0, got 16; .*'ring'"),
        ({"offsets": Offsets(key=jnp.int32(0))}, "offsets.key: expected 0"),
        (
            {"mask": Mask.causal("bottom_right"), "key_value_seq_lengths": np.array([20])},
            "bottom-right window together with lengths .* align the window top-left",
        ),
        ({"key_value_seq_lengths": np.array([25])}, r"must be in \[0, 24\], got 25"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    rows, columns = arguments.pop("rows", 6), arguments.pop("columns", 6)
    bias = arguments.pop("bias", None)
    arguments = {"axis_name": "ring", **arguments}

    def call(query, key):
        added = None if bias is None else jnp.zeros(bias)
        return jax_memeff.ring_attention(query, key, key, added, **arguments)

    sharded = jax.shard_map(
        call, mesh=ring_mesh(HOST), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(sharded, *(jnp.zeros((1, len(HOST) * n, 2, 4)) for n in (rows, columns)))


@pytest.mark.parametrize("length", [10, 1])
def test_a_sequence_that_does_not_divide_is_refused_by_shard_map(length):
    """Local lengths are therefore always equal."""
    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring")
    rows = P(None, "ring")
    sharded = jax.shard_map(ring, mesh=ring_mesh(HOST), in_specs=rows, out_specs=rows)
    with pytest.raises(ValueError, match=rf"size {length}\).*'ring' \(of size 4\)"):
        jax.eval_shape(sharded, *[jnp.zeros((1, length, 2, 4))] * 3)


@pytest.mark.parametrize("name", ["query", "key"])
def test_lengths_that_differ_over_the_ring_are_refused(name):
    """Lengths belong to the whole sequence, so they must be the same on all devices."""

    def call(x, part, total=lambda part: part):
        ring: Any = jax_memeff.ring_attention
        mask = Mask.lengths(**{name: total(part)})
        return ring(x, x, x, mask=mask, axis_name="ring")

    def shapes_of(call):
        specs = P(None, "ring"), P("ring")
        local = jax.shard_map(call, mesh=ring_mesh(HOST), in_specs=specs, out_specs=specs[0])
        return jax.eval_shape(local, jnp.zeros((1, 24, 2, 4)), jnp.array([6, 6, 3, 0])).shape

    with pytest.raises(ValueError, match=f"{name} lengths: .* axis 'ring', .* jax.lax.psum"):
        shapes_of(call)
    whole = functools.partial(call, total=lambda part: jax.lax.psum(part, "ring"))
    assert shapes_of(whole) == (1, 24, 2, 4)


@pytest.mark.parametrize("axis_name", [["ring"], {"ring"}])
def test_a_list_of_axes_is_refused(axis_name):
    x = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(
        TypeError, match=r"axis_name must be a mesh axis or a tuple .*; pass a tuple"
    ):
        jax_memeff.ring_attention(x, x, x, axis_name=axis_name)


def test_outside_of_shard_map_the_axis_is_not_bound():
    x = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"'ring'; the axes here are: none. Call .* jax.shard_map"):
        jax_memeff.ring_attention(x, x, x, axis_name="ring")


def test_zigzag_and_its_inverse():
    x = np.arange(24).reshape(2, 12)
    there = jax_memeff.zigzag(x, -1, 3)
    assert there[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    np.testing.assert_array_equal(jax_memeff.unzigzag(there, 1, 3), x)
    np.testing.assert_array_equal(jax_memeff.zigzag(jnp.asarray(x), 1, 3), there)
    for function in (jax_memeff.zigzag, jax_memeff.unzigzag):
        with pytest.raises(ValueError, match=r"multiple of 2n = 10 .* axis 1, got 12; pad"):
            function(x, 1, 5)
        with pytest.raises(ValueError, match=r"axis must be a dim of x, got 2 for shape \(2, 12\)"):
            function(x, 2, 3)


@pytest.mark.parametrize(
    "x, axis, n, message",
    [
        ([0, 1, 2, 3], 0, 2, "x must be an array of JAX or NumPy, got list"),
        (np.arange(4), None, 2, "axis must be a Python integer, got None"),
        (np.arange(4), 0, 2.0, "n must be a Python integer, got 2.0"),
        (np.arange(4), 0, "2", "n must be a Python integer, got '2'"),
    ],
)
@pytest.mark.parametrize("reorder", [jax_memeff.zigzag, jax_memeff.unzigzag])
def test_wrong_arguments_of_zigzag(reorder, x, axis, n, message):
    with pytest.raises(TypeError, match=message):
        reorder(x, axis, n)


@pytest.mark.parametrize("reorder", [jax_memeff.zigzag, jax_memeff.unzigzag])
def test_wrong_numbers_of_devices_take_no_memory(reorder):
    with pytest.raises(ValueError, match=r"multiple of 2n = 2361183241434822606848 positions"):
        reorder(np.arange(4), 0, 2**70)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        reorder(np.arange(4), 0, 0)


def test_merging_keeps_nan():
    """A row of NaN stays NaN if another device has no columns for it."""
    nan = jnp.full((1, 2), jnp.nan), jnp.full(1, jnp.nan)
    nothing = jnp.zeros((1, 2)), jnp.full(1, -jnp.inf)
    for parts in ((nan, nothing), (nothing, nan)):
        assert all(jnp.isnan(x).all() for x in attention._merge(*parts))
    out, lse = attention._merge(nothing, nothing)
    assert not out.any() and lse == -jnp.inf
