"""The canonical form of a call, and the arguments that all public functions have in common."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from jax_memeff._api import argument_arrays, argument_functions, argument_masks
from jax_memeff._api import argument_numbers as numbers
from jax_memeff._call import dropout, functions, max_logits, scaling
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import checked as offsets_of_call
from jax_memeff._call.operands.arrays import Operands, QkvPackedOperands
from jax_memeff._call.options import Options
from jax_memeff._call.values import flag
from jax_memeff._op import vjp
from jax_memeff._sharding import explicit

AnyOperands = TypeVar("AnyOperands", Operands, QkvPackedOperands)


class Call(NamedTuple, Generic[AnyOperands]):
    """A valid call in canonical form."""

    operands: AnyOperands
    options: Options
    batched: bool
    """Whether the user's arrays had a batch dim."""

    def run(self, with_residual: bool, with_max_logits: bool = False) -> Any:
        """The output; or a tuple of it, the logsumexp and the largest logits, as requested."""
        options = dataclasses.replace(self.options, row_maxima=with_max_logits)
        found = explicit.on_shards(vjp.attention, self.operands, options)
        largest = functools.partial(max_logits.of_heads, operands=self.operands)
        return results(found, with_residual, self.batched, largest)


def results(
    found: Sequence[jax.Array],
    with_residual: bool,
    batched: bool,
    largest: Callable[[jax.Array], jax.Array],
) -> Any:
    """The result of a public function: the output, or a tuple of it and what else is requested.

    Args:
        found: out, lse, and row maxima if they are asked for; with a batch dim. with_residual:
            whether lse is asked for.
        batched: whether the user's arrays had a batch dim.
        largest: computes the largest logits from the row maxima.
    """
    out, lse, *maxima = found if batched else [x[0] for x in found]
    chosen = (out, *([lse] if with_residual else []), *map(largest, maxima))
    return chosen if len(chosen) > 1 else out


class Common(NamedTuple):
    """The parts of a call that all public functions build in the same way."""

    options: Options
    mask: Mask
    """Not canonical yet, and without ``query_seq_lengths`` and ``key_value_seq_lengths``."""
    arrays: dict[str, Any]
    """The other operands that every function takes, by their names in ``Operands``."""


def common(
    dtype: Any,
    head_dim: int,
    scores: tuple[int, int, int, int],
    bias: Any,
    mask: Any,
    arguments: Mapping[str, Any],
    tokens: tuple[int, int] | None = None,
) -> Common:
    """Check the common arguments.

    Args:
        dtype: the query's.
        head_dim: H.
        scores: (B, N, T, S).
        bias: the argument of ``dot_product_attention``.
        mask: likewise.
        arguments: all of ``CommonArguments``.
        tokens: the numbers of query and of key tokens of packed sequences; each has a segment id.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    own, score_function, captured = argument_functions.score_mod(
        arguments["score_mod"], dtype, *scaling.of_call(arguments, head_dim, dtype)
    )
    combined = argument_masks.mask(mask, scores, tokens)
    if flag(
        "is_causal",
        arguments["is_causal"],
        "make it static (jax.jit's static_argnames helps), or pass mask=jax_memeff.Mask.window("
        "None, bound), whose bound may be traced: 0 is causal, and a large number is no bound",
    ):
        combined &= Mask.causal()
    window = numbers.local_window(arguments["local_window_size"])
    if window is not None:
        combined &= Mask.window(*window)

    offsets = offsets_of_call(arguments["offsets"], scores[0], scores[1])
    threshold, state = dropout.of_call(arguments, scores[0], scores[1], offsets)
    options = Options(
        own,
        score_function=score_function,
        dropout_threshold=threshold,
        precision=numbers.precision(arguments["precision"]),
        deterministic_backward=flag("deterministic_backward", arguments["deterministic_backward"]),
        implementation=numbers.implementation(arguments["implementation"]),
        residual_checkpoint_name=numbers.residual_checkpoint_name(
            arguments["residual_checkpoint_name"]
        ),
    )
    arrays = {
        "bias": argument_arrays.bias(bias, dtype, scores),
        "sinks": argument_arrays.sinks(arguments["sinks"], dtype, scores[1]),
        "dropout": state,
        "position": None if offsets is None else offsets.position(),
        "functions": None,
        "captured": captured,
    }
    if score_function is not None or combined.has_function():
        arrays["functions"] = functions.state(scores[0], scores[1], offsets)
    return Common(options, combined, arrays)
