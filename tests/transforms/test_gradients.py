"""The custom_vjp: differentiated operands, saved residuals, and computed gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from arrays import normal

import jax_memeff
from jax_memeff import Mask
from jax_memeff._call.operands import NeedsGrad, Operands
from jax_memeff._call.options import Options
from jax_memeff._call.scaling import Scaling

B, T, S, N, K, H = 2, 9, 11, 4, 2, 8


QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
BIAS = normal(3, B, N, T, S)
WEIGHT, ROW_WEIGHT = normal(4, B, T, N, H), normal(6, B, T, N)
attention: Any = jax_memeff.dot_product_attention


def primitives_of(function, *arguments):
    """Every equation of a function's jaxpr, including inner jaxprs."""

    def equations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)

    return list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))


def named(function, name, *arguments):
    found = primitives_of(function, *arguments)
    return [equation for equation in found if equation.primitive.name == name]


BIASES = {
    "none": None,
    "full": BIAS,
    "of_head": BIAS[:1, :, :1, :1],
    "of_row": BIAS[:, :, :, :1],
    "of_column": BIAS[:1, :1, :1],
    "rank_2": BIAS[0, 0],
    "scalar": BIAS[0, 0, 0, 0],
}


def compare_with_oracle(results, gradients, bias, dout, dlse, mask=None):
    """Compares the results and gradients of a call with QUERY, KEY, VALUE with the definition."""
    rank_4 = None if bias is None else jnp.reshape(bias, (1,) * (4 - bias.ndim) + bias.shape)
    operands = Operands(QUERY, KEY, VALUE, rank_4, Mask() if mask is None else mask, None, None)
    answer = oracle.answer(operands, Options(Scaling(H**-0.5)), dout, dlse)
    for name, got in {**results, **gradients}.items():
        want = getattr(answer, name)
        oracle.check(name, got, want.reshape(got.shape))


@pytest.mark.quick("full")
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_gradients_of_everything_through_output_and_residual(bias):
    # Row 0 has no keys.
    valid = jax.random.bernoulli(jax.random.key(5), 0.7, (B, N, T, S)).at[:, :, 0].set(False)

    @jax.jit
    def differentiate(*operands):
        results, vjp = jax.vjp(
            lambda *x: attention(*x, mask=valid, return_residual=True), *operands
        )
        return results, vjp((WEIGHT, ROW_WEIGHT))

    operands = (QUERY, KEY, VALUE) if bias is None else (QUERY, KEY, VALUE, bias)
    results, gradients = differentiate(*operands)
    compare_with_oracle(
        dict(zip(("out", "lse"), results, strict=True)),
        dict(zip(("query", "key", "value", "bias"), gradients, strict=False)),
        bias,
        WEIGHT,
        ROW_WEIGHT,
        Mask.boolean(valid),
    )


def test_residual_alone():
    residual, vjp = jax.vjp(lambda *x: attention(*x, return_residual=True)[1], QUERY, KEY, VALUE)
    gradients = dict(zip(("query", "key", "value"), vjp(ROW_WEIGHT), strict=True))
    compare_with_oracle({"lse": residual}, gradients, None, 0 * WEIGHT, ROW_WEIGHT)


def test_float64(x64):
    operands = [np.asarray(x, np.float64) for x in (QUERY, KEY, VALUE, BIAS)]
    cotangents = [np.asarray(x, np.float64) for x in (WEIGHT, ROW_WEIGHT)]
    results, vjp = jax.vjp(lambda *x: attention(*x, return_residual=True), *operands)
    gradients = vjp(tuple(jnp.asarray(x) for x in cotangents))
    assert all(x.dtype == jnp.float64 for x in (*results, *gradients))
    compare_with_oracle(
        dict(zip(("out", "lse"), results, strict=True)),
        dict(zip(("query", "key", "value", "bias"), gradients, strict=True)),
        BIAS,
        *cotangents,
    )


@pytest.mark.quick
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2), (0, 1, 2, 3)])
def test_only_needed_gradients_are_computed(wanted, assert_close):
    def loss(*operands):
        return jnp.sum(attention(*operands, is_causal=True) * WEIGHT)

    operands = (QUERY, KEY, VALUE, BIAS)
    (backward,) = named(jax.grad(loss, wanted), "attention_bwd", *operands)
    query, key, value, bias = (i in wanted for i in range(4))
    assert backward.params["needs_grad"] == NeedsGrad(query, key, value, bias)
    assert len(backward.outvars) == len(wanted)
    everything = jax.grad(loss, (0, 1, 2, 3))(*operands)
    assert_close(jax.grad(loss, wanted)(*operands), tuple(everything[i] for i in wanted), 1e-6)


def test_constants_and_inner_jits_need_no_gradients():
    inner = jax.jit(functools.partial(attention, is_causal=True))
    grad = jax.grad(lambda query: inner(query, KEY, VALUE).sum())
    (backward,) = named(grad, "attention_bwd", QUERY)
    assert backward.params["needs_grad"] == NeedsGrad(True, False, False, False)


def test_unused_residual_has_no_cotangent():
    def operands_of_backward(loss):
        (backward,) = named(jax.grad(loss), "attention_bwd", QUERY)
        return len(backward.invars)

    without = operands_of_backward(lambda q: attention(q, KEY, VALUE).sum())
    both = operands_of_backward(
        lambda q: sum(x.sum() for x in attention(q, KEY, VALUE, return_residual=True))
    )
    assert both == without + 1


