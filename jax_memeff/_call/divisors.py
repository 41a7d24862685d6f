"""Operands that have fewer elements than the batch: :class:`jax_memeff.options.Divisors`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_memeff._call.mask import Mask
from jax_memeff._call.options import Divisors, Operands, Options, QkvPackedOperands


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


AnyOperands = TypeVar("AnyOperands", Operands, QkvPackedOperands)


def batch_of(operands: Operands | QkvPackedOperands) -> int:
    """B"""
    if isinstance(operands, QkvPackedOperands):
        return operands.query_key_value.shape[0]
    return operands.scores[0]


def shareable(operands: Operands | QkvPackedOperands) -> tuple[str, ...]:
    """The differentiable operands that may have fewer elements than the batch."""
    has_batch = isinstance(operands, Operands) and operands.sequences is None
    return ("key", "value", "bias") if has_batch else ("bias",)


def gradient_shape(
    name: str, shape: tuple[int, ...], operands: Operands | QkvPackedOperands, divisors: Divisors
) -> tuple[int, ...]:
    """The shape of the gradient of an operand of this shape: an element for each of the batch.

    That of a bias is summed over the elements of the batch that ``Divisors.bias_gradient`` says.
    """
    batch, summed = batch_of(operands), divisors.bias_gradient
    if name not in shareable(operands) or (name == "bias" and not summed and shape[0] == 1):
        return shape
    return batch // summed if name == "bias" and summed else batch, *shape[1:]


def as_gradient(name: str, x: jax.Array, operands: Any, divisors: Divisors) -> jax.Array:
    """An operand, or its tangent, in the shape of its gradient."""
    elements = gradient_shape(name, x.shape, operands, divisors)[0]
    if name not in shareable(operands) or elements == x.shape[0]:
        return x
    divisor = getattr(divisors, name)
    if name == "bias" and divisors.bias_gradient:
        # The elements that have one gradient share one of the bias.
        divisor //= divisors.bias_gradient
    return expanded(x, divisor, elements)


def summed(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The sum over dims that are 1 in the shape, and over as many elements of the first in a row
    as make that of the shape.

    >>> summed(jnp.arange(12).reshape(4, 3), (2, 1)).tolist()
    [[15], [51]]
    """
    dims = tuple(dim for dim, size in enumerate(shape) if size == 1 != x.shape[dim])
    x = jnp.sum(x, dims, keepdims=True)
    if x.shape[0] == shape[0]:
        return x
    return jnp.sum(x.reshape(shape[0], -1, *x.shape[1:]), 1)


def of_leaves(operands: Any, divisors: Divisors) -> Any:
    """The divisor of each array of the operands, in its place."""
    ones: Any = jax.tree.map(lambda _: 1, operands)
    mask = dataclasses.replace(ones.mask, booleans=divisors.of_booleans(operands.mask))
    return ones._replace(mask=mask, **{name: getattr(divisors, name) for name in _shared(operands)})


def changed(operands: Any, divisors: Divisors, change: Callable[[int, int], int]) -> Divisors:
    """Other divisors, for the elements of each array and its own divisor."""
    mask = operands.mask
    found = {
        name: change(getattr(operands, name).shape[0], getattr(divisors, name))
        for name in _shared(operands)
    }
    if operands.bias is not None:
        elements = gradient_shape("bias", operands.bias.shape, operands, divisors)[0]
        found["bias_gradient"] = change(elements, batch_of(operands) // elements)
    booleans = zip(mask.booleans, divisors.of_booleans(mask), strict=True)
    return Divisors(**found, booleans=tuple(change(x.shape[0], divisor) for x, divisor in booleans))


def _shared(operands: Operands | QkvPackedOperands) -> list[str]:
    """Those of :func:`shareable` that are present."""
    return [name for name in shareable(operands) if getattr(operands, name) is not None]


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
        name: (broadcastable if name == "bias" else expanded)(
            getattr(operands, name), getattr(options.divisors, name), batch
        )
        for name in _shared(operands)
    }
    booleans = zip(mask.booleans, options.divisors.of_booleans(mask), strict=True)
    changed["mask"] = dataclasses.replace(
        mask, booleans=tuple(broadcastable(*array, batch) for array in booleans)
    )
    return operands._replace(**changed)
