"""CUDA programs of packed sequences and of packed projections."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_programs import (
    attention_calls,
    loss,
    lower,
    names_of,
    shapes,
    types_of,
    varlen_loss,
    varlen_shapes,
)

import jax_memeff
from jax_memeff import Mask, Offsets, UnsupportedError
from jax_memeff.codegen.features import PACKED

pytestmark = pytest.mark.usefixtures("hopper")


def test_positions_of_packed_sequences(fake_compiler):
    first = jax.ShapeDtypeStruct((7,), jnp.int32)
    text = lower(
        lambda first, *x: varlen_loss(*x, offsets=Offsets(query=first), is_causal=True),
        first,
        *varlen_shapes(sequences=7),
    )
    (call,) = attention_calls(text)
    operands, _ = types_of(call)
    assert operands[names_of(call).split(",").index("query_position")] == "7xi32"


def test_projections_are_read_and_written_in_place(fake_compiler):
    """There is one operand and one gradient, and no operation copies either."""
    qkv = jax.ShapeDtypeStruct((2, 128, 3, 4, 64), jnp.bfloat16)

    def packed_loss(qkv):
        out = jax_memeff.dot_product_attention_packed(qkv, is_causal=True)
        return out.astype(jnp.float32).sum()

    text = lower(jax.grad(packed_loss), qkv)
    whole = "tensor<2x128x3x4x64xbf16>"
    forward, backward = attention_calls(text)
    assert 'operands = "query,key,value"' in forward
    assert f": ({whole}) -> (" in forward
    assert 'results = "query_gradient,key_gradient,value_gradient,row_statistics,' in backward
    assert f") -> ({whole}, " in backward
    copies = ("slice", "concatenate", "pad", "transpose", "reshape", "gather", "scatter", "select")
    assert not [name for name in copies if f"stablehlo.{name}" in text]
    # The kernels are the same as for three arrays.
    lower(jax.grad(functools.partial(loss, is_causal=True), (0, 1, 2)), *shapes(N=4, K=4))
    assert len(fake_compiler) == 2


def test_projections_with_masks_that_are_arrays(fake_compiler, monkeypatch):
    """XLA needs no values of the arrays for what it computes before the call."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_86")
    ids = jax.ShapeDtypeStruct((8, 300), jnp.int32)
    boolean = jax.ShapeDtypeStruct((8, 1, 300, 1), jnp.bool)

    def packed_loss(qkv, ids, boolean):
        mask = Mask.segments(ids, ids) & Mask.boolean(boolean) & Mask.boolean(boolean[:1])
        out = jax_memeff.dot_product_attention_packed(qkv, mask=mask)
        return out.astype(jnp.float32).sum()

    qkv = jax.ShapeDtypeStruct((8, 300, 3, 4, 64), jnp.bfloat16)
    text = lower(jax.grad(packed_loss), qkv, ids, boolean)
    for spec, _ in fake_compiler:
        (block_mask,) = spec.block_masks
        names = rf'operands = "query,key,value,[^"]*segments,boolean,[^"]*\b{block_mask.name}\b'
        assert re.search(names, text)


