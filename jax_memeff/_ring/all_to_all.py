"""Context parallelism by heads: each device computes the whole sequence for some of the heads.

One all-to-all reshards arrays from the sequence to the heads, and another one reshards the output
back (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3.1). In between, the call and
its derivatives are those of a single device.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff import _compat as compat
from jax_memeff._call.operands import Item, Operands, mapped
from jax_memeff._op import vjp
from jax_memeff._ring.products import Ring
from jax_memeff._ring.schedule import unzigzag, zigzag

_SEQUENCE, _HEADS = 1, 2
"""The dims of ``[B, T, N, H]``."""


def check_heads(axis_name: object, devices: int, heads: int, key_heads: int) -> None:
    """Check that every device gets whole query heads, from whole groups or from one group.

    Raises:
        ValueError: the heads do not divide.
    """
    if heads % devices:
        raise ValueError(
            f"query: method 'all_to_all' needs a multiple of {devices} heads, the size of axis "
            f"{axis_name!r}, got {heads}; shard the sequence over fewer devices, or use method "
            "'ring'"
        )
    if key_heads % devices and devices % key_heads:
        raise ValueError(
            f"key: method 'all_to_all' needs a number of heads that divides {devices}, the size of "
            f"axis {axis_name!r}, or is a multiple of it, got {key_heads}; repeat the heads of key "
            "and value (jnp.repeat along axis 2), or use method 'ring'"
        )


def attention(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    """Results of a device's rows; arguments and results as in ``vjp.attention``."""
    whole = compat.cast_to_common_varying_axes(_whole_sequence(operands, ring))
    return tuple(_to_sequence(x, ring) for x in vjp.attention(whole, ring.options))


def _whole_sequence(operands: Operands, ring: Ring) -> Operands:
    """The whole sequence for this device's heads."""
    operands = mapped(functools.partial(_replicated, ring=ring), operands)
    mask, local_rows = operands.mask, operands.query.shape[_SEQUENCE]
    return operands._replace(
        query=_to_heads(operands.query, ring),
        key=_to_heads(_for_all_devices(operands.key, ring), ring),
        value=_to_heads(_for_all_devices(operands.value, ring), ring),
        bias=None if operands.bias is None else _scores(operands.bias, local_rows, ring),
        mask=dataclasses.replace(
            mask,
            segment_ids=tuple(
                (ring.gather(query_ids), ring.gather(key_ids))
                for query_ids, key_ids in mask.segment_ids
            ),
            booleans=tuple(_scores(array, local_rows, ring) for array in mask.booleans),
        ),
    )


def _replicated(item: Item, ring: Ring) -> jax.Array:
    """This device's heads of an array that has those of all devices and no positions."""
    dims = item.operand.dims
    if "heads" not in dims or {"rows", "columns"} & set(dims):
        return item.array
    return _own_heads(item.array, dims.index("heads"), ring)


def _for_all_devices(x: jax.Array, ring: Ring) -> jax.Array:
    """Key heads, repeated to the number of devices if they are fewer: each device needs one."""
    return jnp.repeat(x, max(1, ring.devices // x.shape[_HEADS]), _HEADS)


def _to_heads(x: jax.Array, ring: Ring) -> jax.Array:
    """[B, T local, N, ...] to [B, T, N local, ...], in natural order."""
    x = lax.all_to_all(x, ring.axis_name, _HEADS, _SEQUENCE, tiled=True)
    return _natural(x, _SEQUENCE, ring)


def _to_sequence(x: jax.Array, ring: Ring) -> jax.Array:
    """The inverse of :func:`_to_heads`."""
    x = zigzag(x, _SEQUENCE, ring.devices) if ring.layout == "zigzag" else x
    return lax.all_to_all(x, ring.axis_name, _SEQUENCE, _HEADS, tiled=True)


def _scores(x: jax.Array, local_rows: int, ring: Ring) -> jax.Array:
    """[1|B, 1|N, 1|T local, 1|S] to [1|B, 1|N local, 1|T, 1|S]."""
    heads, rows = 1, 2
    # If each device has a single row, it has its own.
    is_broadcast = x.shape[rows] == 1 != local_rows
    if x.shape[heads] == 1 and is_broadcast:
        return x
    if is_broadcast:
        return _own_heads(x, heads, ring)
    if x.shape[heads] == 1:
        return _natural(lax.all_gather(x, ring.axis_name, axis=rows, tiled=True), rows, ring)
    return _natural(lax.all_to_all(x, ring.axis_name, heads, rows, tiled=True), rows, ring)


def _own_heads(x: jax.Array, axis: int, ring: Ring) -> jax.Array:
    """This device's heads of an array that has the heads of all devices."""
    size = x.shape[axis] // ring.devices
    return lax.dynamic_slice_in_dim(x, lax.axis_index(ring.axis_name) * size, size, axis)


def _natural(x: jax.Array, axis: int, ring: Ring) -> jax.Array:
    return unzigzag(x, axis, ring.devices) if ring.layout == "zigzag" else x
