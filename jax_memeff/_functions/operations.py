"""Scalar types, and the operations of programs as functions of ``jax.lax``.

:func:`apply_rounded` rounds sums, products and quotients as IEEE 754 says, whatever XLA makes of
them. A mask such as ``weights[k] / weights[q] >= 1`` jumps if an operand changes by one rounding
error, so all programs that evaluate it must round alike. Kernels follow IEEE 754. XLA does not:

- It multiplies by a reciprocal if the divisor is a constant or broadcast, and it rewrites quotients
  of quotients, of powers and of square roots.
- It adds constants first: ``(x + a) + b`` becomes ``x + (a + b)``. Products likewise.
- LLVM fuses ``a * b + c``.
- On GPUs a quotient is off by up to two units in the last place, and a root by one.

``lax.optimization_barrier`` helps against the first two only, and newer versions of XLA store what
passes it, so tiles of scores would go through memory. Here each result is put together again from
its bits instead. This hides the operation from compilers and takes a few integer instructions, or
none. Quotients and roots are corrected by their remainder, which is exact in integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    is_float = jnp.issubdtype(numbers.dtype, np.floating)
    if not (is_float and jnp.issubdtype(dtype, np.integer)):
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
    shape = jnp.broadcast_shapes(*(np.shape(arg) for arg in args))
    args = [arg if np.shape(arg) == shape else jnp.broadcast_to(arg, shape) for arg in args]
    if value.op == "convert_element_type":
        if isinstance(args[0], np.ndarray):  # JAX would let NumPy convert it
            return jnp.asarray(converted_numbers(args[0], value.dtype))
        return lax.convert_element_type(args[0], value.dtype)
    if value.op == "bitcast_convert_type":
        return lax.bitcast_convert_type(args[0], np.dtype(value.dtype))
    if value.op == "integer_pow":
        return lax.integer_pow(args[0], value.param("y"))
    if value.op == "round":
        return lax.round(args[0], lax.RoundingMethod(value.param("rounding_method")))
    return _function(value.op)(*args)


_NOT_COMBINED = frozenset(
    {"abs", "ceil", "clamp", "convert_element_type", "floor", "max", "min", "neg", "round"}
    | {"select_n", "sign"}
)
"""Operations that round nothing, or that XLA combines with no other operation."""


def apply_rounded(value: Value, args: list[Any]) -> jax.Array:
    """One operation of a program; :func:`apply` with results that are rounded as IEEE 754 says.

    Subnormal numbers are those of XLA, which takes them for zero on a CPU.

    >>> quotient, numbers = Value("div", "float32"), np.full((2, 2), 41, np.float32)
    >>> jax.jit(lambda x: apply(quotient, [x, np.float32(41)]))(numbers).max()
    Array(0.99999994, dtype=float32)
    >>> jax.jit(lambda x: apply_rounded(quotient, [x, np.float32(41)]))(numbers).max()
    Array(1., dtype=float32)
    """
    if not value.dtype.startswith("float"):
        return apply(value, args)
    if value.op == "div":
        return _quotient(*jnp.broadcast_arrays(*args))
    if value.op == "mul":
        return _product(*jnp.broadcast_arrays(*args))
    if value.op == "sqrt":
        return _root(jnp.asarray(args[0]))
    if value.op == "square":
        return _power(jnp.asarray(args[0]), 2)
    if value.op == "integer_pow":
        return _power(jnp.asarray(args[0]), value.param("y"))
    result = apply(value, args)
    return result if value.op in _NOT_COMBINED else _hidden(result)


def _differentiated_as(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A decorator: the derivatives of the decorated function are those of ``function``."""

    def decorator(rounded: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        # Without a surrounding jit, the whole function is one program instead of forty.
        result = jax.custom_jvp(jax.jit(rounded, inline=True))

        @result.defjvp
        def derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
            return result(*primals), jax.jvp(function, primals, tangents)[1]

        return result

    return decorator


@_differentiated_as(lambda x: x)
def _hidden(x: jax.Array) -> jax.Array:
    """The same number; XLA cannot combine the operation that computes it with others."""
    return _with_sign(x, _bits(x))


@_differentiated_as(lax.mul)
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # LLVM would see that a number with its own sign is the same number, and fuse it with a sum.
    return _with_sign(a * b, _bits(a) ^ _bits(b))


def _power(x: jax.Array, exponent: int) -> jax.Array:
    """Products in the order of ``lax.integer_pow``."""
    result, remaining = None, abs(exponent)
    while remaining:
        if remaining % 2:
            result = x if result is None else _product(result, x)
        remaining //= 2
        if remaining:
            x = _product(x, x)
    one = jnp.ones_like(x)
    if result is None:
        return one
    return result if exponent > 0 else _quotient(one, result)


@_differentiated_as(lax.div)
def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """The quotient; that of XLA if an operand or the result is zero, subnormal or not finite."""
    info = jnp.finfo(a.dtype)
    bias = 2 ** (info.nexp - 1) - 1
    one = 1 << info.nmant  # the leading bit of a significand
    x, y = _bits(a), _bits(b)
    dividend, divisor = ((bits & (one - 1)) | one for bits in (x, y))
    is_below_1 = dividend < divisor

    to_float = (bias - 1) << info.nmant  # makes floats between 1 and 2 of significands
    numerator, denominator = (_float(n + to_float, a.dtype) for n in (dividend, divisor))
    estimate = numerator / denominator
    found = _bits(jnp.where(is_below_1, 2 * estimate, estimate)) - to_float

    # Integers of the size of a float hold neither the shifted dividend nor the product, but their
    # difference fits: both wrap around alike.
    shift = info.nmant + is_below_1.astype(x.dtype)
    remainder = (dividend << shift) - found * divisor
    # XLA's quotients are off by a few units: the first one by as many divisors in the remainder,
    # the next one by a part of a divisor. Then the nearest integer is found or its neighbour.
    step = jnp.round(remainder.astype(a.dtype) / divisor.astype(a.dtype)).astype(x.dtype)
    found, remainder = found + step, remainder - step * divisor
    # A quotient of two significands never lies halfway between two others.
    found += (2 * remainder > divisor).astype(x.dtype) - (2 * remainder < -divisor).astype(x.dtype)

    infinite = 2 * bias + 1  # the exponent of infinity and NaN
    exponents = [(bits >> info.nmant) & infinite for bits in (x, y)]
    exponent = exponents[0] - exponents[1] + bias + info.nmant - shift
    are_normal = ((n > 0) & (n < infinite) for n in (*exponents, exponent))
    magnitude = _float((exponent << info.nmant) + (found - one), a.dtype)
    return jnp.where(
        functools.reduce(jnp.logical_and, are_normal), _with_sign(magnitude, x ^ y), a / b
    )


@_differentiated_as(lax.sqrt)
def _root(x: jax.Array) -> jax.Array:
    """The square root; that of XLA if the operand is zero, negative, subnormal or not finite."""
    return _corrected_root(x, lax.sqrt)


def _corrected_root(x: jax.Array, root: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The square root, from a function that may be off by a few units in the last place."""
    info = jnp.finfo(x.dtype)
    bias = 2 ** (info.nexp - 1) - 1
    one = 1 << info.nmant
    bits = _bits(x)
    exponent = bits >> info.nmant
    significand = (bits & (one - 1)) | one
    is_odd = (exponent - bias) & 1
    # A root of a number from 1 to 4 is from 1 to 2.
    estimate = root(_float((significand - one) + ((bias + is_odd) << info.nmant), x.dtype))
    found = _bits(estimate) - ((bias - 1) << info.nmant)
    # As in _quotient(): neither of the two fits into an integer, but their difference does.
    remainder = (significand << (info.nmant + is_odd)) - found * found
    step = jnp.round(remainder.astype(x.dtype) / (2 * found).astype(x.dtype)).astype(bits.dtype)
    remainder -= step * (2 * found + step)
    found += step
    # A root never lies halfway between two others.
    found += (remainder > found).astype(bits.dtype) - (remainder <= -found).astype(bits.dtype)
    half = (exponent - bias - is_odd) // 2 + bias
    is_normal = (exponent > 0) & (exponent < 2 * bias + 1)
    return jnp.where(is_normal, _float((half << info.nmant) + (found - one), x.dtype), root(x))


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))


def _float(bits: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(bits, dtype)


def _with_sign(x: jax.Array, bits: jax.Array) -> jax.Array:
    """The magnitude of floats with the sign bits of integers."""
    magnitude = np.iinfo(bits.dtype).max
    return _float((_bits(x) & magnitude) | (bits & ~magnitude), x.dtype)