def test_projections_with_a_bias(fake_compiler):
    qkv = jax.ShapeDtypeStruct((128, 3, 4, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)

    def packed_loss(qkv, bias):
        out = jax_memeff.dot_product_attention_packed(qkv, bias)
        return out.astype(jnp.float32).sum()

    names = 'results = "{}row_statistics,'
    projections = "query_gradient,key_gradient,value_gradient,"
    both = lower(jax.grad(packed_loss, (0, 1)), qkv, bias)
    assert names.format(projections + "bias_gradient,") in both
    assert names.format(projections) in lower(jax.grad(packed_loss), qkv, bias)
    assert 'results = "bias_gradient,' in lower(jax.grad(packed_loss, 1), qkv, bias)


def test_packed_sequences_are_not_padded(fake_compiler):
    """Before the kernels only numbers per sequence are computed."""
    text = lower(jax.grad(varlen_loss, (0, 1, 2)), *varlen_shapes())
    forward, backward = attention_calls(text)
    assert 'operands = "query,key,value,query_lengths,key_lengths,query_starts,key_starts"' in (
        forward
    )
    assert "sizes = dense<[7, 300, 300, 4, 2, 64, 64, 1000, 900]> : tensor<9xi32>" in forward
    assert [spec[PACKED] for spec, _ in fake_compiler] == [True, True]
    for line in text.splitlines():
        copies = ("slice", "concatenate", "pad", "gather", "scatter", "select", "transpose")
        if any(f"stablehlo.{name}" in line for name in copies):
            assert "bf16" not in line
    tile = next(spec.tile.query for spec, _ in fake_compiler if spec.direction == "backward")
    rows = 4 * (1000 // tile + 7) * tile
    assert f"tensor<{2 * rows}xf32>, tensor<{64 * rows}xf32>" in backward


def test_sequences_do_not_make_kernels(fake_compiler):
    for total, sequences, longest in ((1000, 7, 300), (77, 1, 77), (5000, 300, 0)):
        gradient = jax.grad(functools.partial(varlen_loss, longest=longest), (0, 1, 2))
        lower(gradient, *varlen_shapes(total, total, sequences))
    # Few tiles, as of one short sequence, use a different forward.
    directions = [spec.direction for spec, _ in fake_compiler]
    assert sorted(directions) == ["backward", "forward", "forward"]


def test_no_sequence_needs_no_kernel(fake_compiler):
    assert "jax_memeff" not in lower(varlen_loss, *varlen_shapes(sequences=0))


def test_too_many_tokens_are_an_error(fake_compiler):
    with pytest.raises(UnsupportedError, match=f"got {2**28 + 1}"):
        lower(varlen_loss, *varlen_shapes(total_q=2**28 + 1))
    with pytest.raises(UnsupportedError, match=f"got {2**29}"):
        lower(functools.partial(varlen_loss, longest=2**29), *varlen_shapes())


def paged(longest=None, **shapes: tuple[int, ...]):
    """A program that calls ``paged_attention`` with 4 heads and 6 sequences."""
    arrays = {
        "query": jax.ShapeDtypeStruct(shapes.pop("query"), jnp.bfloat16),
        "key_pages": jax.ShapeDtypeStruct((32, 16, 2, 64), jnp.bfloat16),
        "value_pages": jax.ShapeDtypeStruct((32, 16, 2, 64), jnp.bfloat16),
    }
    shapes |= {"page_table": (6, 8), "kv_lengths": (6,)}
    arrays |= {name: jax.ShapeDtypeStruct(own, jnp.int32) for name, own in shapes.items()}
    call: Any = functools.partial(
        jax_memeff.paged_attention, max_query_length=longest, implementation="cuda"
    )
    return lower(lambda arrays: call(**arrays), arrays)


def computed_integers(call: str) -> dict[str, str]:
    """The types of the integer operands of a custom call that are not arguments of the program."""
    names, (types, _) = names_of(call).split(","), types_of(call)
    values = re.findall(r"%\w+(?:#\d)?", call.split("@jax_memeff_forward(")[1])
    return {
        name: own
        for name, own, value in zip(names, types, values, strict=False)
        if own.endswith("i32") and not value.startswith("%arg")
    }


@pytest.mark.parametrize(("longest", "parts"), [(64, 2), (3, 1), (1, 1)])
def test_xla_fills_nothing_before_a_ragged_call(longest, parts, fake_compiler):
    """It computes starts and lengths, which have the same shape and are no concatenation: otherwise
    they take two kernels. Two calls write into one output.
    """
    text = paged(longest, query=(9, 4, 64), query_starts=(7,))
    calls = attention_calls(text)
    assert [call.count("output_operand_alias<") for call in calls] == [0, 2][:parts]
    for call in calls:
        names = ("marked_query_lengths", "query_starts", "key_starts")
        assert computed_integers(call) == dict.fromkeys(names, "7xi32")
        for value in re.findall(r"(%\w+) = (?:call @append|stablehlo.concatenate)", text):
            assert not re.search(rf"{value}\b", call)
    of_outputs = re.findall(r"stablehlo\.(\w+) [^\n]*1x9x4(?:x64xbf16|xf32)", text)
    assert {*of_outputs} <= {"custom_call", "reshape", "broadcast_in_dim"}, of_outputs
    assert not re.findall(r"\(tensor<(?:bf16|f32)>\) -> ", text)  # a number for all elements


def test_a_step_is_one_custom_call(fake_compiler):
    """XLA computes a constant 0, 1, 2, ... of rank 1 in a kernel, but not one of rank 2."""
    text = paged(query=(6, 1, 4, 64))
    (call,) = attention_calls(text)
    assert computed_integers(call) == dict.fromkeys(("query_starts", "key_starts"), "1x7xi32")
    found = set(re.findall(r"stablehlo\.(\w+)", text))
    assert found <= {"custom_call", "reshape", "broadcast_in_dim", "constant"}, found
