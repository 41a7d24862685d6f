"""The operations of users' functions: the C++ of each lax primitive for each scalar type.

This is the one list of what a program may contain besides inputs, constants, literals, sizes and
reads.
Names, argument orders and results are those of ``jax.lax``. Device functions that a form calls are
in ``codegen/memeff/core/function/``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_memeff.codegen.functions.program import Program

# Costs, in instructions: whether a value is worth a register depends on their order only.
CHEAP = 1
FUNCTION = 20

CPP_TYPES = {"float32": "float", "int32": "int", "uint32": "unsigned", "bool": "bool"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One lax primitive.

    Args:
        forms: for each dtype of the operands, a C++ expression of ``{0}``, ``{1}``, ...: names or
            expressions in parentheses.
        exact: a form for float32 that the compiler cannot fuse with others, if it otherwise would.
        approximate: a faster form for float32 in kernels for 16-bit inputs.
        bound: the error of ``approximate``, for the documentation.
        cost: in instructions.
        discontinuous: whether its result jumps if a float operand changes by one rounding error.
    """

    forms: dict[str, str]
    exact: str = ""
    approximate: str = ""
    bound: str = ""
    cost: int = CHEAP
    discontinuous: bool = False

    def form(self, dtype: str, *, exact: bool, precise: bool) -> str:
        """The expression for operands of ``dtype``.

        ``exact`` is for values on which a discontinuous operation depends: all kernels that
        evaluate the function have to agree on them.
        """
        if dtype == "float32" and exact and self.exact:
            return self.exact
        if dtype == "float32" and not exact and not precise and self.approximate:
            return self.approximate
        return self.forms[dtype]


def _arithmetic(sign: str, float_name: str, int_name: str) -> Operation:
    plain = f"{{0}} {sign} {{1}}"
    return Operation(
        {"float32": plain, "int32": f"wrapping_{int_name}({{0}}, {{1}})", "uint32": plain},
        exact=f"__f{float_name}_rn({{0}}, {{1}})",
    )


def _comparison(sign: str) -> Operation:
    return Operation(dict.fromkeys(CPP_TYPES, f"{{0}} {sign} {{1}}"), discontinuous=True)


def _bitwise(sign: str) -> Operation:
    form = f"{{0}} {sign} {{1}}"
    return Operation({"int32": form, "uint32": form, "bool": f"bool({form})"})


def _function(
    form: str, *, approximate: str = "", bound: str = "", cost: int = FUNCTION, **more: Any
) -> Operation:
    return Operation({"float32": form}, "", approximate, bound, cost, **more)


def _extremum(name: str, bool_sign: str) -> Operation:
    form = f"{name}({{0}}, {{1}})"
    bools = {"bool": f"bool({{0}} {bool_sign} {{1}})"}
    return Operation({**dict.fromkeys(("float32", "int32", "uint32"), form), **bools})


OPERATIONS: dict[str, Operation] = {
    "add": _arithmetic("+", "add", "add"),
    "sub": _arithmetic("-", "sub", "subtract"),
    "mul": _arithmetic("*", "mul", "multiply"),
    "div": Operation(
        {
            "float32": "{0} / {1}",
            "int32": "divide({0}, {1})",
            "uint32": "divide({0}, {1})",
        },
        approximate="divide_approx({0}, {1})",
        bound="relative, 2⁻²²; 0 for divisors from 2¹²⁶ on",
        cost=FUNCTION,
    ),
    "rem": Operation(
        {
            "float32": "fmodf({0}, {1})",
            "int32": "remainder({0}, {1})",
            "uint32": "remainder({0}, {1})",
        },
        cost=FUNCTION,
        discontinuous=True,
    ),
    "neg": Operation({"float32": "-{0}", "int32": "wrapping_negate({0})", "uint32": "0u - {0}"}),
    "abs": Operation({"float32": "fabsf({0})", "int32": "absolute({0})"}),
    "sign": Operation(
        {"float32": "sign({0})", "int32": "sign({0})", "uint32": "unsigned({0} != 0)"},
        cost=2,
        discontinuous=True,
    ),
    "square": Operation(
        {"float32": "{0} * {0}", "int32": "wrapping_multiply({0}, {0})", "uint32": "{0} * {0}"},
        exact="__fmul_rn({0}, {0})",
    ),
    "max": _extremum("maximum", "|"),
    "min": _extremum("minimum", "&"),
    "clamp": Operation(
        dict.fromkeys(("float32", "int32", "uint32"), "minimum(maximum({1}, {0}), {2})"), cost=2
    ),
    # Comparisons.
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "is_finite": _function("is_finite({0})", cost=2, discontinuous=True),
    # Bits.
    "and": _bitwise("&"),
    "or": _bitwise("|"),
    "xor": _bitwise("^"),
    "not": Operation({"int32": "~{0}", "uint32": "~{0}", "bool": "!{0}"}),
    "shift_left": Operation(
        {
            "int32": "int(shift_left(unsigned({0}), unsigned({1})))",
            "uint32": "shift_left({0}, {1})",
        },
        cost=2,
    ),
    "shift_right_logical": Operation(
        {
            "int32": "int(shift_right_logical(unsigned({0}), unsigned({1})))",
            "uint32": "shift_right_logical({0}, {1})",
        },
        cost=2,
    ),
    "shift_right_arithmetic": Operation(
        {
            "int32": "shift_right_arithmetic({0}, unsigned({1}))",
            "uint32": "unsigned(shift_right_arithmetic(int({0}), {1}))",
        },
        cost=2,
    ),
    "population_count": Operation(
        {"int32": "__popc(unsigned({0}))", "uint32": "unsigned(__popc({0}))"}, cost=4
    ),
    "clz": Operation({"int32": "__clz({0})", "uint32": "unsigned(__clz(int({0})))"}, cost=4),
    "mulhi": Operation({"int32": "__mulhi({0}, {1})", "uint32": "__umulhi({0}, {1})"}, cost=2),
    # Rounding.
    "floor": _function("floorf({0})", cost=2, discontinuous=True),
    "ceil": _function("ceilf({0})", cost=2, discontinuous=True),
    "round": _function("roundf({0})", cost=6, discontinuous=True),
    "round_even": _function("rintf({0})", cost=2, discontinuous=True),
    "nextafter": _function("nextafterf({0}, {1})", discontinuous=True),
    # Powers and exponentials.
    "sqrt": _function("sqrtf({0})", approximate="sqrt_approx({0})", bound="relative, 2⁻²³"),
    "rsqrt": _function("rsqrtf({0})", cost=6),
    "cbrt": _function("cbrtf({0})"),
    "pow": _function("powf({0}, {1})", cost=2 * FUNCTION),
    "exp": _function(
        "expf({0})", approximate="exp_approx({0})", bound="relative, 2⁻²² + 2⁻²³ abs(x)", cost=8
    ),
    "exp2": _function("exp2f({0})", approximate="exp2_approx({0})", bound="relative, 2⁻²²", cost=6),
    "expm1": _function("expm1f({0})"),
    "log": _function(
        "logf({0})",
        approximate="log_approx({0})",
        bound="2⁻²² if x is between 1/2 and 2, else relative, 2⁻²¹",
    ),
    "log1p": _function("log1pf({0})"),
    "logistic": _function(
        "logistic({0})",
        approximate="logistic_approx({0})",
        bound="relative, 2⁻²¹ + 2⁻²³ abs(x)",
    ),
    "erf": _function("erff({0})"),
    "erfc": _function("erfcf({0})"),
    # Circular and hyperbolic functions.
    "sin": _function("sinf({0})"),
    "cos": _function("cosf({0})"),
    "tan": _function("tanf({0})"),
    "asin": _function("asinf({0})"),
    "acos": _function("acosf({0})"),
    "atan": _function("atanf({0})"),
    "atan2": _function("atan2f({0}, {1})", cost=2 * FUNCTION),
    "sinh": _function("sinhf({0})"),
    "cosh": _function("coshf({0})"),
    "tanh": _function("tanhf({0})", approximate="tanh_approx({0})", bound="relative, 2⁻¹¹"),
    "asinh": _function("asinhf({0})"),
    "acosh": _function("acoshf({0})"),
    "atanh": _function("atanhf({0})"),
}

