"""The derivatives of a score function with respect to the score and the floats that it reads.

They are JAX's own: the function of scalars is differentiated by ``jax.vjp`` and traced again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._functions.graph import canonical, graph_of, needed
from jax_memeff._functions.interpreter import CustomCall, Interpreter
from jax_memeff._functions.operations import apply
from jax_memeff._functions.views import Scalars
from jax_memeff.codegen.functions.program import INPUTS, Program

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
            own, left = left[:count], left[count:]
            dtype = operand.dtype
            operand = jnp.stack([jnp.asarray(x, dtype) for x in own]).reshape(operand.shape)
        inputs.append(operand)
    return call.function(*inputs)
