"""Operands with fewer batch indices than the call, and the index that each batch index reads.

:class:`jax_memeff._call.options.Divisors` holds the divisors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import (
    Item,
    Operands,
    QkvPackedOperands,
    batch_of,
    differentiable,
    is_packed,
    items,
    mapped,
)
from jax_memeff._call.options import Divisors, Options

AnyOperands = TypeVar("AnyOperands", Operands, QkvPackedOperands)


def expanded(x: jax.Array, divisor: int, batch: int) -> jax.Array:
    """``x[(arange(batch) // divisor) % x.shape[0]]``.

    >>> expanded(jnp.arange(2), 2, 8).tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    indices, rest = x.shape[0], x.shape[1:]
    if indices == batch:
        return x
    if indices == 1:
        return jnp.broadcast_to(x, (batch, *rest))
    outer = batch // (indices * divisor)
    shape = (outer, indices, divisor, *rest)
    return jnp.broadcast_to(x[None, :, None], shape).reshape(batch, *rest)


def broadcastable(x: jax.Array, divisor: int, batch: int) -> jax.Array:
    """Like :func:`expanded`, but an operand with a single batch index stays as it is."""
    return x if x.shape[0] == 1 else expanded(x, divisor, batch)


def _has_own_divisor(name: str, operands: Any) -> bool:
    operand = differentiable(operands)[name]
    return operand.may_lack_batch(is_packed(operands))


def may_sum_gradient(name: str, operands: Any) -> bool:
    """Whether the gradient may be a sum over batch indices."""
    return differentiable(operands)[name].dims[0] == "batch|1"


def gradient_shape(
    name: str, shape: tuple[int, ...], operands: AnyOperands, divisors: Divisors
) -> tuple[int, ...]:
    """The shape of the gradient of an operand of this shape: each batch index has its own.

    If the operand's first dim may be 1, the gradient is instead summed over runs of batch indices,
    as ``Divisors.gradients`` says.
    """
    if not _has_own_divisor(name, operands):
        return shape
    batch, summed = batch_of(operands), divisors.of_gradient(name)
    if not may_sum_gradient(name, operands):
        return batch, *shape[1:]
    if not summed and shape[0] == 1:
        return shape
    return batch // (summed or 1), *shape[1:]


def as_gradient(name: str, x: jax.Array, operands: Any, divisors: Divisors) -> jax.Array:
    """An operand, or its tangent, in the shape of its gradient."""
    indices = gradient_shape(name, x.shape, operands, divisors)[0]
    if indices == x.shape[0]:
        return x
    # Batch indices that sum into one gradient read one index of the operand.
    return expanded(x, divisors[name] // (divisors.of_gradient(name) or 1), indices)


def summed(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``x`` summed to ``shape``: over the dims of size 1 in it, and over runs of the first dim.

    The length of a run is the ratio of the two first dims.

    >>> summed(jnp.arange(12).reshape(4, 3), (2, 1)).tolist()
    [[15], [51]]
    """
    dims = tuple(dim for dim, size in enumerate(shape) if size == 1 != x.shape[dim])
    x = jnp.sum(x, dims, keepdims=True)
    if x.shape[0] == shape[0]:
        return x
    return jnp.sum(x.reshape(shape[0], -1, *x.shape[1:]), 1)


def with_divisors(operands: Any) -> list[Item]:
    """The arrays of a call that may have fewer batch indices than the batch."""
    packed = is_packed(operands)
    return [item for item in items(operands) if item.operand.may_lack_batch(packed)]


def changed(operands: Any, divisors: Divisors, change: Callable[[int, int], int]) -> Divisors:
    """New divisors: ``change(batch indices of an array, its divisor)``."""
    of_operands, sums = {}, {}
    batch = batch_of(operands)
    for item in with_divisors(operands):
        shape = item.array.shape
        of_operands[item.name] = change(shape[0], divisors[item.name])
        if item.operand.has_gradient and may_sum_gradient(item.name, operands):
            indices = gradient_shape(item.name, shape, operands, divisors)[0]
            sums[item.name] = change(indices, batch // indices)
    return Divisors.of(of_operands, sums)


def of_booleans(mask: Mask, divisors: Divisors) -> tuple[int, ...]:
    """The divisors of ``Mask.booleans``."""
    return tuple(divisors[f"mask.booleans.{index}"] for index in range(len(mask.booleans)))


def combined(mask: Mask, divisors: Divisors, batch: int) -> tuple[int, int]:
    """Batch indices and divisor of the conjunction of the boolean masks, or of their bits.

    If masks that are not broadcast have different divisors, the conjunction has the whole batch.
    """
    if mask.bits is not None:
        return mask.bits.shape[0], divisors["mask.bits"]
    pairs = zip(mask.booleans, of_booleans(mask, divisors), strict=True)
    different = {(x.shape[0], divisor) for x, divisor in pairs if x.shape[0] != 1}
    if not different:
        return 1, 1
    return different.pop() if len(different) == 1 else (batch, 1)


def conjunction(mask: Mask, divisors: Divisors, batch: int) -> tuple[jax.Array, int]:
    """One mask for all boolean masks, with as few batch indices as possible, and its divisor."""
    indices, divisor = combined(mask, divisors, batch)
    booleans = mask.booleans
    if indices == batch:
        pairs = zip(booleans, of_booleans(mask, divisors), strict=True)
        booleans = tuple(broadcastable(*boolean, batch) for boolean in pairs)
    return functools.reduce(jnp.logical_and, booleans), divisor


def whole(operands: AnyOperands, options: Options) -> AnyOperands:
    """The operands, expanded to the whole batch; bias and masks may still broadcast.

    An operand is copied for every batch index that reads it.
    """
    batch, packed = batch_of(operands), is_packed(operands)

    def one(item: Item) -> jax.Array:
        if not item.operand.may_lack_batch(packed):
            return item.array
        expand = broadcastable if item.operand.dims[0] == "batch|1" else expanded
        return expand(item.array, options.divisors[item.name], batch)

    return mapped(one, operands)


def with_values(operands: Any, options: Options) -> tuple[Operands, Options]:
    """The same call with three arrays, if query, key and value are one, or keys have the values."""
    if isinstance(operands, QkvPackedOperands):
        return operands.separate(), options
    if options.latent_dim is None:
        return operands, options
    divisors = options.divisors
    shared = Divisors.of(
        {**dict(divisors.operands), "value": divisors["key"]},
        dict(divisors.gradients),
    )
    value = operands.key[..., : options.latent_dim]
    options = dataclasses.replace(options, latent_dim=None, divisors=shared)
    return operands._replace(value=value), options


def without_divisors(options: Options) -> Options:
    """The options of :func:`whole` operands."""
    return dataclasses.replace(options, divisors=Divisors())
