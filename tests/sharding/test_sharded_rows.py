"""Queries sharded over their sequence, with whole keys on every device.

Windows, lengths and dropout count from the positions in the whole sequence. The oracle is the same
function on one device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharding_case import (
    gathered,
    loss,
    put,
    random,
    refused_or_gathered,
    run,
    value_and_grad,
)

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention

B, T, S, N, K, H = 2, 64, 48, 4, 2, 8
HOST = jax.devices("cpu")[:8]
IDS = np.arange(B * T).reshape(B, T) // 24
CASES = {
    "causal": {"is_causal": True},
    "bottom-right window": {"mask": Mask.window(20, 3, "bottom_right")},
    "window, dropout and lengths": {
        "local_window_size": (9, 4),
        "dropout_rate": 0.5,
        "dropout_key": jax.random.key(3),
        "query_seq_lengths": np.array([40, 64]),
        "key_value_seq_lengths": np.array([48, 17]),
    },
    "segments and an array": {
        "mask": Mask.segments(IDS, IDS[:, :S]) & Mask.boolean(random(T, S) > -1),
    },
    "offsets": {"is_causal": True, "offsets": Offsets(query=16, key=48)},
}
SPECS = {
    "over the rows": (P("x", "y"), P("x"), P(None, None, "y")),
    "over rows and heads": (P(None, "y", "x"), P(None, None, "x"), P(None, "x", "y")),
    "over two axes": (P(None, ("x", "y")), P(), P(None, None, ("x", "y"))),
}

auto_and_explicit = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def mesh_of(axis_type):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2, devices=HOST)


def arrays():
    return random(B, T, N, H), random(B, S, K, H), random(B, S, K, H + 1), random(1, N, T, S)


@functools.cache
def unsharded(case):
    function = value_and_grad(functools.partial(loss, **CASES[case]), *arrays())
    return function(*arrays())


@pytest.mark.rotating(3)
@auto_and_explicit
@pytest.mark.parametrize(
    ("case", "spec"),
    [*((case, "over the rows") for case in CASES), *(("causal", spec) for spec in [*SPECS][1:])],
)
def test_results_and_gradients(axis_type, case, spec, assert_close):
    mesh = mesh_of(axis_type)
    query, key, bias = SPECS[spec]
    specs = (query, key, key, bias)
    if case == "window, dropout and lengths":
        specs = (P(None, "y"), P(), P(), P(None, None, "y"))  # 16 rows a device
    operands = [put(mesh, x, *spec) for x, spec in zip(arrays(), specs, strict=True)]
    function = value_and_grad(functools.partial(loss, **CASES[case]), *operands)
    got, hlo = run(function, *operands)
    assert_close(got, unsharded(case))
    assert gathered(hlo) == []
    for gradient, x in zip(got[1], operands, strict=True):
        assert gradient.sharding.is_equivalent_to(x.sharding, gradient.ndim)


@auto_and_explicit
def test_dropout_drops_the_elements_of_the_whole_sequence(axis_type):
    """One-hot values show which elements each row keeps."""
    mesh = mesh_of(axis_type)
    zeros = np.zeros((1, T, 1, H), np.float32)
    value = np.eye(T, dtype=np.float32)[None, :, None]

    @jax.jit
    def kept(query, key, value):
        return dot_product_attention(
            query, key, value, dropout_rate=0.5, dropout_key=jax.random.key(0)
        )

    want = np.asarray(kept(zeros, zeros, value)) > 0
    sharded = put(mesh, zeros, None, "y"), put(mesh, zeros), put(mesh, value)
    np.testing.assert_array_equal(np.asarray(kept(*sharded)) > 0, want)
    assert 0.4 < want.mean() < 0.6


def test_the_rows_of_the_output_are_sharded_like_the_query():
    """The sharding propagates: a program that continues with the output gathers nothing."""
    mesh = mesh_of(AxisType.Auto)
    query, key = put(mesh, arrays()[0], "x", "y"), put(mesh, arrays()[1], "x")

    @jax.jit
    def call(query, key):
        return jnp.tanh(dot_product_attention(query, key, jnp.tanh(key)))

    got, hlo = run(call, query, key)
    assert gathered(hlo) == []
    assert got.sharding.is_equivalent_to(query.sharding, 4)


@auto_and_explicit
@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
            r"query: with dropout every device needs a multiple of 16 rows, got 64 rows.*pad",
        ),
        (
            {
                "mask": Mask.causal("bottom_right"),
                "key_value_seq_lengths": np.array([S, 5]),
            },
            r"mask: a bottom-right window together with lengths has a diagonal for each batch "
            r"index",
        ),
    ],
)
def test_unsupported_row_shardings(axis_type, arguments, message, messages, assert_close):
    mesh = mesh_of(axis_type)
    specs = (P(None, ("x", "y")), P(), P())
    operands = [put(mesh, x, *spec) for x, spec in zip(arrays()[:3], specs, strict=True)]
    call = functools.partial(dot_product_attention, **arguments)
    refused_or_gathered(axis_type, call, operands, message, messages, assert_close)


@auto_and_explicit
def test_one_array_of_query_key_and_value_has_no_sharded_rows(axis_type, messages, assert_close):
    qkv = put(mesh_of(axis_type), random(B, T, 3, N, H), None, "y")
    call = functools.partial(jax_memeff.dot_product_attention_packed)
    message = r"query_key_value of shape .* its sequence dim is sharded"
    refused_or_gathered(axis_type, call, [qkv], message, messages, assert_close)
