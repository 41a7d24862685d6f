"""Operands that have fewer elements than the batch: :class:`jax_memeff.options.Divisors`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_memeff.mask import Mask
from jax_memeff.options import Divisors, Operands, Options, PackedOperands


def expanded(x: jax.Array, divisor: int, batch: int) -> jax.Array:
    """``x[(arange(batch) // divisor) % x.shape[0]]``.

    >>> expanded(jnp.arange(2), 2, 8).tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    elements, rest = x.shape[0], x.shape[1:]
    if elements == batch:
        return x
    if elements == 1:
        return jnp.broadcast_to(x, (batch, *rest))
    outer = batch // (elements * divisor)
    shape = (outer, elements, divisor, *rest)
    return jnp.broadcast_to(x[None, :, None], shape).reshape(batch, *rest)


def broadcastable(x: jax.Array, divisor: int, batch: int) -> jax.Array:
    """:func:`expanded`, but one element stays one."""
    return x if x.shape[0] == 1 else expanded(x, divisor, batch)


AnyOperands = TypeVar("AnyOperands", Operands, PackedOperands)


def batch_of(operands: Operands | PackedOperands) -> int:
    """B"""
    if isinstance(operands, PackedOperands):
        return operands.query_key_value.shape[0]
    return operands.scores[0]


def shareable(operands: Operands | PackedOperands) -> tuple[str, ...]:
    """The differentiable operands that may have fewer elements than the batch."""
    has_batch = isinstance(operands, Operands) and operands.sequences is None
    return ("key", "value", "bias") if has_batch else ("bias",)


def whole_array(name: str, x: jax.Array, options: Options, batch: int) -> jax.Array:
    """A shareable operand, or its tangent, with an element for each of the batch."""
    place = broadcastable if name == "bias" else expanded
    return place(x, getattr(options.divisors, name), batch)


def gradient_shape(
    name: str, shape: tuple[int, ...], operands: Operands | PackedOperands
) -> tuple[int, ...]:
    """The shape of the gradient of an operand of this shape: an element for each of the batch.

    That of a bias of one element is summed over the batch.
    """
    if name not in shareable(operands) or (name == "bias" and shape[0] == 1):
        return shape
    return batch_of(operands), *shape[1:]


def combined(mask: Mask, divisors: Divisors, batch: int) -> tuple[int, int]:
    """Elements and divisor of the conjunction of the boolean masks.

    It has an element for each of the batch where masks, other than those that broadcast, are shared
    in different ways.
    """
    own = zip(mask.booleans, divisors.of_booleans(mask), strict=True)
    shares = {(x.shape[0], divisor) for x, divisor in own if x.shape[0] != 1}
    if not shares:
        return 1, 1
    return shares.pop() if len(shares) == 1 else (batch, 1)


def conjunction(mask: Mask, divisors: Divisors, batch: int) -> tuple[jax.Array, int]:
    """The boolean masks as one, which has as few elements as they allow, and its divisor."""
    elements, divisor = combined(mask, divisors, batch)
    booleans = mask.booleans
    if elements == batch:
        own = zip(booleans, divisors.of_booleans(mask), strict=True)
        booleans = tuple(broadcastable(*boolean, batch) for boolean in own)
    return functools.reduce(jnp.logical_and, booleans), divisor


def whole(operands: AnyOperands, options: Options) -> AnyOperands:
    """The same operands with an element for each of the batch; bias and masks may still broadcast.

    They are copied as often as they are shared.
    """
    batch, mask = batch_of(operands), operands.mask
    changed: dict[str, Any] = {
        name: whole_array(name, getattr(operands, name), options, batch)
        for name in shareable(operands)
        if getattr(operands, name) is not None
    }
    booleans = zip(mask.booleans, options.divisors.of_booleans(mask), strict=True)
    changed["mask"] = dataclasses.replace(
        mask, booleans=tuple(broadcastable(*array, batch) for array in booleans)
    )
    return operands._replace(**changed)


def whole_call(leaves: Any, params: dict[str, Any]) -> list[jax.Array]:
    """Operands of the same bind of a primitive, without shared ones."""
    arguments: Any = jax.tree.unflatten(params["tree"], leaves)
    if isinstance(arguments, (Operands, PackedOperands)):
        arguments = (arguments,)
    operands, *rest = arguments
    return jax.tree.leaves((whole(operands, params["options"]), *rest))
