"""Traces a user's function to a program and the arrays that the function closes over.

The derivatives of a score function, with respect to the score and the floats that it reads, are
JAX's own: the function of scalars is differentiated by ``jax.vjp`` and traced again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._functions import outside
from jax_memeff._functions.graph import Graph, canonical, graph_of, needed
from jax_memeff._functions.interpreter import CustomCall, Interpreter
from jax_memeff._functions.operations import SCALAR_TYPES, apply
from jax_memeff._functions.views import NotScalarError, Scalars
from jax_memeff.codegen.functions.program import INPUTS, CapturedType, Program, ScalarType
from jax_memeff.errors import UnsupportedError

_ARGUMENTS = (*INPUTS, "literal", "size", "read")


def with_derivatives(
    function: Program, calls: Sequence[CustomCall]
) -> tuple[Program, tuple[int, ...]]:
    """The program with its derivatives after its result, and the old indices of its arrays.

    Args:
        function: a program with one result; it may have ``custom`` values.
        calls: the calls to which ``custom`` values refer.
    """
    if calls:
        return _with_derivatives(function, function.literals, calls)
    # Literals are arguments of the derivative: here the number of each one is its index.
    program, used = _of_structure(function.structure, len(function.literals))
    # Floats are literals that the derivative itself has added: only -0.0.
    literals = tuple(
        function.literals[number] if isinstance(number, int) else number
        for number in program.literals
    )
    return program._replace(literals=literals), used


@functools.lru_cache(maxsize=256)
def _of_structure(structure: Program, literals: int) -> tuple[Program, tuple[int, ...]]:
    return _with_derivatives(structure, range(literals), ())


def _with_derivatives(
    function: Program, literals: Sequence[float | int], calls: Sequence[CustomCall]
) -> tuple[Program, tuple[int, ...]]:
    graph, place = graph_of(function)
    result = place[function.results[0]]
    dtype = graph.dtype(result)
    reads = function.float_reads
    others = [
        index
        for index, value in enumerate(function.values)
        if value.op in _ARGUMENTS and value.op != "score" and index not in reads
    ]

    def derivatives(score: Any, floats: Sequence[Any], rest: Sequence[Any]) -> Any:
        def value(score: Any, floats: Sequence[Any]) -> jax.Array:
            known = dict(zip((*reads, *others), (*floats, *rest), strict=True))
            return _Evaluation(function, calls, score, known).value(function.results[0])

        _, transposed = jax.vjp(value, score, floats)
        return transposed(np.ones((), dtype))

    def types(indices: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((), function.values[index].dtype) for index in indices]

    score = jax.ShapeDtypeStruct((), dtype)
    jaxpr = jax.make_jaxpr(derivatives)(score, types(reads), types(others))
    interpreter = Interpreter(graph, custom_rules=False, structural=True)
    inputs = [graph.add("score", dtype), *(place[index] for index in (*reads, *others))]
    scalars = [Scalars(np.array(index), np.dtype(graph.dtype(index))) for index in inputs]
    by_score, *by_reads = (
        int(interpreter.scalars(x).elements[()]) for x in interpreter.run(jaxpr, scalars)
    )
    # Two reads may have been merged where a derivative rule was left out.
    sums: dict[int, int] = {}
    for read, derivative in zip((place[index] for index in reads), by_reads, strict=True):
        known = sums.get(read)
        sums[read] = derivative if known is None else graph.add("add", dtype, (known, derivative))
    order = [index for index in needed(graph.values, (result, *sums)) if index in sums]
    results = (result, by_score, *(sums[read] for read in order))
    return canonical(graph.values, results, function.arrays, literals=literals, also=order)


class _Evaluation:
    """The values of a program as JAX arrays, with the derivative rules of ``custom`` values."""

    def __init__(
        self,
        program: Program,
        calls: Sequence[CustomCall],
        score: Any,
        known: dict[int, Any],
    ) -> None:
        self._values = program.values
        self._calls = calls
        self._score = score
        self._known = known
        self._outputs: dict[int, list[Any]] = {}

    def value(self, index: int) -> Any:
        """The value with an index, computed once."""
        for needed_index in needed(self._values, (index,), keep_custom=True):
            if needed_index not in self._known:
                self._known[needed_index] = self._computed(needed_index)
        return self._known[index]

    def _computed(self, index: int) -> Any:
        value = self._values[index]
        if value.op == "score":
            return self._score
        if value.op == "constant":
            return np.asarray(value.param("value"), value.dtype)
        args = [self._known[arg] for arg in value.args]
        if value.op != "custom":
            return apply(value, args)
        number = value.param("call")
        if number not in self._outputs:
            self._outputs[number] = _called(self._calls[number], args[1:])
        output = self._outputs[number][value.param("output")]
        return jnp.ravel(output)[value.param("element")].astype(value.dtype)


def _called(call: CustomCall, elements: Sequence[Any]) -> list[Any]:
    """The results of a call from the elements of its operands, in the user's dtypes."""
    left, inputs = list(elements), []
    for operand in call.inputs:
        if isinstance(operand, Scalars):
            count = operand.elements.size
            of_operand, left = left[:count], left[count:]
            dtype = operand.dtype
            operand = jnp.stack([jnp.asarray(x, dtype) for x in of_operand]).reshape(operand.shape)
        inputs.append(operand)
    return call.function(*inputs)


