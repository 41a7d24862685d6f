"""From a user's function to a program, and the arrays that the function closes over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_memeff._functions.canonical import canonical
from jax_memeff._functions.derivative import with_derivatives
from jax_memeff._functions.graph import Graph
from jax_memeff._functions.interpreter import Interpreter
from jax_memeff._functions.operations import SCALAR_TYPES
from jax_memeff._functions.views import NotScalarError, Scalars
from jax_memeff.codegen.functions.program import INPUTS, CapturedType, Program, ScalarType
from jax_memeff.errors import UnsupportedError

_NOT_IN_PYTHON = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
)
_UNSUPPORTED = "{} cannot be written as operations on scalars"


def traced_score_function(
    function: Callable[..., Any], accumulator: ScalarType = "float32"
) -> tuple[Program, tuple[jax.Array, ...]]:
    """The program of ``function(score, batch, head, query, key)`` and its derivatives.

    Args:
        function: from a score and four int32 scalars to a float scalar. It is called once, with
            tracers. Arrays that it closes over may be tracers of transformations around the call.
        accumulator: the dtype of the score and of the result, ``float32`` or ``float64``.

    Returns:
        The program and the arrays that it reads, in the order of ``Program.arrays``. These are the
        user's arrays or, if the function computes with arrays before it indexes them, the results.

    Raises:
        TypeError: if it is no function of five arguments, its result is no float, or it uses a
            traced value as a Python number.
        ValueError: if the result is no scalar.
        UnsupportedError: if a part of it has no scalar form.

    >>> slopes = jax.numpy.array([0.5, 0.25])
    >>> program, arrays = traced_score_function(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    >>> arrays[0] is slopes, program.arrays
    (True, (CapturedType(dtype='float32', ndim=1),))
    >>> program.values[program.results[1]]  # the derivative by the score is 1
    Value(op='constant', dtype='float32', args=(), params=(('value', 1.0),))
    """
    tracer = _Tracer(function, INPUTS, accumulator, "score_mod")
    function_alone, arrays = tracer.program(keep_custom=True)
    try:
        program, used = with_derivatives(function_alone, tracer.calls)
        return program, tuple(arrays[index] for index in used)
    except NotScalarError as error:
        reason = f"its derivative: {error}; close over jax.lax.stop_gradient of what has none"
        raise UnsupportedError([reason], _UNSUPPORTED.format("score_mod")) from None


def traced_mask_function(function: Callable[..., Any]) -> tuple[Program, tuple[jax.Array, ...]]:
    """The program of ``function(batch, head, query, key)``, which gives a bool.

    Returns and raises what :func:`traced_score_function` does; the program has no derivatives.

    >>> program, _ = traced_mask_function(lambda b, h, q, k: q - k < 8)
    >>> [value.op for value in program.values]
    ['query', 'key', 'sub', 'literal', 'lt']
    """
    return _Tracer(function, INPUTS[1:], "bool", "Mask.function").program()


class _Tracer:
    """One traced function. ``argument`` names it in errors."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: tuple[str, ...],
        result: ScalarType,
        argument: str,
    ) -> None:
        self._argument = argument
        self._graph = Graph()
        self._interpreter = Interpreter(self._graph, custom_rules=result != "bool")
        types: list[tuple[str, ScalarType]] = [
            (name, result if name == "score" else "int32") for name in inputs
        ]
        traced = self._traced(function, types)
        try:
            self._result = self._interpreted(traced, types, result)
        except NotScalarError as error:
            raise UnsupportedError(
                [f"{self._interpreter.line}: {error}"],
                _UNSUPPORTED.format(argument),
            ) from None

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
        names = ", ".join(name for name, _ in types)
        if not callable(function):
            raise TypeError(
                f"{self._argument} must be a function of {len(types)} arguments ({names}), "
                f"got {function!r}"
            )
        _check_arguments(function, len(types), f"{self._argument} must take ({names})")

        # A function of its own for each call: JAX keeps jaxprs by function, with the tracers that
        # they close over.
        def called(*args: Any) -> Any:
            try:
                result = function(*args)
            except _NOT_IN_PYTHON as error:
                raise TypeError(self._not_in_python(error)) from error
            return self._checked(result, types)

        return jax.make_jaxpr(called)(*(jax.ShapeDtypeStruct((), dtype) for _, dtype in types))

    def _not_in_python(self, error: Exception) -> str:
        start = f"{self._argument} is traced by JAX: its arguments are no Python numbers. "
        if isinstance(error, jax.errors.TracerBoolConversionError):
            return start + "Use jnp.where(condition, a, b) instead of `if`, and & | ~ for and, or"
        return start + (
            "Index jnp.asarray(array)[...] instead of a NumPy array or a list, and compute with "
            "jnp instead of np, math, int() and float()"
        )

    def _checked(self, result: Any, types: list[tuple[str, ScalarType]]) -> Any:
        """The result, if it is a scalar of the right kind."""
        kind = "a float" if types[0][0] == "score" else "a bool"
        expected = f"{self._argument} must return {kind} scalar"
        try:
            aval = jax.typeof(result)
        except TypeError:
            raise TypeError(f"{expected}, got {type(result).__name__}") from None
        if aval.shape != ():
            raise ValueError(
                f"{expected}, got an array of shape {aval.shape}; its arguments are scalars, and "
                "it is called for each score"
            )
        name = aval.dtype.name
        right = "float" in SCALAR_TYPES.get(name, "") if kind == "a float" else name == "bool"
        if right:
            return result
        advice = {
            "a float": "; return the score for scores that do not change",
            "a bool": "; write a comparison, or != 0",
        }[kind]
        if name == "bool":
            advice = "; a function that says which scores count is a Mask.function"
        raise TypeError(f"{expected}, got {name}{advice}")

    def _interpreted(self, traced: Any, types: list[tuple[str, ScalarType]], result: Any) -> int:
        inputs = [
            Scalars(np.array(self._graph.add(name, dtype)), np.dtype(dtype))
            for name, dtype in types
        ]
        (found,) = self._interpreter.run(traced, inputs)
        value = int(self._interpreter.scalars(found).elements[()])
        return self._graph.add("convert_element_type", result, (value,))


def _check_arguments(function: Callable[..., Any], count: int, expected: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # builtins have none; a wrong call is Python's error then
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"{expected} by position, got a function of {signature}: {error}") from None
