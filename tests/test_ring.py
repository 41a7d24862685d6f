"""Ring attention against one device: results, gradients, dropout bits, transfers, skipped work."""

from __future__ import annotations

import collections
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, Offsets, dropout, primitives
from jax_memeff.mask import Window
from jax_memeff.ring_schedule import steps

DEVICES = 4
LAYOUTS = ("contiguous", "zigzag")

# Compilation is most of the time of these tests.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def ring_mesh(devices: int = DEVICES) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("ring",))


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def ordered(layout: str, x: Any, axis: int) -> Any:
    return jax_memeff.zigzag(x, axis, DEVICES) if layout == "zigzag" else x


def natural(layout: str, x: Any, axis: int) -> Any:
    return jax_memeff.unzigzag(x, axis, DEVICES) if layout == "zigzag" else x


def masking(bias: jax.Array) -> jax.Array:
    """The same bias with two masked columns (of one, rows), by each of the values that mask."""
    return bias.at[0, 0, 0, -1].set(-jnp.inf).at[-1, -1, -1, -1].set(-1e38)


class Case:
    """One problem: the arrays of the whole sequence, and the arguments of both functions."""

    def __init__(self, *, rows=128, columns=128, bias=None, dtype=np.float32, **arguments):
        batch, heads, key_heads, dim, value_dim = 2, 4, 2, 8, 16
        query = normal(0, batch, rows, heads, dim, dtype=dtype)
        key = normal(1, batch, columns, key_heads, dim, dtype=dtype)
        value = normal(2, batch, columns, key_heads, value_dim, dtype=dtype)
        segments = arguments.pop("segments", None)
        mask = arguments.pop("mask", Mask())
        dout = normal(4, batch, rows, heads, value_dim, dtype=dtype)
        self.by_row = query, key, value, segments, (dout, normal(5, batch, rows, heads))
        self.by_score = None if bias is None else masking(normal(3, *bias)), mask.booleans
        self.mask = Mask(**{**vars(mask), "booleans": ()})
        self.arguments = arguments
        self.programs: dict[Any, Any] = {}

    def call(self, function, by_row, by_score):
        """Output, logsumexp, and the gradients of query, key, value and bias."""
        query, key, value, segments, cotangents = by_row
        bias, booleans = by_score
        mask = self.mask & Mask(booleans=booleans)
        if segments is not None:
            mask &= Mask.segments(*segments)

        def attention(query, key, value, bias):
            return function(query, key, value, bias, mask, return_residual=True, **self.arguments)

        results, transpose = jax.vjp(attention, query, key, value, bias)
        *gradients, bias_gradient = transpose(cotangents)
        return (*results, *gradients), bias_gradient

    @functools.cached_property
    def want(self):
        one_device = functools.partial(self.call, jax_memeff.dot_product_attention)
        return compiled(one_device)(self.by_row, self.by_score)

    def inputs(self, layout: str) -> tuple[Any, Any]:
        by_row = jax.tree.map(lambda x: ordered(layout, x, 1), self.by_row)
        return by_row, jax.tree.map(
            lambda x: ordered(layout, x, 2) if x.shape[2] != 1 else x, self.by_score
        )

    def program(self, layout: str, method: str = "ring"):
        """The compiled ring."""
        if (layout, method) not in self.programs:
            ring: Any = jax_memeff.ring_attention
            function = functools.partial(ring, axis_name="ring", layout=layout, method=method)
            scores = jax.tree.map(
                lambda x: P(None, None, "ring") if x.shape[2] != 1 else P(), self.by_score
            )
            sharded = jax.shard_map(
                functools.partial(self.call, function),
                mesh=ring_mesh(),
                in_specs=(P(None, "ring"), scores),
                out_specs=(P(None, "ring"), scores[0]),
            )
            lowered = compiled(sharded).lower(*self.inputs(layout))
            self.programs[layout, method] = lowered.compile()
        return self.programs[layout, method]

    def got(self, layout: str, method: str = "ring"):
        program = self.program(layout, method)
        inputs = jax.device_put(self.inputs(layout), program.input_shardings[0])
        results, bias_gradient = program(*inputs)
        if bias_gradient is not None and bias_gradient.shape[2] != 1:
            bias_gradient = natural(layout, bias_gradient, 2)
        return tuple(natural(layout, x, 1) for x in results), bias_gradient


