"""Every wrong argument raises an error that names it, what was expected and what was got."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, Offsets

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
attention: Any = jax_memeff.dot_product_attention


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def good():
    return {"query": zeros(B, T, N, H), "key": zeros(B, S, K, H), "value": zeros(B, S, K, H)}


KEY = jax.random.key(0)
DROPOUT = {"dropout_rate": 0.5}

# name: (arguments that replace the good ones, error, what the message must hold in this order)
CASES = {
    "not_an_array": ({"query": None}, TypeError, "query must be an array, got NoneType"),
    "rank_2": (
        {"query": zeros(T, H)},
        ValueError,
        r"query must have rank 4 \[B, T, N, H\].*got shape \(5, 8\)",
    ),
    "rank_5": ({"key": zeros(1, B, S, K, H)}, ValueError, r"key must have rank 4.*got shape \(1,"),
    "ranks_differ": (
        {"key": zeros(S, K, H)},
        ValueError,
        r"key must have the rank of query, 4, got shape \(7, 2, 8\)",
    ),
    "batch": ({"key": zeros(3, S, K, H)}, ValueError, "key must have the batch size.*2, got 3"),
    "value_batch": (
        {"value": zeros(1, S, K, H)},
        ValueError,
        "value must have the batch size of query, 2, got 1",
    ),
    "head_dim": ({"key": zeros(B, S, K, 9)}, ValueError, "key must have the head dim.*8, got 9"),
    "value_length": (
        {"value": zeros(B, 6, K, H)},
        ValueError,
        "value must have the sequence length of key, 7, got 6",
    ),
    "value_heads": (
        {"value": zeros(B, S, 4, H)},
        ValueError,
        "value must have the number of heads of key, 2, got 4",
    ),
    "heads": (
        {"key": zeros(B, S, 3, H), "value": zeros(B, S, 3, H)},
        ValueError,
        "query must have a multiple of key's 3 heads, got 4 heads",
    ),
    "no_key_heads": (
        {"key": zeros(B, S, 0, H), "value": zeros(B, S, 0, H)},
        ValueError,
        "query must have a multiple of key's 0 heads, got 4 heads",
    ),
    "integer_query": (
        {"query": zeros(B, T, N, H, dtype=jnp.int32)},
        TypeError,
        "query must be one of float16.*got int32; cast it",
    ),
    "float8": (
        {"value": zeros(B, S, K, H, dtype=jnp.float8_e4m3fn)},
        TypeError,
        "value must be one of float16.*got float8_e4m3fn",
    ),
    "complex_key": (
        {"key": zeros(B, S, K, H, dtype=jnp.complex64)},
        TypeError,
        "key must be one of.*got complex64",
    ),
    "mixed_dtypes": (
        {"value": zeros(B, S, K, H, dtype=jnp.bfloat16)},
        TypeError,
        r"value must have the dtype of query, float32, got bfloat16; pass value.astype\(query",
    ),
    "bias_shape": (
        {"bias": zeros(B, 3, T, S)},
        ValueError,
        r"bias must broadcast to \[B, N, T, S\] = \[2, 4, 5, 7\].*got shape \(2, 3, 5, 7\)",
    ),
    "bias_rank": ({"bias": zeros(1, B, N, T, S)}, ValueError, "bias must have rank <= 4, got.*5"),
    "bias_dtype": (
        {"bias": zeros(T, S, dtype=jnp.bfloat16)},
        TypeError,
        "bias must have the dtype of query, float32, or float32, got bfloat16",
    ),
    "boolean_bias": (
        {"bias": zeros(T, S, dtype=bool)},
        TypeError,
        "bias must have the dtype.*got bool; pass a boolean array as mask",
    ),
    "mask_shape": (
        {"mask": zeros(T, S + 1, dtype=bool)},
        ValueError,
        r"mask must broadcast to \[B, N, T, S\] = \[2, 4, 5, 7\].*got shape \(5, 8\)",
    ),
    "mask_dtype": (
        {"mask": zeros(T, S)},
        TypeError,
        "mask must be a boolean array.*got dtype float32; pass mask != 0",
    ),
    "mask_rank": (
        {"mask": zeros(1, 1, 1, T, S, dtype=bool)},
        ValueError,
        "mask must have rank <= 4, got rank 5",
    ),
    "Mask_boolean_shape": (
        {"mask": Mask.boolean(zeros(3, 1, 1, dtype=bool))},
        ValueError,
        r"mask must broadcast to.*got shape \(3, 1, 1\)",
    ),
    "Mask_lengths": (
        {"mask": Mask.lengths(key=np.array([7, 8]))},
        ValueError,
        r"key lengths must be in \[0, 7\], got 8 at index 1",
    ),
    "Mask_lengths_shape": (
        {"mask": Mask.lengths(query=jnp.array([1, 2, 3]))},
        ValueError,
        r"query lengths must have shape \[B\] = \[2\], got shape \(3,\)",
    ),
    "Mask_segments": (
        {"mask": Mask.segments(jnp.zeros((B, S), int), jnp.zeros((B, S), int))},
        ValueError,
        r"query segment ids must have shape \[2, 5\] or \[5\], got \(2, 7\)",
    ),
    "nan_scale": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "infinite_scale": ({"scale": np.inf}, ValueError, "scale must be finite, got inf"),
    "text_scale": ({"scale": "big"}, TypeError, "scale must be a number, got 'big' of type str"),
    "zero_head_dim": (
        {"query": zeros(B, T, N, 0), "key": zeros(B, S, K, 0)},
        ValueError,
        "scale must be given when the head dim is 0: expected a number, got None",
    ),
    "soft_cap": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be > 0, got 0.0"),
    "nan_soft_cap": ({"logits_soft_cap": np.nan}, ValueError, "logits_soft_cap must be finite"),
    "rate_1": ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.0"),
    "negative_rate": ({"dropout_rate": -0.1}, ValueError, r"dropout_rate must be in.*got -0.1"),
    "small_rate": (
        {"dropout_rate": 1e-4, "dropout_key": KEY},
        ValueError,
        "dropout_rate.*0.0001.*nearest legal rates are 0.0 and 0.00390625",
    ),
    "large_rate": (
        {"dropout_rate": 0.9999, "dropout_key": KEY},
        ValueError,
        "dropout_rate.*0.9999.*nearest legal rate is 0.99609375",
    ),
    "no_key": (DROPOUT, ValueError, "dropout_key must be given when dropout_rate > 0.*got None"),
    "seed_as_key": (
        {**DROPOUT, "dropout_key": 3},
        TypeError,
        "dropout_key must be a jax.random key, got int",
    ),
    "float_key": (
        {**DROPOUT, "dropout_key": zeros(2)},
        TypeError,
        "dropout_key must be a key of jax.random.key.*got an array of dtype float32",
    ),
    "many_keys": (
        {**DROPOUT, "dropout_key": jax.random.split(KEY, 3)},
        ValueError,
        r"dropout_key must be one key, got an array of keys of shape \(3,\)",
    ),
    "many_legacy_keys": (
        {**DROPOUT, "dropout_key": zeros(3, 2, dtype=jnp.uint32)},
        ValueError,
        r"dropout_key must be one key, got an array of keys of shape \(3, 2\)",
    ),
    "long_keys": (
        {"key_value_seq_lengths": np.array([7, 8])},
        ValueError,
        r"key_value_seq_lengths must be in \[0, 7\], got 8 at index 1",
    ),
    "negative_length": (
        {"query_seq_lengths": [-1, 5]},
        ValueError,
        r"query_seq_lengths must be in \[0, 5\], got -1 at index 0",
    ),
    "float_lengths": (
        {"query_seq_lengths": zeros(B)},
        TypeError,
        "query_seq_lengths must be integers, got dtype float32",
    ),
    "lengths_shape": (
        {"query_seq_lengths": np.array([5])},
        ValueError,
        r"query_seq_lengths must have shape \[B\] = \[2\], got shape \(1,\)",
    ),
    "negative_window": (
        {"local_window_size": (3, -1)},
        ValueError,
        "local_window_size must be >= 0 on both sides, got -1",
    ),
    "window_of_three": (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        r"local_window_size must be an int or \(left, right\), got 3 values",
    ),
    "fractional_window": (
        {"local_window_size": 2.5},
        TypeError,
        r"local_window_size must be an int or \(left, right\), got 2.5",
    ),
    "causal_flag": ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    "residual_flag": ({"return_residual": "yes"}, TypeError, "return_residual must be True.*'yes'"),
    "deterministic_flag": (
        {"deterministic_backward": None},
        TypeError,
        "deterministic_backward must be True or False, got None",
    ),
    "precision": ({"precision": "bf16"}, ValueError, "precision must be None.*got 'bf16'"),
    "cudnn": ({"implementation": "cudnn"}, ValueError, "implementation='cudnn'.*pass 'cuda'"),
    "implementation": (
        {"implementation": "triton"},
        ValueError,
        "implementation must be None, 'cuda' or 'xla', got 'triton'",
    ),
    "offsets": ({"offsets": (0, 1)}, TypeError, "offsets must be jax_memeff.Offsets.*got tuple"),
    "offsets_dtype": (
        {"offsets": Offsets(query=0.5)},  # type: ignore[arg-type]
        TypeError,
        "offsets.query must be an int.*got dtype float64",
    ),
    "negative_offset": (
        {"offsets": Offsets(head=-1)},
        ValueError,
        "offsets.head must be >= 0, got -1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_argument(name):
    arguments, error, message = CASES[name]
    with pytest.raises(error) as raised:
        attention(**{**good(), **arguments})
    assert re.search(message, str(raised.value)), str(raised.value)


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
        r"query \[total_q, N, H\] must have rank 3.*got shape \(1, 5, 4, 8\)",
    ),
    "value_tokens": (
        {"value": zeros(6, K, H)},
        ValueError,
        "value must have the sequence length of key, 7, got 6",
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
        "cu_seqlens_k must have the length of cu_seqlens_q, 3, got 4",
    ),
    "decreasing": (
        {"cu_seqlens_q": [0, 3, 2]},
        ValueError,
        "cu_seqlens_q must not decrease, got 2 after 3 at index 2",
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
    "negative_longest": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be >= 0, got -1"),
    "float_longest": (
        {"max_seqlen_q": 3.0},
        TypeError,
        "max_seqlen_q must be a Python integer, got 3.0 of type float",
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


@pytest.mark.parametrize("name", VARLEN_CASES)
def test_bad_argument_of_varlen_attention(name):
    arguments, error, message = VARLEN_CASES[name]
    with pytest.raises(error) as raised:
        jax_memeff.varlen_attention(**{**good_varlen(), **arguments})
    assert re.search(message, str(raised.value)), str(raised.value)


def test_a_traced_longest_sequence():
    arguments = good_varlen()
    arguments.pop("max_seqlen_q")
    with pytest.raises(TypeError, match="max_seqlen_q must be a static integer, got a traced"):
        jax.jit(lambda n: jax_memeff.varlen_attention(**arguments, max_seqlen_q=n))(3)


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


TRACED = {
    "scale": "scale must be a static number, got a traced value; multiply query by it",
    "logits_soft_cap": "logits_soft_cap must be a static number, got a traced value",
    "dropout_rate": "dropout_rate must be a static number, got a traced value",
    "local_window_size": "local_window_size must be static integers, got a traced value",
    "is_causal": "is_causal must be True or False, got a traced value",
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_static_argument(name):
    values = {"local_window_size": 3, "is_causal": True}

    @jax.jit
    def call(value):
        return attention(**good(), **{name: value})

    with pytest.raises(TypeError, match=TRACED[name]):
        call(values.get(name, 0.5))


def test_cuda_asked_for_on_the_cpu():
    with pytest.raises(jax_memeff.UnsupportedError, match=r"needs a CUDA device, got.*cpu"):
        attention(**good(), implementation="cuda")


def test_device_lengths_are_clamped(assert_close):
    operands = {name: x + 1 for name, x in good().items()}
    lengths = {
        "query_seq_lengths": jnp.array([-3, 9]),
        "key_value_seq_lengths": jnp.array([100, -1]),
    }
    clamped = {
        "query_seq_lengths": jnp.array([0, 5]),
        "key_value_seq_lengths": jnp.array([7, 0]),
    }
    assert_close(
        attention(**operands, **lengths, return_residual=True),
        attention(**operands, **clamped, return_residual=True),
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query_seq_lengths": jnp.array([5, 6])}, ValueError, "query_seq.*got 6 at index 1"),
        ({"mask": Mask.lengths(key=jnp.array([-1, 0]))}, ValueError, "key lengths.*got -1 at"),
        ({"query": zeros(B, T, N, H).at[1, 2].set(jnp.nan)}, ValueError, r"query.*nan.*\(1, 2, 0"),
        ({"value": zeros(B, S, K, H).at[0, 6].set(jnp.inf)}, ValueError, "value must be finite"),
        ({"bias": zeros(T, S).at[0, 0].set(jnp.nan)}, ValueError, "bias must be finite or -inf"),
        (
            {"mask": Mask.segments(jnp.array([0, 0, 1, 3, -1]), jnp.array([0, 0, 0, 1, 1, 2, -1]))},
            ValueError,
            r"query segment ids must occur among.*got 3 at index \(0, 3\)",
        ),
        ({"scale": np.nan}, ValueError, "scale must be finite"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_check_reads_values(arguments, error, message):
    with pytest.raises(error, match=message):
        jax_memeff.check(**{**good(), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens_q": jnp.array([0, 3, 2])}, "cu_seqlens_q must not decrease, got 2 after 3"),
        ({"cu_seqlens_k": jnp.array([0, 4, 9])}, r"cu_seqlens_k must be in \[0, 7\].*got 9 at"),
        ({"cu_seqlens_q": jnp.array([0, 4, 5])}, "max_seqlen_q must be at least.*sequence 0 has 4"),
        ({"query": zeros(T, N, H).at[3].set(jnp.nan)}, r"query must be finite.*\(3, 0, 0\)"),
        ({"bias": zeros(3, 4).at[1, 3].set(jnp.nan)}, "bias must be finite or -inf"),
        (
            {"mask": Mask.segments(jnp.array([0, 0, 1, 3, -1]), jnp.array([0, 3, 0, 3, 1, 2, -1]))},
            r"query segment ids must occur among.*got 3 at index \(3,\)",
        ),
    ],
)
def test_check_reads_packed_sequences(arguments, message):
    with pytest.raises(ValueError, match=message):
        jax_memeff.check(**{**good_varlen(), **arguments})


def test_check_accepts_what_is_defined_of_packed_sequences():
    garbage = zeros(S, K, H).at[jnp.array([0, 6])].set(jnp.nan)
    starts = {"cu_seqlens_q": jnp.array([0, 3, 5]), "cu_seqlens_k": jnp.array([1, 1, 6])}
    bias = jnp.full((2, 1, 1, 6), -jnp.inf).at[1, :, :, 5].set(jnp.nan)
    arguments = good_varlen() | starts | {"max_seqlen_k": 6, "bias": bias}
    jax_memeff.check(**(arguments | {"key": garbage, "value": garbage}))


def test_check_accepts_what_is_defined():
    garbage = zeros(B, S, K, H).at[1, 3:].set(jnp.nan)
    jax_memeff.check(
        zeros(B, T, N, H),
        garbage,
        garbage,
        zeros(T, S).at[0, 1].set(-jnp.inf),
        key_value_seq_lengths=jnp.array([7, 3]),
        return_residual=True,
    )


def test_check_is_eager():
    with pytest.raises(TypeError, match=r"query must hold concrete values.*outside jax\.jit"):
        jax.jit(jax_memeff.check)(*good().values())
