"""The device code that bounds a mask function in a box of elements: interval arithmetic.

It determines whether a tile of scores has no valid element, or only valid ones, without evaluating
the elements. XLA computes the same bounds where block masks exist
(``jax_memeff/_call/mask/ranges``). Operations without a rule are exact if their operands are, and
unbounded otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_memeff.codegen.functions.nodes import ELEMENT_TYPES, constant
from jax_memeff.codegen.functions.operations import (
    BITCASTS,
    CONVERSIONS,
    CPP_TYPES,
    OPERATIONS,
)
from jax_memeff.codegen.functions.program import INPUTS, Program, Value

_NUMBERS = frozenset({"float32", "int32"})
_ORDERED = _NUMBERS | {"uint32", "bool"}

# The functions of core/function/ranges.cuh, and the dtypes of operands that they take.
_RULES: Mapping[str, tuple[str, frozenset[str]]] = {
    "abs": ("absolute({0})", _NUMBERS),
    "add": ("add({0}, {1})", _NUMBERS),
    "clamp": ("clamp({0}, {1}, {2})", _ORDERED),
    "div": ("divide({0}, {1})", _NUMBERS),
    "max": ("maximum({0}, {1})", _ORDERED),
    "min": ("minimum({0}, {1})", _ORDERED),
    "mul": ("multiply({0}, {1})", _NUMBERS),
    "neg": ("negate({0})", _NUMBERS),
    "rem": ("remainder({0}, {1})", frozenset({"int32"})),
    "shift_right_arithmetic": ("shift_right_arithmetic({0}, {1})", frozenset({"int32"})),
    "shift_right_logical": ("shift_right_logical({0}, {1})", frozenset({"int32"})),
    "sqrt": ("sqrt({0})", frozenset({"float32"})),
    "square": ("square({0})", _NUMBERS),
    "sub": ("subtract({0}, {1})", _NUMBERS),
}
# Rules of comparisons and of bools. Their ranges are exact if those of the operands are.
_DECISIONS: Mapping[str, str] = {
    "eq": "equal({0}, {1})",
    "ge": "less_equal({1}, {0})",
    "gt": "less({1}, {0})",
    "le": "less_equal({0}, {1})",
    "lt": "less({0}, {1})",
    "ne": "none_of(ranges::equal({0}, {1}))",
}
_BOOLS: Mapping[str, str] = {
    "and": "all_of({0}, {1})",
    "max": "any_of({0}, {1})",
    "min": "all_of({0}, {1})",
    "not": "none_of({0})",
    "or": "any_of({0}, {1})",
    "xor": "one_of({0}, {1})",
}
_INCREASING = frozenset({"ceil", "floor", "round", "sign"})
"""Operations that apply to both bounds, except the sign of unsigned integers."""


def member(program: Program) -> str:
    """The member ``range(arrays, batch, head, query, key)`` of the struct of a mask function.

    Args:
        program: a mask function.

    ``head``, ``query`` and ``key`` are ``ranges::Range<int>``; it returns ``ranges::Range<bool>``.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> values = Value("query", "int32"), Value("key", "int32"), Value("ge", "bool", (0, 1))
    >>> print(member(Program(values, (2,), ())))  # doctest: +ELLIPSIS
      template <class Arrays>
      CUTE_DEVICE static ranges::Range<bool> range(...
        ranges::Range<int> const r0 = query;
        ranges::Range<int> const r1 = key;
        ranges::Range<bool> const r2 = ranges::less_equal(r1, r0);
        return r2;
      }
    <BLANKLINE>
    """
    return (
        "  template <class Arrays>\n"
        "  CUTE_DEVICE static ranges::Range<bool> range(\n"
        "      Arrays const& arrays, int batch, ranges::Range<int> head,\n"
        "      ranges::Range<int> query, ranges::Range<int> key) {\n"
        f"{statements(program)}"
        f"    return r{program.results[0]};\n"
        "  }\n"
    )


def statements(program: Program) -> str:
    """Definitions of the ranges ``r0``, ``r1``, ... of all values of a program."""
    return "".join(_definition(program, index) for index in range(len(program.values)))


def _definition(program: Program, index: int) -> str:
    value = program.values[index]
    read = _read(program, index, value) if value.op == "read" else ""
    expression = _read_range(index, value) if read else _expression(program, value)
    return f"{read}    ranges::Range<{CPP_TYPES[value.dtype]}> const r{index} = {expression};\n"


def _expression(program: Program, value: Value) -> str:
    cpp_type = CPP_TYPES[value.dtype]
    if value.op == "score":
        return _everything(value)
    if value.op in INPUTS:
        return f"ranges::exact({value.op})" if value.op == "batch" else value.op
    if value.op == "constant":
        return f"ranges::exact({constant(value.dtype, value.param('value'))})"
    if value.op == "literal":
        index = int(value.param("index"))
        return f"ranges::exact(arrays.template literal<{index}, {cpp_type}>())"
    if value.op == "size":
        array, dim = int(value.param("array")), int(value.param("dim"))
        return f"ranges::exact(arrays.template size<{array}, {dim}>())"
    dtypes = [program.values[arg].dtype for arg in value.args]
    ranges = [f"r{arg}" for arg in value.args]
    if (decided := _decision(value)) is not None:
        return f"ranges::{decided.format(*ranges)}"
    rule = _rule(value, dtypes, ranges) or _everything(value)
    form = _form(value, dtypes)
    if form is None:
        return rule
    known = " && ".join(f"ranges::is_exact({name})" for name in dict.fromkeys(ranges))
    exact = form.format(*(f"{name}.low" for name in ranges))
    return f"{known} ? ranges::exact<{cpp_type}>({exact}) : {rule}"


def _everything(value: Value) -> str:
    return f"ranges::everything<{CPP_TYPES[value.dtype]}>()"


def _decision(value: Value) -> str | None:
    if value.op in _DECISIONS:
        return _DECISIONS[value.op]
    return _BOOLS.get(value.op) if value.dtype == "bool" else None


def _form(value: Value, dtypes: Sequence[str]) -> str | None:
    """The result for exact operands, as kernels compute it; None if it takes several statements."""
    if value.op == "convert_element_type":
        return CONVERSIONS[dtypes[0], value.dtype]
    if value.op == "bitcast_convert_type":
        return BITCASTS[dtypes[0], value.dtype]
    if value.op in ("select_n", "integer_pow") or (value.op == "pow" and dtypes[1] != "float32"):
        return None
    return OPERATIONS[_name(value)].form(dtypes[0], exact=True, precise=True)


def _name(value: Value) -> str:
    is_even = value.op == "round" and int(value.param("rounding_method")) == 1
    return "round_even" if is_even else value.op


def _rule(value: Value, dtypes: Sequence[str], ranges: Sequence[str]) -> str | None:
    """The range if some operands are not exact; None if it is unbounded."""
    dtype = dtypes[0]
    if value.op == "select_n":
        is_choice = dtype == "bool" and len(value.args) == 3
        return "ranges::select({}, {}, {})".format(*ranges) if is_choice else None
    if value.op == "convert_element_type":
        return _conversion(dtype, value.dtype, ranges[0])
    if value.op == "mul" and value.args[:1] == value.args[1:]:
        return _rule(value._replace(op="square"), dtypes, ranges)
    if value.op in _INCREASING:
        form = OPERATIONS[_name(value)].form(dtype, exact=True, precise=True)
        return None if dtype == "uint32" else _increasing(value.dtype, form, ranges[0])
    if value.op == "and" and dtype == "int32":
        return "ranges::low_bits({}, {})".format(*ranges)
    form, known = _RULES.get(value.op, ("", frozenset()))
    return f"ranges::{form.format(*ranges)}" if dtype in known else None


def _conversion(source: str, target: str, name: str) -> str | None:
    if target == "bool":
        zero = (
            "ranges::exact(false)" if source == "bool" else f"ranges::exact({constant(source, 0)})"
        )
        return f"ranges::none_of(ranges::equal({name}, {zero}))"
    if source == target:
        return name
    if target == "float32" or source == "bool":
        return _increasing(target, CONVERSIONS[source, target], name)
    if target == "int32":
        return f"ranges::to_int({name})"
    return f"ranges::to_unsigned({name})" if source == "int32" else None


def _increasing(dtype: str, form: str, name: str) -> str:
    low, high = form.format(f"{name}.low"), form.format(f"{name}.high")
    return f"ranges::Range<{CPP_TYPES[dtype]}>{{{low}, {high}}}"


def _read(program: Program, index: int, value: Value) -> str:
    """The definition of the set of elements that a read may return."""
    array = int(value.param("array"))
    element = ELEMENT_TYPES[program.arrays[array].dtype]
    types = f"{array}, {CPP_TYPES[value.dtype]}, {element}, Arrays, {len(value.args)}"
    clamped = "".join(
        f"    read{index}.template clamp<{dim}>(r{arg});\n" for dim, arg in enumerate(value.args)
    )
    return f"    ranges::Read<{types}> read{index}{{arrays}};\n{clamped}"


def _read_range(index: int, value: Value) -> str:
    if value.param("mode") != "fill":
        return f"read{index}.range()"
    return f"read{index}.range_or({constant(value.dtype, value.param('fill_value'))})"
