"""Replacing the import from jax.nn changes no result that both functions define.

Besides our own cases there is each case of JAX's tests of its function (``tests/nn_test.py``).
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import changed, normal

import jax_memeff

B, T, S, N, K, H = 2, 19, 23, 4, 2, 8
OURS: Any = jax_memeff.dot_product_attention
THEIRS: Any = jax.nn.dot_product_attention


# These programs run once, so optimizing them would cost more than it gains.
unoptimised: Any = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def operands(dtype=jnp.float32):
    return (
        normal(0, B, T, N, H, dtype=dtype),
        normal(1, B, S, K, H, dtype=dtype),
        normal(2, B, S, K, H, dtype=dtype),
    )


BIAS = normal(3, B, N, T, S)
# Column 0 of the mask is valid, because jax.nn defines rows without keys differently.
MASK = changed(
    jax.device_put(np.random.default_rng(4).random((B, N, T, S)) < 0.6), np.s_[..., 0], 1
)
KEY_LENGTHS = jax.device_put(np.array([23, 11], np.int32))
QUERY_LENGTHS = jax.device_put(np.array([7, 19], np.int32))
TRIANGLE = jax.device_put(np.tri(T, S, dtype=bool)[None, None])

CASES = {
    "plain": {},
    "negative_scale": {"scale": -0.3},
    "causal": {"is_causal": True},
    "bias_of_heads_and_mask": {"bias": BIAS[:1], "mask": MASK[:, :1]},
    "bias_of_rows": {"bias": BIAS[:, :1, :1, :]},
    "window": {"local_window_size": 6},
    "window_sides": {"local_window_size": (7, 9), "is_causal": True},
    "causal_and_window": {"local_window_size": (3, 2), "is_causal": True},
    "custom_mask": {"mask": TRIANGLE},
    "bias_and_causal": {"bias": BIAS[:1], "is_causal": True},
    "padding": {"query_seq_lengths": QUERY_LENGTHS, "key_value_seq_lengths": KEY_LENGTHS},
    "causal_and_padding": {
        "is_causal": True,
        "query_seq_lengths": QUERY_LENGTHS,
        "key_value_seq_lengths": KEY_LENGTHS,
    },
    "custom_mask_and_padding": {
        "mask": TRIANGLE,
        "query_seq_lengths": QUERY_LENGTHS,
        "key_value_seq_lengths": KEY_LENGTHS,
    },
    "key_lengths": {"key_value_seq_lengths": KEY_LENGTHS},
    "query_lengths": {"query_seq_lengths": QUERY_LENGTHS},
    "all": {
        "bias": BIAS,
        "mask": MASK,
        "is_causal": True,
        "scale": 0.2,
        "query_seq_lengths": QUERY_LENGTHS,
        "key_value_seq_lengths": KEY_LENGTHS,
        "local_window_size": (30, 0),
    },
}


@pytest.mark.rotating(3)
@pytest.mark.quick("all")
@pytest.mark.parametrize("name", CASES)
def test_output_residual_and_gradients(name, assert_close):
    arguments = dict(CASES[name])
    bias = arguments.pop("bias", None)
    # Beyond the query lengths only our results are defined.
    lengths = arguments.get("query_seq_lengths", jnp.full((B,), T))
    rows = (jnp.arange(T)[None] < lengths[:, None])[:, :, None]

    def loss(attention, *operands):
        out, residual = attention(*operands, return_residual=True, **arguments)
        out, residual = jnp.where(rows[..., None], out, 0), jnp.where(rows, residual, 0)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), (out, residual)

    @unoptimised
    def both(*operands):
        wanted = tuple(range(len(operands)))
        return [
            jax.value_and_grad(functools.partial(loss, attention), wanted, has_aux=True)(*operands)
            for attention in (OURS, THEIRS)
        ]

    inputs = operands() if bias is None else (*operands(), bias)
    (ours, our_gradients), (theirs, their_gradients) = both(*inputs)
    assert_close((ours[1], our_gradients), (theirs[1], their_gradients))


def results(attention, *operands, **arguments):
    return unoptimised(functools.partial(attention, **arguments))(*operands)


@pytest.mark.parametrize("use_vmap", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize(
    ("dtype", "group"), [("bfloat16", 1), ("float16", 2), ("bfloat16", 4)], ids=str
)
def test_groups_in_low_precision(dtype, group, use_vmap):
    """Compares with repeated heads in float32. Under vmap the arrays have no batch dim."""
    query = normal(0, B, T, N, H, dtype=dtype)
    key, value = (normal(seed, B, S, N // group, H, dtype=dtype) for seed in (1, 2))
    cotangent = normal(3, B, T, N, H, dtype=dtype)

    def ours(query, key, value):
        attention = jax.vmap(OURS) if use_vmap else functools.partial(OURS, implementation="xla")
        return attention(query, key, value)

    def theirs(query, key, value):
        key, value = (jnp.repeat(x.astype(jnp.float32), group, 2) for x in (key, value))
        return THEIRS(query.astype(jnp.float32), key, value)

    @unoptimised
    def both(*operands):
        answers = []
        for attention in (ours, theirs):
            out, transpose = jax.vjp(attention, *operands)
            answers.append((out, *transpose(cotangent.astype(out.dtype))))
        return answers

    for got, want in zip(*both(query, key, value), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize("use_vmap", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("batch", [1, 16])
def test_bias_gradient_of_self_attention(batch, use_vmap, assert_close):
    x, bias = normal(0, batch, T, N, H), normal(1, batch, N, T, T)
    mask = jnp.ones((1, 1, T), bool)

    def gradients(attention):
        def attend(x, bias):
            return attention(query=x, key=x, value=x, bias=bias, mask=mask)

        attend = jax.vmap(attend) if use_vmap else attend
        return lambda x, bias: jax.vjp(attend, x, bias)[1](x)

    @unoptimised
    def both(x, bias):
        return gradients(OURS)(x, bias), gradients(THEIRS)(x, bias)

    assert_close(*both(x, bias))


def test_a_window_needs_no_mask():
    large, small = (
        results(OURS, *operands(), mask=None, local_window_size=(size, size)) for size in (12, 1)
    )
    assert not jnp.allclose(large, small)


def test_float64_and_a_mask_make_no_infinities(x64):
    """Runs under ``jax.debug_infs``, without a batch dim, and with a mask of one dimension."""
    query, key = jnp.zeros((5, 6, 11)), jnp.zeros((7, 3, 11))
    assert query.dtype == jnp.float64
    with jax.debug_infs(True):
        out = OURS(query, key, key, mask=jnp.arange(7) <= 3)
    assert out.shape == query.shape and not np.any(out)


QUERY, KEY, VALUE = operands()
BAD_CALLS = {
    "rank": {"query": QUERY[None]},
    "head dims": {"query": QUERY[..., 1:]},
    "heads": {"query": QUERY[:, :, 1:]},
    "batch sizes": {"key": KEY[1:]},
    "lengths of key and value": {"value": VALUE[:, 1:]},
    "dtypes": {"key": KEY.astype(jnp.bfloat16)},
    "dtype of the mask": {"mask": MASK.astype(jnp.float32)},
    "number of lengths": {"key_value_seq_lengths": jnp.zeros((B + 1,), jnp.int32)},
    "dtype of lengths": {"query_seq_lengths": jnp.zeros((B,), jnp.float32)},
    "implementation": {"implementation": "fastest"},
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_is_an_error_there_is_one_here(name):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **BAD_CALLS[name]}
    for attention in (OURS, THEIRS):
        with pytest.raises((ValueError, TypeError)):
            attention(**arguments)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_key_heads(heads, assert_close):
    query, key, value = operands()
    key, value = (jnp.repeat(x[:, :, :1], heads, 2) for x in (key, value))
    key = key * jnp.arange(1, heads + 1)[:, None]
    assert_close(results(OURS, query, key, value), results(THEIRS, query, key, value))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_low_precision(dtype, assert_close):
    exact = results(THEIRS, *(x.astype(jnp.float32) for x in operands(dtype)))
    ours = results(OURS, *operands(dtype))
    assert ours.dtype == dtype
    assert_close(ours, exact, tolerance=4 * float(jnp.finfo(dtype).eps))


def test_without_batch(assert_close):
    query, key, value = (x[0] for x in operands())
    arguments = {"bias": BIAS[0], "mask": MASK[0], "return_residual": True}
    ours = results(OURS, query, key, value, **arguments)
    assert ours[0].shape == (T, N, H)
    assert ours[1].shape == (T, N)
    assert_close(ours, results(THEIRS, query, key, value, **arguments))
    theirs = results(THEIRS, query, key, value, key_value_seq_lengths=jnp.array([11], jnp.int32))
    for length in (jnp.array([11]), 11):
        assert_close(results(OURS, query, key, value, key_value_seq_lengths=length), theirs)


def test_numpy_operands(assert_close):
    host = [np.asarray(x) for x in (*operands(), BIAS, MASK)]
    assert_close(OURS(*host), results(THEIRS, *host))


def test_every_argument_of_jax_nn_is_ours_in_the_same_order():
    ours, theirs = (
        list(inspect.signature(attention).parameters.values()) for attention in (OURS, THEIRS)
    )
    names = [parameter.name for parameter in theirs]
    shared = [parameter for parameter in ours if parameter.name in names]
    assert {parameter.name for parameter in shared} == set(names)
    assert [p.name for p in shared[:5]] == names[:5]
    assert {p.name: (p.kind, p.default) for p in shared} == {
        p.name: (p.kind, p.default) for p in theirs
    }


@pytest.mark.parametrize("name", ["query", "key", "value", "sinks"])
def test_nan_propagates(name):
    """NaN within the lengths reaches every result that depends on it, as in ``jax.nn``."""
    query, key, value = operands()
    sinks = jnp.zeros(N)
    given = {"query": query, "key": key, "value": value, "sinks": sinks}
    given[name] = given[name].at[(1,) * given[name].ndim].set(jnp.nan)

    def ours(query, key, value, sinks):
        return OURS(query, key, value, sinks=sinks, return_residual=True)

    def dense(query, key, value, sinks):
        # A sink is a key of which the scores are the bias, and the value is 0.
        padded = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (key, value))
        bias = jnp.zeros((1, N, 1, S + 1)).at[..., S].set(sinks[:, None])
        return THEIRS(query, *padded, bias=bias, return_residual=True)

    def are_nan(attention):
        def loss(*arrays):
            out, lse = attention(*arrays)
            return out.sum(), (out, lse)

        gradients, results = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*given.values())
        return jax.tree.map(jnp.isnan, (*results, *gradients))

    found = unoptimised(lambda: (are_nan(ours), are_nan(dense)))()
    for where, (got, want) in zip(("out", "lse", *given), zip(*found, strict=True), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=where)
