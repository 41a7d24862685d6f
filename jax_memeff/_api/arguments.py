"""The keyword arguments of attention functions: their names, types, defaults, and checks.

``dot_product_attention`` documents them. A function lists its own arguments and takes these as
``**arguments: Unpack[CommonArguments]``, which editors and type checkers expand;
:func:`in_full` does the same for ``help`` and ``inspect``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_memeff._call.functions import ScoreFunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.options import Implementation
from jax_memeff._call.values import INT32_MAX, static_integer

PrecisionLike = Literal["default", "high", "highest"] | jax.lax.Precision | None

Function = TypeVar("Function", bound=Callable[..., Any])


class CommonArguments(TypedDict, total=False):
    """The arguments of every attention function besides its arrays, bias and mask."""

    scale: float | None
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    score_mod: ScoreFunction | None
    sinks: ArrayLike | None
    dropout_rate: float
    dropout_key: jax.Array | None
    offsets: Offsets | None
    precision: PrecisionLike
    deterministic_backward: bool
    implementation: Implementation | None
    residual_checkpoint_name: str | None


class PaddedArguments(CommonArguments, total=False):
    """The arguments of functions whose sequences are padded to one length."""

    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None


class PagedArguments(TypedDict, total=False):
    """The keyword arguments of ``paged_attention``, which documents them."""

    query_starts: ArrayLike | None
    max_query_length: int | None
    scale: float | None
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    score_mod: ScoreFunction | None
    mask: ArrayLike | Mask | None
    offsets: Offsets | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    value_dim: int | None
    batch_invariant: bool
    implementation: Implementation | None


_DEFAULTS = {
    "is_causal": False,
    "dropout_rate": 0.0,
    "deterministic_backward": False,
    "batch_invariant": False,
}
"""The default of all other arguments is None."""

_WINDOW = 'mask=jax_memeff.Mask.window(left, right, "bottom_right")'
_OF_OTHER_LIBRARIES = {
    "alibi_slopes": "score_mod",
    "attn_bias": "bias, or a jax_memeff.Mask",
    "attn_mask": "mask if it is boolean, else bias",
    "block_mask": "mask=jax_memeff.Mask.function(mask_mod)",
    "causal": 'is_causal, or mask=jax_memeff.Mask.causal("bottom_right") as in FlashAttention',
    "deterministic": "deterministic_backward",
    "dropout_p": "dropout_rate and dropout_key",
    "enable_gqa": "nothing: the shapes determine it",
    "mask_mod": "mask=jax_memeff.Mask.function(mask_mod)",
    "return_attn_probs": "return_residual",
    "return_lse": "return_residual",
    "segment_ids": "mask=jax_memeff.Mask.segments(query_ids, key_ids)",
    "sm_scale": "scale",
    "softcap": "logits_soft_cap",
    "softmax_scale": "scale",
    "window_size": f"{_WINDOW}, None for no bound",
}
"""The replacements for arguments of FlashAttention, FlexAttention, xFormers and PyTorch."""


def _default(kind: Any, name: str) -> Any:
    # New tokens end their sequence, so paged calls are causal by default.
    return True if kind is PagedArguments and name == "is_causal" else _DEFAULTS.get(name)


def with_defaults(kind: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a kind, by name.

    Raises:
        TypeError: an argument is not of that kind.
    """
    names = kind.__annotations__
    for name in arguments:
        if name in names:
            continue
        advice = f"pass {_OF_OTHER_LIBRARIES[name]}" if name in _OF_OTHER_LIBRARIES else ""
        if not advice:
            close = difflib.get_close_matches(name, names, 1)
            advice = (
                f"did you mean {close[0]!r}?"
                if close
                else f"expected one of {', '.join(sorted(names))}"
            )
        raise TypeError(f"got an unexpected keyword argument {name!r}; {advice}")
    return {name: _default(kind, name) for name in names} | dict(arguments)


def in_full(function: Function) -> Function:
    """Let ``inspect.signature`` and ``help`` show what ``**arguments: Unpack[...]`` stands for."""
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    (kind,) = get_args(get_type_hints(function)[rest.name])
    common = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(kind, name),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in kind.__annotations__.items()
    ]
    in_order = sorted([*own, *common], key=lambda parameter: parameter.kind)
    # inspect reads this attribute, which the type of functions lacks.
    function.__signature__ = signature.replace(parameters=in_order)  # type: ignore[attr-defined]
    return function


_PRECISIONS: dict[Any, Literal["tf32x3", "tf32"]] = {
    None: "tf32x3",
    "highest": "tf32x3",
    "high": "tf32x3",
    "default": "tf32",
    jax.lax.Precision.HIGHEST: "tf32x3",
    jax.lax.Precision.HIGH: "tf32x3",
    jax.lax.Precision.DEFAULT: "tf32",
}


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
    if any(side is None for side in sides):
        raise TypeError(
            f"local_window_size must be an int or (left, right), got {value!r}; for a side without "
            f"bound pass mask=jax_memeff.Mask.window{tuple(sides)}"
        )
    left, right = map(_window_side, sides)
    if left < 0 or right < 0:
        raise ValueError(
            f"local_window_size must be >= 0 on both sides, got {value!r}; "
            f"{_without_bound(left, right)}"
        )
    return left, right


def _without_bound(left: int, right: int) -> str:
    """The remedy for a window with a negative side, which FlashAttention does not bound."""
    if (left, right) == (-1, -1):
        return "pass None for no window"
    bounds = tuple(None if side == -1 else side for side in (left, right))
    if None not in bounds:
        return f"pass mask=jax_memeff.Mask.window{bounds}, whose bounds may be negative"
    return f"if -1 means no bound, as in FlashAttention, pass mask=jax_memeff.Mask.window{bounds}"


def _window_side(value: Any) -> int:
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim:
        raise TypeError(
            "local_window_size must be an int or (left, right) of static integers, got an array of "
            f"shape {tuple(value.shape)}; pass a tuple"
        )
    return static_integer(
        "local_window_size",
        value,
        "an int or (left, right) of static integers",
        "use mask=Mask.window(left, right), whose bounds may be traced",
    )


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
