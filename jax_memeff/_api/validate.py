"""Every check of user input. Messages say which argument, what was expected, and what was got.

Shapes, dtypes, static values and NumPy or Python values are checked. The values of device and
traced arrays are not readable here; the semantics define what out-of-range ones mean, and
``jax_memeff.check`` looks at them eagerly.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_memeff._call.offsets import Offsets

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")

_PRECISIONS: dict[Any, Literal["tf32x3", "tf32"]] = {
    None: "tf32x3",
    "highest": "tf32x3",
    "high": "tf32x3",
    "default": "tf32",
    jax.lax.Precision.HIGHEST: "tf32x3",
    jax.lax.Precision.HIGH: "tf32x3",
    jax.lax.Precision.DEFAULT: "tf32",
}


def array(name: str, value: Any) -> Any:
    """``value`` as an array: a NumPy array stays one, so that its values can be checked."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return value
    if hasattr(value, "__jax_array__"):
        return jnp.asarray(value)
    if isinstance(value, (bool, int, float, np.generic, list, tuple)):
        return np.asarray(value)
    raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def is_host(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def static_number(name: str, value: Any, instead: str) -> float:
    """A finite Python number; a traced one cannot be a constant of the kernel's launch."""
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be a static number, got a traced value; {instead}")
    # float() would accept "0.5".
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def scale(value: Any, head_dim: int) -> float:
    if value is None:
        if head_dim == 0:
            raise ValueError(
                "scale must be given when the head dim is 0: expected a number, got None, and "
                "the default 1/sqrt(head dim) does not exist"
            )
        return 1.0 / math.sqrt(head_dim)
    return static_number("scale", value, "multiply query by it and pass scale=1.0")


def soft_cap(value: Any) -> float | None:
    if value is None:
        return None
    cap = static_number(
        "logits_soft_cap",
        value,
        "pass a Python number (a cap cannot be folded into query; jax.jit's static_argnames helps)",
    )
    if cap <= 0:
        raise ValueError(f"logits_soft_cap must be > 0, got {cap}; pass None for no cap")
    return cap


def dropout_rate(value: Any) -> float:
    rate = static_number(
        "dropout_rate", value, "pass a Python number (jax.jit's static_argnames helps)"
    )
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
    return rate


def dropout_key(value: Any) -> None:
    if value is None:
        raise ValueError(
            "dropout_key must be given when dropout_rate > 0: expected a jax.random key, got None; "
            "pass dropout_key=jax.random.key(seed) or dropout_rate=0.0"
        )
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(f"dropout_key must be a jax.random key, got {type(value).__name__}")
    typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not typed and value.dtype != np.uint32:
        raise TypeError(
            "dropout_key must be a key of jax.random.key or jax.random.PRNGKey (uint32), got an "
            f"array of dtype {value.dtype}"
        )
    # A legacy key is one row of words, as many as its generator has: two for threefry.
    if value.ndim != (0 if typed else 1):
        raise ValueError(
            f"dropout_key must be one key, got an array of keys of shape {value.shape}; use "
            "jax.vmap for one key per batch element"
        )


def precision(value: Any) -> Literal["tf32x3", "tf32"]:
    name = value.lower() if isinstance(value, str) else value
    try:
        return _PRECISIONS[name]
    except (KeyError, TypeError):
        raise ValueError(
            "precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision, got "
            f"{value!r}"
        ) from None


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        got = "a traced value" if isinstance(value, Tracer) else repr(value)
        raise TypeError(f"{name} must be True or False, got {got}")
    return bool(value)


def choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def implementation(value: Any) -> Literal["cuda", "xla"] | None:
    if isinstance(value, str) and value == "cudnn":
        raise ValueError(
            "implementation='cudnn' is jax.nn's; expected None, 'cuda' or 'xla': pass 'cuda' for "
            "this library's GPU kernels"
        )
    if not (value is None or (isinstance(value, str) and value in ("cuda", "xla"))):
        raise ValueError(f"implementation must be None, 'cuda' or 'xla', got {value!r}")
    return value


def residual_checkpoint_name(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise TypeError(
        "residual_checkpoint_name must be None or a name that a policy of jax.checkpoint saves, "
        f"such as 'context', got {value!r}"
    )


def local_window(value: Any) -> tuple[int, int] | None:
    """``local_window_size`` as (left, right)."""
    if value is None:
        return None
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be an int or (left, right), got {len(sides)} values: {value!r}"
        )
    return window_side(sides[0]), window_side(sides[1])


def window_side(value: Any) -> int:
    if isinstance(value, Tracer):
        raise TypeError(
            "local_window_size must be static integers, got a traced value; use "
            "Mask.boolean(array) for a window that is computed"
        )
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(
            f"local_window_size must be an int or (left, right), got {value!r}; for a side "
            "without bound use mask=Mask.window(left, None)"
        ) from None
    if size < 0:
        raise ValueError(f"local_window_size must be >= 0 on both sides, got {size}")
    return size


def float_dtype(name: str, value: Any) -> None:
    if value.dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {value.dtype}; cast it, "
            f"for example {name}.astype('float32')"
        )


