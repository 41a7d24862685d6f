"""Lowers programs for CUDA on a machine without a GPU, and reads their content."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

import jax_memeff


def lower(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def shapes(B=2, T=128, S=128, N=4, K=2, H=64, dtype=jnp.bfloat16):
    struct = jax.ShapeDtypeStruct
    return struct((B, T, N, H), dtype), struct((B, S, K, H), dtype), struct((B, S, K, H), dtype)


def loss(query, key, value, **arguments):
    out = jax_memeff.dot_product_attention(query, key, value, **arguments)
    return out.astype(jnp.float32).sum()


def attention_calls(text):
    return [line for line in text.splitlines() if "@jax_memeff_" in line]


def varlen_shapes(total_q=1000, total_k=900, sequences=7, N=4, K=2, H=64) -> tuple[Any, ...]:
    struct = jax.ShapeDtypeStruct
    query, key = (
        struct((total, heads, H), jnp.bfloat16) for total, heads in ((total_q, N), (total_k, K))
    )
    return query, key, key, *[struct((sequences + 1,), jnp.int32)] * 2


def varlen_loss(*arrays: Any, longest=300, **features: Any):
    attention: Any = jax_memeff.varlen_attention
    out = attention(*arrays, longest, longest, **features)
    return out.astype(jnp.float32).sum()


def names_of(call):
    """The names of the operands."""
    (names,) = re.findall(r'operands = "([^"]*)"', call)
    return names


def divisors_of(call):
    """The divisors that are not 1, by the names of operands and results."""
    (results,) = re.findall(r'results = "([^"]*)"', call)
    (numbers,) = re.findall(r"\barrays = dense<\[([^]]*)\]>", call)
    divisors = map(int, numbers.split(", ")[3::4])
    named = zip([*names_of(call).split(","), *results.split(",")], divisors, strict=True)
    return {name: divisor for name, divisor in named if divisor != 1}


def types_of(call):
    """The types of the operands and of the results."""
    return [re.findall(r"tensor<([^>]*)>", types) for types in call.split(" : (")[-1].split("->")]
