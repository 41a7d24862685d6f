"""The device code of users' functions: a program as a C++ struct that kernels call.

The source comes from the structure of a program alone: variables are numbered, and literals, sizes
and dims of arrays are read at run time. So no user text reaches the compiler, and a function that
is traced again, even for other lengths, has the same source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax_memeff.codegen.functions.nodes import Graph, Level, Node, float32_bits, graph, kept, slope
from jax_memeff.codegen.functions.program import Program
from jax_memeff.codegen.functions.ranges import member
from jax_memeff.codegen.functions.regions import diagonal_reads

INCLUDES = """\
#include <memeff/core/function/arrays.cuh>
#include <memeff/core/function/operations.cuh>
#include <memeff/core/function/ranges.cuh>
"""

_STRUCTS = {Level.HEAD: "OfHead", Level.ROW: "OfRow", Level.COLUMN: "OfColumn"}
_NAMES = {Level.HEAD: "of_head", Level.ROW: "of_row", Level.COLUMN: "of_column"}

_ELEMENT_ARGUMENTS = """
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key"""


def source(program: Program, name: str, *, precise: bool) -> str:
    """A struct ``memeff::function::<name>`` that evaluates ``program``, without includes.

    Args:
        program: a score function, with or without derivatives, or a mask function.
        name: of the struct.
        precise: whether float32 functions are those of the CUDA math library, as for float32
            inputs, or the approximations that ``operations.py`` lists.

    Returns C++ that needs ``INCLUDES``. Programs of equal structure give equal text. Members:

    - ``kUsesScore``, ``kDependsOnBatch``, ``kDependsOnHead``, ``kDependsOnQuery``,
      ``kDependsOnKey``: whether the function's value depends on that argument.
    - ``kHasDiagonalReads``: whether any ``kDiagonalReads[i]`` is true.
    - ``OfHead``, ``OfRow``, ``OfColumn``: the values worth keeping for a (batch, head) slice, a
      row and a column. ``of_head(arrays, batch, head)``, ``of_row(arrays, of_head, query)`` and
      ``of_column(arrays, of_head, key)`` return them. ``arrays`` is a ``FunctionArrays``; batch,
      head, query and key are the arguments of the user's function.
    - ``value(arrays, of_head, of_row, of_column, score, query, key)``: the score, or whether the
      element is valid.

    A score function that ``is_linear`` also has:

    - ``slope(arrays, of_head)``: the factor in ``value == score + slope * (key - query)``.

    The struct of a mask function also has:

    - ``range(arrays, batch, head, query, key)``: whether all elements of a box are valid, and
      whether any may be (``ranges.py``).

    With derivatives, whose arguments are those of ``value``, also:

    - ``derivative(...)``: the derivative of the value with respect to the score;
      ``kConstantDerivative``: whether it is 1.
    - ``kFloatReads``: how many reads have derivatives, ``kReadArrays[i]``: the captured array of
      each, ``kDiagonalReads[i]``: whether it depends on query and key, and only through their
      difference, and ``kReadDerivativesAreFinite[i]``: whether the derivative with respect to it is
      finite at every element.
    - ``kReadDerivativesUseScore``: whether the derivative with respect to a read depends on the
      score.
    - ``read_values(..., float (&values)[kFloatReads])``: the values of the reads. A kernel that
      stages the reads of a tile passes its own ``FunctionArrays``, whose ``read<i>(value)``
      returns the staged number; the compiler then drops index, address and load of that read from
      the other members. In the same way a kernel can supply ``difference(key, query)``, their
      difference as a float, ``scaled_difference(slope, key, query)``, its product with a number of
      the head, and ``plus_scaled_difference(x, ...)``. Programs that are not ``precise`` use the
      last two.
    - ``read_derivatives(..., float (&derivatives)[kFloatReads])``: the derivatives of the value
      with respect to each read.
    - ``read_offsets(..., long long (&offsets)[kFloatReads])``: the offset of the element that was
      read in the user's array, or -1 if it was out of bounds. A kernel that needs one of them
      ignores the others, and the compiler drops them.

    Raises ``ValueError`` if the program has an operation, type or parameter without a form.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> score = Value("score", "float32")
    >>> program = Program((score, Value("tanh", "float32", (0,))), (1,), ())
    >>> [line for line in source(program, "Cap", precise=False).splitlines() if "tanh" in line]
    ['    float const v1 = tanh_approx(score);']
    """
    nodes = graph(program, precise=precise)
    derivatives = nodes.results[1:]
    targets = {*nodes.results}
    if derivatives:
        targets |= {*nodes.offsets, *(nodes.values[read] for read in program.float_reads)}
    printer = Printer(nodes.nodes, kept(nodes.nodes, targets))
    cpp_type = nodes.nodes[nodes.results[0]].cpp_type
    parts = [
        _facts(program, nodes),
        *(printer.level(level) for level in _STRUCTS),
        printer.function(f"{cpp_type} value", nodes.results[0]),
    ]
    if (factor := slope(nodes)) is not None:
        parts.append(printer.head_function("float slope", factor))
    if cpp_type == "bool":
        parts.append(member(program))
    if derivatives:
        parts.append(printer.function("float derivative", derivatives[0]))
        if nodes.offsets:
            reads = [nodes.values[read] for read in program.float_reads]
            parts.append(printer.array_function("read_values", "float", reads))
            parts.append(printer.array_function("read_derivatives", "float", derivatives[1:]))
            parts.append(printer.array_function("read_offsets", "long long", nodes.offsets))
    body = "\n".join(parts)
    return (
        f"namespace memeff::function {{\n\nstruct {name} {{\n{body}}};\n\n"
        "}  // namespace memeff::function\n"
    )


@functools.cache
def is_linear(program: Program, *, precise: bool) -> bool:
    """Whether the value of a score function is the score plus ``slope * (key - query)``, with a
    slope per head. Never if it is ``precise``, because kernels add these terms in another order.
    """
    return slope(graph(program, precise=precise)) is not None


def literal_bits(program: Program) -> tuple[int, ...]:
    """The words that ``FunctionArrays::literals`` points to: the bits of each literal, unsigned.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> values = (Value("literal", "float32", (), (("index", 0),)),)
    >>> literal_bits(Program(values, (0,), (), (1.0,)))
    (1065353216,)
    """
    dtypes = {v.param("index"): v.dtype for v in program.values if v.op == "literal"}
    words = []
    for index, number in enumerate(program.literals):
        if dtypes.get(index) == "float32":
            words.append(float32_bits(float(number)))
        else:
            words.append(int(number) % 2**32)
    return tuple(words)


class Printer:
    """Prints bodies of functions, given the nodes that structs hold."""

    def __init__(self, nodes: Sequence[Node], kept: frozenset[int]):
        self.nodes = nodes
        self.kept = kept

    def level(self, level: Level) -> str:
        """The struct with a level's kept values, and the function that returns it."""
        members = [index for index in sorted(self.kept) if self.nodes[index].level == level]
        struct = _STRUCTS[level]
        fields = "".join(f"    {self.nodes[index].cpp_type} v{index};\n" for index in members)
        arguments = {
            Level.HEAD: "Arrays const& arrays, int batch, int head",
            Level.ROW: "Arrays const& arrays, OfHead const& of_head, int query",
            Level.COLUMN: "Arrays const& arrays, OfHead const& of_head, int key",
        }[level]
        values = ", ".join(self.name(index, level) for index in members)
        return (
            f"  struct {struct} {{\n{fields}  }};\n\n"
            "  template <class Arrays>\n"
            f"  CUTE_DEVICE static {struct} {_NAMES[level]}({arguments}) {{\n"
            f"{self.statements(members, level)}    return {{{values}}};\n  }}\n"
        )

    def function(self, declaration: str, result: int) -> str:
        """A function of one element that returns a node."""
        returned = f"    return {self.name(result, Level.ELEMENT)};\n"
        return self._element_function(declaration, _ELEMENT_ARGUMENTS, [result], returned)

    def head_function(self, declaration: str, result: int) -> str:
        """A function of a head that returns a node of its level."""
        arguments = "Arrays const& arrays, OfHead const& of_head"
        returned = f"    return {self.name(result, Level.ELEMENT)};\n"
        return self._element_function(declaration, arguments, [result], returned)

    def array_function(self, name: str, cpp_type: str, results: Sequence[int]) -> str:
        """A function of one element that stores nodes in an array."""
        stores = "".join(
            f"    {name}[{i}] = {self.name(result, Level.ELEMENT)};\n"
            for i, result in enumerate(results)
        )
        arguments = f"{_ELEMENT_ARGUMENTS}, {cpp_type} (&{name})[kFloatReads]"
        return self._element_function(f"void {name}", arguments, results, stores)

    def _element_function(
        self, declaration: str, arguments: str, results: Iterable[int], end: str
    ) -> str:
        return (
            "  template <class Arrays>\n"
            f"  CUTE_DEVICE static {declaration}({arguments}) {{\n"
            f"{self.statements(results, Level.ELEMENT)}{end}  }}\n"
        )

    def statements(self, targets: Iterable[int], level: Level) -> str:
        """Definitions of the target nodes of a level and of all variables that they need."""
        pending = [index for index in targets if not self._is_member(index, level)]
        needed = set(pending)
        while pending:
            args = self.nodes[pending.pop()].args
            fresh = {arg for arg in args if not self._is_member(arg, level)} - needed
            needed |= fresh
            pending += fresh
        return "".join(
            f"    {node.cpp_type} const v{index} = {self._expression(node, level)};\n"
            for index in sorted(needed)
            if not (node := self.nodes[index]).inline
        )

    def _expression(self, node: Node, level: Level) -> str:
        return node.form.format(*(self.name(arg, level) for arg in node.args))

    def _is_member(self, index: int, level: Level) -> bool:
        return index in self.kept and self.nodes[index].level < level

    def name(self, index: int, level: Level) -> str:
        """How a function of this level refers to a node."""
        node = self.nodes[index]
        if self._is_member(index, level):
            return f"{_NAMES[node.level]}.v{index}"
        return node.form if node.inline else f"v{index}"


