"""Wrong arguments of packed sequences and of packed projections raise errors that name them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import zeros
from test_bad_input import B, H, K, N, S, T

import jax_memeff
from jax_memeff import Mask


def good_varlen():
    return {
        "query": zeros(T, N, H),
        "key": zeros(S, K, H),
        "value": zeros(S, K, H),
        "cu_seqlens_q": np.array([0, 2, 5]),
        "cu_seqlens_k": np.array([0, 4, 7]),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }


VARLEN_CASES = {
    "batch_dim": (
        {"query": zeros(1, T, N, H)},
        ValueError,
        r"query must have shape \[total_q, N, H\], because.*got shape \(1, 5, 4, 8\)",
    ),
    "value_tokens": (
        {"value": zeros(6, K, H)},
        ValueError,
        "value must have the number of tokens of key, 7, got 6",
    ),
    "float_cu_seqlens": (
        {"cu_seqlens_q": zeros(3)},
        TypeError,
        "cu_seqlens_q must be integers, got dtype float32; pass .astype",
    ),
    "cu_seqlens_rank": (
        {"cu_seqlens_k": np.array([[0, 4, 7]])},
        ValueError,
        r"cu_seqlens_k must have shape \[B \+ 1\].*got shape \(1, 3\)",
    ),
    "empty_cu_seqlens": (
        {"cu_seqlens_q": np.array([], int)},
        ValueError,
        r"cu_seqlens_q must have shape \[B \+ 1\].*got shape \(0,\)",
    ),
    "cu_seqlens_differ": (
        {"cu_seqlens_k": jnp.array([0, 4, 5, 7])},
        ValueError,
        r"cu_seqlens_k must have shape \[B \+ 1\] = \[3\], the length of.*, got shape \(4,",
    ),
    "decreasing": (
        {"cu_seqlens_q": [0, 3, 2]},
        ValueError,
        "cu_seqlens_q must not decrease, got 2 after 3 at index 2",
    ),
    "lengths": (
        {"cu_seqlens_q": [3, 2, 2]},
        ValueError,
        r"got 2 after 3 at index 1; of lengths, pass np.cumsum\(\[0, \*lengths\]\)$",
    ),
    "past_the_end": (
        {"cu_seqlens_k": np.array([0, 4, 8])},
        ValueError,
        r"cu_seqlens_k must be in \[0, 7\], the number of tokens, got 8 at index 2",
    ),
    "negative": (
        {"cu_seqlens_q": np.array([-1, 2, 5])},
        ValueError,
        r"cu_seqlens_q must be in \[0, 5\].*got -1 at index 0",
    ),
    "longer_than_the_longest": (
        {"max_seqlen_k": 3},
        ValueError,
        "max_seqlen_k must be at least the length of every sequence, got 3, and sequence 0 has 4",
    ),
    "negative_longest": (
        {"max_seqlen_q": -1},
        ValueError,
        r"max_seqlen_q must be in \[0, 2147483647\], got -1",
    ),
    "huge_longest": (
        {"max_seqlen_k": 2**31},
        ValueError,
        r"max_seqlen_k must be in \[0, 2147483647\], got 2147483648",
    ),
    "boolean_longest": (
        {"max_seqlen_k": True},
        TypeError,
        "max_seqlen_k must be a static Python integer, got True of type bool",
    ),
    "ragged_cu_seqlens": (
        {"cu_seqlens_q": [[0], [1, 2]]},
        ValueError,
        "cu_seqlens_q must be an array, got a list whose rows differ in length",
    ),
    "huge_cu_seqlens": (
        {"cu_seqlens_q": np.array([0, 2, 2**32 + 5])},
        ValueError,
        r"cu_seqlens_q must be in \[0, 5\].*got 4294967301 at index 2",
    ),
    "padded_lengths": (
        {"query_seq_lengths": [1, 2]},
        TypeError,
        "got an unexpected keyword argument 'query_seq_lengths'; expected one of deterministic",
    ),
    "float_longest": (
        {"max_seqlen_q": 3.0},
        TypeError,
        "max_seqlen_q must be a static Python integer, got 3.0 of type float",
    ),
    "bias_shape": (
        {"bias": zeros(T, S)},
        ValueError,
        r"bias must broadcast to \[B, N, T, S\] = \[2, 4, 3, 4\].*got shape \(5, 7\)",
    ),
    "segments": (
        {"mask": Mask.segments(jnp.zeros(3, int), jnp.zeros(4, int))},
        ValueError,
        r"query segment ids must have shape \[1, 5\] or \[5\], got \(3,\)",
    ),
    "mask_lengths": (
        {"mask": Mask.lengths(query=jnp.array([1, 2, 3]))},
        ValueError,
        r"query lengths must have shape \[B\] = \[2\], got shape \(3,\)",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", VARLEN_CASES)
def test_bad_argument_of_varlen_attention(name):
    arguments, error, message = VARLEN_CASES[name]
    with pytest.raises(error) as raised:
        jax_memeff.varlen_attention(**{**good_varlen(), **arguments})
    assert re.search(message, str(raised.value)), str(raised.value)


def test_a_traced_longest_sequence():
    arguments = good_varlen()
    arguments.pop("max_seqlen_q")
    with pytest.raises(TypeError, match=r"max_seqlen_q must be a static.*integer, got a traced"):
        jax.jit(lambda n: jax_memeff.varlen_attention(**arguments, max_seqlen_q=n))(3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("qkv", "error", "message"),
    [
        (zeros(B, T, N, H), ValueError, r"qkv must have shape \[B, T, 3, N, H\].*\(2, 5, 4, 8\)"),
        (zeros(B, T, 3, 3, N, H), ValueError, r"qkv must have shape.*\(2, 5, 3, 3, 4, 8\)"),
        (zeros(B, T, 3, N, H, dtype=int), TypeError, "qkv must be one of float16.*got int32"),
        ("qkv", TypeError, "qkv must be an array, got str"),
    ],
)
def test_bad_projections(qkv, error, message):
    with pytest.raises(error, match=message):
        jax_memeff.dot_product_attention_packed(qkv)
