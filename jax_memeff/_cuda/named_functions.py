"""The functions that the user names on the command line, in the form that kernels take."""

from __future__ import annotations

import difflib
import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from jax_memeff._call.functions import adds_columns
from jax_memeff._call.mask import Mask
from jax_memeff._call.scaling import Scaling
from jax_memeff._cuda.functions import in_kernel_types
from jax_memeff._functions.trace import traced_mask_function, traced_score_function
from jax_memeff.codegen.features import DELTA_FROM_SCORES, DETERMINISTIC, FUNCTIONS, SINKS, SOFT_CAP
from jax_memeff.codegen.features.functions import AskedDelta, AskedFunctions
from jax_memeff.codegen.problem import DTYPE_BYTES, Dtype
from jax_memeff.errors import UnsupportedError

Trace = Callable[[Callable[..., Any]], Any]

_CAP = 30.0
"""An arbitrary cap: it is a literal and does not affect the kernel."""


def added(
    features: Mapping[str, Any],
    score: str | None,
    mask: str | None,
    *,
    dtype: Dtype,
    gradients: bool,
) -> dict[str, Any]:
    """The features of a problem, by name, with the structures of the functions.

    Args:
        features: those without functions.
        score, mask: ``"MODULE:NAME"``. The module may be in the current directory. The function
            reads the arrays in its scope. The length of sequences is unknown: an array that has an
            index for the columns is taken to have an element for each.
        dtype: that of the problem.
        gradients: whether the gradients of all float arrays that the score function reads are
            needed.

    Raises:
        ValueError: a name cannot be imported, or has the wrong arguments or result.
        UnsupportedError: a function has no scalar form.
    """
    found, score_program, mask_program, summed = dict(features), None, None, ()
    delta = None
    if score is not None:
        scaling = Scaling(1.0, _CAP if found[SOFT_CAP.name] else None)
        found[SOFT_CAP.name] = SOFT_CAP.off  # the cap becomes part of the function
        trace = functools.partial(traced_score_function, before=scaling.before_function())
        program, arrays = _traced("--score-function", score, trace)
        score_program = in_kernel_types(program).structure
        if gradients:
            is_float = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]
            summed = tuple(index for index, own in enumerate(is_float) if own)
            shapes = [array.shape for array in arrays]
            if DTYPE_BYTES[dtype] == 2 and adds_columns(program, shapes, is_float, 0):
                delta = AskedDelta(has_sinks=found[SINKS.name])
    if mask is not None:
        program, _ = _traced("--mask-function", mask, traced_mask_function)
        mask_program = in_kernel_types(program).structure
    fixed_point = bool(summed) and found[DETERMINISTIC.name]
    asked = AskedFunctions(score_program, mask_program, gradients=summed, fixed_point=fixed_point)
    return found | {FUNCTIONS.name: asked, DELTA_FROM_SCORES.name: delta}


def mask(text: str) -> Mask:
    """The mask of a function, with the arrays that it reads.

    Args:
        text: ``"MODULE:NAME"``, as :func:`added` takes it.

    Raises:
        ValueError: the name cannot be imported.
    """
    return Mask.function(imported("--mask-function", text))


def require(score: str | None, mask: str | None) -> None:
    """Raise unless both names, as :func:`added` takes them, are those of a function of its kind.

    Raises:
        ValueError, UnsupportedError: as :func:`added` says.
    """
    if score is not None:
        _traced("--score-function", score, traced_score_function)
    if mask is not None:
        _traced("--mask-function", mask, traced_mask_function)


def _traced(flag: str, name: str, trace: Trace) -> Any:
    function = imported(flag, name)
    try:
        return trace(function)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{flag} {name}: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(error.reasons, f"{flag} {name}: {error.summary}") from error
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        raise ValueError(f"{flag} {name} raised {type(error).__name__}: {error}") from error


def imported(flag: str, text: str) -> Any:
    """What ``text`` names, ``"MODULE:NAME"``; ``flag`` is named in errors.

    Raises:
        ValueError: as :func:`added` says.
    """
    module_name, _, name = text.partition(":")
    is_file = "/" in module_name or module_name.endswith(".py")
    if not module_name or not name or is_file:
        raise ValueError(
            f"{flag} must be MODULE:NAME, for example models.attention:alibi for a function of "
            f"models/attention.py, got {text!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ValueError(
            f"{flag} {text}: the import of {module_name} raised {type(error).__name__}: {error}; "
            "modules are searched in the current directory, PYTHONPATH and the environment"
        ) from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        near = difflib.get_close_matches(name, dir(module), 1)
        advice = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ValueError(f"{flag} {text}: {error}{advice}") from error
    except Exception as error:  # whatever the user's __getattr__ raises
        raise ValueError(
            f"{flag} {text}: the attribute raised {type(error).__name__}: {error}"
        ) from error
