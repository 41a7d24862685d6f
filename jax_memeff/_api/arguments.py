"""The keyword arguments that all attention functions take: their names, types and defaults.

``dot_product_attention`` documents them. A function lists its own arguments and takes these as
``**arguments: Unpack[CommonArguments]``, which editors and type checkers expand;
:func:`in_full` does the same for ``help`` and ``inspect``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

import jax
from jax.typing import ArrayLike

from jax_memeff._call.functions import ScoreFunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.options import Implementation

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
    "return_lse": "return_residual",
    "segment_ids": "mask=jax_memeff.Mask.segments(query_ids, key_ids)",
    "sm_scale": "scale",
    "softcap": "logits_soft_cap",
    "softmax_scale": "scale",
    "window_size": _WINDOW,
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
