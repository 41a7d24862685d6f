"""A call in its one canonical form, and what all public functions do to bring it there.

The values of device and traced arrays are not readable here. The semantics define what values out
of range mean, and ``jax_memeff.check`` looks at them eagerly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._api.arguments import (
    implementation,
    local_window,
    precision,
    residual_checkpoint_name,
)
from jax_memeff._api.arrays import bias_and_sinks
from jax_memeff._call import dropout, functions, scaling
from jax_memeff._call.mask import Mask, checks
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.offsets import checked as offsets_of_call
from jax_memeff._call.operands import Operands, QkvPackedOperands, is_packed
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import sequence_of_tokens
from jax_memeff._call.values import flag
from jax_memeff._op import vjp
from jax_memeff._sharding import explicit

AnyOperands = TypeVar("AnyOperands", Operands, QkvPackedOperands)


class AttentionCall(NamedTuple, Generic[AnyOperands]):
    """A valid call in canonical form."""

    operands: AnyOperands
    options: Options
    batched: bool
    """Whether the user's arrays had a batch dim."""

    def run(self, with_residual: bool, with_max_logits: bool = False) -> Any:
        """The output; or a tuple of it, the logsumexp and the max logits, as requested."""
        options = dataclasses.replace(self.options, row_maxima=with_max_logits)
        outputs = explicit.on_shards(vjp.attention, self.operands, options)
        of_maxima = functools.partial(max_logits, operands=self.operands)
        return results(outputs, with_residual, self.batched, of_maxima)


def results(
    outputs: Sequence[jax.Array],
    with_residual: bool,
    batched: bool,
    of_maxima: Callable[[jax.Array], jax.Array],
) -> Any:
    """The result of a public function: the output, or a tuple of it and what else is requested.

    Args:
        outputs: out, lse, and row maxima if they are asked for; with a batch dim.
        with_residual: whether lse is asked for.
        batched: whether the user's arrays had a batch dim.
        of_maxima: computes the max logits from the row maxima.
    """
    out, lse, *row_maxima = outputs if batched else [x[0] for x in outputs]
    chosen = (out, *([lse] if with_residual else []), *map(of_maxima, row_maxima))
    return chosen if len(chosen) > 1 else out


def max_logits(row_maxima: jax.Array, operands: Any) -> jax.Array:
    """The max logit of each head, which has no derivative; -inf if no row has a valid score.

    Args:
        row_maxima: [B, T, N] or [T, N]; [tokens, N] for packed sequences.
        operands: those of the call.

    Returns:
        [B, N] or [N]; [B, N] for packed sequences.
    """
    row_maxima = lax.stop_gradient(row_maxima)
    if not is_packed(operands):
        return jnp.max(row_maxima, -2, initial=-jnp.inf)
    # Tokens that belong to no sequence have -inf, so they may be assigned to any sequence.
    sequence = sequence_of_tokens(operands.sequences.query_starts, row_maxima.shape[0])
    of_sequences = functools.partial(
        jax.ops.segment_max,
        segment_ids=sequence,
        num_segments=operands.scores_shape[0],
        indices_are_sorted=True,
    )
    # Head by head: a scatter has no rule for explicitly sharded heads, but a vmapped one does.
    return jax.vmap(of_sequences, 1, 1)(row_maxima)


class Common(NamedTuple):
    """The parts of a call that all public functions build in the same way."""

    options: Options
    mask: Mask
    """Not canonical yet, and without ``query_seq_lengths`` and ``key_value_seq_lengths``."""
    arrays: dict[str, Any]
    """The other operands that every function takes, by their names in ``Operands``."""


