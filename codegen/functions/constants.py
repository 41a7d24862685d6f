"""Numbers of a program as C++ expressions with exactly the same value."""

from __future__ import annotations

import math
import struct
from typing import Any


def reciprocal(number: float) -> tuple[float, bool] | None:
    """1 / number rounded to float32, and whether multiplying by it gives exactly the quotients.

    None if the number or its reciprocal is not a normal float32.

    >>> reciprocal(-8.0), reciprocal(3.0), reciprocal(0.0)
    ((-0.125, True), (0.3333333432674408, False), None)
    """
    number = _rounded(number)
    if not 2.0**-126 <= abs(number) <= 2.0**126:
        return None
    return _rounded(1 / number), abs(math.frexp(number)[0]) == 0.5


def _rounded(number: float) -> float:
    """The nearest float32, which is infinite beyond the range."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def float32_bits(number: float) -> int:
    """The bits of a number rounded to float32."""
    return struct.unpack("<I", struct.pack("<f", _rounded(number)))[0]


def constant(dtype: str, number: Any) -> str:
    """A number of a scalar type of 32 bits, or a bool.

    Raises ``ValueError`` if it is not such a number.

    >>> constant("int32", -7), constant("float32", 0.1), constant("bool", 1)
    ('int(0xfffffff9u)', '0x1.99999ap-4f', 'true')
    """
    if dtype == "bool":
        return "true" if number else "false"
    if dtype == "float32":
        return float_constant(float(number))
    if dtype == "uint32":
        return f"{int(number) % 2**32}u"
    number = int(number)
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"a constant of type int32 needs a number of 32 bits, got {number}")
    # C++ has no negative literals: -2147483648 would be the negation of a long.
    return str(number) if number >= 0 else f"int({number % 2**32:#x}u)"


def float_constant(number: float) -> str:
    """A float32, in hexadecimal if it is not whole."""
    rounded = _rounded(number)
    if math.isnan(number):
        return "__uint_as_float(0x7fc00000u)"
    if math.isinf(rounded):
        return f"__uint_as_float({'0x7f800000u' if number > 0 else '0xff800000u'})"
    if abs(rounded) < 2**24 and rounded == int(rounded) and math.copysign(1, rounded) == 1:
        return f"{int(rounded)}.0f"
    mantissa, _, exponent = rounded.hex().partition("p")
    text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}f"
    return f"({text})" if text.startswith("-") else text
