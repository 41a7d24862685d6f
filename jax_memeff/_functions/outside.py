"""What a user's function has besides its scalars: equations outside of the program, and lines.

Equations that depend on no argument of the function are evaluated by JAX, outside of the program.
Numbers in the function's source stay numbers. NumPy computes with them where it is exact, because
JAX compiles each operation on a new shape. Errors name lines of the user's source.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff import _compat as compat
from jax_memeff._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax_memeff._functions.graph import fold
from jax_memeff._functions.operations import converted_numbers
from jax_memeff._functions.rules import MOVES

_MOST_NUMBERS = 4096
"""Constants larger than this are treated as JAX arrays."""


def constant(const: Any) -> Any:
    """A constant of a jaxpr: a JAX array, numbers, or a mutable array."""
    # NumPy would read a traced reference forever.
    return const if isinstance(const, jax.Array | jax.Ref) else np.asarray(const)


def literal(atom: Literal) -> np.ndarray:
    """A number in a jaxpr, with its dtype in JAX."""
    return np.asarray(atom.val, aval(atom).dtype)


def aval(atom: Any) -> Any:
    """The type of a variable or a number in a jaxpr."""
    return atom.aval


def alone(jaxpr: Jaxpr, equation: JaxprEqn) -> Callable[..., list[Any]]:
    """A function of all operands of an equation of ``jaxpr`` that evaluates the equation."""
    places = {atom: place for place, atom in enumerate(equation.invars) if isinstance(atom, Var)}
    single = jaxpr.replace(
        constvars=[],
        invars=list(places),
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    evaluated = jaxpr_as_fun(ClosedJaxpr(single, ()))
    return lambda *inputs: evaluated(*(inputs[place] for place in places.values()))


def evaluated(jaxpr: Jaxpr, equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """The results of an equation whose inputs are JAX arrays and numbers."""
    return alone(jaxpr, equation)(*map(_varying, inputs, equation.invars))


def _varying(x: Any, atom: Any) -> Any:
    """A number, made to vary over the ``jax.shard_map`` axes over which its variable varies."""
    axes = aval(atom).manual_axis_type.varying if isinstance(x, np.ndarray) else ()
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def numbers(jaxpr: Jaxpr, equation: JaxprEqn, inputs: list[np.ndarray]) -> list[Any]:
    """The results of an equation whose inputs are all numbers."""
    name, avals = equation.primitive.name, list(map(aval, equation.outvars))
    result = None
    if name == "convert_element_type":
        result = converted_numbers(inputs[0], avals[0].dtype)
    elif name in MOVES:
        result = MOVES[name](equation.params, *inputs)
    elif name == "iota" and avals[0].size <= _MOST_NUMBERS:
        dimension = equation.params["dimension"]
        result = np.indices(avals[0].shape)[dimension].astype(avals[0].dtype)
    elif len({x.shape for x in inputs}) == 1 and inputs[0].dtype.kind in "biuf":
        result = fold(name, inputs)
    if result is not None:
        return [np.asarray(x) for x in (result if isinstance(result, list) else [result])]
    with compat.without_tracing():
        found = alone(jaxpr, equation)(*inputs)
    small = all(aval.size <= _MOST_NUMBERS for aval in avals)
    keys = any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found)
    return [np.asarray(x) for x in found] if small and not keys else found


_LIBRARIES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (inspect.getfile(jax), inspect.getfile(np), os.path.dirname(__file__))
)
"""The directories of JAX, NumPy and this package, whose lines are not the user's."""


def line_of_error(error: BaseException, function: Callable[..., Any]) -> str:
    """The innermost line of the user's code at which ``error`` was raised in ``function``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return (
        f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})"
        if own
        else line_of_function(function)
    )


def line_of_equations(equations: Iterable[compat.JaxprEqn]) -> str | None:
    """The line of the first of ``equations`` that has one in the user's code."""
    lines = map(compat.line_of, equations)
    # Equations of jnp functions that JAX had already traced have no line, and the call of a jitted
    # function has that of this package.
    own = (line for line in lines if ":" in line and not line.startswith(_LIBRARIES))
    return next(own, None)


def line_of_function(function: Callable[..., Any]) -> str:
    """The line at which ``function`` is defined; its ``repr`` if it is not written in Python."""
    found: Any = function
    while isinstance(found, functools.partial):
        found = found.func
    found = inspect.unwrap(found)
    if not hasattr(found, "__code__"):
        found = type(found).__call__
    code = getattr(found, "__code__", None)
    if code is None:
        return f"{function!r:.80}"
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"