_NOT_IN_PYTHON = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
)
_UNSUPPORTED = "{} cannot be written as operations on scalars"


def _unchanged(score: jax.Array) -> jax.Array:
    return score


class BeforeFunction(NamedTuple):
    """The first part of a program: from a score to the first argument of the user's function."""

    apply: Callable[..., jax.Array] = _unchanged
    """Takes the score and the ``literals``."""
    literals: tuple[float, ...] = ()
    """Literals of the program, even if a number would normally be part of the structure."""


_NOTHING = BeforeFunction()


def traced_score_function(
    function: Callable[..., Any],
    accumulator: ScalarType = "float32",
    before: BeforeFunction = _NOTHING,
) -> tuple[Program, tuple[jax.Array, ...]]:
    """The program of ``function(score, batch, head, query, key)`` and its derivatives.

    Args:
        function: from a score and four int32 scalars to a float scalar. It is called once, with
            tracers. Arrays that it closes over may be tracers of transformations around the call.
        accumulator: the dtype of the score and of the result, ``float32`` or ``float64``.
        before: the first part of the program.

    Returns:
        The program and the arrays that it reads, in the order of ``Program.arrays``. These are the
        user's arrays or, if the function computes with arrays before it indexes them, the results.

    Raises:
        TypeError: if it is not a function of five arguments, its result is not a float, or it uses
            a traced value as a Python number.
        ValueError: if the result is not a scalar.
        UnsupportedError: if a part of it has no scalar form.

    >>> slopes = jax.numpy.array([0.5, 0.25])
    >>> program, arrays = traced_score_function(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    >>> arrays[0] is slopes, program.arrays
    (True, (CapturedType(dtype='float32', ndim=1),))
    >>> program.values[program.results[1]]  # the derivative by the score is 1
    Value(op='constant', dtype='float32', args=(), params=(('value', 1.0),))
    """
    tracer = _Tracer(function, INPUTS, accumulator, "score_mod", before)
    function_alone, arrays = tracer.program(keep_custom=True)
    try:
        program, used = with_derivatives(function_alone, tracer.calls)
        return program, tuple(arrays[index] for index in used)
    except (NotScalarError, NotImplementedError) as error:  # JAX raises the latter
        reason = (
            f"{outside.line_of_function(function)}: its derivative: {error}; close over "
            "jax.lax.stop_gradient of values that have none"
        )
        raise UnsupportedError([reason], _UNSUPPORTED.format("score_mod")) from None


def traced_mask_function(function: Callable[..., Any]) -> tuple[Program, tuple[jax.Array, ...]]:
    """The program of ``function(batch, head, query, key)``, which returns a bool.

    Returns and raises the same as :func:`traced_score_function`, but without derivatives.

    >>> program, _ = traced_mask_function(lambda b, h, q, k: q - k < 8)
    >>> [value.op for value in program.values]
    ['query', 'key', 'sub', 'literal', 'lt']
    """
    return _Tracer(function, INPUTS[1:], "bool", "Mask.function").program()