def canonical(
    query_dtype: Any,
    head_dim: int,
    scores_shape: tuple[int, int, int, int],
    key_heads: int,
    bias: Any,
    mask: Any,
    arguments: Mapping[str, Any],
    tokens: tuple[int, int] | None = None,
) -> Common:
    """Check the common arguments.

    Args:
        query_dtype: the query's.
        head_dim: H.
        scores_shape: (B, N, T, S).
        key_heads: K.
        bias: the argument of ``dot_product_attention``.
        mask: likewise.
        arguments: all of ``CommonArguments``.
        tokens: the numbers of query and of key tokens of packed sequences; segment ids and lists
            of keys belong to tokens.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    batch, heads = scores_shape[:2]
    scaled, score_function, captured = scaling.canonical(arguments, head_dim, query_dtype)
    combined = checked_mask(mask, scores_shape, tokens, key_heads)
    if flag(
        "is_causal",
        arguments["is_causal"],
        "make it static (jax.jit's static_argnames helps), or pass mask=jax_memeff.Mask.window("
        "None, bound), whose bound may be traced: 0 is causal, and a large number is no bound",
    ):
        combined &= Mask.causal()
    window = local_window(arguments["local_window_size"])
    if window is not None:
        combined &= Mask.window(*window)

    offsets = offsets_of_call(arguments["offsets"], batch, heads)
    threshold, state = dropout.canonical(arguments, batch, heads, offsets)
    options = Options(
        scaled,
        score_function=score_function,
        dropout_threshold=threshold,
        precision=precision(arguments["precision"]),
        deterministic_backward=flag("deterministic_backward", arguments["deterministic_backward"]),
        implementation=implementation(arguments["implementation"]),
        residual_checkpoint_name=residual_checkpoint_name(arguments["residual_checkpoint_name"]),
    )
    bias, sinks = bias_and_sinks(bias, arguments["sinks"], query_dtype, scores_shape)
    others = {
        "bias": bias,
        "sinks": sinks,
        "dropout": state,
        "position": None if offsets is None else offsets.position(),
        "functions": None,
        "captured": captured,
    }
    if score_function is not None or combined.has_function():
        others["functions"] = functions.state(batch, heads, offsets)
    return Common(options, combined, others)


def padded(
    common: Common,
    scores_shape: tuple[int, int, int, int],
    arguments: Mapping[str, Any],
    batched: bool,
) -> Mask:
    """The canonical mask of a padded call, with the lengths of its arguments."""
    batch, _, *sizes = scores_shape
    rows, columns = sizes
    mask = common.mask & padded_lengths(arguments, batch, (rows, columns), batched)
    mask = mask.canonical(batch, rows, columns)
    return compiled(mask, Frame.of(mask, (rows, columns), arguments["offsets"]))


def padded_lengths(
    arguments: Mapping[str, Any], batch: int, longest: tuple[int, int], batched: bool
) -> Mask:
    """The mask of ``query_seq_lengths`` and ``key_value_seq_lengths``, [B] each.

    One number is enough without a batch dim.
    """

    def checked(name: str, longest: int) -> Any:
        value = arguments[name]
        if value is None:
            return None
        return checks.lengths(name, value, batch, longest, batched=batched)

    return Mask.lengths(
        query=checked("query_seq_lengths", longest[0]),
        key=checked("key_value_seq_lengths", longest[1]),
    )


def checked_mask(
    value: Any,
    scores_shape: tuple[int, int, int, int],
    tokens: tuple[int, int] | None = None,
    key_heads: int | None = None,
) -> Mask:
    """The mask as a ``Mask``, each of its arrays checked against the scores [B, N, T, S].

    Packed sequences have a segment id and a list of keys for each of their ``tokens``.
    """
    if value is None:
        return Mask()
    require_no_text_or_function(value)
    if not isinstance(value, Mask):
        return Mask.boolean(checks.boolean(value, scores_shape))
    return checks.checked(value, scores_shape, tokens, key_heads=key_heads)


def require_no_text_or_function(value: Any) -> None:
    """Raise ``TypeError`` for a name, or a function, that other libraries take as a mask."""
    if isinstance(value, str):
        raise TypeError(
            f"mask must be a boolean array or a jax_memeff.Mask, got {value!r}; pass "
            "is_causal=True, or mask=jax_memeff.Mask.causal()"
        )
    if not callable(value):
        return
    if value is Mask:
        got, remedy = "the class Mask", "jax_memeff.Mask.causal(), for example"
    elif (name := _method_of_mask(value)) is not None:
        got, remedy = f"Mask.{name}, which was not called", f"jax_memeff.Mask.{name}(...)"
    else:
        got, remedy = "a function", "jax_memeff.Mask.function(function)"
    raise TypeError(
        f"mask must be a boolean array or a jax_memeff.Mask, got {got}; pass mask={remedy}"
    )


def _method_of_mask(value: Any) -> str | None:
    """The name of a method of ``Mask``, such as ``Mask.causal``; None for other functions."""
    name = getattr(value, "__name__", "")
    function = getattr(value, "__func__", value)
    return name if name and getattr(Mask, name, None) is function else None
