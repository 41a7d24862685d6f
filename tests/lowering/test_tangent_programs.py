"""CUDA programs of forward mode: calls of the tangent kernel, or plain JAX if there is none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_programs import attention_calls, lower, names_of, shapes, types_of, varlen_shapes

import jax_memeff
from jax_memeff._cuda import lowering
from jax_memeff.codegen.features import BROADCAST_BATCH

pytestmark = pytest.mark.usefixtures("hopper")
attention: Any = jax_memeff.dot_product_attention


def jvp(function, moving: int = 3):
    """Results and tangents of the first ``moving`` arguments; tangents follow the arguments."""

    def derivative(*arrays):
        primals, directions = arrays[:-moving], arrays[-moving:]
        constants = primals[moving:]
        with jax_memeff.forward_mode():
            return jax.jvp(lambda *x: function(*x, *constants), primals[:moving], directions)

    return derivative


def targets(text: str) -> list[str]:
    """The directions of the calls in a program, in their order."""
    return [call.split("@jax_memeff_")[1].split("(")[0] for call in attention_calls(text)]


def test_a_jvp_is_a_forward_and_a_call_for_tangents(fake_compiler):
    function = functools.partial(attention, is_causal=True, return_residual=True)
    text = lower(jvp(function), *shapes(), *shapes())
    assert targets(text) == ["forward", "tangent"]
    assert "stablehlo.while" not in text
    call = attention_calls(text)[1]
    assert names_of(call) == (
        "query,key,value,out,logsumexp,query_tangent,key_tangent,value_tangent"
    )
    _, results = types_of(call)
    assert results[:2] == ["2x128x4x64xbf16", "2x128x4xf32"]
    names = {spec.name for spec, _ in fake_compiler if spec.direction == "tangent"}
    assert names == {"fmha_tangent_bf16_d64_128x96_causal_sm90"}


@pytest.mark.parametrize("moving", [1, 2])
def test_tangents_that_are_zero_take_no_memory(fake_compiler, moving):
    text = lower(jvp(attention, moving), *shapes(), *shapes()[:moving])
    call = attention_calls(text)[1]
    given = ["query_tangent", "key_tangent"][:moving]
    assert names_of(call).split(",")[5:] == given
    assert "dense<0.0" not in text
    (spec,) = (spec for spec, _ in fake_compiler if spec.direction == "tangent")
    assert spec.gradients == ("query", "key")[:moving]


def test_packed_sequences(fake_compiler):
    query, key, value, *starts = varlen_shapes()

    def function(*arrays):
        varlen: Any = jax_memeff.varlen_attention
        return varlen(*arrays, 300, 300)

    text = lower(jvp(function), query, key, value, *starts, query, key, value)
    assert targets(text) == ["forward", "tangent"]


def test_one_array_of_query_key_and_value(fake_compiler):
    array = jax.ShapeDtypeStruct((2, 128, 3, 4, 64), jnp.bfloat16)
    function: Any = jax_memeff.dot_product_attention_packed
    text = lower(jvp(function, 1), array, array)
    assert targets(text) == ["forward", "tangent"]
    assert names_of(attention_calls(text)[1]).endswith("query_tangent,key_tangent,value_tangent")


def test_tangents_that_a_vmap_maps_share_keys_and_values(fake_compiler):
    """A batch of tangents is one call that copies neither keys nor values."""

    def jacobian(*arrays):
        primals, directions = arrays[:3], arrays[3:]
        with jax_memeff.forward_mode():
            _, linear = jax.linearize(attention, *primals)
        return jax.vmap(linear)(*directions)

    directions = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in shapes()]
    text = lower(jacobian, *shapes(), *directions)
    assert targets(text) == ["forward", "tangent"]
    operands, _ = types_of(attention_calls(text)[1])
    assert operands[:3] == ["10x128x4x64xbf16", "2x128x2x64xbf16", "2x128x2x64xbf16"]
    assert operands[-2:] == ["10x128x2x64xbf16"] * 2
    assert all(spec[BROADCAST_BATCH] for spec, _ in fake_compiler if spec.direction == "tangent")


def test_gradients_in_forward_mode_are_those_of_the_backward(fake_compiler):
    def loss(*arrays):
        return attention(*arrays).astype(jnp.float32).sum()

    with jax_memeff.forward_mode():
        text = lower(jax.grad(loss, (0, 1, 2)), *shapes())
    assert targets(text) == ["forward", "backward"]


def test_the_transpose_of_a_backward_is_a_call_for_tangents(fake_compiler):
    """A backward is linear in the cotangent of the output."""
    out = shapes()[0]

    def second(query, key, value, dout, directions):
        def gradient(dout):
            return jax.vjp(attention, query, key, value)[1](dout)

        return jax.linear_transpose(gradient, out)(directions)

    operands = shapes()
    text = lower(second, *operands, out, operands)
    assert targets(text)[-1] == "tangent"


def test_second_tangents_are_computed_in_plain_jax(fake_compiler):
    twice = jvp(jvp(attention), 6)
    text = lower(twice, *[*shapes()] * 4)
    assert "forward" in targets(text) and "stablehlo.while" in text


def biased(query, key, value, bias):
    return attention(query, key, value, bias)


def with_sinks(query, sinks):
    return attention(query, query, query, sinks=sinks)


BIAS = jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.bfloat16)
SINKS = jax.ShapeDtypeStruct((4,), jnp.float32)
QUERY = shapes()[0]


@pytest.mark.parametrize(
    ("function", "arrays", "moving"),
    [
        (attention, shapes(dtype=jnp.float32), 3),
        (attention, shapes(H=100), 3),
        (attention, shapes(H=264), 3),
        (biased, (*shapes(), BIAS), 4),
        (with_sinks, (QUERY, SINKS), 2),
    ],
    ids=["float32", "unaligned", "large", "bias", "sinks"],
)
def test_tangents_without_a_kernel_are_computed_in_plain_jax(
    fake_compiler, function, arrays, moving
):
    text = lower(jvp(function, moving), *arrays, *arrays[:moving])
    assert targets(text) == ["forward"] and "stablehlo.while" in text


def test_a_bias_or_sinks_without_a_tangent_have_kernels(fake_compiler):
    assert targets(lower(jvp(biased), *shapes(), BIAS, *shapes())) == ["forward", "tangent"]
    assert targets(lower(jvp(with_sinks, 1), QUERY, SINKS, QUERY)) == ["forward", "tangent"]


def test_other_architectures_compute_tangents_in_plain_jax(fake_compiler, monkeypatch):
    for archs in ("sm_80", "sm_80,sm_90a"):
        monkeypatch.setenv("JAX_MEMEFF_ARCHS", archs)
        jax.clear_caches()
        assert targets(lower(jvp(attention), *shapes(), *shapes())) == ["forward"]


def test_the_digest_of_sharded_programs_names_the_kernel(fake_compiler, monkeypatch):
    equation = next(
        equation
        for equation in jax.make_jaxpr(jvp(attention))(*shapes(), *shapes()).eqns
        if equation.primitive.name == "attention_tangent"
    )
    avals = [variable.aval for variable in equation.invars]
    digest = functools.partial(lowering.digest, avals, **equation.params)
    on_hopper = digest()
    assert len(on_hopper) == 32
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80")
    assert digest() == b""