def test_bias_of_rows_needs_no_kernel():
    def loss(bias):
        out, lse = attention(QUERY, KEY, VALUE, bias, return_residual=True)
        return jnp.sum(out) + jnp.sum(lse)

    assert not named(jax.grad(loss), "attention_bwd", BIAS[..., :1])
    np.testing.assert_allclose(jax.grad(loss)(BIAS[..., :1]), 1.0)


def test_bias_of_rows_under_dropout(assert_close):
    """The gradient is dlse, which dropout does not affect; a bias in a kernel agrees."""

    def loss(bias, S_of_bias):
        bias = jnp.broadcast_to(bias, (B, N, T, S_of_bias))
        out, lse = attention(
            QUERY,
            KEY,
            VALUE,
            bias,
            dropout_rate=0.25,
            dropout_key=jax.random.key(1),
            return_residual=True,
        )
        return jnp.sum(out * WEIGHT) + jnp.sum(lse**2)

    bias = BIAS[..., :1]
    assert_close(jax.grad(loss)(bias, 1), jax.grad(loss)(bias, S), 1e-5)


def test_integer_and_boolean_operands():
    def loss(query, mask, lengths, key_bits):
        return attention(
            query,
            KEY,
            VALUE,
            mask=Mask.boolean(mask) & Mask.lengths(key=lengths),
            dropout_rate=0.5,
            dropout_key=key_bits,
        ).sum()

    arguments = (QUERY, jnp.ones((T, S), bool), jnp.array([5, 11]), jax.random.key(0))
    _, vjp = jax.vjp(loss, *arguments)
    query, mask, lengths, _ = vjp(jnp.float32(1))
    assert query.shape == QUERY.shape
    assert mask.dtype == lengths.dtype == jax.dtypes.float0


NAMES = ("jax_memeff_out", "jax_memeff_lse")
POLICIES = {
    "everything": (jax.checkpoint_policies.everything_saveable, 1),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "both_names": (jax.checkpoint_policies.save_only_these_names(*NAMES), 1),
    "out_only": (jax.checkpoint_policies.save_only_these_names(NAMES[0]), 2),
    "dots": (jax.checkpoint_policies.dots_saveable, 2),
}


@pytest.mark.parametrize(("policy", "forwards"), POLICIES.values(), ids=POLICIES)
def test_checkpoint_policies(policy, forwards, assert_close):
    def layer(query, key, value):
        return jnp.sum(jnp.sin(attention(jnp.tanh(query), key, value, is_causal=True)) * WEIGHT)

    grad = jax.grad(jax.checkpoint(layer, policy=policy), (0, 1, 2))
    assert len(named(grad, "attention_fwd", QUERY, KEY, VALUE)) == forwards
    assert_close(
        jax.jit(grad)(QUERY, KEY, VALUE), jax.grad(layer, (0, 1, 2))(QUERY, KEY, VALUE), 1e-6
    )


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat, assert_close):
    projections = normal(7, 3, H, H) / np.sqrt(H)

    def layer(x, projection):
        x = x @ projection
        return x + attention(x, x[:, :, :K], x[:, :, :K], is_causal=True), None

    def scanned(projections, x):
        body = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jax.lax.scan(body, x, projections)[0] * WEIGHT)

    def unrolled(projections, x):
        for projection in projections:
            x, _ = layer(x, projection)
        return jnp.sum(x * WEIGHT)

    assert_close(
        jax.jit(jax.grad(scanned, (0, 1)))(projections, QUERY),
        jax.jit(jax.grad(unrolled, (0, 1)))(projections, QUERY),
    )


@pytest.mark.parametrize(("policy", "forwards"), [(POLICIES["both_names"][0], 1), (None, 2)])
def test_forwards_of_a_scan_over_layers(policy, forwards):
    """If both results are saved, the backward's loop runs no forward."""

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, _):
        return x + attention(x, x[:, :, :K], x[:, :, :K], is_causal=True), None

    def loss(x):
        return jnp.sum(jax.lax.scan(layer, x, length=3)[0])

    loops = named(jax.grad(loss), "scan", QUERY)
    count = [str(loop.params["jaxpr"]).count("attention_fwd[") for loop in loops]
    assert sum(count) == forwards
    assert sum(str(loop.params["jaxpr"]).count("attention_bwd[") for loop in loops) == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_have_the_operands_dtypes(dtype):
    operands = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
    gradients = jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2, 3))(
        *operands, BIAS
    )
    assert [x.dtype for x in gradients] == [dtype] * 3 + [jnp.float32]


@pytest.mark.parametrize("jit", [False, True])
def test_shard_map(jit, assert_close):
    """Queries vary over the mesh. Keys and values do not, so their gradients are summed."""
    mesh = jax.make_mesh(
        (2,), ("batch",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    split, whole = jax.P("batch"), jax.P()
    lengths = jnp.array([6, 11])

    def local(query, key, value, lengths):
        return attention(
            query, key, value, is_causal=True, key_value_seq_lengths=lengths, return_residual=True
        )

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(split, whole, whole, split), out_specs=(split, split)
    )

    def loss(function, query, key, value):
        out, lse = function(query, key, value, lengths)
        return jnp.sum(out * WEIGHT) + jnp.sum(lse**2)

    def reference(query, key, value, lengths):
        key, value = (jnp.broadcast_to(x, (B, *x.shape[1:])) for x in (key, value))
        return local(query, key, value, lengths)

    got, want = (
        jax.grad(functools.partial(loss, function), (0, 1, 2)) for function in (sharded, reference)
    )
    got = jax.jit(got) if jit else got
    operands = (QUERY, KEY[:1], VALUE[:1])
    assert_close(got(*operands), want(*operands))