def segment_ids(seed: int) -> np.ndarray:
    """Sorted ids [2, 128], the last ones padding."""
    ids = np.sort(np.random.default_rng(seed).integers(0, 3, (2, 128)), 1)
    ids[:, 120:] = -1
    return ids


CASES = {
    "everything": lambda: Case(
        bias=(1, 4, 128, 128),
        segments=(segment_ids(7), segment_ids(7)),
        is_causal=True,
        query_seq_lengths=np.array([128, 90]),
        key_value_seq_lengths=np.array([117, 40]),
        logits_soft_cap=3.0,
        scale=-0.7,
        dropout_rate=0.25,
        dropout_key=jax.random.key(3),
    ),
    "shared bias": lambda: Case(bias=(2, 1, 1, 128), mask=Mask.window(40, 3)),
    "row bias": lambda: Case(rows=64, bias=(1, 4, 64, 1), mask=Mask.causal("bottom_right")),
    "boolean": lambda: Case(
        mask=Mask.boolean(np.random.default_rng(9).random((1, 2, 128, 128)).repeat(2, 1) < 0.5),
        key_value_seq_lengths=np.array([128, 0]),
    ),
}


@functools.cache
def case(name: str) -> Case:
    return CASES[name]()


@pytest.mark.parametrize(
    "name, layout, method",
    [
        ("everything", "zigzag", "ring"),
        ("everything", "zigzag", "all_gather"),
        ("shared bias", "contiguous", "ring"),
        ("shared bias", "zigzag", "ring"),
        ("row bias", "zigzag", "ring"),
        ("boolean", "contiguous", "all_gather"),
        ("boolean", "zigzag", "ring"),
    ],
)
def test_equals_one_device(assert_close, name, layout, method):
    assert_close(case(name).got(layout, method), case(name).want)


def transfers(text: str, kind: str) -> list[str]:
    """The types of what the transfers of a compiled program give."""
    return re.findall(rf"= (\w+\[[\d,]*\])\S* {kind}\(", text)


def test_keys_and_values_are_never_gathered():
    """Reads the compiled program: what travels is what one device holds, and window steps less."""
    text = case("shared bias").program("zigzag").as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    local = {"f32[2,32,2,8]", "f32[2,32,2,16]"}  # key and value, and their gradients
    permuted = transfers(text, "collective-permute")
    assert set(permuted) == local
    # Keys and values travel three times forward and backward, and their gradients go home as well.
    assert len(permuted) <= 2 * (3 + 3 + 4)
    assert transfers(text, "all-reduce") == ["f32[2,1,1,128]"]  # the gradient of the shared bias
    gathered = case("boolean").program("contiguous", "all_gather").as_text()
    assert set(transfers(gathered, "all-gather")) == {"f32[2,128,2,8]", "f32[2,128,2,16]"}
    assert "collective-permute" not in gathered


@pytest.mark.parametrize(
    "layout, method", [("contiguous", "ring"), ("zigzag", "ring"), ("zigzag", "all_gather")]
)
def test_dropout_bits_equal_those_of_one_device(layout, method):
    """With equal scores and values of one column each, the output is the keep mask."""
    length = 32 * DEVICES
    zeros = jnp.zeros((1, length, 2, 4))
    value = jnp.broadcast_to(jnp.eye(length)[None, :, None], (1, length, 2, length))
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
        ring, mesh=ring_mesh(), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    out = compiled(sharded)(*(ordered(layout, x, 1) for x in (zeros, zeros, value)))
    kept = natural(layout, out, 1)[0].transpose(1, 0, 2) > 0
    state = dropout.state(key, batch=1, num_heads=2)
    expected = dropout.keep_mask(state, dropout.threshold(0.5), 0, 0, length, length)[0]
    np.testing.assert_array_equal(kept, np.tril(expected))


