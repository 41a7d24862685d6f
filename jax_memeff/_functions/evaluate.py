"""Programs evaluated in JAX, for arrays of scores."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jax_memeff._functions.graph import needed
from jax_memeff._functions.operations import apply, apply_rounded
from jax_memeff.codegen.functions.operations import exact_values
from jax_memeff.codegen.functions.program import INPUTS, Program, Value

ArrayLike = Any


def evaluate(
    program: Program,
    score: ArrayLike | None,
    batch: ArrayLike,
    head: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    arrays: Sequence[jax.Array],
    valid: ArrayLike | None = None,
) -> jax.Array:
    """The function at each score.

    Derivatives with respect to the score and the arrays, of any order and in both modes, are those
    that kernels compute: the results of the program, not the derivatives of its operations.
    Gradients of 16-bit arrays are summed in float32 and rounded once.

    Args:
        score: floats of any shape; None for a mask function.
        batch, head, query, key: int32, of shapes that broadcast with that of the score.
        arrays: the captured arrays, of the user's shapes.
        valid: bools; derivatives are 0 at elements that are not valid. Outside the domain of the
            function they may be NaN, even if the cotangent is 0.

    Returns:
        The program's score dtype or bool, with the shape to which all arguments broadcast.

    >>> from jax_memeff._functions.trace import traced_score_function
    >>> slopes = jnp.array([1.0, 2.0])
    >>> program, arrays = traced_score_function(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    >>> scores, rows = np.zeros((2, 3), np.float32), np.arange(2)[:, None]
    >>> evaluate(program, scores, 0, 1, rows, np.arange(3), arrays)
    Array([[ 0.,  2.,  4.],
           [-2.,  0.,  2.]], dtype=float32)
    """
    given = _Given(program, arrays, score, (batch, head, query, key))
    if len(program.results) == 1:
        (value,) = given.results(program.results)
        return jnp.broadcast_to(value, given.shape)

    # The rule refers to the function, so both live until Python's cycle collector runs. JAX would
    # report tracers held by them as leaked.
    form = given.without_values()

    @jax.custom_jvp
    def function(floats: list[Any], others: dict[int, Any], valid: Any) -> jax.Array:
        del valid  # passed because the rule may be traced after this call has returned
        (value,) = form.replaced(floats, others).results(program.results[:1])
        return jnp.broadcast_to(value, form.shape)

    def function_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        floats, others, valid = primals
        moving = [
            (result, tangent)
            for result, tangent in zip(program.results[1:], tangents[0], strict=True)
            if not isinstance(tangent, SymbolicZero)
        ]
        slopes = form.replaced(floats, others).results([result for result, _ in moving])
        if valid is not None:
            slopes = [jnp.where(valid, slope, 0) for slope in slopes]
        value = function(floats, others, valid)
        total = jnp.zeros_like(value)
        for slope, (_, tangent) in zip(slopes, moving, strict=True):
            # Reads of 64-bit arrays may be wider than the score.
            term = jnp.broadcast_to(slope * tangent, form.shape)
            total = total + term.astype(value.dtype)
        return value, total

    function.defjvp(function_jvp, symbolic_zeros=True)
    return function(*given.parts(), None if valid is None else jnp.asarray(valid))


def derivatives(
    program: Program,
    score: ArrayLike,
    batch: ArrayLike,
    head: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    arrays: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """The derivatives at each score, with respect to the score and each of ``program.float_reads``.

    Arguments and shapes are those of :func:`evaluate`.
    """
    given = _Given(program, arrays, score, (batch, head, query, key))
    return tuple(
        jnp.broadcast_to(result, given.shape) for result in given.results(program.results[1:])
    )


class _Given:
    """The values of a program that its arguments determine: inputs, sizes, and reads."""

    def __init__(
        self,
        program: Program,
        arrays: Sequence[jax.Array],
        score: ArrayLike | None,
        positions: Sequence[ArrayLike],
    ) -> None:
        named: dict[str, Any] = {
            name: jnp.asarray(position, jnp.int32)
            for name, position in zip(INPUTS[1:], positions, strict=True)
        }
        self._score = None
        if score is not None:
            named["score"] = jnp.asarray(score, program.values[program.results[0]].dtype)
            self._score = named["score"]
        # Sizes may be symbolic in an exported program.
        self.shape = jnp.broadcast_shapes(*(x.shape for x in named.values()))
        self._program = program
        self._exact = exact_values(program)
        self._known: dict[int, Any] = {}
        for index, value in enumerate(program.values):
            if value.op in INPUTS:
                self._known[index] = named[value.op]
            elif value.op == "size":
                length = arrays[value.param("array")].shape[value.param("dim")]
                self._known[index] = np.asarray(length, value.dtype)
        for index in program.reads:  # an index may depend on earlier reads
            value = program.values[index]
            self._known[index] = _read(value, self.results(value.args), arrays)

    def results(self, wanted: Sequence[int]) -> list[Any]:
        """Values of the program."""
        values, known = self._program.values, dict(self._known)
        for index in needed(values, tuple(wanted)):
            if index in known:
                continue
            value = values[index]
            if value.op == "constant":
                known[index] = np.asarray(value.param("value"), value.dtype)
            elif value.op == "literal":
                number = self._program.literals[value.param("index")]
                known[index] = np.asarray(number, value.dtype)
            else:
                operation = apply_rounded if index in self._exact else apply
                known[index] = operation(value, [known[arg] for arg in value.args])
        return [known[index] for index in wanted]

    def parts(self) -> tuple[list[Any], dict[int, Any]]:
        """The score and the float reads, and everything else that is given."""
        floats = self._program.float_reads
        others = {i: x for i, x in self._known.items() if i not in (*floats, *self._scores())}
        return [self._score, *(self._known[index] for index in floats)], others

    def without_values(self) -> _Given:
        """The program and the shape alone, for :meth:`replaced`."""
        new = copy.copy(self)
        new._score, new._known = None, {}
        return new

    def replaced(self, floats: Sequence[Any], others: Mapping[int, Any]) -> _Given:
        """The same values with other arrays in place of the results of :meth:`parts`."""
        score, *reads = floats
        new = copy.copy(self)
        new._score = score
        new._known = {
            **others,
            **dict.fromkeys(self._scores(), score),
            **dict(zip(self._program.float_reads, reads, strict=True)),
        }
        return new

    def _scores(self) -> list[int]:
        return [i for i, value in enumerate(self._program.values) if value.op == "score"]


def _read(value: Value, indices: Sequence[Any], arrays: Sequence[jax.Array]) -> jax.Array:
    array = arrays[value.param("array")]
    if value.dtype.startswith("float"):
        array = array.astype(value.dtype)  # before the gather, which sums gradients in this type
    if not indices:
        return array.astype(value.dtype)
    # All indices get one shape: jnp would take a whole row for a scalar index.
    indices = jnp.broadcast_arrays(*indices)
    options: dict[str, Any] = {"mode": "clip", "wrap_negative_indices": False}
    if value.param("mode") == "fill":
        options |= {"mode": "fill", "fill_value": value.param("fill_value")}
    return array.at[tuple(indices)].get(**options).astype(value.dtype)
