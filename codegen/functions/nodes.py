"""A program as typed C++ expressions, each with the level at which a kernel evaluates it.

Numbers become C++ expressions with exactly the same value. A read becomes several nodes: an index
clamped to the array, the address, and the load. Nodes that depend on the head, the row or the
column alone are evaluated once for each of these, and kept in registers if that is cheaper than
evaluating them again for each score.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax_memeff.codegen import launch
from jax_memeff.codegen.functions.operations import (
    BITCASTS,
    CHEAP,
    CONVERSIONS,
    CPP_TYPES,
    FUNCTION,
    OPERATIONS,
    exact_values,
)
from jax_memeff.codegen.functions.program import INPUTS, CapturedType, Program, Value


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


KEPT_FROM = 4
"""From this cost upwards, a register is cheaper than another evaluation."""


class Level(enum.IntEnum):
    """How often a node is evaluated; the enum's values give the order of evaluation."""

    HEAD = 0
    ROW = 1
    COLUMN = 2
    ELEMENT = 3


class Node(NamedTuple):
    """A C++ expression over earlier nodes."""

    cpp_type: str
    form: str
    args: tuple[int, ...] = ()
    level: Level = Level.HEAD
    cost: int = CHEAP
    inline: bool = False
    """Whether the expression is a name or a number, which needs no variable."""


class Graph(NamedTuple):
    """The nodes of a program in topological order, and which of them are its results."""

    nodes: tuple[Node, ...]
    results: tuple[int, ...]
    offsets: tuple[int, ...]
    """For each of ``Program.float_reads``, the offset of the element in its array; -1 if none."""
    values: tuple[int, ...]
    """The node of each value of the program."""


def kept(nodes: Sequence[Node], targets: Iterable[int]) -> frozenset[int]:
    """The nodes below Level.ELEMENT whose values are kept, if ``targets`` are needed per element.

    A node is kept if a node of a higher level uses it, and if its cost, including the nodes that
    it needs and that are not kept, is worth a register.
    """
    users: dict[int, Level] = {}
    pending = [(target, Level.ELEMENT) for target in targets]
    seen: set[tuple[int, Level]] = set()
    while pending:
        if (edge := pending.pop()) in seen:
            continue
        seen.add(edge)
        index, level = edge
        users[index] = max(users.get(index, Level.HEAD), level)
        pending += [(arg, nodes[index].level) for arg in nodes[index].args]
    kept_nodes: set[int] = set()
    for index in sorted(users):
        node = nodes[index]
        if node.level < users[index] and _cone_cost(nodes, index, kept_nodes) >= KEPT_FROM:
            kept_nodes.add(index)
    return frozenset(kept_nodes)


def _cone_cost(nodes: Sequence[Node], index: int, kept_nodes: set[int]) -> int:
    """The cost of a node and of the nodes of its own level that it needs."""
    cost, pending, seen = 0, [index], {index}
    while pending:
        node = nodes[pending.pop()]
        cost += node.cost
        fresh = {arg for arg in node.args if nodes[arg].level == node.level} - seen - kept_nodes
        seen |= fresh
        pending += fresh
    return cost


def joined(levels: Iterable[Level]) -> Level:
    """The level of an expression whose operands have these levels."""
    distinct = set(levels)
    if {Level.ROW, Level.COLUMN} <= distinct:
        return Level.ELEMENT
    return max(distinct, default=Level.HEAD)


# The element types of captured arrays in device memory.
ELEMENT_TYPES = {
    "float32": "float",
    "bfloat16": "cutlass::bfloat16_t",
    "float16": "cutlass::half_t",
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
}

# ArrayView::kMostDims less the first dim, which a vmap adds.
MOST_DIMS = launch.MOST_DIMS - 1

_DIFFERENCE = "arrays.difference({0}, {1})"
_NEGATIVE = "0.0f - {0}"
_SCALED_DIFFERENCE = "arrays.scaled_difference({0}, {1}, {2})"
_DIFFERENCES = (_DIFFERENCE, _NEGATIVE, _SCALED_DIFFERENCE)
"""Forms that ``_scaled_difference`` multiplies by a per-head number."""
_PLUS_SCALED_DIFFERENCE = "arrays.plus_scaled_difference({0}, {1}, {2}, {3})"

_LOAD = 2 * FUNCTION

