"""The graph of scalars that tracing builds: it merges equal values and drops trivial operations.

Its values are those of a program with two more operations:

- ``number``, with ``value``: :func:`canonical` makes it a literal or a size.
- ``custom``: a result of a function with a derivative rule of its own. Its first argument is the
  result of the same function without the rule (``trace.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._functions.operations import SCALAR_TYPES, bits_of_small, converted_numbers
from jax_memeff.codegen.functions.program import INPUTS, CapturedType, Program, ScalarType, Value

_COMMUTATIVE = frozenset({"add", "and", "eq", "mul", "ne", "or", "xor"})
_ZERO_IS_NEUTRAL = frozenset(
    {"add", "sub", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"}
)
_FOLDED: dict[str, Any] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sign": np.sign,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
"""Operations whose results in NumPy are bit for bit those of XLA."""


def fold(op: str, args: list[np.ndarray]) -> np.ndarray | None:
    """The result of an operation on numbers; None if NumPy may round it differently."""
    with np.errstate(all="ignore"):
        if op == "select_n" and len(args) == 3 and args[0].dtype == np.bool_:
            return np.where(args[0], args[2], args[1])
        if op in _FOLDED:
            return np.asarray(_FOLDED[op](*args))
    return None


class Graph:
    """Scalar values in topological order."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.arrays: list[jax.Array] = []
        self.float_reads_asked = 0
        """How often a read of a float was requested, whether or not it existed already."""
        self._index: dict[Value, int] = {}
        self._dependence: list[frozenset[str]] = []

    def dtype(self, index: int) -> ScalarType:
        return self.values[index].dtype

    def dependence(self, index: int) -> frozenset[str]:
        """The inputs that a value depends on."""
        return self._dependence[index]

    def add(
        self, op: str, dtype: ScalarType, args: tuple[int, ...] = (), params: dict | None = None
    ) -> int:
        """The index of the requested value: new, or an equal one that is earlier or simpler."""
        self.float_reads_asked += op == "read" and dtype.startswith("float")
        value = Value(op, dtype, args, tuple(sorted((params or {}).items())))
        key = value._replace(args=tuple(sorted(args))) if op in _COMMUTATIVE else value
        if (known := self._index.get(key)) is not None:
            return known
        index = self._simpler(value)
        if index is None:
            index = len(self.values)
            self.values.append(value)
            inherited = (self._dependence[arg] for arg in args)
            itself = frozenset({op} if op in INPUTS else ())
            self._dependence.append(itself.union(*inherited))
        self._index[key] = index
        return index

    def number(self, number: Any, dtype: ScalarType, structural: bool = False) -> int:
        """A number. Kernels take it as a run-time parameter unless it is ``structural``.

        0, 1, -1, booleans, infinities and NaN are always structural.
        """
        value = np.asarray(number).astype(dtype).item()
        if value != value:
            value, structural = math.nan, True  # one object, so that equal numbers compare equal
        elif value == 0 and math.copysign(1, value) < 0:
            structural = False  # -0.0 equals 0.0, so it cannot be told apart in the structure
        else:
            structural = structural or value in (0, 1, -1) or not math.isfinite(value)
        return self.add("constant" if structural else "number", dtype, (), {"value": value})

    def converted(self, value: int, source: np.dtype, target: np.dtype) -> int:
        """A value of dtype ``source`` as ``target``, each a dtype of JAX.

        Floats beyond the limits of an integer type become these limits, and NaN becomes 0. Integers
        wrap around.
        """
        converted = self.add("convert_element_type", SCALAR_TYPES[target.name], (value,))
        if not bits_of_small(target) or not jnp.issubdtype(source, jnp.floating):
            return self.wrapped(converted, target)
        info = np.iinfo(target)
        least, most = (
            self.number(limit, "int32", structural=True) for limit in (info.min, info.max)
        )
        return self.add("clamp", "int32", (least, converted, most))

    def wrapped(self, value: int, dtype: np.dtype) -> int:
        """An int32 wrapped around as arithmetic in a smaller dtype wraps; others unchanged."""
        bits = bits_of_small(dtype)
        if not bits:
            return value
        if (number := self.static(value)) is not None:
            is_structural = self.constant(value) is not None
            return self.number(np.int32(number).astype(dtype), "int32", structural=is_structural)
        if dtype.kind == "u":
            mask = self.number((1 << bits) - 1, "int32", structural=True)
            return self.add("and", "int32", (value, mask))
        shift = self.number(32 - bits, "int32", structural=True)
        high = self.add("shift_left", "int32", (value, shift))
        return self.add("shift_right_arithmetic", "int32", (high, shift))

    def captured(self, array: jax.Array) -> int:
        """The index of an array that the function closes over."""
        for index, known in enumerate(self.arrays):
            if known is array:
                return index
        self.arrays.append(array)
        return len(self.arrays) - 1

    def constant(self, index: int) -> Any | None:
        """The value of a structural number, else None."""
        value = self.values[index]
        return value.param("value") if value.op == "constant" else None

    def static(self, index: int) -> Any | None:
        """The value of any number, structural or not, else None."""
        value = self.values[index]
        return value.param("value") if value.op in ("constant", "number") else None

    def _simpler(self, value: Value) -> int | None:
        """An earlier or a simpler value that is equal to this one, if there is one."""
        op, dtype, args = value.op, value.dtype, value.args
        if not args or op in ("read", "custom"):
            return None
        numbers = [self.constant(arg) for arg in args]
        if None not in numbers:
            typed = [np.array(n, self.dtype(a)) for n, a in zip(numbers, args, strict=True)]
            converts = op == "convert_element_type"
            folded = converted_numbers(typed[0], dtype) if converts else fold(op, typed)
            if folded is not None and math.isfinite(folded):
                return self.number(folded, dtype, structural=True)
        if len(args) == 1:
            return self._simpler_function(value)
        if op == "select_n":
            return self._simpler_select(*args)
        if len(args) == 2:
            return self._simpler_pair(value, numbers)
        return None

    def _simpler_function(self, value: Value) -> int | None:
        (arg,) = value.args
        inner = self.values[arg]
        if value.op in ("neg", "not") and inner.op == value.op:
            return inner.args[0]
        if value.op in ("convert_element_type", "bitcast_convert_type"):
            return arg if inner.dtype == value.dtype else None
        if value.op == "abs" and self.never_negative(arg):
            return arg
        if value.op == "square":
            return self.add("mul", value.dtype, (arg, arg))
        if value.op == "integer_pow":
            power = value.param("y")
            if power in (1, 2):
                return arg if power == 1 else self.add("mul", value.dtype, (arg, arg))
            return self.number(1, value.dtype) if power == 0 else None
        return None

    def _simpler_select(self, predicate: int, if_false: int, if_true: int) -> int | None:
        choice = self.constant(predicate)
        if choice is not None:
            return if_true if choice else if_false
        return if_true if if_true == if_false else None

    def _simpler_pair(self, value: Value, numbers: list[Any]) -> int | None:
        op, dtype, (left, right) = value.op, value.dtype, value.args
        negated = [self.values[arg].op == "neg" for arg in value.args]
        inner = [
            self.values[arg].args[0] if n else arg
            for n, arg in zip(negated, value.args, strict=True)
        ]
        if negated[1] and op in ("add", "sub"):  # exact, except for the sign of a zero
            if negated[0] and op == "add":
                return self.add("neg", dtype, (self.add("add", dtype, tuple(inner)),))
            return self.add("sub" if op == "add" else "add", dtype, (left, inner[1]))
        # Not for integers: the quotient differs if one is unsigned, or the least of its type.
        if all(negated) and (op == "mul" or (op == "div" and dtype.startswith("float"))):
            return self.add(op, dtype, tuple(inner))
        if left == right and op in ("max", "min", "and", "or"):
            return left
        if dtype == "bool" and (found := self._simpler_predicate(op, left, right)) is not None:
            return found
        # Commutative operations may have their number on either side.
        sides = [(left, numbers[1])] + ([(right, numbers[0])] if op in _COMMUTATIVE else [])
        for other, number in sides:
            if number is None or self.dtype(other) != dtype:
                continue
            if number == 0 and op in _ZERO_IS_NEUTRAL:
                return other
            if number == 0 and op in ("mul", "and") and not dtype.startswith("float"):
                return self.number(0, dtype)
            if number == 1 and (op in ("mul", "div") or (op == "and" and dtype == "bool")):
                return other
            if number == 1 and op == "or" and dtype == "bool":
                return self.number(True, dtype)
            if number == -1 and op == "mul":
                return self.add("neg", dtype, (other,))
        if op == "sub" and numbers[0] == 0 and not dtype.startswith("float"):
            return self.add("neg", dtype, (right,))
        return None

    def _simpler_predicate(self, op: str, left: int, right: int) -> int | None:
        """Comparisons that the signs of the operands decide, and those of booleans."""
        number = self.constant(right)
        if number == 0 and op in ("lt", "ge") and self.never_negative(left):
            return self.number(op == "ge", "bool")
        if op in ("eq", "ne") and self.dtype(left) == "bool":
            for other, known in ((left, number), (right, self.constant(left))):
                if known is not None:
                    same = bool(known) == (op == "eq")
                    return other if same else self.add("not", "bool", (other,))
        inner = self.values[left]
        from_bool = inner.op == "convert_element_type" and self.dtype(inner.args[0]) == "bool"
        if from_bool and (op, number) in (("ne", 0), ("eq", 1), ("ge", 1), ("gt", 0)):
            return inner.args[0]
        if op == "and" and (self._rounds_down(left, right) or self._rounds_down(right, left)):
            return self.number(False, "bool")
        return None

    def _rounds_down(self, signs: int, remains: int) -> bool:
        """Whether two predicates test if ``x // n`` is below ``x / n`` truncated, with x, n >= 0.

        ``jnp.floor_divide`` computes ``sign(x) != sign(n)`` and ``rem(x, n) != 0``.
        """
        first, second = self.values[signs], self.values[remains]
        if first.op != "ne" or second.op != "ne":
            return False
        for sign, one in (first.args, first.args[::-1]):
            for rem, zero in (second.args, second.args[::-1]):
                x, remainder = self.values[sign], self.values[rem]
                if (
                    (x.op, remainder.op) == ("sign", "rem")
                    and (self.constant(one), self.constant(zero)) == (1, 0)
                    and x.args[0] == remainder.args[0]
                    and all(map(self.never_negative, remainder.args))
                ):
                    return True
        return False

    def never_negative(self, index: int) -> bool:
        """Whether an integer is known to be at least 0. Positions and indices always are."""
        value = self.values[index]
        if value.dtype not in ("int32", "int64", "uint32", "uint64"):
            return False
        if value.op in ("batch", "head", "query", "key", "size"):
            return True
        if (number := self.static(index)) is not None:
            return number >= 0
        if value.op == "div":  # x / 0 is -1
            positive = (self.constant(value.args[1]) or 0) > 0
            return positive and self.never_negative(value.args[0])
        if value.op in ("rem", "shift_right_arithmetic"):
            return self.never_negative(value.args[0])
        if value.op == "min":
            return all(map(self.never_negative, value.args))
        return value.op == "max" and any(map(self.never_negative, value.args))