# convert_element_type, from a dtype to another. "{0}" has the type of the source.
CONVERSIONS: dict[tuple[str, str], str] = {
    **{(dtype, dtype): "{0}" for dtype in CPP_TYPES},
    **{(dtype, "bool"): "{0} != 0" for dtype in ("float32", "int32", "uint32")},
    **{(dtype, "float32"): "float({0})" for dtype in ("int32", "uint32", "bool")},
    ("float32", "int32"): "to_int({0})",
    ("float32", "uint32"): "to_unsigned({0})",
    ("int32", "uint32"): "unsigned({0})",
    ("uint32", "int32"): "int({0})",
    ("bool", "int32"): "int({0})",
    ("bool", "uint32"): "unsigned({0})",
}

# bitcast_convert_type.
BITCASTS: dict[tuple[str, str], str] = {
    **{(dtype, dtype): "{0}" for dtype in ("float32", "int32", "uint32")},
    ("float32", "int32"): "__float_as_int({0})",
    ("float32", "uint32"): "__float_as_uint({0})",
    ("int32", "float32"): "__int_as_float({0})",
    ("uint32", "float32"): "__uint_as_float({0})",
    ("int32", "uint32"): "unsigned({0})",
    ("uint32", "int32"): "int({0})",
}

# The primitives that ``expand`` writes in terms of others, or that have forms by pairs of dtypes.
SPECIAL = frozenset({"select_n", "integer_pow", "convert_element_type", "bitcast_convert_type"})


def is_supported(op: str) -> bool:
    """Whether a lax primitive has a form in device code.

    >>> is_supported("tanh"), is_supported("integer_pow"), is_supported("lgamma")
    (True, True, False)
    """
    return op in SPECIAL or (op in OPERATIONS and op != "round_even")


def exact_values(program: Program) -> frozenset[int]:
    """The values on which a discontinuity of the function, or the index of a read, depends.

    A rounding error there can change a result by any amount. So these values are neither
    approximated nor fused, and every kernel that evaluates the function gets the same bits. Jumps
    of derivatives need no such care: like that of ``max``, they select between one-sided
    derivatives.
    """
    reads = {index for index, value in enumerate(program.values) if value.op == "read"}
    decisive = _needed(program, {program.results[0], *reads})
    found: set[int] = set()
    for index in reversed(range(len(program.values))):
        value = program.values[index]
        jumps = value.op in OPERATIONS and OPERATIONS[value.op].discontinuous
        if value.op in ("convert_element_type", "bitcast_convert_type"):
            jumps = value.dtype != "float32" or value.op == "bitcast_convert_type"
        if index in found or (index in decisive and (jumps or index in reads)):
            found.update(value.args)
    return frozenset(found)


def _needed(program: Program, results: set[int]) -> set[int]:
    """The results and all values on which they depend."""
    found = set(results)
    for index in reversed(range(len(program.values))):
        if index in found:
            found.update(program.values[index].args)
    return found
