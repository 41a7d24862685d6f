"""Scale, soft cap and score function: how products of query and key become scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_memeff._call.mask import Mask
from jax_memeff._call.values import require_static, score_dtype, static_number
from jax_memeff._functions.trace import BeforeFunction, traced_score_function
from jax_memeff.codegen.functions import builtin
from jax_memeff.codegen.functions.program import Program

_LEAST_SOFTMAX_SCALE = 1e-6
"""A larger scale multiplies the sum of a score and its bias. Any other scale multiplies the score
before the bias is added."""

_PER_HEAD = "for one scale per head use score_mod"


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The static scaling of a call: the product of query and key times the scale, then capped.

    If the call has a score function, the soft cap is part of the function's program.
    """

    scale: float
    soft_cap: float | None = None

    def capped(self, scores: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Scaled products after the soft cap, and its derivative; None if there is no cap."""
        return (scores, None) if self.soft_cap is None else _cap_and_slope(scores, self.soft_cap)

    def before_function(self, traced_scale: jax.Array | None = None) -> BeforeFunction:
        """The first part of a score function's program.

        The soft cap is a literal, so that another cap has the same structure.

        Args:
            traced_scale: multiplies the score before the cap; the program reads it as an array.
        """

        def scaled_and_capped(score: jax.Array, *caps: jax.Array) -> jax.Array:
            score = score if traced_scale is None else score * traced_scale
            return _capped(score, *caps) if caps else score

        return BeforeFunction(scaled_and_capped, () if self.soft_cap is None else (self.soft_cap,))

    def without_cap(self) -> Scaling:
        """The scaling of a call whose program begins with the soft cap."""
        return dataclasses.replace(self, soft_cap=None)

    def instead_of(self, program: Program) -> Scaling | None:
        """The scaling that equals this scale followed by ``program``, or None if there is none.

        Args:
            program: begins with the soft cap, if there is one.
        """
        if builtin.is_identity(program):
            return self.without_cap()
        cap = builtin.soft_cap(program)
        if cap is None:
            return None
        # The program may be the cap alone, which the argument has in full precision.
        return self if self.soft_cap is not None else dataclasses.replace(self, soft_cap=cap)

    def kernel_factors(self, has_function: bool) -> tuple[float, float, float, float]:
        """The fields of ``ScoreScale`` (ffi/include/memeff/params.h).

        Args:
            has_function: whether the call has a score function.

        >>> Scaling(0.5, soft_cap=2.0).kernel_factors(has_function=False)[0]
        0.25
        """
        scale, cap, log2e = self.scale, self.soft_cap, math.log2(math.e)
        if has_function:
            prescale, softmax_scale = scale, log2e  # functions take the score itself
        elif cap is not None:
            prescale, softmax_scale = scale / cap, cap * log2e
        elif scale > _LEAST_SOFTMAX_SCALE:
            prescale, softmax_scale = 1.0, scale * log2e
        else:
            prescale, softmax_scale = scale * log2e, 1.0
        return prescale, softmax_scale, scale, log2e / softmax_scale


def canonical(
    arguments: Mapping[str, Any], head_dim: int, dtype: Any
) -> tuple[Scaling, Program | None, tuple[jax.Array, ...]]:
    """The static scaling of a call, the program of its scores, and the arrays that it reads.

    The arrays are [1, ...]. The program contains the traced scale, the soft cap and the score
    function. It is None if the scaling alone does the same.

    Args:
        arguments: all of ``CommonArguments``.
        head_dim: H.
        dtype: the query's. If it is float64, the scores are, too.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    traced = _traced_scale(arguments["scale"], dtype)
    scale = 1.0 if traced is not None else _static_scale(arguments["scale"], head_dim, dtype)
    scaling = Scaling(scale, _soft_cap(arguments["logits_soft_cap"], scale, dtype))
    score_mod = _checked_function(arguments["score_mod"])
    if score_mod is None and traced is None:
        return scaling, None, ()
    program, arrays = traced_score_function(
        _same_score if score_mod is None else score_mod,
        "float64" if score_dtype(dtype) == np.dtype("float64") else "float32",
        scaling.before_function(traced),
    )
    if traced is None and (same := scaling.instead_of(program)) is not None:
        return same, None, ()
    return scaling.without_cap(), program, tuple(jnp.asarray(x)[None] for x in arrays)


def _checked_function(score_mod: Any) -> Any:
    if isinstance(score_mod, Mask):
        raise TypeError(
            "score_mod must be a function of (score, b, h, q, k), got a Mask; pass mask="
        )
    if score_mod is not None and not callable(score_mod):
        raise TypeError(
            "score_mod must be a function of (score, b, h, q, k), for example "
            f"lambda s, b, h, q, k: s + slopes[h] * (k - q), got {score_mod!r:.80}; an array to "
            "add is bias"
        )
    return score_mod


def _same_score(score: jax.Array, b: Any, h: Any, q: Any, k: Any) -> jax.Array:
    return score


def is_in_range(scale: float, dtype: Any) -> bool:
    """Whether scores can be multiplied by a scale without loss; ``dtype`` is the query's.

    >>> is_in_range(0.125, "float32"), is_in_range(1e-40, "float32"), is_in_range(0, "float32")
    (True, False, True)
    """
    least, most = _range_of_factors(dtype)
    return scale == 0 or least <= abs(scale) <= most


def _static_scale(value: Any, head_dim: int, dtype: Any) -> float:
    if value is None:
        require_static(
            {"query": (head_dim,)},
            where="the head dim must be static",
            remedy="export a program for each head dim",
        )
        if head_dim == 0:
            raise ValueError(
                "scale must be given when the head dim is 0: expected a number, got None, and "
                "the default 1/sqrt(head dim) does not exist"
            )
        return 1.0 / math.sqrt(head_dim)
    number = static_number(
        "scale", value, "multiply query by it and pass scale=1.0", instead_of_array=_PER_HEAD
    )
    if not is_in_range(number, dtype):
        least, most = _range_of_factors(dtype)
        raise ValueError(
            f"scale must be 0 or between {least:.3g} and {most:.3g} in magnitude, for scores in "
            f"{score_dtype(dtype)}, got {number}"
        )
    return number


def _traced_scale(value: Any, dtype: Any) -> jax.Array | None:
    """A traced factor of the scores in their dtype; None if it is static."""
    if not isinstance(value, Tracer):
        return None
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if value.shape != () or not is_real:
        raise TypeError(
            f"scale must be one number, got a traced array of {value.dtype} and shape "
            f"{value.shape}; {_PER_HEAD}"
        )
    return value.astype(score_dtype(dtype))


def _soft_cap(value: Any, scale: float, dtype: Any) -> float | None:
    if value is None:
        return None
    cap = static_number(
        "logits_soft_cap",
        value,
        "pass a Python number (a cap cannot be folded into query; jax.jit's static_argnames helps)",
    )
    if cap <= 0:
        raise ValueError(f"logits_soft_cap must be > 0, got {cap}; pass None for no cap")
    # Kernels compute cap * tanh((scale / cap) * q.k), so the quotient must fit, too. A score below
    # cap * least counts as 0, because its quotient is denormal: with larger caps that would show.
    least, most = _range_of_factors(dtype)
    lowest, highest = (
        max(least, abs(scale) / most),
        most * float(jnp.finfo(score_dtype(dtype)).eps),
    )
    if scale != 0:
        highest = min(highest, abs(scale) / least)
    if not lowest <= cap <= highest:
        raise ValueError(
            f"logits_soft_cap must be between {lowest:.3g} and {highest:.3g}, for scores in "
            f"{score_dtype(dtype)} and scale {scale:.3g}, got {cap}"
        )
    return cap


def _range_of_factors(dtype: Any) -> tuple[float, float]:
    """The normal numbers x of the scores' dtype for which 1/x and x * log2(e) are normal, too."""
    info = jnp.finfo(score_dtype(dtype))
    return float(info.smallest_normal), 2.0 ** (info.maxexp - 2)


def _cap_and_slope(score: jax.Array, cap: float | jax.Array) -> tuple[jax.Array, jax.Array]:
    """``cap * tanh(score / cap)``, and its derivative by the score."""
    tanh = jnp.tanh(score / cap)
    return cap * tanh, 1 - tanh * tanh


@jax.custom_jvp
def _capped(score: jax.Array, cap: jax.Array) -> jax.Array:
    """The capped score.

    JAX's own derivative would multiply and divide each score by the cap.
    """
    return _cap_and_slope(score, cap)[0]


@_capped.defjvp
def _capped_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    capped, slope = _cap_and_slope(*primals)
    return capped, slope * tangents[0]  # the cap is static