def _facts(program: Program, nodes: Graph) -> str:
    depends = program.dependence(program.results[0])
    facts = {"kUsesScore": "score" in depends}
    for name in ("batch", "head", "query", "key"):
        facts[f"kDependsOn{name.capitalize()}"] = name in depends
    lines = [f"  static constexpr bool {name} = {_cpp(value)};" for name, value in facts.items()]
    if not nodes.results[1:]:
        lines.append("  static constexpr bool kHasDiagonalReads = false;")
    for derivative in nodes.results[1:2]:
        constant = nodes.nodes[derivative].form == "1.0f"
        reads = program.float_reads
        along = diagonal_reads(program)
        lines.append(f"  static constexpr bool kHasDiagonalReads = {_cpp(bool(along))};")
        lines.append(f"  static constexpr bool kConstantDerivative = {_cpp(constant)};")
        lines.append(f"  static constexpr int kFloatReads = {len(reads)};")
        uses = any("score" in program.dependence(result) for result in program.results[2:])
        lines.append(f"  static constexpr bool kReadDerivativesUseScore = {_cpp(uses)};")
        if reads:
            arrays = [str(int(program.values[read].param("array"))) for read in reads]
            lines.append(_array_fact("int", "kReadArrays", arrays))
            are_diagonal = [_cpp(read in along) for read in reads]
            lines.append(_array_fact("bool", "kDiagonalReads", are_diagonal))
            are_finite = [_cpp(is_finite(program, result)) for result in program.results[2:]]
            lines.append(_array_fact("bool", "kReadDerivativesAreFinite", are_finite))
    return "\n".join(lines) + "\n"


