"""The canonical form of a call, and what all public functions make of the arguments they share."""

from __future__ import annotations

from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_memeff._api import validate
from jax_memeff._call import dropout
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import DropoutState, Operands, QkvPackedOperands
from jax_memeff._call.options import Options
from jax_memeff._op import vjp
from jax_memeff._sharding import explicit

PrecisionLike = Literal["default", "high", "highest"] | jax.lax.Precision | None

AnyOperands = TypeVar("AnyOperands", Operands, QkvPackedOperands)


class Call(NamedTuple, Generic[AnyOperands]):
    """A valid call in canonical form."""

    operands: AnyOperands
    options: Options
    batched: bool
    """Whether the user's arrays had a batch dim."""

    def run(self, with_residual: bool) -> Any:
        """The output, or the pair of it and the logsumexp."""
        out, lse = explicit.on_shards(vjp.attention, self.operands, self.options)
        if not self.batched:
            out, lse = out[0], lse[0]
        return (out, lse) if with_residual else out


class Shared(NamedTuple):
    """What the public functions have in common."""

    options: Options
    bias: jax.Array | None
    mask: Mask
    """Not canonical yet."""
    dropout: DropoutState | None
    position: Position | None


def projections(*arrays: Any) -> list[jax.Array]:
    """Query, key and value as arrays.

    NumPy's float64 becomes what jax makes of it before dtypes are compared.
    """
    names = ("query", "key", "value")
    return [
        jnp.asarray(validate.array(name, array)) for name, array in zip(names, arrays, strict=True)
    ]


def shared(
    dtype: Any,
    head_dim: int,
    scores: tuple[int, int, int, int],
    bias: Any,
    mask: Any,
    *,
    scale: Any,
    is_causal: Any,
    local_window_size: Any,
    logits_soft_cap: Any,
    dropout_rate: Any,
    dropout_key: Any,
    offsets: Any,
    precision: Any,
    deterministic_backward: Any,
    implementation: Any,
    residual_checkpoint_name: Any,
    tokens: tuple[int, int] | None = None,
) -> Shared:
    """Check the shared arguments.

    Args:
        dtype: the query's.
        head_dim: H.
        scores: (B, N, T, S).
        tokens: of query and of key, for packed sequences: segment ids have one each.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    if bias is not None:
        bias = jnp.asarray(validate.array("bias", bias))
        validate.bias(bias, dtype, scores)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)

    options = Options(
        scale=validate.scale(scale, head_dim),
        soft_cap=validate.soft_cap(logits_soft_cap),
        dropout_threshold=dropout.threshold(validate.dropout_rate(dropout_rate)),
        precision=validate.precision(precision),
        deterministic_backward=validate.flag("deterministic_backward", deterministic_backward),
        implementation=validate.implementation(implementation),
        residual_checkpoint_name=validate.residual_checkpoint_name(residual_checkpoint_name),
    )
    combined = _mask(mask, scores, tokens)
    if validate.flag("is_causal", is_causal):
        combined &= Mask.causal()
    window = validate.local_window(local_window_size)
    if window is not None:
        combined &= Mask.window(*window)

    offsets = validate.offsets(offsets)
    state = None
    if options.dropout_threshold:
        validate.dropout_key(dropout_key)
        state = dropout.state(dropout_key, scores[0], scores[1], offsets)
    return Shared(options, bias, combined, state, None if offsets is None else offsets.position())


def _mask(mask: Any, scores: tuple[int, int, int, int], tokens: tuple[int, int] | None) -> Mask:
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        validate.mask(mask, scores, tokens)
        return mask
    array = validate.array("mask", mask)
    validate.boolean_mask(array, scores)
    return Mask.boolean(array)


def lengths(name: str, value: Any, batch: int, longest: int, batched: bool) -> Any:
    """Sequence lengths, checked; one number is enough without a batch dim."""
    if value is None:
        return None
    array = validate.array(name, value)
    if array.ndim == 0 and not batched:
        array = array.reshape(1)
    validate.lengths(name, array, batch, longest)
    return array
