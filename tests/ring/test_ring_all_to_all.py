"""Ring attention by heads (``method="all_to_all"``): results, dropout, transfers, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropout_bits import kept_by_half
from jax.sharding import PartitionSpec as P
from ring_case import case, compiled, natural, normal, ordered, ring_mesh
from several_devices import at, shape_of, sizes, transfers

import jax_memeff

HOST = jax.devices("cpu")[:4]


@pytest.mark.rotating(3)
@at(
    "name, layout, devices",
    cpu=[
        ("everything", "zigzag", 4),  # fewer key heads than devices
        ("everything", "contiguous", 2),
        ("shared bias", "contiguous", 4),
        ("row bias", "zigzag", 4),
        ("boolean", "zigzag", 2),
    ],
    cuda=[("everything", "zigzag", 2), ("everything", "contiguous", 4)],
)
def test_equals_one_device(assert_close, name, layout, devices):
    problem = case(name, sizes(devices))
    got = problem.got(devices, layout, "all_to_all")
    assert_close(got, problem.want, problem.sizes.tolerance)


def test_one_row_on_each_device(assert_close):
    """A bias or boolean mask of one row on each device is not broadcast over the sequence."""
    arrays = [normal(seed, 1, 4, 4, 8) for seed in range(3)]
    arrays += [normal(3, 1, 4, 4, 4), normal(4, 1, 1, 4, 4), normal(5, 1, 4, 1, 4)]
    specs = P(None, "ring"), P(None, "ring"), P(None, "ring"), P(None, None, "ring")

    def attend(function, query, key, value, bias, drawn, common):
        mask = jax_memeff.Mask.boolean(drawn > 0) & jax_memeff.Mask.boolean(common > -1)
        return function(query, key, value, bias, mask)

    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring", method="all_to_all")
    sharded = jax.shard_map(
        functools.partial(attend, ring),
        mesh=ring_mesh(HOST),
        in_specs=(*specs, P(None, None, "ring"), P()),
        out_specs=P(None, "ring"),
    )
    one_device = functools.partial(attend, jax_memeff.dot_product_attention)

    def of(function):
        gradient = jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 3))
        return compiled(lambda *x: (function(*x), gradient(*x)))(*arrays)

    assert_close(of(sharded), of(one_device), 1e-5)


@at("devices", cpu=4)
def test_only_heads_are_transferred(devices):
    problem = case("shared bias", sizes(devices))
    text = problem.program(devices, "contiguous", "all_to_all").as_text()
    assert "all-gather" not in text and "collective-permute" not in text
    moved = {int(np.prod(shape_of(array))) for array in transfers(text, "all-to-all")}
    query, key, value, *_ = problem.by_row
    # A device sends and receives its share of each array, and key heads once for each device.
    parts = query.size, 2 * key.size, 2 * value.size, problem.want[0][0].size
    assert max(moved) <= max(parts) // len(devices)


@at("devices", cpu=4)
def test_dropout_bits_equal_those_of_one_device(devices):
    """With equal scores and values of one column each, the output is the keep mask."""
    length, heads = 20, 4  # five rows a device: this need not be a multiple of 16
    zeros = np.zeros((1, length, heads, length), np.float32)
    value = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], zeros.shape)
    key = jax.random.key(11)
    ring = functools.partial(
        jax_memeff.ring_attention,
        axis_name="ring",
        method="all_to_all",
        dropout_rate=0.5,
        dropout_key=key,
    )
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(devices), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    kept = np.asarray(compiled(sharded)(zeros, zeros, value))[0].transpose(1, 0, 2) > 0
    np.testing.assert_array_equal(kept, kept_by_half(key, 1, heads, length)[0])


def test_second_derivatives(assert_close):
    operands = [normal(seed, 1, 32, 4, 8) for seed in range(3)]

    def norm_of_gradient(attention):
        def function(*operands):
            gradients = jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1, 2))(*operands)
            return sum(jnp.sum(x * x) for x in gradients)

        return compiled(jax.grad(function, (0, 1, 2)))

    ring = functools.partial(
        jax_memeff.ring_attention,
        axis_name="ring",
        layout="zigzag",
        method="all_to_all",
        is_causal=True,
    )
    sharded = jax.shard_map(
        ring, mesh=ring_mesh(HOST), in_specs=P(None, "ring"), out_specs=P(None, "ring")
    )
    got = norm_of_gradient(sharded)(*(ordered("zigzag", x, 1, HOST) for x in operands))
    want = norm_of_gradient(functools.partial(jax_memeff.dot_product_attention, is_causal=True))
    assert_close([natural("zigzag", x, 1, HOST) for x in got], list(want(*operands)), 2e-5)


@pytest.mark.parametrize(
    "heads, key_heads, message",
    [
        (6, 2, r"query: method 'all_to_all' needs a multiple of 4 heads, .* 'ring', got 6; shard"),
        (
            12,
            6,
            r"key: method 'all_to_all' needs a number of heads that divides 4, .* got 6; repeat",
        ),
    ],
)
def test_heads_that_do_not_divide(heads, key_heads, message):
    sharded = jax.shard_map(
        functools.partial(jax_memeff.ring_attention, axis_name="ring", method="all_to_all"),
        mesh=ring_mesh(HOST),
        in_specs=P(None, "ring"),
        out_specs=P(None, "ring"),
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(sharded, np.ones((1, 16, heads, 8)), *[np.ones((1, 16, key_heads, 8))] * 2)