def test_heads_sharded_too_and_differentiated_outside(assert_close):
    """A mesh of two axes, a bias that all devices share, and ``jax.grad`` around the shard_map."""
    query, key, value = (normal(seed, 2, 64, heads, 8) for seed, heads in ((0, 4), (1, 2), (2, 2)))
    bias, weights = normal(3, 4, 1, 64), normal(4, 2, 64, 4, 8)
    arguments = {"is_causal": True, "dropout_rate": 0.3, "dropout_key": jax.random.key(5)}

    def local(query, key, value, bias):
        offsets = Offsets(head=jax.lax.axis_index("heads") * 2, num_heads=4)
        return jax_memeff.ring_attention(
            query, key, value, bias, axis_name="ring", offsets=offsets, **arguments
        )

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("heads", "ring"))
    spec = P(None, "ring", "heads")
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec, spec, P("heads")), out_specs=spec
    )

    def gradients(function):
        def loss(*operands):
            return jnp.sum(function(*operands) * weights)

        return compiled(jax.value_and_grad(loss, range(4)))(query, key, value, bias)

    one_device = functools.partial(jax_memeff.dot_product_attention, **arguments)
    assert_close(gradients(sharded), gradients(one_device))


def test_float64_one_column_a_device_and_no_batch(assert_close, x64):
    """The smallest parts, in the precision that shows every error."""
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
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
        return jax.shard_map(function, mesh=mesh, in_specs=sequence, out_specs=sequence)(*operands)

    one_device = functools.partial(jax_memeff.dot_product_attention, is_causal=True)
    assert_close(gradients(sharded), gradients(one_device), 1e-12)


def test_bfloat16_is_merged_in_float32():
    query, key, value = (normal(seed, 1, 128, 2, 16, dtype=jnp.bfloat16) for seed in range(3))
    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring", return_residual=True)
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    out, lse = compiled(sharded)(query, key, value)
    wide = (x.astype(np.float32) for x in (query, key, value))
    want, want_lse = jax_memeff.dot_product_attention(*wide, return_residual=True)
    assert out.dtype == jnp.bfloat16 and lse.dtype == np.float32
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    # Each part is rounded to bfloat16, and so is their sum: two roundings of half a unit.
    np.testing.assert_allclose(out.astype(np.float32), want, atol=2**-8 * float(abs(want).max()))


def pairs_of_chunks(layout: str, devices: int, mask: Mask, rows: int, columns: int):
    """The pairs of chunks with a valid element, by device, from the materialised mask."""
    chunks = devices * (2 if layout == "zigzag" else 1)
    tiles = np.asarray(mask.as_array(1, 1, rows * chunks, columns * chunks))[0, 0]
    tiles = tiles.reshape(chunks, rows, chunks, columns).any((1, 3))
    owner = [
        min(chunk, chunks - 1 - chunk) if layout == "zigzag" else chunk for chunk in range(chunks)
    ]
    pairs = collections.defaultdict(set)
    for row, column in np.argwhere(tiles):
        pairs[owner[row]].add((row * rows, column * columns))
    return [pairs[rank] for rank in range(devices)]


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
    """Counts the forwards that every device really executes."""
    executed: collections.Counter[int] = collections.Counter()
    forward = primitives.forward

    def counted(operands, options):
        jax.debug.callback(lambda rank: executed.update([int(rank)]), jax.lax.axis_index("ring"))
        return forward(operands, options)

    monkeypatch.setattr(primitives, "forward", counted)
    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring", layout=layout, mask=mask)
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    x = normal(0, 1, 16 * DEVICES, 1, 4)
    jax.block_until_ready(compiled(sharded)(x, x, x))
    jax.effects_barrier()
    size = 8 if layout == "zigzag" else 16
    expected = pairs_of_chunks(layout, DEVICES, mask, size, size)
    assert [executed[rank] for rank in range(DEVICES)] == list(map(len, expected))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"axis_name": "rings"}, "axis_name: .* got 'rings'; the axes here are: 'ring'. Call"),
        ({"layout": "striped"}, "layout must be 'contiguous' or 'zigzag', got 'striped'"),
        ({"method": "gather"}, "method must be 'ring' or 'all_gather', got 'gather'"),
        (
            {"rows": 5, "layout": "zigzag"},
            "query: .* multiple of 2 positions .* 'ring', got 5; pad",
        ),
        ({"columns": 7, "layout": "zigzag"}, "key: .* multiple of 2 positions .* got 7; pad"),
        (
            {"layout": "zigzag", "dropout_rate": 0.5},
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
            "bottom-right window beside lengths .* align the window top-left",
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
        call, mesh=ring_mesh(), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(sharded, *(jnp.zeros((1, DEVICES * n, 2, 4)) for n in (rows, columns)))


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
