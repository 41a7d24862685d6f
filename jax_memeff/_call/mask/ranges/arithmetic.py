"""The ranges of sums, products, quotients, roots, minima and maxima."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_memeff._call.mask.ranges.range import (
    MORE_THAN_ROUNDING,
    SAFE_PRODUCT,
    Range,
    Rule,
    is_float,
    largest,
    least,
)
from jax_memeff._functions.operations import apply, apply_rounded
from jax_memeff.codegen.functions.program import Value


def _plus(*widths: int | None) -> int | None:
    return None if None in widths else sum(width for width in widths if width is not None)


def _sum(value: Value, low: Any, high: Any, terms: tuple[Range, Range]) -> Range | None:
    """The range of a sum or difference; ``terms`` include their signs."""
    width = _plus(terms[0].width, terms[1].width)
    if is_float(value):
        # inf - inf is NaN, though neither bound is.
        return Range(low, high).where(jnp.isfinite(low) & jnp.isfinite(high), value.dtype)
    if value.dtype != "int32":
        return None
    fits = ~(_overflows(terms[0].low, terms[1].low, low))
    fits &= ~(_overflows(terms[0].high, terms[1].high, high))
    return Range(low, high, width).where(fits, value.dtype)


def _overflows(a: Any, b: Any, total: Any) -> jax.Array:
    return ((a ^ total) & (b ^ total)) < 0


def _add(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    low, high = _result(value, "add", a.low, b.low), _result(value, "add", a.high, b.high)
    return _sum(value, low, high, (a, b))


def _sub(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    low, high = _result(value, "sub", a.low, b.high), _result(value, "sub", a.high, b.low)
    if value.dtype == "int32":
        # -INT32_MIN overflows to INT32_MIN, but ~x = -x - 1 never does: a - b overflows like
        # a + ~b.
        b = Range(~b.high, ~b.low, b.width)
    return _sum(value, low, high, (a, b))


def _neg(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    if value.dtype in ("uint32", "uint64"):
        return None
    found = Range(-a.high, -a.low, a.width)
    return found if is_float(value) else found.where(a.low > -(2**31), value.dtype)


def _mul(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if value.dtype not in ("int32", "float32", "float64"):
        return None
    if value.args[:1] == value.args[1:]:
        return _square(value, [a], numbers)
    products = [_result(value, "mul", x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = least(products), largest(products)
    if is_float(value):
        return Range(low, high).where(jnp.isfinite(low) & jnp.isfinite(high), value.dtype)
    sizes = [jnp.maximum(*(jnp.abs(jnp.float32(x)) for x in arg[:2])) for arg in args]
    factor = next((abs(number) for number in numbers if number is not None), None)
    width = next((arg.width for arg, x in zip(args, numbers, strict=True) if x is None), None)
    width = None if factor is None or width is None else width * factor
    return Range(low, high, width).where(sizes[0] * sizes[1] < SAFE_PRODUCT, value.dtype)


def _square(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    if value.dtype not in ("int32", "float32", "float64"):
        return None
    size = _abs(value, [a], numbers)
    if size is None:
        return None
    low, high = (_result(value, "mul", x, x) for x in (size.low, size.high))
    found = Range(low, high)
    fits = jnp.float32(size.high) * jnp.float32(size.high) < SAFE_PRODUCT
    if is_float(value):
        fits = jnp.isfinite(found.high)
    return found.where(fits, value.dtype)


def _abs(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    if value.dtype in ("uint32", "uint64"):
        return None
    low = jnp.where(a.low > 0, a.low, jnp.where(a.high < 0, -a.high, 0)).astype(value.dtype)
    found = Range(low, jnp.maximum(-a.low, a.high), a.width)
    if is_float(value):
        return found.where(~jnp.isnan(a.low + a.high), value.dtype)
    return found.where(a.low > -(2**31), value.dtype)


def _div(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if is_float(value):
        quotients = [_result(value, "div", x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = least(quotients), largest(quotients)
        known = ((b.low > 0) | (b.high < 0)) & jnp.isfinite(low) & jnp.isfinite(high)
        return Range(low, high).where(known, value.dtype)
    if value.dtype != "int32" or not b.is_exact:
        return None
    # Never by -1: XLA crashes the process when it folds the division of INT32_MIN by -1.
    divisor, width = b.low, None
    if numbers[1] is not None and numbers[1] > 0 and a.width is not None:
        width = a.width // numbers[1] + 1
    low, high = (_result(value, "div", x, jnp.maximum(divisor, 1)) for x in (a.low, a.high))
    return Range(low, high, width).where(divisor > 0, value.dtype)


def remainder(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if value.dtype != "int32" or not b.is_exact:
        return None
    divisor = jnp.maximum(b.low, 1)
    most = divisor - 1
    quotients, remainders = (
        [_result(value, op, x, divisor) for x in (a.low, a.high)] for op in ("div", "rem")
    )
    is_one_period = quotients[0] == quotients[1]
    width = None
    if numbers[1] is not None and numbers[1] > 0 and a.width is not None:
        width = max(a.width, 2 * (numbers[1] - 1))
    return Range(
        jnp.where(is_one_period, remainders[0], jnp.where(a.low < 0, -most, 0)),
        jnp.where(is_one_period, remainders[1], jnp.where(a.high > 0, most, 0)),
        width,
    ).where(b.low > 0, value.dtype)


def _shift_right(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, _ = args
    bits = numbers[1]
    if value.dtype != "int32" or bits is None or not 0 <= bits < 31:
        return None
    width = None if a.width is None else (a.width >> bits) + 1
    found = Range(a.low >> bits, a.high >> bits, width)
    is_signed = value.op == "shift_right_arithmetic"
    return found if is_signed else found.where(a.low >= 0, value.dtype)


def _max(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    return Range(largest([a.low, b.low]), largest([a.high, b.high]), _wider(a, b))


def _min(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    return Range(least([a.low, b.low]), least([a.high, b.high]), _wider(a, b))


def _clamp(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    least, x, most = args
    at_least = Range(largest([least.low, x.low]), largest([least.high, x.high]), _wider(least, x))
    return _min(value, [at_least, most], numbers)


def _wider(a: Range, b: Range) -> int | None:
    return None if a.width is None or b.width is None else max(a.width, b.width)


def _sign(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    found = Range(jnp.sign(a.low), jnp.sign(a.high), 2)
    return None if value.dtype == "uint32" else found


def _monotone(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    return Range(apply(value, [jnp.asarray(a.low)]), apply(value, [jnp.asarray(a.high)]))


def _sqrt(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    """Approximations may not be monotone, so the bounds are widened by more than their error."""
    (a,) = args
    low, high = jnp.sqrt(a.low), jnp.sqrt(a.high)
    found = Range(low * (1 - MORE_THAN_ROUNDING), high * (1 + MORE_THAN_ROUNDING))
    return found.where(a.low >= 0, value.dtype)


def _result(value: Value, op: str, *bounds: Any) -> jax.Array:
    """An operation on bounds, in the type of a value and rounded as that on elements."""
    return apply_rounded(Value(op, value.dtype), [jnp.asarray(bound) for bound in bounds])


ARITHMETIC: dict[str, Rule] = {
    "abs": _abs,
    "add": _add,
    "ceil": _monotone,
    "clamp": _clamp,
    "div": _div,
    "floor": _monotone,
    "max": _max,
    "min": _min,
    "mul": _mul,
    "neg": _neg,
    "rem": remainder,
    "round": _monotone,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "sign": _sign,
    "sqrt": _sqrt,
    "square": _square,
    "sub": _sub,
}