_LINEAR_IN_ALL = frozenset({"add", "sub", "neg"})


def are_linear(graph: Graph, results: Iterable[int], variables: Iterable[int]) -> bool:
    """Whether each result is 0 or a linear function of the variables together.

    Other values count as constants. A sum of products that cancel a constant counts as not linear.

    >>> graph = Graph()
    >>> x, two = graph.add("score", "float32"), graph.number(2.0, "float32")
    >>> double, shifted = (graph.add(op, "float32", (x, two)) for op in ("mul", "add"))
    >>> are_linear(graph, [double], [x]), are_linear(graph, [shifted], [x])
    (True, False)
    """
    linear = set(variables)
    nonlinear: set[int] = set()

    def is_homogeneous(index: int) -> bool:
        return index in linear or graph.static(index) == 0

    for index, value in enumerate(graph.values):
        moving = [arg in linear for arg in value.args]
        if nonlinear.intersection(value.args):
            nonlinear.add(index)
        elif any(moving):
            if value.op in _LINEAR_IN_ALL:
                is_linear = all(map(is_homogeneous, value.args))
            elif value.op == "select_n":
                is_linear = not moving[0] and all(map(is_homogeneous, value.args[1:]))
            elif value.op == "mul":
                is_linear = moving.count(True) == 1
            elif value.op == "div":
                is_linear = moving == [True, False]
            else:
                is_linear = value.op == "convert_element_type" and value.dtype.startswith("float")
            (linear if is_linear else nonlinear).add(index)
    return all(map(is_homogeneous, results))


