"""Scalar types, and the operations of programs as functions of ``jax.lax``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_memeff.codegen.functions.program import ScalarType, Value

SCALAR_TYPES: dict[str, ScalarType] = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
    "int8": "int32",
    "int16": "int32",
    "int32": "int32",
    "int64": "int64",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "uint32",
    "uint64": "uint64",
    "bool": "bool",
}
"""The types in which programs compute with each dtype.

float16 and bfloat16 are computed in float32: bfloat16 represents no odd number above 256, so
positions would be wrong in it. Integers of 8 and 16 bits wrap around as they do in JAX.
"""

_OTHER_NAMES = {
    "and": "bitwise_and",
    "not": "bitwise_not",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


def bits_of_small(dtype: np.dtype) -> int:
    """The bits of an integer type that programs hold in a wider one; 0 for other types."""
    return dtype.itemsize * 8 if dtype.name in ("int8", "int16", "uint8", "uint16") else 0


def converted_numbers(numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """Numbers in another dtype, as XLA converts them.

    Floats beyond the limits of an integer type become these limits, and NaN becomes 0.

    >>> converted_numbers(np.float32([300, -1, np.nan]), "uint8").tolist()
    [255, 0, 0]
    """
    is_float = jax.numpy.issubdtype(numbers.dtype, np.floating)
    if not (is_float and jax.numpy.issubdtype(dtype, np.integer)):
        with np.errstate(all="ignore"):
            return numbers.astype(dtype)
    limits, wide = np.iinfo(dtype), numbers.astype(np.float64)
    # The largest int64 and uint64 are not float64 numbers, but the numbers one above them are.
    is_above, is_below = wide >= float(limits.max) + 1, wide <= float(limits.min) - 1
    inside = np.where(is_above | is_below | np.isnan(wide), 0, wide).astype(dtype)
    least, most = np.asarray(limits.min, dtype), np.asarray(limits.max, dtype)
    return np.where(is_above, most, np.where(is_below, least, inside))


def _function(op: str) -> Callable[..., jax.Array]:
    return getattr(lax, _OTHER_NAMES.get(op, op))


def apply(value: Value, args: list[Any]) -> jax.Array:
    """One operation of a program; its operands are broadcast against each other."""
    # Sizes may be symbolic in an exported program.
    shape = jax.numpy.broadcast_shapes(*(np.shape(arg) for arg in args))
    args = [arg if np.shape(arg) == shape else jax.numpy.broadcast_to(arg, shape) for arg in args]
    if value.op == "convert_element_type":
        if isinstance(args[0], np.ndarray):  # JAX would let NumPy convert it
            return jax.numpy.asarray(converted_numbers(args[0], value.dtype))
        return lax.convert_element_type(args[0], value.dtype)
    if value.op == "bitcast_convert_type":
        return lax.bitcast_convert_type(args[0], np.dtype(value.dtype))
    if value.op == "integer_pow":
        return lax.integer_pow(args[0], value.param("y"))
    if value.op == "round":
        return lax.round(args[0], lax.RoundingMethod(value.param("rounding_method")))
    return _function(value.op)(*args)
