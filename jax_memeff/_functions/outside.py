"""Equations that depend on no argument of the function: JAX evaluates them, outside of the program.

Numbers in the function's source stay numbers. NumPy computes with them where it is exact, because
JAX compiles each operation on a new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff import _compat as compat
from jax_memeff._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax_memeff._functions.array_rules import MOVES
from jax_memeff._functions.graph import fold
from jax_memeff._functions.operations import converted_numbers

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
