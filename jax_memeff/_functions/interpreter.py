"""A jaxpr of one score, replayed on scalars.

A variable of the jaxpr is one of:

- a NumPy array: numbers that the function's source determines.
- a JAX array, or a tracer of a transformation around the call: it depends on no argument of the
  function, so equations of such arrays alone are evaluated by JAX, outside of the program.
- :class:`View`: a part of a JAX array at indices that depend on the arguments.
- :class:`Scalars`: a small array of values of the graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_memeff import _compat as compat
from jax_memeff._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax_memeff._functions import indexing, outside, rules
from jax_memeff._functions.graph import Graph, are_linear
from jax_memeff._functions.views import (
    CLIP,
    MOST_ELEMENTS,
    NotScalarError,
    Scalars,
    View,
    check_size,
    materialized,
    whole,
    window,
)

_IDENTITIES = frozenset({"copy_p", "name", "optimization_barrier", "pcast", "pvary", "reshard"})
_READS_IN_RULE = (
    "a function with a derivative rule of its own (custom_jvp, custom_vjp) reads an array that it "
    "closes over, so the array would get no gradient; read the element outside and pass it to the "
    "function"
)
_NOT_LINEAR = (
    "the backward of a custom_vjp is not linear in its cotangent (it clips it, for example), but "
    "kernels multiply one derivative by the cotangent of each score; write a backward that is "
    "linear, or apply the custom_vjp to an array before the function reads it"
)
_MUTABLE = (
    "it uses a mutable array (jax.new_ref), but kernels neither write to arrays nor see later "
    "changes; read it outside of the function, array = ref[...], and close over the result"
)
_LOOPS = frozenset({"scan", "while"})


class CustomCall(NamedTuple):
    """A call whose derivative is not that of its equations."""

    function: Callable[..., list[Any]]
    inputs: tuple[Scalars | np.ndarray, ...]


class Interpreter:
    """Replays jaxprs into a graph.

    Args:
        custom_rules: whether calls with derivative rules of their own are recorded. If not, they
            are replaced by their equations.
        structural: whether all numbers belong to the structure, as those of derivative rules do.
    """

    def __init__(self, graph: Graph, *, custom_rules: bool, structural: bool = False) -> None:
        self.graph = graph
        self.calls: list[CustomCall] = []
        self._nested: list[tuple[Jaxpr, JaxprEqn]] = []
        self._copies: dict[int, tuple[np.ndarray, jax.Array]] = {}
        self._taken: list[int] = []
        """For each branch that is being replayed, outermost first: whether it and those outside of
        it are taken."""
        self._custom_rules = custom_rules
        self._structural = structural

    @property
    def line(self) -> str | None:
        """The line of the user's function that is being replayed, if it is known."""
        return outside.line_of_equations(equation for _, equation in reversed(self._nested))

    def run(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        return self._run(closed.jaxpr, closed.consts, inputs)

    def scalars(self, x: Any, structural: bool = False) -> Scalars:
        """Any value as scalars of the graph; captured arrays are read."""
        if isinstance(x, Scalars):
            return x
        if isinstance(x, np.ndarray):
            check_size(x.shape, "an array of numbers")
            dtype = rules.scalar_type(x.dtype)
            elements = np.empty(x.shape, int)
            for position in np.ndindex(x.shape):
                elements[position] = self.graph.number(
                    x[position], dtype, structural or self._structural
                )
            return Scalars(elements, x.dtype)
        read = materialized(self.graph, self.view(x))
        return self._guarded(read) if self._taken else read

    def view(self, x: Any) -> View:
        """A captured array, or a part of one, as a view."""
        if isinstance(x, View):
            return x
        rules.scalar_type(x.dtype)
        if isinstance(x, np.ndarray):
            if id(x) not in self._copies:
                self._copies[id(x)] = x, jax.numpy.asarray(x)
            x = self._copies[id(x)][1]
        return whole(self.graph, x)

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        known: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update(zip(jaxpr.constvars, map(outside.constant, consts), strict=True))

        def value(atom: Any) -> Any:
            return outside.literal(atom) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            self._nested.append((jaxpr, equation))
            results = self._equation(equation, [value(atom) for atom in equation.invars])
            self._nested.pop()  # not on an exception: ``line`` names the equation that raised it
            known.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if any(isinstance(x, jax.Ref) for x in inputs):
            raise NotScalarError(_MUTABLE)
        if name in _IDENTITIES and not _is_outside(inputs[0]):
            return inputs
        if all(isinstance(x, np.ndarray) for x in inputs):
            if compat.is_call(equation):
                return self._inlined(equation, inputs)
            if inputs or name == "iota":  # axis_index has no inputs either
                return outside.numbers(self._nested[-1][0], equation, inputs)
        if not any(isinstance(x, (View, Scalars)) for x in inputs):
            return outside.evaluated(self._nested[-1][0], equation, inputs)
        if self._custom_rules and compat.may_have_rule(equation):
            return self._custom_call(equation, inputs)
        if compat.is_call(equation):
            return self._inlined(equation, inputs)
        if name == "cond":
            return self._branches(equation, inputs)
        if name == "scan" and equation.params["length"] <= MOST_ELEMENTS:
            return self._unrolled(equation, inputs)
        return self._array_equation(equation, name, inputs)

    def _array_equation(self, equation: JaxprEqn, name: str, inputs: list[Any]) -> list[Any]:
        rule = indexing.RULES.get(name)
        unrolled = name in rules.MOVES or name in rules.COMBINATIONS
        if not (rule or unrolled or rules.is_elementwise(name)):
            raise NotScalarError(_without_scalar_form(name))
        if rule is not None:
            operand = inputs[0] if isinstance(inputs[0], Scalars) else self.view(inputs[0])
            indices = [self.scalars(x) for x in inputs[1:]]
            found = rule(self.graph, equation.params, operand, *indices)
            if found is not None:
                return [found]
        result = outside.aval(equation.outvars[0])
        small = [self.scalars(x, self._divides(name, i)) for i, x in enumerate(inputs)]
        if name in rules.MOVES:
            moved = rules.MOVES[name](equation.params, *(x.elements for x in small))
            parts = moved if isinstance(moved, list) else [moved]
            results = [Scalars(part, np.dtype(result.dtype)) for part in parts]
        elif name in rules.COMBINATIONS:
            combine = rules.COMBINATIONS[name]
            elements = combine(self.graph, name, equation.params, np.dtype(result.dtype), *small)
            results = [Scalars(elements, np.dtype(result.dtype))]
        else:
            results = [self._elementwise(equation, name, small)]
        for x in results:
            check_size(x.shape, "an intermediate array")
        return results

    @staticmethod
    def _divides(name: str, operand: int) -> bool:
        return rules.STRUCTURAL_OPERAND.get(name) == operand

    def _elementwise(self, equation: JaxprEqn, name: str, operands: list[Scalars]) -> Scalars:
        aval = outside.aval(equation.outvars[0])
        check_size(aval.shape, "an intermediate array")
        rows = [np.broadcast_to(x.elements, aval.shape) for x in operands]
        dtypes = [x.dtype for x in operands]
        result = np.dtype(aval.dtype)
        elements = np.empty(aval.shape, int)
        for position in np.ndindex(aval.shape):
            args = tuple(int(row[position]) for row in rows)
            elements[position] = rules.lower(
                self.graph, name, equation.params, result, dtypes, args
            )
        return Scalars(elements, result)

    def _inlined(self, equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        if equation.primitive.name == "stop_gradient":
            return inputs
        return self.run(compat.body_of_call(equation), inputs)

    def _unrolled(self, equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        """A scan with few steps, unrolled."""
        body, length = equation.params["jaxpr"], equation.params["length"]
        consts, carried = compat.constants_and_carry(equation)
        carry, sequences = inputs[consts : consts + carried], inputs[consts + carried :]
        collected: list[list[Scalars]] = [[] for _ in equation.outvars[carried:]]
        steps = range(length)
        for step in reversed(steps) if equation.params["reverse"] else steps:
            now = [self._row(sequence, step) for sequence in sequences]
            results = self._run(body.jaxpr, body.consts, [*inputs[:consts], *carry, *now])
            carry = results[:carried]
            for rows, row in zip(collected, results[carried:], strict=True):
                rows.append(self.scalars(row))
        if equation.params["reverse"]:
            collected = [rows[::-1] for rows in collected]
        stacked = []
        for variable, rows in zip(equation.outvars[carried:], collected, strict=True):
            aval = outside.aval(variable)
            check_size(aval.shape, "the result of a scan")
            elements = np.array([row.elements for row in rows], int).reshape(aval.shape)
            stacked.append(Scalars(elements, np.dtype(aval.dtype)))
        return [*carry, *stacked]

    def _row(self, x: Any, index: int) -> Any:
        """``x[index]``."""
        if isinstance(x, Scalars):
            return Scalars(np.asarray(x.elements[index]), x.dtype)
        if not isinstance(x, View):
            return np.asarray(x[index]) if isinstance(x, np.ndarray) else x[index]
        first = self.graph.number(index, "int32", structural=True)
        starts = [first, *(self.graph.number(0, "int32") for _ in x.axes[1:])]
        row = window(self.graph, x, starts, [1, *x.shape[1:]], CLIP)
        return row.with_axes(row.axes[1:])

    def _custom_call(self, equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        if any(math.prod(x.shape) > MOST_ELEMENTS for x in inputs):
            raise NotScalarError(_READS_IN_RULE)
        small = [x if isinstance(x, np.ndarray) else self.scalars(x) for x in inputs]
        before = self.graph.float_reads_asked
        plain = [self.scalars(x) for x in self._inlined(equation, list(small))]
        if self.graph.float_reads_asked > before:
            raise NotScalarError(_READS_IN_RULE)
        number = len(self.calls)
        call = CustomCall(outside.alone(self._nested[-1][0], equation), tuple(small))
        if compat.writes_backward(equation) and not _is_backward_linear(call, plain):
            raise NotScalarError(_NOT_LINEAR)
        self.calls.append(call)
        used = [int(e) for x in small if isinstance(x, Scalars) for e in x.elements.flat]
        results = []
        for output, x in enumerate(plain):
            elements = np.empty(x.shape, int)
            for index, position in enumerate(np.ndindex(x.shape)):
                element = int(x.elements[position])
                params = {"call": number, "output": output, "element": index}
                dtype = self.graph.dtype(element)
                elements[position] = self.graph.add("custom", dtype, (element, *used), params)
            results.append(Scalars(elements, x.dtype))
        return results

    def _branches(self, equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        which, *operands = inputs
        branches = equation.params["branches"]
        if isinstance(which, np.ndarray):
            chosen = branches[min(max(int(which), 0), len(branches) - 1)]
            return self._run(chosen.jaxpr, chosen.consts, operands)
        index = int(self.scalars(which).elements[()])
        results = []
        for number, branch in enumerate(branches):
            self._taken.append(self._is_taken(index, number, len(branches)))
            guarded = [self._guarded(x) if isinstance(x, Scalars) else x for x in operands]
            results.append(self._run(branch.jaxpr, branch.consts, guarded))
            self._taken.pop()
        selected = []
        for cases in zip(*results, strict=True):
            rows = [self.scalars(case) for case in cases]
            elements = np.empty(rows[0].shape, int)
            for position in np.ndindex(elements.shape):
                values = [int(row.elements[position]) for row in rows]
                elements[position] = rules.choice(self.graph, index, values)
            selected.append(Scalars(elements, rows[0].dtype))
        return selected

    def _is_taken(self, index: int, number: int, count: int) -> int:
        """Whether an index, clamped to ``count`` branches, selects branch ``number``, and the
        branches around it are taken."""
        tests = [("ge", number)] if number else []
        tests += [("le", number)] if number < count - 1 else []
        taken = self._taken[-1] if self._taken else self.graph.number(True, "bool")
        for op, bound in tests:
            limit = self.graph.number(bound, self.graph.dtype(index), structural=True)
            test = self.graph.add(op, "bool", (index, limit))
            taken = self.graph.add("and", "bool", (taken, test))
        return taken

    def _guarded(self, x: Scalars) -> Scalars:
        """Floats that a branch uses, with derivatives of 0 unless the branch is taken.

        The program computes all branches. Without this the derivative of one that is not taken
        could be NaN, and NaN times a cotangent of 0 is NaN.
        """
        if not self._custom_rules or not rules.scalar_type(x.dtype).startswith("float"):
            return x
        elements = x.elements.copy()
        for position in np.ndindex(x.shape):
            element = int(elements[position])
            if self.graph.static(element) is not None:
                continue
            dtype = self.graph.dtype(element)
            used = (
                Scalars(np.array(self._taken[-1]), np.dtype(bool)),
                Scalars(np.array(element), np.dtype(dtype)),
            )
            params = {"call": len(self.calls), "output": 0, "element": 0}
            self.calls.append(CustomCall(_derivative_if, used))
            elements[position] = self.graph.add(
                "custom", dtype, (element, self._taken[-1], element), params
            )
        return Scalars(elements, x.dtype)


def _is_float(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.numpy.floating)


def _is_backward_linear(call: CustomCall, results: Sequence[Scalars]) -> bool:
    """Whether the gradients of a call with these results are linear in their cotangents."""
    is_float, kept = [_is_float(x) for x in call.inputs], [_is_float(x) for x in results]

    def gradients(cotangents: list[Any], inputs: list[Any]) -> list[Any]:
        def function(*floats: Any) -> list[Any]:
            left = iter(floats)
            own = (next(left) if moves else x for moves, x in zip(is_float, inputs, strict=True))
            return [x for x, keep in zip(call.function(*own), kept, strict=True) if keep]

        floats = (x for moves, x in zip(is_float, inputs, strict=True) if moves)
        return list(jax.vjp(function, *floats)[1](cotangents))

    def types(arrays: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    given = [x for x, keep in zip(results, kept, strict=True) if keep], call.inputs
    jaxpr = jax.make_jaxpr(gradients)(*map(types, given))
    graph, variables = Graph(), list[Scalars]()
    for number, x in enumerate(itertools.chain(*given)):
        elements = np.empty(x.shape, int)
        for index, position in enumerate(np.ndindex(x.shape)):
            params = {"argument": number, "element": index}
            dtype = rules.scalar_type(x.dtype)
            elements[position] = graph.add("argument", dtype, (), params)
        variables.append(Scalars(elements, np.dtype(x.dtype)))
    interpreter = Interpreter(graph, custom_rules=False, structural=True)
    found = [interpreter.scalars(x) for x in interpreter.run(jaxpr, variables)]
    cotangents = variables[: len(given[0])]
    return are_linear(
        graph, *(itertools.chain(*(x.elements.flat for x in xs)) for xs in (found, cotangents))
    )


def _derivative_if(taken: jax.Array, x: jax.Array) -> list[jax.Array]:
    return [jax.numpy.where(taken, x, jax.lax.stop_gradient(x))]


def _is_outside(x: Any) -> bool:
    return not isinstance(x, (np.ndarray, View, Scalars))


def _without_scalar_form(name: str) -> str:
    if name in _LOOPS:
        return (
            f"loops (`{name}`) of more than {MOST_ELEMENTS} steps, or of an unknown number of "
            "steps, have no scalar form; write the steps out, or compute the result outside of the "
            "function and close over it"
        )
    if "callback" in name or "debug" in name:
        return f"`{name}` has no scalar form: kernels have no side effects; print when tracing"
    return (
        f"the primitive `{name}` has no scalar form; compute its result outside of the function "
        "and close over it, or write it with elementwise operations"
    )
