"""CUDA programs of operands that a ``vmap`` broadcasts use divisors instead of copies."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_programs import (
    attention_calls,
    divisors_of,
    loss,
    lower,
    names_of,
    shapes,
    types_of,
)

import jax_memeff
from jax_memeff import Mask, Offsets
from jax_memeff.codegen.features import (
    BROADCAST_BATCH,
)
from jax_memeff.codegen.features.bias import gradient as bias_gradient

pytestmark = pytest.mark.usefixtures("hopper")


def test_mapped_positions_are_one_call(fake_compiler):
    def positioned(first, *x):
        return loss(*x, is_causal=True, offsets=Offsets(query=first))

    first = jax.ShapeDtypeStruct((3,), jnp.int32)
    mapped = jax.vmap(positioned, (0, None, None, None))
    (call,) = attention_calls(lower(mapped, first, *shapes()))
    operands, _ = types_of(call)
    assert operands[names_of(call).split(",").index("query_position")] == "6xi32"


def shared_operands():
    """Three mapped queries, and unmapped keys, values, biases and masks, all with a batch of 2."""
    query, key, value = shapes()
    queries = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    bias = jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)
    return queries, key, value, bias, mask


def vmapped_loss(queries, key, value, bias, mask):
    attend: Any = jax_memeff.dot_product_attention
    out = jax.vmap(lambda query: attend(query, key, value, bias, mask))(queries)
    return out.astype(jnp.float32).sum()


SHARED_TYPES = ["2x128x2x64xbf16", "2x128x2x64xbf16", "2x4x128x128xbf16"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_operands_that_a_vmap_broadcasts_are_not_copied(fake_compiler, monkeypatch, arch):
    """Neither the forward nor the backward copies them; each mapped index has its gradients."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    text = lower(jax.grad(vmapped_loss, (0, 1, 2, 3)), *shared_operands())
    forward, backward = attention_calls(text)
    for call in (forward, backward):
        operands, _ = types_of(call)
        *projections, bias = SHARED_TYPES
        assert operands[:5] == ["6x128x4x64xbf16", *projections, "2x1x128x4xui32", bias]
        assert not divisors_of(call)
    _, gradients = types_of(backward)
    whole = [name.replace("2x", "6x", 1) for name in SHARED_TYPES]
    assert gradients[:4] == ["6x128x4x64xbf16", *whole]
    for line in text.splitlines():
        if "broadcast_in_dim" in line or "concatenate" in line:
            assert not any(name in line.split("->")[-1] for name in whole)
    assert all(spec[BROADCAST_BATCH] and "_vmap_" in spec.name for spec, _ in fake_compiler)


def test_divisors_of_nested_vmaps(fake_compiler):
    """The outer vmap maps the keys, the inner one the queries."""
    query, key, value = (jax.ShapeDtypeStruct((3, *x.shape[1:]), x.dtype) for x in shapes())
    queries = jax.ShapeDtypeStruct((5, *query.shape[1:]), query.dtype)
    attend: Any = jax_memeff.dot_product_attention

    def mapped(queries, keys, value):
        inner = jax.vmap(attend, (0, None, None))
        return jax.vmap(inner, (None, 0, None))(queries, keys, value[0])

    (call,) = attention_calls(lower(mapped, queries, key, value))
    assert divisors_of(call) == {"key": 5}
    operands, _ = types_of(call)
    assert operands[1:3] == ["3x128x2x64xbf16", "1x128x2x64xbf16"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("batch, mapped", [(1, False), (2, False), (2, True)])
def test_a_bias_of_one_batch_index_is_not_copied_for_its_gradients(
    fake_compiler, monkeypatch, arch, batch, mapped
):
    """The gradient of a mapped index is the sum over its batch."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    query, key, value = shapes(B=batch)
    queries = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    sizes = (3,) * mapped + (1, 4, 128, 128)
    bias = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def element(query, key, value, bias):
        return jax.grad(lambda bias: loss(query, key, value, bias=bias))(bias)

    axes = (0, None, None, 0 if mapped else None)
    text = lower(jax.vmap(element, axes), queries, key, value, bias)
    for call in attention_calls(text):
        own = 3 if mapped else 1
        assert types_of(call)[0][3] == f"{own}x4x128x128xbf16"
    assert types_of(call)[1][0] == "3x4x128x128xbf16"
    expected = {"bias": batch if mapped else 1, "bias_gradient": batch}
    assert divisors_of(call) == {name: own for name, own in expected.items() if own > 1}
    for line in text.splitlines():
        assert "broadcast_in_dim" not in line or "x4x128x128x" not in line.split("->")[-1]
    (way,) = {bias_gradient(spec) for spec, _ in fake_compiler} - {"none"}
    assert way == ("full" if batch == 1 else "dbias_kernel" if arch == "sm_90a" else "common")


def test_masks_with_equal_divisors_stay_broadcast(fake_compiler):
    queries, key, value, _, mask = shared_operands()
    rows = jax.ShapeDtypeStruct((2, 1, 128, 1), jnp.bool_)
    own = jax.ShapeDtypeStruct((3, 2, 1, 1, 128), jnp.bool_)
    attend: Any = jax_memeff.dot_product_attention

    def mapped(*arrays):
        queries, key, value, *shared, own = arrays

        def element(query, mask):
            masks = [Mask.boolean(x) for x in (*shared, mask) if x is not None]
            return attend(query, key, value, mask=functools.reduce(operator.and_, masks))

        return jax.vmap(element)(queries, own)

    for masks, elements in (((mask, rows, None), 2), ((mask, rows, own), 6)):
        (call,) = attention_calls(lower(mapped, queries, key, value, *masks))
        assert types_of(call)[0][3] == f"{elements}x1x128x4xui32"


def test_kernels_are_the_plain_ones_if_nothing_is_broadcast(fake_compiler):
    """A bias that is broadcast over the batch and a vmap of size 1 use the plain kernels."""
    queries, key, value, _, _ = shared_operands()
    keys, values = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (key, value))
    bias = jax.ShapeDtypeStruct((1, 4, 128, 128), jnp.bfloat16)
    attend: Any = jax_memeff.dot_product_attention
    lower(jax.vmap(attend, (0, 0, 0, None)), queries, keys, values, bias)
    one = jax.ShapeDtypeStruct((1, *queries.shape[1:]), queries.dtype)
    lower(jax.vmap(attend, (0, None, None)), one, key, value)
    assert not any(spec[BROADCAST_BATCH] for spec, _ in fake_compiler)