_LEVEL_OF_INPUT = {
    "batch": Level.HEAD,
    "head": Level.HEAD,
    "query": Level.ROW,
    "key": Level.COLUMN,
    "score": Level.ELEMENT,
}


def graph(program: Program, *, precise: bool) -> Graph:
    """The nodes of a program.

    Args:
        precise: float32 functions are those of the CUDA math library, as for float32 inputs;
            otherwise those with an approximation in ``operations.py`` use it.

    Raises ``ValueError`` if the program has an operation, a type or a parameter without a form.
    """
    return _Builder(program, precise).graph()


def slope(nodes: Graph) -> int | None:
    """The node of the slope if the value is the score plus ``slope * (key - query)``, with one
    slope per head; None if the value does not have this form.
    """
    value = nodes.nodes[nodes.results[0]]
    if value.form != _PLUS_SCALED_DIFFERENCE or nodes.nodes[value.args[0]].form != "score":
        return None
    return value.args[1]


class _Builder:
    def __init__(self, program: Program, precise: bool):
        self.program = program
        self.precise = precise
        self.exact = exact_values(program)
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        self.of_value: list[int] = []
        self.offset_of_read: dict[int, int] = {}

    def graph(self) -> Graph:
        for index, value in enumerate(self.program.values):
            try:
                self.of_value.append(self._value(index, value))
            except KeyError as error:
                raise ValueError(
                    f"value {index} of a program has no device code: expected an operation of "
                    f"operations.py with operands and parameters of its forms, got {value} "
                    f"({error} is unknown)"
                ) from error
        return Graph(
            tuple(self.nodes),
            tuple(self.of_value[result] for result in self.program.results),
            tuple(self.offset_of_read[read] for read in self.program.float_reads),
            tuple(self.of_value),
        )

    def _node(
        self,
        cpp_type: str,
        form: str,
        args: tuple[int, ...] = (),
        cost: int = CHEAP,
        *,
        level: Level = Level.HEAD,
        inline: bool = False,
    ) -> int:
        """The number of a node; equal nodes share one."""
        level = joined([level, *(self.nodes[arg].level for arg in args)])
        node = Node(cpp_type, form, args, level, cost, inline)
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def _value(self, index: int, value: Value) -> int:
        cpp_type = CPP_TYPES[value.dtype]
        params = dict(value.params)
        args = tuple(self.of_value[arg] for arg in value.args)
        if value.op in INPUTS:
            # A kernel passes batch and head when a head begins, not for each score.
            cost = KEPT_FROM if value.op in ("batch", "head") else 0
            level = _LEVEL_OF_INPUT[value.op]
            return self._node(cpp_type, value.op, (), cost, level=level, inline=True)
        if value.op == "constant":
            return self._constant(value.dtype, params["value"])
        if value.op == "literal":
            form = f"arrays.template literal<{int(params['index'])}, {cpp_type}>()"
            return self._node(cpp_type, form, (), _LOAD)
        if value.op == "size":
            return self._size(params["array"], params["dim"])
        if value.op == "read":
            return self._read(index, value, params)
        if value.op == "integer_pow":
            return self._integer_pow(value, args[0], params["y"], index in self.exact)
        if value.op == "select_n":
            return self._select(cpp_type, value, args)
        dtype = self.program.values[value.args[0]].dtype
        if value.op == "bitcast_convert_type":
            return self._node(cpp_type, BITCASTS[dtype, value.dtype], args)
        if value.op == "convert_element_type":
            if (difference := self._difference(index, value)) is not None:
                return difference
            # The special function unit converts between floats and integers.
            cost = CHEAP if "float32" not in (dtype, value.dtype) else KEPT_FROM
            return self._node(cpp_type, CONVERSIONS[dtype, value.dtype], args, cost)
        return self._operation(index, value, dtype, args, params)

    def _difference(self, index: int, value: Value) -> int | None:
        """The node of ``float(key - query)``, its negative or its absolute value; else None.

        A kernel has the difference of its first row and column as a float, so it can add to that
        instead of converting an integer for each score.
        """
        operand = self.program.values[value.args[0]]
        size = operand.op == "abs"
        if size:
            operand = self.program.values[operand.args[0]]
        if value.dtype != "float32" or index in self.exact or operand[:2] != ("sub", "int32"):
            return None
        operations = [self.program.values[arg].op for arg in operand.args]
        if sorted(operations) != ["key", "query"]:
            return None
        key, query = sorted(operand.args, key=lambda arg: self.program.values[arg].op)
        args = (self.of_value[key], self.of_value[query])
        difference = self._node("float", _DIFFERENCE, args)
        if not size and operations[0] == "key":
            return difference
        # 0 - 0 is 0, as it is in integers; -0 is not.
        return self._node("float", "fabsf({0})" if size else _NEGATIVE, (difference,))

    def _scaled_difference(self, args: tuple[int, ...]) -> int | None:
        """The node of a difference, or its negative, times per-head numbers."""
        for slope, node in (args, args[::-1]):
            if self.nodes[slope].level != Level.HEAD:
                continue
            if self.nodes[node].form == _SCALED_DIFFERENCE:
                inner, *positions = self.nodes[node].args
                slope = self._node("float", "{0} * {1}", (inner, slope))
                return self._node("float", _SCALED_DIFFERENCE, (slope, *positions))
            if self.nodes[node].form == _NEGATIVE:
                slope, node = self._node("float", "-{0}", (slope,)), self.nodes[node].args[0]
            if self.nodes[node].form == _DIFFERENCE:
                return self._node("float", _SCALED_DIFFERENCE, (slope, *self.nodes[node].args))
        return None

    def _plus_scaled_difference(self, op: str, args: tuple[int, ...]) -> int | None:
        """The node of a sum with, or a difference from, such a product."""
        for other, node in (args, args[::-1]):
            if self.nodes[node].form != _SCALED_DIFFERENCE or (op == "sub" and other != args[0]):
                continue
            slope, *positions = self.nodes[node].args
            if op == "sub":
                slope = self._node("float", "-{0}", (slope,))
            return self._node("float", _PLUS_SCALED_DIFFERENCE, (other, slope, *positions))
        return None

    def _operation(
        self, index: int, value: Value, dtype: str, args: tuple[int, ...], params: dict[str, Any]
    ) -> int:
        cpp_type = CPP_TYPES[value.dtype]
        if value.op == "pow" and self.program.values[value.args[1]].dtype != "float32":
            args = (args[0], self._node("float", "float({0})", (args[1],)))
        # jax.lax.RoundingMethod: 0 rounds halves away from zero, 1 to even.
        even = value.op == "round" and int(params["rounding_method"]) == 1
        operation = OPERATIONS["round_even" if even else value.op]
        exact = index in self.exact
        form, cost = operation.form(dtype, exact=exact, precise=self.precise), operation.cost
        if dtype == "float32" and not (exact or self.precise):
            node = None
            if value.op == "mul":
                node = self._scaled_difference(args)
            elif value.op in ("add", "sub"):
                node = self._plus_scaled_difference(value.op, args)
            if node is not None:
                return node
        if value.op == "div":
            divisor = self.program.values[value.args[1]]
            if divisor.op == "constant" and dtype == "float32":
                inverse = reciprocal(divisor.param("value"))
                if inverse is not None and (inverse[1] or not (exact or self.precise)):
                    number = float_constant(inverse[0])
                    scales = self.nodes[args[0]].form in _DIFFERENCES
                    if scales and not (exact or self.precise):
                        factor = self._node("float", number, (), 0, inline=True)
                        if (node := self._scaled_difference((args[0], factor))) is not None:
                            return node
                    form, cost = f"{{0}} * {number}", CHEAP
                    args = args[:1]
        return self._node(cpp_type, form, args, cost)

    def _constant(self, dtype: str, number: Any) -> int:
        return self._node(CPP_TYPES[dtype], constant(dtype, number), (), 0, inline=True)

    def _size(self, array: int, dim: int) -> int:
        return self._node("int", f"arrays.template size<{int(array)}, {int(dim)}>()")

    def _integer_pow(self, value: Value, base: int, power: int, exact: bool) -> int:
        """Products in the order of lax: the powers of two of the base, from the first."""
        multiply = OPERATIONS["mul"].form(value.dtype, exact=exact, precise=True)
        cpp_type = CPP_TYPES[value.dtype]
        one = self._constant(value.dtype, 1)
        if power == 0:
            return one
        result, remaining = None, abs(power)
        while remaining:
            if remaining % 2:
                result = base if result is None else self._node(cpp_type, multiply, (result, base))
            remaining //= 2
            if remaining:
                base = self._node(cpp_type, multiply, (base, base))
        assert result is not None
        if power > 0:
            return result
        divide = OPERATIONS["div"]
        form = divide.form(value.dtype, exact=exact, precise=self.precise)
        return self._node(cpp_type, form, (one, result), divide.cost)

    def _select(self, cpp_type: str, value: Value, args: tuple[int, ...]) -> int:
        predicate, *cases = args
        if self.program.values[value.args[0]].dtype == "bool":
            return self._node(cpp_type, "{0} ? {2} : {1}", args)
        result = cases[-1]
        for number in reversed(range(len(cases) - 1)):
            form = f"{{0}} <= {number} ? {{1}} : {{2}}"
            result = self._node(cpp_type, form, (predicate, cases[number], result), 2)
        return result

    def _read(self, index: int, value: Value, params: dict[str, Any]) -> int:
        array = int(params["array"])
        captured = self.program.arrays[array]
        if len(value.args) != captured.ndim or params["mode"] not in ("clip", "fill", "promise"):
            raise ValueError(
                f"a read needs one index for each of {captured.ndim} dims and the mode clip, fill "
                f"or promise, got {value}"
            )
        if captured.ndim > MOST_DIMS:
            raise ValueError(
                f"a captured array of a kernel has at most {MOST_DIMS} dims, got {captured.ndim}: "
                "join dims of the array, and their indices in the function"
            )
        indices = [self.of_value[arg] for arg in value.args]
        sizes = [self._size(array, dim) for dim in range(captured.ndim)]
        clamped = [
            self._node("int", "clamp_index({0}, {1})", pair, 2)
            for pair in zip(indices, sizes, strict=True)
        ]
        address = self._address(array, captured, clamped)
        cpp_type = CPP_TYPES[value.dtype]
        load = f"load<{cpp_type}>({{0}})" if captured.dtype != "bool" else "load<int>({0}) != 0"
        result = self._node(cpp_type, load, (address,), _LOAD)
        offset = self._offset(array, clamped)
        if params["mode"] == "fill" and clamped:
            inside = self._inside(indices, sizes)
            fill = self._constant(value.dtype, params["fill_value"])
            result = self._node(cpp_type, "{0} ? {1} : {2}", (inside, result, fill))
            none = self._node("long long", "-1", (), 0, inline=True)
            offset = self._node("long long", "{0} ? {1} : {2}", (inside, offset, none))
        self.offset_of_read[index] = offset
        if self.nodes[result].level == Level.ELEMENT and value.dtype == "float32":
            number = self.program.float_reads.index(index)
            result = self._node(cpp_type, f"arrays.template read<{number}>({{0}})", (result,), 0)
        return result

    def _inside(self, indices: Sequence[int], sizes: Sequence[int]) -> int:
        result = None
        for pair in zip(indices, sizes, strict=True):
            one = self._node("bool", "in_bounds({0}, {1})", pair)
            result = one if result is None else self._node("bool", "{0} && {1}", (result, one))
        assert result is not None
        return result

    def _address(self, array: int, captured: CapturedType, clamped: Sequence[int]) -> int:
        """The address of an element. Offsets of the head are added first, then those of the row."""
        cpp_type = f"{ELEMENT_TYPES[captured.dtype]} const*"
        form = f"arrays.template data<{array}, {ELEMENT_TYPES[captured.dtype]}>()"
        address = self._node(cpp_type, form, (), KEPT_FROM)
        last = len(clamped) - 1
        for dim in sorted(range(len(clamped)), key=lambda dim: self.nodes[clamped[dim]].level):
            step = "{0} + {1}"
            if dim != last:
                step += f" * arrays.template stride<{array}, {dim}>()"
            cost = 2 if dim == last else KEPT_FROM
            address = self._node(cpp_type, step, (address, clamped[dim]), cost)
        return address

    def _offset(self, array: int, clamped: Sequence[int]) -> int:
        """The offset in elements, without the part for the dim that a vmap adds."""
        offset = self._node("long long", "0", (), 0, inline=True)
        for dim, index in enumerate(clamped):
            step = "{0} + {1}"
            if dim != len(clamped) - 1:
                step += f" * arrays.template stride<{array}, {dim}>()"
            offset = self._node("long long", step, (offset, index), 2)
        return offset
