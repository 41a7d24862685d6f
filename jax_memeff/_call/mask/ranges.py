"""Interval arithmetic on the operations of programs: the minimum and maximum result in a tile.

Ranges are conservative: every element of a tile lies in the range of the tile, which may be wider
than necessary. Decisions based on the bounds of a mask function are therefore always correct. If an
operation has no rule, or could overflow, its range is unbounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._functions.operations import apply, apply_rounded
from jax_memeff.codegen.functions.program import Value

_SAFE_PRODUCT = float(2**30)
_MORE_THAN_ROUNDING = 2.0**-20


class Range(NamedTuple):
    """The bounds of a value in each tile; for bools, whether all and whether any are true."""

    low: Any
    high: Any
    """The same object as ``low`` if the value is constant in a tile."""
    width: int | None = None
    """For integers, an upper bound on ``high - low`` in every tile, provided that no sum overflows;
    None if unknown."""

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @classmethod
    def exact(cls, value: Any) -> Range:
        return cls(value, value, 0)

    @classmethod
    def everything(cls, dtype: str) -> Range:
        """The unbounded range."""
        if dtype == "bool":
            return cls(jnp.asarray(False), jnp.asarray(True))
        if dtype.startswith("float"):
            # NaN bounds make every comparison undecided.
            return cls(jnp.asarray(np.nan, dtype), jnp.asarray(np.nan, dtype))
        limits = np.iinfo(dtype)
        return cls(jnp.asarray(limits.min, dtype), jnp.asarray(limits.max, dtype))

    def where(self, known: jax.Array, dtype: str) -> Range:
        """This range in tiles where ``known`` is true, and the unbounded range in the others."""
        other = Range.everything(dtype)
        low, high = jnp.where(known, self.low, other.low), jnp.where(known, self.high, other.high)
        return Range(low, high, self.width)

    def widened(self) -> Range:
        """The range of floats whose last bits are unknown.

        A result that overflows here may be just finite in a kernel, so infinity is widened to the
        largest floats.
        """
        most = float(jnp.finfo(jnp.result_type(self.low)).max)
        low, high = jnp.minimum(self.low, most), jnp.maximum(self.high, -most)
        return Range(
            low - jnp.abs(low) * _MORE_THAN_ROUNDING, high + jnp.abs(high) * _MORE_THAN_ROUNDING
        )


_Rule = Callable[[Value, list[Range], list[Any]], Range | None]
"""Like :func:`applied`, if some operands are not exact; None if the range is unbounded."""


def _dtype_of(x: Range) -> str:
    return np.dtype(jnp.result_type(x.low)).name


def _is_float(value: Value) -> bool:
    return value.dtype.startswith("float")


def _least(bounds: list[Any]) -> Any:
    found = bounds[0]
    for bound in bounds[1:]:
        found = jnp.minimum(found, bound)
    return found


def _largest(bounds: list[Any]) -> Any:
    found = bounds[0]
    for bound in bounds[1:]:
        found = jnp.maximum(found, bound)
    return found


def _plus(*widths: int | None) -> int | None:
    return None if None in widths else sum(width for width in widths if width is not None)


def _sum(value: Value, low: Any, high: Any, terms: tuple[Range, Range]) -> Range | None:
    """The range of a sum or difference; ``terms`` include their signs."""
    width = _plus(terms[0].width, terms[1].width)
    if _is_float(value):
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
    return found if _is_float(value) else found.where(a.low > -(2**31), value.dtype)


def _mul(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if value.dtype not in ("int32", "float32", "float64"):
        return None
    if value.args[:1] == value.args[1:]:
        return _square(value, [a], numbers)
    products = [_result(value, "mul", x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = _least(products), _largest(products)
    if _is_float(value):
        return Range(low, high).where(jnp.isfinite(low) & jnp.isfinite(high), value.dtype)
    sizes = [jnp.maximum(*(jnp.abs(jnp.float32(x)) for x in arg[:2])) for arg in args]
    factor = next((abs(number) for number in numbers if number is not None), None)
    width = next((arg.width for arg, x in zip(args, numbers, strict=True) if x is None), None)
    width = None if factor is None or width is None else width * factor
    return Range(low, high, width).where(sizes[0] * sizes[1] < _SAFE_PRODUCT, value.dtype)


def _square(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    if value.dtype not in ("int32", "float32", "float64"):
        return None
    size = _abs(value, [a], numbers)
    if size is None:
        return None
    low, high = (_result(value, "mul", x, x) for x in (size.low, size.high))
    found = Range(low, high)
    fits = jnp.float32(size.high) * jnp.float32(size.high) < _SAFE_PRODUCT
    if _is_float(value):
        fits = jnp.isfinite(found.high)
    return found.where(fits, value.dtype)


def _abs(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    if value.dtype in ("uint32", "uint64"):
        return None
    low = jnp.where(a.low > 0, a.low, jnp.where(a.high < 0, -a.high, 0)).astype(value.dtype)
    found = Range(low, jnp.maximum(-a.low, a.high), a.width)
    if _is_float(value):
        return found.where(~jnp.isnan(a.low + a.high), value.dtype)
    return found.where(a.low > -(2**31), value.dtype)


def _div(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if _is_float(value):
        quotients = [_result(value, "div", x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = _least(quotients), _largest(quotients)
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


def _remainder(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
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
    return Range(_largest([a.low, b.low]), _largest([a.high, b.high]), _wider(a, b))


def _min(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    return Range(_least([a.low, b.low]), _least([a.high, b.high]), _wider(a, b))


def _clamp(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    least, x, most = args
    at_least = Range(_largest([least.low, x.low]), _largest([least.high, x.high]), _wider(least, x))
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
    found = Range(low * (1 - _MORE_THAN_ROUNDING), high * (1 + _MORE_THAN_ROUNDING))
    return found.where(a.low >= 0, value.dtype)


def _result(value: Value, op: str, *bounds: Any) -> jax.Array:
    """An operation on bounds, in the type of a value and rounded as that on elements."""
    return apply_rounded(Value(op, value.dtype), [jnp.asarray(bound) for bound in bounds])


_ARITHMETIC: dict[str, _Rule] = {
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
    "rem": _remainder,
    "round": _monotone,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "sign": _sign,
    "sqrt": _sqrt,
    "square": _square,
    "sub": _sub,
}


def _convert(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    source, target = _dtype_of(a), value.dtype
    if target == "bool":
        return _not(value, [_equal(a, Range.exact(np.asarray(0, source)))], numbers)
    if source.startswith("float") and not target.startswith("float"):
        # Platforms disagree on the conversion of larger floats.
        fits = (a.low > -_SAFE_PRODUCT) & (a.high < _SAFE_PRODUCT)
        return _converted(a, target).where(fits, target) if target == "int32" else None
    found = _converted(a, target)._replace(width=1 if source == "bool" else a.width)
    if source == "bool" or target.startswith("float"):
        return found
    # Numbers outside the target's range wrap around, which changes their order.
    held, limits = np.iinfo(source), np.iinfo(target)
    least = np.asarray(max(held.min, limits.min), source)
    most = np.asarray(min(held.max, limits.max), source)
    return found.where((a.low >= least) & (a.high <= most), target)


def _converted(x: Range, dtype: str) -> Range:
    return Range(jnp.asarray(x.low).astype(dtype), jnp.asarray(x.high).astype(dtype))


def _and(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if value.dtype == "bool":
        return Range(a.low & b.low, a.high & b.high)
    power = next((number for number in numbers if number is not None), None)
    if value.dtype != "int32" or power is None:
        return None
    if not 0 <= power < 2**30 or power & (power + 1):
        return None
    # The bitwise and with 2**n - 1 is the remainder of division by 2**n.
    other = a if numbers[0] is None else b
    found = _remainder(value, [other, Range.exact(jnp.int32(power + 1))], [None, power + 1])
    return None if found is None else found.where(other.low >= 0, value.dtype)


def _or(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    return Range(a.low | b.low, a.high | b.high) if value.dtype == "bool" else None


def _xor(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    if value.dtype != "bool":
        return None
    decided, result = (a.low == a.high) & (b.low == b.high), a.low ^ b.low
    return Range(decided & result, ~decided | result)


def _not(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    return Range(~a.high, ~a.low) if value.dtype == "bool" else None


def _equal(a: Range, b: Range) -> Range:
    a, b = (_converted(x, "int32") if _dtype_of(x) == "bool" else x for x in (a, b))
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Range(same, ~((a.low > b.high) | (b.low > a.high)))


def _eq(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    return _equal(*args)


def _ne(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    same = _equal(*args)
    return Range(~same.high, ~same.low)


def _lt(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    return Range(a.high < b.low, ~(a.low >= b.high))


def _le(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    a, b = args
    return Range(a.high <= b.low, ~(a.low > b.high))


def _gt(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    return _lt(value, args[::-1], numbers)


def _ge(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    return _le(value, args[::-1], numbers)


def _select(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    predicate, *cases = args
    if len(cases) != 2 or _dtype_of(predicate) != "bool":
        return None
    if_false, if_true = cases

    def chosen(false: Any, true: Any, both: Any) -> Any:
        return jnp.where(predicate.low, true, jnp.where(predicate.high, both, false))

    return Range(
        chosen(if_false.low, if_true.low, _least([if_false.low, if_true.low])),
        chosen(if_false.high, if_true.high, _largest([if_false.high, if_true.high])),
    )


_LOGIC: dict[str, _Rule] = {
    "and": _and,
    "convert_element_type": _convert,
    "eq": _eq,
    "ge": _ge,
    "gt": _gt,
    "le": _le,
    "lt": _lt,
    "ne": _ne,
    "not": _not,
    "or": _or,
    "select_n": _select,
    "xor": _xor,
}


_RULES = _ARITHMETIC | _LOGIC
_ROUNDED_ALIKE = frozenset(
    {"abs", "add", "ceil", "clamp", "convert_element_type", "div", "floor", "integer_pow", "max"}
    | {"bitcast_convert_type", "min", "mul", "neg", "read", "round", "select_n", "sign", "square"}
    | {"sub"}
)
"""Operations on floats with the same bits in :func:`apply_rounded` and in the kernels. Others may
differ in the last bits, because each library has its own exponentials."""


def applied(value: Value, args: list[Range], numbers: list[Any]) -> Range:
    """The range of one operation.

    Args:
        value: the operation.
        args: the ranges of its operands.
        numbers: for each operand, its value if it is the same constant everywhere, else None.

    >>> import numpy as np
    >>> tile = Range(np.int32(64), np.int32(127), 63)  # columns
    >>> block = applied(Value("div", "int32"), [tile, Range.exact(np.int32(64))], [None, 64])
    >>> int(block.low), int(block.high), block.width
    (1, 1, 1)
    """
    if all(arg.is_exact for arg in args):
        found = Range.exact(apply_rounded(value, [arg.low for arg in args]))
    else:
        rule = _RULES.get(value.op)
        found = None if rule is None else rule(value, args, numbers)
        found = Range.everything(value.dtype) if found is None else found
    return found.widened() if _is_float(value) and value.op not in _ROUNDED_ALIKE else found
