"""Checks of static numbers, choices and the dropout key."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_memeff._call import dropout
from jax_memeff._call.values import INT32_MAX, score_dtype, static_integer, static_number

_PRECISIONS: dict[Any, Literal["tf32x3", "tf32"]] = {
    None: "tf32x3",
    "highest": "tf32x3",
    "high": "tf32x3",
    "default": "tf32",
    jax.lax.Precision.HIGHEST: "tf32x3",
    jax.lax.Precision.HIGH: "tf32x3",
    jax.lax.Precision.DEFAULT: "tf32",
}


def scale(value: Any, head_dim: int, dtype: Any) -> float:
    """The factor of the scores; ``dtype`` is query's."""
    if value is None:
        if head_dim == 0:
            raise ValueError(
                "scale must be given when the head dim is 0: expected a number, got None, and "
                "the default 1/sqrt(head dim) does not exist"
            )
        return 1.0 / math.sqrt(head_dim)
    number = static_number("scale", value, "multiply query by it and pass scale=1.0")
    least, most = _range_of_factors(dtype)
    if number != 0 and not least <= abs(number) <= most:
        raise ValueError(
            f"scale must be 0 or between {least:.3g} and {most:.3g} in magnitude, for scores in "
            f"{_accumulator(dtype)}, got {number}"
        )
    return number


def traced_scale(value: Any, dtype: Any) -> jax.Array | None:
    """A traced factor of the scores in their dtype; None if it is static."""
    if not isinstance(value, Tracer):
        return None
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if value.shape != () or not is_real:
        raise TypeError(
            f"scale must be one number, got a traced array of {value.dtype} and shape "
            f"{value.shape}; for one scale per head use score_mod"
        )
    return value.astype(score_dtype(dtype))


def soft_cap(value: Any, scale: float, dtype: Any) -> float | None:
    """The cap of the scores, or None; ``dtype`` is query's."""
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
        most * float(jnp.finfo(_accumulator(dtype)).eps),
    )
    if scale != 0:
        highest = min(highest, abs(scale) / least)
    if not lowest <= cap <= highest:
        raise ValueError(
            f"logits_soft_cap must be between {lowest:.3g} and {highest:.3g}, for scores in "
            f"{_accumulator(dtype)} and scale {scale:.3g}, got {cap}"
        )
    return cap


def _accumulator(dtype: Any) -> np.dtype:
    return score_dtype(dtype)


def _range_of_factors(dtype: Any) -> tuple[float, float]:
    """The normal numbers x of the scores' dtype for which 1/x and x * log2(e) are normal, too."""
    info = jnp.finfo(_accumulator(dtype))
    return float(info.smallest_normal), 2.0 ** (info.maxexp - 2)


def dropout_rate(value: Any) -> float:
    rate = static_number(
        "dropout_rate", value, "pass a Python number (jax.jit's static_argnames helps)"
    )
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
    return rate


def dropout_key(value: Any, rate: float) -> None:
    if value is None:
        if rate == 0:
            return
        raise ValueError(
            "dropout_key must be given when dropout_rate > 0: expected a jax.random key, got None; "
            "pass dropout_key=jax.random.key(seed) or dropout_rate=0.0"
        )
    dropout.require_key(value)


def precision(value: Any) -> Literal["tf32x3", "tf32"]:
    name = value.lower() if isinstance(value, str) else value
    is_name = value is None or isinstance(value, (str, jax.lax.Precision))  # others may not hash
    if not is_name or name not in _PRECISIONS:
        raise ValueError(
            "precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision, got "
            f"{value!r}"
        )
    return _PRECISIONS[name]


def choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def implementation(value: Any) -> Literal["cuda", "xla"] | None:
    if isinstance(value, str) and value == "cudnn":
        raise ValueError(
            "implementation='cudnn' is jax.nn's; expected None, 'cuda' or 'xla': pass 'cuda' for "
            "this library's GPU kernels"
        )
    if not (value is None or (isinstance(value, str) and value in ("cuda", "xla"))):
        raise ValueError(f"implementation must be None, 'cuda' or 'xla', got {value!r}")
    return value


def residual_checkpoint_name(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise TypeError(
        "residual_checkpoint_name must be None or a name that a policy of jax.checkpoint saves, "
        f"such as 'context', got {value!r}"
    )


def local_window(value: Any) -> tuple[int, int] | None:
    """``local_window_size`` as (left, right)."""
    if value is None:
        return None
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be an int or (left, right), got {len(sides)} values: {value!r}"
        )
    return _window_side(sides[0]), _window_side(sides[1])


def _window_side(value: Any) -> int:
    if value is None:
        raise TypeError(
            "local_window_size must be an int or (left, right), got None; for a side without bound "
            "use mask=Mask.window(left, None)"
        )
    size = static_integer(
        "local_window_size",
        value,
        "an int or (left, right) of static integers",
        "use mask=Mask.window(left, right), whose bounds may be traced",
    )
    if size < 0:
        raise ValueError(f"local_window_size must be >= 0 on both sides, got {size}")
    return size


def max_seqlen(name: str, value: Any) -> int:
    longest = static_integer(
        name,
        value,
        "a static Python integer",
        "pass a number that no sequence is longer than (jax.jit's static_argnames helps)",
    )
    if not 0 <= longest <= INT32_MAX:
        raise ValueError(f"{name} must be in [0, {INT32_MAX}], got {longest}")
    return longest


def latent_dim(
    value_dim: Any, has_values: bool, head_dim: int, names: tuple[str, str]
) -> int | None:
    """``value_dim`` of latent attention, whose values are the first columns of the keys; else None.

    Args:
        value_dim: the user's.
        has_values: whether there is an array of values.
        head_dim: the columns of the keys.
        names: of the arrays of keys and values.

    Raises:
        ValueError: it is missing, out of range, or given beside an array of values.
        TypeError: it is not a static integer.
    """
    keys, values = names
    if has_values:
        if value_dim is not None:
            raise ValueError(
                f"value_dim must be None if {values} is given, got {value_dim!r:.80}; pass "
                f"{values}=None for values that are columns of the keys"
            )
        return None
    if value_dim is None:
        raise ValueError(
            f"value_dim must be given if {values} is None: expected the number of columns of "
            f"{keys} that are the values, got None"
        )
    dim = static_integer("value_dim", value_dim, "a Python integer", "make it static")
    if not 1 <= dim <= head_dim:
        raise ValueError(f"value_dim must be in [1, {head_dim}], the columns of {keys}, got {dim}")
    return dim
