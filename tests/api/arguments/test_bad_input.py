"""Every wrong argument raises an error that names it, the expectation and the value."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import zeros

import jax_memeff
from jax_memeff import Mask, Offsets

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
attention: Any = jax_memeff.dot_product_attention


def good():
    return {"query": zeros(B, T, N, H), "key": zeros(B, S, K, H), "value": zeros(B, S, K, H)}


# name: (arguments that replace the good ones, error, words that the message must have in this
# order)
CASES = {
    "no_value": ({"value": None}, ValueError, "value_dim must be given if value is None"),
    "value_and_value_dim": (
        {"value_dim": 4},
        ValueError,
        "value_dim must be None if value is given, got 4; pass value=None",
    ),
    "value_dim": (
        {"value": None, "value_dim": 9},
        ValueError,
        r"value_dim must be in \[1, 8\], the columns of key, got 9",
    ),
    "value_dim_kind": (
        {"value": None, "value_dim": 4.0},
        TypeError,
        "value_dim must be a Python integer",
    ),
    "not_an_array": ({"query": None}, TypeError, "query must be an array, got NoneType"),
    "rank_2": (
        {"query": zeros(T, H)},
        ValueError,
        r"query must have shape \[B, T, N, H\], or \[T, N, H\] without.*, got shape \(5, 8\)",
    ),
    "rank_5": (
        {"key": zeros(1, B, S, K, H)},
        ValueError,
        r"key must have shape \[B, S.*got shape \(1,",
    ),
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
        "query's number of heads must be a multiple of key's, 3, got 4",
    ),
    "no_key_heads": (
        {"key": zeros(B, S, 0, H), "value": zeros(B, S, 0, H)},
        ValueError,
        "query's number of heads must be a multiple of key's, 0, got 4",
    ),
    "integer_query": (
        {"query": zeros(B, T, N, H, dtype=jnp.int32)},
        TypeError,
        "query must be one of float16.*got int32; cast it",
    ),
    "float8": (
        {"value": zeros(B, S, K, H, dtype=jnp.float8_e4m3fn)},
        TypeError,
        "value must have the dtype of query, float32, got float8_e4m3fn",
    ),
    "complex_key": (
        {"key": zeros(B, S, K, H, dtype=jnp.complex64)},
        TypeError,
        "key must have the dtype of query, float32, got complex64",
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
        {"bias": zeros(T, S, dtype=int)},
        TypeError,
        r"bias must be one of float16.*got int32; cast it, for example bias.astype\('float32'\)",
    ),
    "boolean_bias": (
        {"bias": zeros(T, S, dtype=bool)},
        TypeError,
        "bias must be an array to add to the scores, got a boolean array; pass it as mask",
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
    "ragged_query": (
        {"query": [[1.0], [1.0, 2.0]]},
        ValueError,
        r"query must be an array, got a list whose rows differ in length: \[\[1.0\]",
    ),
    "object_key": (
        {"key": np.array([None, 1])},
        TypeError,
        "key must be an array of numbers.*got dtype object",
    ),
    "text_value": (
        {"value": np.array(["a", "b"])},
        TypeError,
        "value must be an array of numbers.*got dtype <U1",
    ),
    "date_bias": (
        {"bias": np.zeros((T, S), "M8[s]")},
        TypeError,
        "bias must be an array of numbers.*got dtype datetime64",
    ),
    "record_bias": (
        {"bias": np.zeros((T, S), [("x", int)])},
        TypeError,
        "bias must be an array of numbers.*got dtype",
    ),
    "long_double": (
        {"query": np.zeros((B, T, N, H), np.longdouble)},
        TypeError,
        "query must be an array of numbers.*got dtype float128",
    ),
    "masked_array": (
        {"key": np.ma.masked_array(np.zeros((B, S, K, H)), True)},
        TypeError,
        r"key must be an array, got a NumPy masked array, whose mask would be ignored",
    ),
    "masked_lengths": (
        {"query_seq_lengths": np.ma.masked_array([1, 2])},
        TypeError,
        "query_seq_lengths must be an array, got a NumPy masked array",
    ),
    "text_lengths": (
        {"key_value_seq_lengths": ["a", "b"]},
        TypeError,
        "key_value_seq_lengths must be an array of numbers.*got dtype <U1",
    ),
    "huge_length": (
        {"key_value_seq_lengths": [1, 2**70]},
        TypeError,
        "key_value_seq_lengths must be an array of numbers.*got dtype object.*64 bits",
    ),
    "ragged_mask": (
        {"mask": [[True], [True, False]]},
        ValueError,
        "mask must be an array, got a list whose rows differ in length",
    ),
    "mask_by_name": (
        {"mask": "causal"},
        TypeError,
        r"mask must be a boolean array or a jax_memeff.Mask, got 'causal'; pass is_causal=True",
    ),
    "mask_of_another_library": ({"mask": object()}, TypeError, "mask must be an array, got object"),
    "Mask_of_lists": (
        {"mask": Mask(query_lengths=[9, 9])},  # type: ignore[arg-type]
        ValueError,
        r"query lengths must be in \[0, 5\], got 9 at index 0",
    ),
    "time_key": (
        {"key": np.zeros((2, 7, 2, 16), "m8[s]")},
        TypeError,
        "key .* got dtype timedelta64",
    ),
    "time_precision": (
        {"precision": np.timedelta64(3, "s")},
        ValueError,
        "precision must be None, 'default', .* got np.timedelta64",
    ),
    "zero_head_dim": (
        {"query": zeros(B, T, N, 0), "key": zeros(B, S, K, 0)},
        ValueError,
        "scale must be given when the head dim is 0: expected a number, got None",
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
        r"local_window_size must be >= 0 on both sides, got \(3, -1\)",
    ),
    "window_of_three": (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        r"local_window_size must be an int or \(left, right\), got 3 values",
    ),
    "fractional_window": (
        {"local_window_size": 2.5},
        TypeError,
        r"local_window_size must be an int or \(left, right\) of static integers, got 2.5",
    ),
    "boolean_window": (
        {"local_window_size": True},
        TypeError,
        r"local_window_size must be an int or \(left, right\).*got True of type bool",
    ),
    "boolean_window_side": (
        {"local_window_size": (3, False)},
        TypeError,
        "local_window_size must be an int.*got False of type bool",
    ),
    "half_open_window": (
        {"local_window_size": (3, None)},
        TypeError,
        r"local_window_size must be an int.*got \(3, None\); .*mask=jax_memeff.Mask.window\(3, N",
    ),
    "unknown_argument": (
        {"casual": True},
        TypeError,
        "got an unexpected keyword argument 'casual'; did you mean 'is_causal'",
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
    "offsets": (
        {"offsets": (0, 1)},
        TypeError,
        "offsets must be jax_memeff.Offsets.*of type tuple",
    ),
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


def refuse(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Asserts that a good call with these arguments raises the error."""
    with pytest.raises(error) as raised:
        attention(**{**good(), **arguments})
    assert re.search(message, str(raised.value)), str(raised.value)


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_bad_argument(name):
    refuse(*CASES[name])
