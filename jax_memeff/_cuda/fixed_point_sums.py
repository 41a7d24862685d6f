"""Gradients of captured arrays in deterministic backwards: sums independent of the order.

Kernels add in fixed point, in two 64-bit integers per element, with units ``1 / scale`` and
``2**FIXED_POINT_BITS / scale`` (``codegen/memeff/score/function_gradient.cuh``). The scale follows
from an upper bound on the gradient of a score: such gradients keep 56 bits, and derivatives of the
function may be up to 2**23. Larger terms, and terms that are not finite, make the sum NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_memeff._call.operands import QkvPackedOperands
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import sequence_of_tokens
from jax_memeff.codegen.functions.sums import FIXED_POINT_BITS, FIXED_POINT_WORDS

_BITS = 56
_CARRY_BITS = FIXED_POINT_BITS - 32
_LEAST, _LARGEST = 2.0**-60, 2.0**60
_LEAST_SQUARES = 2.0**-100


def sums_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the int32 array of sums for a gradient ``[B~, ...]``.

    >>> sums_shape((2, 3, 5)), sums_shape((2,))
    ((2, 3, 20), (2, 4))
    """
    batch, *dims = shape
    return (batch, *dims[:-1], (dims[-1] if dims else 1) * FIXED_POINT_WORDS)


def scale(*leaves: jax.Array, tree: Any, options: Options) -> jax.Array:
    """A power of two, float32[1], from the arguments of ``attention_bwd``.

    The gradient of a score is ``p (dP - delta)`` with ``p <= 1``, ``|dP| <= |dO| |v|`` and
    ``|delta| <= |dO| |O| + |dlse|``. Rows without keys, and rows that are not finite, are left out.
    """
    operands, out, lse, dout, dlse = jax.tree.unflatten(tree, leaves)
    if isinstance(operands, QkvPackedOperands):
        operands = operands.separate()
    is_row = lse > -jnp.inf
    gradients = _largest(_root_mean_squares(dout), is_row)
    values = _largest(_root_mean_squares(operands.value), _valid_keys(operands))
    outputs = _largest(_root_mean_squares(out), is_row)
    # Only finite numbers are multiplied, because 0 * inf is NaN.
    bound = gradients * values * options.kept_scale + gradients * outputs
    bound *= dout.shape[-1]
    if dlse is not None:
        bound += _largest(jnp.abs(dlse.astype(jnp.float32)), is_row)
    bound = jnp.clip(bound, _LEAST, _LARGEST)
    # The next power of two: the addition carries into the exponent, and the mask keeps only that.
    bits = jax.lax.bitcast_convert_type(bound, jnp.int32)
    power = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return (2.0**_BITS / power)[None]


def rounded(sums: jax.Array, scale: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """The gradient from its sums, rounded once.

    >>> one_and_a_half = jnp.array([[3, 0, 0, 0]], jnp.int32)
    >>> rounded(one_and_a_half, jnp.array([2.0]), (1, 1), jnp.float32)
    Array([[1.5]], dtype=float32)
    """
    words = sums.reshape(*shape, 2, 2).astype(jnp.uint32)
    (low, carry), (high, top) = ((words[..., i, 0], words[..., i, 1]) for i in range(2))
    # The bits of the first sum beyond its unit belong to the second one.
    above = (carry.astype(jnp.int32) >> _CARRY_BITS).astype(jnp.uint32)
    carry &= (1 << _CARRY_BITS) - 1
    whole = high + above
    top += (above >> 31) * jnp.uint32(0xFFFFFFFF) + (whole < high).astype(jnp.uint32)
    is_negative = top.astype(jnp.int32) < 0
    # Negate first: no part is then negative, so their float32 sum does not cancel.
    rest_low = jnp.uint32(0) - low
    rest_carry = jnp.uint32(1 << _CARRY_BITS) - carry - (low != 0).astype(jnp.uint32)
    parts = (
        (jnp.where(is_negative, ~top, top), 2.0 ** (FIXED_POINT_BITS + 32)),
        (jnp.where(is_negative, ~whole, whole), 2.0**FIXED_POINT_BITS),
        (jnp.where(is_negative, rest_carry, carry), 2.0**32),
        (jnp.where(is_negative, rest_low, low), 1.0),
    )
    total = sum(part.astype(jnp.float32) * unit for part, unit in reversed(parts))
    total = jnp.where(is_negative, -total, total) / scale[0]
    # A term out of range makes the top two bits different.
    is_marked = (top ^ (top << 1)).astype(jnp.int32) < 0
    return jnp.where(is_marked, jnp.nan, total).astype(dtype)


def _root_mean_squares(array: jax.Array) -> jax.Array:
    """The root mean square of each row, or a bound on it; finite if all elements are.

    Squares can overflow and underflow in float32. Such rows use their largest element as the bound;
    both reductions read the array once.
    """
    array = array.astype(jnp.float32)
    squares, largest = jnp.mean(jnp.square(array), -1), jnp.max(jnp.abs(array), -1)
    is_in_range = (squares > _LEAST_SQUARES) & jnp.isfinite(squares)
    return jnp.where(is_in_range, jnp.sqrt(squares), largest)


def _largest(array: jax.Array, is_valid: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(is_valid & jnp.isfinite(array), array, 0), initial=0)


def _valid_keys(operands: Any) -> jax.Array:
    """Which rows of the values are within the lengths; broadcasts to [B, S, K]."""
    tokens = jnp.arange(operands.value.shape[1], dtype=jnp.int32)
    if operands.sequences is not None:
        sequences = operands.sequences
        index = sequence_of_tokens(sequences.key_starts, tokens.size)
        place = tokens - sequences.key_starts[index]
        return ((place >= 0) & (place < sequences.key_lengths[index]))[:, None]
    lengths = operands.mask.key_lengths
    if lengths is None or lengths.shape[0] != operands.value.shape[0]:
        longest = tokens.size if lengths is None else jnp.max(lengths)
        return (tokens < longest)[:, None]
    return (tokens < lengths[:, None])[..., None]
