"""The part of a sharded call that one device computes.

The local arrays of a device are a smaller problem of the same kind, with two exceptions:

- If there are more devices than key heads, a device needs one of the key heads that it has. It
  slices that head by its index in the mesh, and pads the gradient with zeros for the others.
- If the rows of the query are sharded, windows, lengths and dropout need their positions in the
  whole sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import mapped
from jax_memeff._call.options import Options
from jax_memeff._sharding.alignment import top_left
from jax_memeff._sharding.layout import Layout

_KEY_HEADS = 2
"""The dim of the key heads in ``[B, S, K, H]``."""

_DROPOUT_BLOCK = 16
"""With dropout in the kernels, the first row is a multiple of this (``Offsets.query``)."""


def check_rows(operands: Any, options: Options, devices: int) -> None:
    """Check that the rows of a call can be divided.

    Args:
        operands: of all devices.
        devices: the number of devices among which the rows are divided.

    Raises:
        ValueError: with dropout, a device would not have a multiple of 16 rows; or a bottom-right
            window comes with lengths.
    """
    if devices == 1:
        return
    _, _, rows, columns = operands.scores
    top_left(operands.mask, rows, columns)
    if options.dropout_threshold and rows // devices % _DROPOUT_BLOCK:
        raise ValueError(
            f"query: with dropout every device needs a multiple of {_DROPOUT_BLOCK} rows, got "
            f"{rows} rows over {devices} devices; pad the sequence, and mask the padding by "
            "query_seq_lengths"
        )


def with_positions(operands: Any, layout: Layout, devices: int) -> Any:
    """A device's operands, with the positions of its rows in the whole sequence.

    Args:
        operands: of one device.
        layout: the sharding of the call.
        devices: the number of devices among which the rows are divided.
    """
    if devices == 1:
        return operands
    _, _, rows, columns = operands.scores
    first = lax.axis_index(layout.rows).astype(jnp.int32) * rows
    mask = top_left(operands.mask, rows * devices, columns)
    if mask.query_lengths is not None:
        lengths = jnp.clip(mask.query_lengths - first, 0, rows)
        mask = dataclasses.replace(mask, query_lengths=lengths)
    position = operands.position or Position(jnp.int32(0), jnp.int32(0))
    position = position._replace(query=position.query + first)
    return operands._replace(mask=mask, position=position)


def take_key_head(x: jax.Array, layout: Layout) -> jax.Array:
    """The key head that a device needs, of the key heads ``[B, S, K, H]`` that it has."""
    if layout.key_head_copies is None:
        return x
    return lax.dynamic_slice_in_dim(x, _key_head(layout, x.shape[_KEY_HEADS]), 1, _KEY_HEADS)


def put_key_head(x: jax.Array, layout: Layout, key_heads: int) -> jax.Array:
    """The transpose of :func:`take_key_head`: zeros for the other key heads."""
    if layout.key_head_copies is None:
        return x
    shape = (*x.shape[:_KEY_HEADS], key_heads, *x.shape[_KEY_HEADS + 1 :])
    start = _key_head(layout, key_heads)
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, _KEY_HEADS)


def _key_head(layout: Layout, key_heads: int) -> jax.Array:
    axes, devices = layout.key_head_copies or ((), 1)
    return lax.axis_index(axes) * key_heads // devices


def take_key_heads(operands: Any, layout: Layout) -> Any:
    """:func:`take_key_head` for every operand with key heads."""
    if layout.key_head_copies is None:
        return operands
    return mapped(
        lambda item: (
            take_key_head(item.array, layout) if "key_heads" in item.operand.dims else item.array
        ),
        operands,
    )