def _array_fact(cpp_type: str, name: str, values: Sequence[str]) -> str:
    return f"  static constexpr {cpp_type} {name}[] = {{{', '.join(values)}}};"


def _cpp(value: bool) -> str:
    return "true" if value else "false"


_LARGEST = 2.0**100
"""Far below the overflow of float32, so that rounding errors do not matter."""


def is_finite(program: Program, value: int) -> bool:
    """Whether a float is known to be finite: integers as floats, and sums and products of them.

    Kernels multiply such a derivative by the zero gradient of a masked element without a test. Any
    other derivative may be inf or NaN there.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> key = Value("key", "int32")
    >>> program = Program((key, Value("convert_element_type", "float32", (0,))), (1,), ())
    >>> is_finite(program, 1)
    True
    """
    bounds: list[float] = []
    for operand in program.values[: value + 1]:
        args = [bounds[arg] for arg in operand.args]
        is_float = operand.dtype == "float32"
        bounds.append(_bound(operand.op, dict(operand.params), args) if is_float else 2.0**32)
    return bounds[value] <= _LARGEST


def _bound(op: str, params: dict[str, Any], bounds: list[float]) -> float:
    """An upper bound on the magnitude of the result; inf if unknown."""
    if op == "constant":
        number = abs(float(params["value"]))
        return number if number <= _LARGEST else math.inf
    if op in ("add", "sub"):
        return sum(bounds)
    if op == "mul":
        # The product of 0 and an unknown number may be NaN.
        return math.inf if math.inf in bounds else math.prod(bounds)
    if op in ("neg", "abs", "sign"):
        return bounds[0]
    if op == "convert_element_type":
        return bounds[0]
    if op == "select_n":
        return max(bounds[1:])
    return math.inf
