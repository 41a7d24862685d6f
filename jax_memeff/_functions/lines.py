"""The lines of a user's function that errors name, as ``file:line (name)``."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jax_memeff import _compat as compat

_LIBRARIES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (inspect.getfile(jax), inspect.getfile(np), os.path.dirname(__file__))
)
"""The directories of JAX, NumPy and this package, whose lines are not the user's."""


def of_error(error: BaseException, function: Callable[..., Any]) -> str:
    """The innermost line of the user's code at which ``error`` was raised in ``function``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else of_function(function)


def of_equations(equations: Iterable[compat.JaxprEqn]) -> str | None:
    """The line of the first of ``equations`` that has one in the user's code."""
    lines = map(compat.line_of, equations)
    # Equations of jnp functions that JAX had already traced have no line, and the call of a jitted
    # function has that of this package.
    own = (line for line in lines if ":" in line and not line.startswith(_LIBRARIES))
    return next(own, None)


def of_function(function: Callable[..., Any]) -> str:
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
