"""The ranges of comparisons, bools, bits, conversions and choices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_memeff._call.mask.ranges.arithmetic import remainder
from jax_memeff._call.mask.ranges.range import (
    SAFE_PRODUCT,
    Range,
    Rule,
    dtype_of,
    largest,
    least,
)
from jax_memeff.codegen.functions.program import Value


def _convert(value: Value, args: list[Range], numbers: list[Any]) -> Range | None:
    (a,) = args
    source, target = dtype_of(a), value.dtype
    if target == "bool":
        return _not(value, [_equal(a, Range.exact(np.asarray(0, source)))], numbers)
    if source.startswith("float") and not target.startswith("float"):
        # Platforms disagree on the conversion of larger floats.
        fits = (a.low > -SAFE_PRODUCT) & (a.high < SAFE_PRODUCT)
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
    found = remainder(value, [other, Range.exact(jnp.int32(power + 1))], [None, power + 1])
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
    a, b = (_converted(x, "int32") if dtype_of(x) == "bool" else x for x in (a, b))
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
    if len(cases) != 2 or dtype_of(predicate) != "bool":
        return None
    if_false, if_true = cases

    def chosen(false: Any, true: Any, both: Any) -> Any:
        return jnp.where(predicate.low, true, jnp.where(predicate.high, both, false))

    return Range(
        chosen(if_false.low, if_true.low, least([if_false.low, if_true.low])),
        chosen(if_false.high, if_true.high, largest([if_false.high, if_true.high])),
    )


LOGIC: dict[str, Rule] = {
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
