"""Checks of query, key and value, bias and sinks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call import values
from jax_memeff._call.mask import Mask
from jax_memeff._call.values import score_dtype

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def projections(*arrays: Any) -> list[jax.Array]:
    """Query, key and value as arrays.

    JAX converts NumPy's float64 before dtypes are compared.
    """
    names = ("query", "key", "value")
    return [
        jnp.asarray(values.array(name, array)) for name, array in zip(names, arrays, strict=True)
    ]


def float_dtype(name: str, value: Any) -> None:
    if value.dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {value.dtype}; cast it, "
            f"for example {name}.astype('float32')"
        )


def query_key_value(query: Any, key: Any, value: Any) -> None:
    """Ranks, dims and dtypes of the three, before anything is reshaped."""
    _alike(query, key, value)
    _static(query, key, value, dims=3)


def _static(*operands: Any, dims: int) -> None:
    """Raise for symbolic sizes among the last ``dims``."""
    named = zip(("query", "key", "value"), operands, strict=True)
    values.require_static_sequences(**{name: x.shape[-dims:] for name, x in named})


def _alike(query: Any, key: Any, value: Any) -> None:
    """The checks that padded and packed operands share."""
    named = {"query": query, "key": key, "value": value}
    layouts = {"query": "[B, T, N, H]", "key": "[B, S, K, H]", "value": "[B, S, K, Hv]"}
    for name, operand in named.items():
        if operand.ndim not in (3, 4):
            advice = (
                f"; merge its leading dims with {name}.reshape, or map over them with jax.vmap"
                if operand.ndim > 4
                else ""
            )
            raise ValueError(
                f"{name} must have rank 4 {layouts[name]}, or 3 without the batch dim, got shape "
                f"{operand.shape}{advice}"
            )
        if operand.ndim != query.ndim:
            raise ValueError(
                f"{name} must have the rank of query, {query.ndim}, got shape {operand.shape}"
            )
        values.require_countable(name, operand.shape)
        float_dtype(name, operand)
    for name in ("key", "value"):
        if named[name].dtype != query.dtype:
            raise TypeError(
                f"{name} must have the dtype of query, {query.dtype}, got {named[name].dtype}; "
                f"pass {name}.astype(query.dtype)"
            )
    for name in ("key", "value"):
        if query.ndim == 4 and named[name].shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} must have the batch size of query, {query.shape[0]}, got "
                f"{named[name].shape[0]} in shape {named[name].shape}{values.of_one_device()}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have the head dim of query, {query.shape[-1]}, got {key.shape[-1]} in shape "
            f"{key.shape}"
        )
    for dim, what in ((-3, "sequence length"), (-2, "number of heads")):
        if value.shape[dim] != key.shape[dim]:
            raise ValueError(
                f"value must have the {what} of key, {key.shape[dim]}, got {value.shape[dim]} in "
                f"shape {value.shape}{values.of_one_device()}"
            )
    query_heads, key_heads = query.shape[-2], key.shape[-2]
    if (query_heads != 0) if key_heads == 0 else (query_heads % key_heads != 0):
        rows, columns = query.shape[-3], key.shape[-3]
        advice = f"; {values.SWAPPED}" if columns and rows % columns == 0 else ""
        raise ValueError(
            f"query's number of heads must be a multiple of key's, {key_heads}, got {query_heads} "
            f"in shape {query.shape}{advice}{values.of_one_device()}"
        )


def tokens(query: Any, key: Any, value: Any) -> None:
    """Query, key and value of packed sequences."""
    layouts = ("query [total_q, N, H]", "key [total_k, K, H]", "value [total_k, K, Hv]")
    for layout, operand in zip(layouts, (query, key, value), strict=True):
        if operand.ndim != 3:
            raise ValueError(
                f"{layout} must have rank 3, because the sequences follow one another, got shape "
                f"{operand.shape}"
                + ("; padded sequences need dot_product_attention" if operand.ndim == 4 else "")
            )
    _alike(query, key, value)
    _static(query, key, value, dims=2)


def qkv(value: Any) -> jax.Array:
    """Query, key and value in one array."""
    value = jnp.asarray(values.array("qkv", value))
    if value.ndim not in (4, 5) or value.shape[-3] != 3:
        raise ValueError(
            "qkv must have shape [B, T, 3, N, H], or [T, 3, N, H] without the batch dim, got shape "
            f"{value.shape}"
        )
    values.require_countable("qkv", value.shape)
    float_dtype("qkv", value)
    return value


def require_no_mask_or_function(bias: Any) -> None:
    """Raise ``TypeError`` for a bias that is another argument of the call."""
    if isinstance(bias, Mask) or bias is Mask:
        got, name = "a Mask", "mask"
    elif callable(bias):
        got, name = "a function", "score_mod"
    else:
        return
    raise TypeError(f"bias must be an array to add to the scores, got {got}; pass it as {name}")


def bias(value: Any, query_dtype: Any, scores: tuple[int, int, int, int]) -> jax.Array | None:
    """The bias, of rank 4, in query's dtype or in that of the scores."""
    if value is None:
        return None
    require_no_mask_or_function(value)
    array = jnp.asarray(values.array("bias", value))
    if array.dtype.name not in FLOAT_DTYPES:
        advice = (
            "pass a boolean array as mask"
            if array.dtype == np.bool_
            else "cast it, for example bias.astype('float32')"
        )
        raise TypeError(
            f"bias must be one of {', '.join(FLOAT_DTYPES)}, got {array.dtype}; {advice}"
        )
    values.broadcasts_to_scores("bias", array, scores)
    if array.dtype not in (query_dtype, np.dtype("float32")):
        # jax.nn does the same. The gradient is returned in the given dtype.
        array = array.astype(score_dtype(query_dtype))
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def sinks(value: Any, query_dtype: Any, heads: int) -> jax.Array | None:
    """The sinks, [1, N] in the dtype of the scores."""
    if value is None:
        return None
    array = jnp.asarray(values.array("sinks", value))
    if array.dtype not in (query_dtype, np.dtype("float32")):
        or_float32 = "" if query_dtype == np.dtype("float32") else ", or float32"
        raise TypeError(
            f"sinks must have the dtype of query, {query_dtype}{or_float32}, got {array.dtype}; "
            "cast it, for example sinks.astype('float32')"
        )
    if array.shape != (heads,):
        raise ValueError(
            f"sinks must have one logit for each of the {heads} heads of query, shape ({heads},), "
            f"got shape {array.shape}{values.of_one_device()}"
        )
    return array.astype(score_dtype(query_dtype))[None]
