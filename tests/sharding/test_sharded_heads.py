"""If the number of devices does not divide the key heads, some share a head; nothing is gathered.

The oracle is the same function on one device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharding_case import gathered, loss, put, random, run, value_and_grad

from jax_memeff import dot_product_attention

B, T, H = 2, 16, 8
HOST = jax.devices("cpu")[:8]
FEATURES = {
    "is_causal": True,
    "dropout_rate": 0.5,
    "dropout_key": jax.random.key(7),
    "key_value_seq_lengths": jnp.array([16, 9]),
}
HEADS = {
    # key heads, mesh, query, key and value
    "2 over 4": (2, (2, 4), P("x", None, "y"), P("x")),
    "4 over 8": (4, (1, 8), P(None, None, "y"), P()),
    "2 over 8, of two axes": (2, (2, 4), P(None, None, ("x", "y")), P()),
    "2 over 8, key heads sharded": (2, (2, 4), P(None, None, ("x", "y")), P(None, None, "x")),
    "2 over 8, of an axis too long": (2, (4, 2), P(None, None, ("x", "y")), P()),
    "4 over 4, replicated": (4, (2, 4), P("x", None, "y"), P("x")),
    "1 over 8": (1, (1, 8), P(None, None, "y"), P()),
    # Each device has query heads of 2 key heads: 4 and 2 of them, or 2 and 4.
    "6 over 4": (6, (2, 4), P("x", None, "y"), P("x")),
    # A device has 3 query heads of one key head, or 1 and 2 of two.
    "3 over 4": (3, (2, 4), P("x", None, "y"), P("x")),
    "6 over 8, of two axes": (6, (2, 4), P(None, None, ("x", "y")), P(None, None, "x")),
}

auto_and_explicit = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
on_heads = pytest.mark.parametrize(
    ("key_heads", "shape", "query_spec", "key_spec"), HEADS.values(), ids=HEADS
)


def mesh_of(axis_type, shape):
    return jax.make_mesh(shape, ("x", "y"), axis_types=(axis_type,) * 2, devices=HOST)


def arrays(key_heads):
    heads = {3: 12, 6: 24}.get(key_heads, 8)
    return (
        random(B, T, heads, H),
        random(B, T, key_heads, H),
        random(B, T, key_heads, H + 1),
        random(heads, T, T),
    )


@functools.cache
def unsharded(key_heads):
    operands = arrays(key_heads)
    function = value_and_grad(functools.partial(loss, **FEATURES), *operands)
    return function(*operands)


@pytest.mark.rotating(5)
@pytest.mark.quick("2 over 4-AxisType.Explicit")
@auto_and_explicit
@on_heads
def test_results_gradients_and_dropout(
    axis_type, key_heads, shape, query_spec, key_spec, assert_close
):
    mesh = mesh_of(axis_type, shape)
    specs = (query_spec, key_spec, key_spec, P())
    operands = [put(mesh, x, *spec) for x, spec in zip(arrays(key_heads), specs, strict=True)]
    function = value_and_grad(functools.partial(loss, **FEATURES), *operands)
    got, hlo = run(function, *operands)
    assert_close(got, unsharded(key_heads))
    # At most the gradients of replicated keys, values and biases are gathered, at the end.
    assert len(gathered(hlo)) <= 3
    for gradient, x in zip(got[1], operands, strict=True):
        if axis_type == AxisType.Explicit or x is operands[0]:
            # The compiler chooses the sharding of the other results.
            assert gradient.sharding.is_equivalent_to(x.sharding, gradient.ndim)


@pytest.mark.rotating(5)
@auto_and_explicit
@on_heads
def test_no_operand_is_gathered(axis_type, key_heads, shape, query_spec, key_spec):
    mesh = mesh_of(axis_type, shape)
    specs = (query_spec, key_spec, key_spec, P())
    operands = [put(mesh, x, *spec) for x, spec in zip(arrays(key_heads), specs, strict=True)]
    for function in (
        functools.partial(loss, **FEATURES),
        # The backward reads all operands but returns one sharded gradient.
        jax.grad(functools.partial(loss, **FEATURES)),
    ):
        _, hlo = run(jax.jit(function), *operands)
        assert gathered(hlo) == []


@auto_and_explicit
def test_keys_of_intermediate_sharding(axis_type, assert_close):
    """Shardings propagate from the query to keys that the program computes, by parts of an axis."""
    mesh = mesh_of(axis_type, (2, 4))
    operands = arrays(2)[:3]
    specs = (P("x", None, "y"), P("x"), P("x"))
    sharded = [put(mesh, x, *spec) for x, spec in zip(operands, specs, strict=True)]

    @jax.jit
    def call(query, key, value):
        return dot_product_attention(query, 2 * key, value)

    got, hlo = run(call, *sharded)
    assert_close(got, call(*operands))
    assert gathered(hlo) == []


def test_strict_promotion_of_16_bit_gradients(request):
    mesh = mesh_of(AxisType.Auto, (2, 4))
    specs = (P("x", None, "y"), P("x"), P("x"))
    narrow = [x.astype(jnp.bfloat16) for x in arrays(3)[:3]]
    operands = [put(mesh, x, *spec) for x, spec in zip(narrow, specs, strict=True)]
    # Not by a context manager: the compiler may ask for the program of a device in another thread.
    request.addfinalizer(lambda: jax.config.update("jax_numpy_dtype_promotion", "standard"))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    run(jax.jit(jax.grad(loss, (0, 1, 2))), *operands)


@pytest.mark.rotating(3)
@auto_and_explicit
@pytest.mark.parametrize("key_heads", [2, 3])
def test_second_derivatives(axis_type, key_heads, assert_close):
    mesh = mesh_of(axis_type, (2, 4))
    operands = arrays(key_heads)[:3]

    def norm_of_gradient(query, key, value):
        gradients = jax.grad(loss, (0, 1, 2))(query, key, value)
        return sum(jnp.sum(x * x) for x in gradients)

    specs = (P("x", None, "y"), P("x"), P("x"))
    sharded = [put(mesh, x, *spec) for x, spec in zip(operands, specs, strict=True)]
    function = jax.jit(jax.grad(norm_of_gradient, (0, 1, 2)))
    assert_close(function(*sharded), function(*operands), 2e-5)