def canonical(
    values: Sequence[Value],
    results: Sequence[int],
    arrays: Sequence[CapturedType],
    shapes: Sequence[Sequence[int]] = (),
    literals: Sequence[float | int] = (),
    *,
    also: Sequence[int] = (),
    keep_custom: bool = False,
) -> tuple[Program, tuple[int, ...]]:
    """A program of the values that results need, in the order in which results need them.

    Args:
        arrays, shapes: those of the captured arrays, to which reads refer by index.
        literals: the numbers of ``literal`` values, if there are any already.
        also: values to keep besides those that results need.
        keep_custom: whether ``custom`` values stay; otherwise their first argument replaces them.

    Returns:
        The program, and the indices in ``arrays`` of the arrays that it reads, in its order.
    """
    order = needed(values, (results[0], *also, *results), keep_custom)
    used = dict.fromkeys(
        values[index].param("array") for index in order if values[index].op in ("read", "size")
    )
    place = {array: position for position, array in enumerate(used)}
    lengths = {}
    for array in reversed(used if shapes else ()):
        for dim, length in reversed(list(enumerate(shapes[array]))):
            lengths[length] = (place[array], dim)

    new_values: dict[Value, int] = {}
    new_index: dict[int, int] = {}
    numbers: dict[object, float | int] = {}

    def literal(key: object, number: float | int, dtype: ScalarType) -> Value:
        numbers.setdefault(key, number)
        return Value("literal", dtype, (), (("index", list(numbers).index(key)),))

    for index in order:
        value = values[index]
        if value.op == "custom" and not keep_custom:
            new_index[index] = new_index[value.args[0]]
            continue
        if value.op == "number":
            number = value.param("value")
            if value.dtype == "int32" and number in lengths:
                array, dim = lengths[number]
                value = Value("size", "int32", (), (("array", array), ("dim", dim)))
            else:
                value = literal((value.dtype, number), number, value.dtype)
        elif value.op == "literal":
            old = value.param("index")
            value = literal(old, literals[old], value.dtype)
        elif value.op in ("read", "size"):
            params = tuple((n, place[p] if n == "array" else p) for n, p in value.params)
            value = value._replace(params=params)
        value = value._replace(args=tuple(new_index[arg] for arg in value.args))
        new_index[index] = new_values.setdefault(value, len(new_values))
    program = Program(
        values=tuple(new_values),
        results=tuple(new_index[result] for result in results),
        arrays=tuple(arrays[array] for array in used),
        literals=tuple(numbers.values()),
    )
    return program, tuple(used)


def needed(values: Sequence[Value], results: Sequence[int], keep_custom: bool = False) -> list[int]:
    """The values that results need, each after its arguments."""
    done: dict[int, None] = {}
    for result in results:
        pending = [result]
        while pending:
            index = pending[-1]
            value = values[index]
            args = value.args
            if value.op == "custom" and not keep_custom:
                args = args[:1]
            missing = [arg for arg in reversed(args) if arg not in done]
            if missing:
                pending += missing
            else:
                done[pending.pop()] = None
    return list(done)


def graph_of(program: Program) -> tuple[Graph, list[int]]:
    """A graph of a program's values without ``custom`` ones, and the index of each value in it."""
    graph, place = Graph(), list[int]()
    for value in program.values:
        if value.op == "custom":
            place.append(place[value.args[0]])
            continue
        args = tuple(place[arg] for arg in value.args)
        place.append(graph.add(value.op, value.dtype, args, dict(value.params)))
    return graph, place