class _Tracer:
    """One traced function.

    Args:
        argument: the name of the function in errors.
        before: the first part of the program.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: tuple[str, ...],
        result: ScalarType,
        argument: str,
        before: BeforeFunction = _NOTHING,
    ) -> None:
        self._argument, self._before = argument, before
        self._graph = Graph()
        self._interpreter = Interpreter(self._graph, custom_rules=result != "bool")
        types: list[tuple[str, ScalarType]] = [
            (name, result if name == "score" else "int32") for name in inputs
        ]
        traced = self._traced(function, types)
        try:
            self._result = self._interpreted(traced, types, result)
        except NotScalarError as error:
            line = self._interpreter.line or outside.line_of_function(function)
            raise UnsupportedError([f"{line}: {error}"], _UNSUPPORTED.format(argument)) from None

    @property
    def calls(self) -> list[Any]:
        """The calls with derivative rules of their own."""
        return self._interpreter.calls

    def program(self, *, keep_custom: bool = False) -> tuple[Program, tuple[jax.Array, ...]]:
        arrays = self._graph.arrays
        program, used = canonical(
            self._graph.values,
            (self._result,),
            [CapturedType(array.dtype.name, array.ndim) for array in arrays],
            [array.shape for array in arrays],
            keep_custom=keep_custom,
        )
        return program, tuple(arrays[index] for index in used)

    def _traced(self, function: Callable[..., Any], types: list[tuple[str, ScalarType]]) -> Any:
        arguments = ", ".join(name for name, _ in types)
        if not callable(function):
            raise TypeError(
                f"{self._argument} must be a function of {len(types)} arguments ({arguments}), "
                f"got {function!r}"
            )
        _check_arguments(function, len(types), f"{self._argument} must take ({arguments})")

        # A fresh function for each call: JAX caches jaxprs by function, with the tracers that they
        # close over.
        def called(first: Any, *args: Any) -> Any:
            others, literals = args[: len(types) - 1], args[len(types) - 1 :]
            try:
                result = function(self._before.apply(first, *literals), *others)
            except _NOT_IN_PYTHON as error:
                line = outside.line_of_error(error, function)
                raise TypeError(f"{line}: {self._not_in_python(error)}") from error
            self._require_array(result, kind, outside.line_of_function(function))
            return result

        kind = "a float" if types[0][0] == "score" else "a bool"
        dtypes = [dtype for _, dtype in types] + [types[0][1]] * len(self._before.literals)
        traced = jax.make_jaxpr(called)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))
        (output,), equations = traced.jaxpr.outvars, traced.jaxpr.eqns
        made_by = (equation for equation in equations if output in equation.outvars)
        line = outside.line_of_equations(made_by) or outside.line_of_function(function)
        self._require_scalar(traced.out_avals[0], kind, line)
        return traced

    def _not_in_python(self, error: Exception) -> str:
        start = f"{self._argument} is traced by JAX: its arguments are not Python numbers. "
        if isinstance(error, jax.errors.TracerBoolConversionError):
            return start + "Use jnp.where(condition, a, b) instead of `if`, and & | ~ for and, or"
        return start + (
            "Index jnp.asarray(array)[...] instead of a NumPy array or a list, and compute with "
            "jnp instead of np, math, int() and float()"
        )

    def _require_array(self, result: Any, kind: str, line: str) -> None:
        try:
            jax.typeof(result)
        except TypeError:
            advice = "; does it lack a `return`?" if result is None else ""
            raise TypeError(
                f"{line}: {self._argument} must return {kind} scalar, got "
                f"{type(result).__name__}{advice}"
            ) from None

    def _require_scalar(self, aval: Any, kind: str, line: str) -> None:
        expected = f"{line}: {self._argument} must return {kind} scalar"
        if aval.shape != ():
            raise ValueError(
                f"{expected}, got an array of shape {aval.shape}; its arguments are scalars, and "
                "it is called for each score"
            )
        name = aval.dtype.name
        right = "float" in SCALAR_TYPES.get(name, "") if kind == "a float" else name == "bool"
        if right:
            return
        advice = {
            "a float": "; convert it, for example by .astype(jnp.float32)",
            "a bool": "; write a comparison, or != 0",
        }[kind]
        if name.startswith("complex"):
            advice = "; return its real part"
        if name == "bool":
            advice = "; for a function that selects scores use Mask.function"
        raise TypeError(f"{expected}, got {name}{advice}")

    def _interpreted(self, traced: Any, types: list[tuple[str, ScalarType]], result: Any) -> int:
        indices = [(self._graph.add(name, dtype), dtype) for name, dtype in types]
        indices += [
            (self._graph.number(x, types[0][1]), types[0][1]) for x in self._before.literals
        ]
        inputs = [Scalars(np.array(index), np.dtype(dtype)) for index, dtype in indices]
        (result_array,) = self._interpreter.run(traced, inputs)
        value = int(self._interpreter.scalars(result_array).elements[()])
        return self._graph.add("convert_element_type", result, (value,))


def _check_arguments(function: Callable[..., Any], count: int, expected: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # builtins have no signature; Python then reports a wrong call
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"{expected} by position, got a function of {signature}: {error}") from None