def query_key_value(query: Any, key: Any, value: Any) -> None:
    """Ranks, dims and dtypes of the three, before anything is reshaped."""
    named = {"query": query, "key": key, "value": value}
    layouts = {"query": "[B, T, N, H]", "key": "[B, S, K, H]", "value": "[B, S, K, Hv]"}
    for name, operand in named.items():
        if operand.ndim not in (3, 4):
            raise ValueError(
                f"{name} must have rank 4 {layouts[name]}, or 3 without the batch dim, got shape "
                f"{operand.shape}"
            )
        if operand.ndim != query.ndim:
            raise ValueError(
                f"{name} must have the rank of query, {query.ndim}, got shape {operand.shape}"
            )
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
                f"{named[name].shape[0]} in shape {named[name].shape}{_of_one_device()}"
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
                f"shape {value.shape}{_of_one_device()}"
            )
    query_heads, key_heads = query.shape[-2], key.shape[-2]
    if (query_heads != 0) if key_heads == 0 else (query_heads % key_heads != 0):
        raise ValueError(
            f"query must have a multiple of key's {key_heads} heads, got {query_heads} heads in "
            f"shape {query.shape}{_of_one_device()}"
        )


def _of_one_device() -> str:
    """What messages about sizes that differ add inside ``jax.shard_map``."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return ""
    return (
        f"; these are the sizes on one device of jax.shard_map over {axes}: shard the batch and "
        "the heads of query, key and value over the same axes (in_specs)"
    )


def broadcasts_to_scores(name: str, value: Any, scores: tuple[int, int, int, int]) -> None:
    shape = value.shape
    if len(shape) > 4:
        raise ValueError(f"{name} must have rank <= 4, got rank {len(shape)}: shape {shape}")
    padded = (1,) * (4 - len(shape)) + tuple(shape)
    if any(size not in (1, full) for size, full in zip(padded, scores, strict=True)):
        raise ValueError(
            f"{name} must broadcast to [B, N, T, S] = {list(scores)} (each dim 1 or full, left-"
            f"padded with 1s), got shape {tuple(shape)}{_of_one_device()}"
        )


def bias(value: Any, query_dtype: Any, scores: tuple[int, int, int, int]) -> None:
    if value.dtype not in (query_dtype, np.dtype("float32")):
        advice = "; pass a boolean array as mask" if value.dtype == np.bool_ else ""
        raise TypeError(
            f"bias must have the dtype of query, {query_dtype}, or float32, got {value.dtype}"
            f"{advice or '; pass bias.astype(query.dtype)'}"
        )
    broadcasts_to_scores("bias", value, scores)


def boolean_mask(value: Any, scores: tuple[int, int, int, int]) -> None:
    if value.dtype != np.bool_:
        raise TypeError(
            f"mask must be a boolean array (True = attend) or a jax_memeff.Mask, got dtype "
            f"{value.dtype}; pass mask != 0, or an additive mask as bias"
        )
    broadcasts_to_scores("mask", value, scores)


def lengths(name: str, value: Any, batch: int, longest: int) -> None:
    """Sequence lengths [B] in [0, longest]; only host values can be compared."""
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {value.dtype}; pass .astype('int32')")
    if value.shape != (batch,):
        raise ValueError(f"{name} must have shape [B] = [{batch}], got shape {tuple(value.shape)}")
    if is_host(value):
        lengths_in_range(name, value, longest)


def lengths_in_range(name: str, value: np.ndarray, longest: int) -> None:
    wrong = np.flatnonzero((value < 0) | (value > longest))
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(f"{name} must be in [0, {longest}], got {value[index]} at index {index}")


def segment_ids(name: str, value: Any, batch: int, length: int) -> None:
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {value.dtype}; pass .astype('int32')")
    if value.shape not in ((batch, length), (length,)):
        raise ValueError(
            f"{name} must have shape [{batch}, {length}] or [{length}], got {tuple(value.shape)}"
        )


def mask(
    value: Any, scores: tuple[int, int, int, int], tokens: tuple[int, int] | None = None
) -> None:
    """Every array of a ``Mask`` against the scores [B, N, T, S] of this call.

    Packed sequences have a segment id for each of their ``tokens``.
    """
    batch, _, rows, columns = scores
    if value.query_lengths is not None:
        lengths("query lengths", value.query_lengths, batch, rows)
    if value.key_lengths is not None:
        lengths("key lengths", value.key_lengths, batch, columns)
    if tokens is not None:
        batch, (rows, columns) = 1, tokens
    for query_ids, key_ids in value.segment_ids:
        segment_ids("query segment ids", query_ids, batch, rows)
        segment_ids("key segment ids", key_ids, batch, columns)
    for element in value.booleans:
        boolean_mask(element, scores)


def offsets(value: Any) -> Any:
    """``Offsets`` of integer scalars, or None."""
    if value is None:
        return None
    if not isinstance(value, Offsets):
        raise TypeError(f"offsets must be jax_memeff.Offsets or None, got {type(value).__name__}")
    for field in dataclasses.fields(value):
        name, number = field.name, getattr(value, field.name)
        if name == "num_heads" and number is None:
            continue
        scalar = array(f"offsets.{name}", number)
        if scalar.ndim != 0 or not jnp.issubdtype(scalar.dtype, jnp.integer):
            raise TypeError(
                f"offsets.{name} must be an int or an integer scalar array, got dtype "
                f"{scalar.dtype}, shape {tuple(scalar.shape)}"
            )
        if is_host(scalar) and scalar < 0:
            raise ValueError(f"offsets.{name} must be >= 0, got {int(scalar)}")
    return value
