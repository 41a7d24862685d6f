"""The part of a sharded call that one device computes.

The local arrays of a device are a smaller problem of the same kind, with three exceptions:

- If the number of devices along the query heads does not divide the key heads, a device has more
  key heads than it needs. It selects those that its query heads read, by its index in the mesh, and
  pads their gradient with zeros for the others. If its query heads are not whole groups, it selects
  some key heads more than once.
- If the rows of the query are sharded, windows, lengths and random bits need their positions in
  the whole sequence.
- If the sequences of a paged call are sharded, starts are relative to a device's first token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.mask import Mask, Window
from jax_memeff._call.mask.block_mask import BLOCK
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import Item, QkvPackedOperands, batch_of, mapped
from jax_memeff._call.options import Options
from jax_memeff._call.values import score_dtype
from jax_memeff._sharding.dims import dims, even_tokens
from jax_memeff._sharding.layout import KeyHeadCopies, Layout, Limit


def limits(operands: Any, options: Options) -> dict[str, Limit]:
    """The dims of the query that cannot be divided among all divisors of their size.

    Args:
        operands: those of all devices.
        options: the options of the call.
    """
    found: dict[str, Limit] = {}
    if isinstance(operands, QkvPackedOperands):
        return found
    rows, (multiple, cause) = operands.scores_shape[2], options.position_multiple
    if not can_align(operands.mask):
        found["rows"] = Limit(1, lambda devices, axes: UNALIGNABLE)
    elif multiple > 1:
        found["rows"] = Limit(
            rows // multiple if rows % multiple == 0 else 1,
            lambda devices, axes: (
                f"query: with {cause} every device needs a multiple of {multiple} rows, got {rows} "
                f"rows over {devices} devices; pad the sequence, and mask the padding by "
                "query_seq_lengths"
            ),
        )
    if even_tokens(operands) is not None:
        sequences = batch_of(operands)
        found["even_tokens"] = Limit(
            sequences,
            lambda devices, axes: (
                f"query: the number of sequences, {sequences}, cannot be divided by {devices}, the "
                f"size of {axes}; pad with sequences of length 0"
            ),
        )
    return found


def with_positions(operands: Any, layout: Layout, devices: int) -> Any:
    """A device's operands, with the positions of its rows in the whole sequence.

    Args:
        operands: those of one device.
        layout: the sharding of the call.
        devices: the number of devices among which the rows are divided.
    """
    if devices == 1:
        return operands
    _, _, rows, columns = operands.scores_shape
    first = lax.axis_index(layout.rows).astype(jnp.int32) * rows
    mask = top_left(operands.mask, rows * devices, columns)
    if mask.query_lengths is not None:
        lengths = jnp.clip(mask.query_lengths - first, 0, rows)
        mask = dataclasses.replace(mask, query_lengths=lengths)
    mask = dataclasses.replace(mask, block_masks=_own_q_blocks(mask, first, rows))
    position = operands.position or Position(jnp.int32(0), jnp.int32(0))
    position = position._replace(query=position.query + first)
    return operands._replace(mask=mask, position=position)


def _own_q_blocks(mask: Mask, first: jax.Array, rows: int) -> tuple[jax.Array, ...]:
    """The block masks of a device's rows; none if the rows begin inside a block."""
    if rows % BLOCK:
        return ()
    return tuple(
        lax.dynamic_slice_in_dim(levels, first // BLOCK, rows // BLOCK, 2)
        for levels in mask.block_masks
    )


def with_own_starts(operands: Any, layout: Layout) -> Any:
    """A device's operands, with the starts of its sequences relative to its tokens."""
    if not layout.sequences:
        return operands
    sequences, tokens = operands.sequences, operands.query.shape[1]
    count = sequences.query_lengths.shape[0]
    device = lax.axis_index(layout.sequences).astype(jnp.int32)
    starts = lax.dynamic_slice_in_dim(sequences.query_starts, device * count, count)
    starts = starts - device * tokens
    own = dataclasses.replace(
        sequences,
        query_starts=jnp.append(starts, starts[:1] + tokens),
        key_starts=sequences.key_starts[: count + 1],
    )
    return operands._replace(sequences=own)


def take_own_key_heads(x: jax.Array, names: Sequence[str], layout: Layout) -> jax.Array:
    """The key heads that a device reads, out of those that it holds.

    Args:
        x: an operand of one device.
        names: those of its dims. The batch may be several of them, so axes count from the end.
        layout: the sharding of the call.
    """
    copies = layout.key_head_copies
    if copies is None or "key_heads" not in names:
        return x
    heads, axis = _key_heads(copies), x.ndim + names.index("key_heads") - len(names)
    if heads.size == 1:
        return lax.dynamic_slice_in_dim(x, heads[0], 1, axis)
    return jnp.take(x, heads, axis)


def put_own_key_heads(x: jax.Array, layout: Layout, key_heads: int) -> jax.Array:
    """The transpose of :func:`take_own_key_heads` for ``[B, S, K, H]``: zeros for the other key
    heads.

    Sums are not rounded: their dtype is at least float32.
    """
    copies = layout.key_head_copies
    if copies is None:
        return x
    heads = _key_heads(copies)
    shape = (*x.shape[:2], key_heads, *x.shape[3:])
    if heads.size == 1:
        zeros = jnp.zeros(shape, x.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, x, heads[0], 2)
    zeros = jnp.zeros(shape, score_dtype(x.dtype))
    return zeros.at[:, :, heads].add(x.astype(zeros.dtype))


def _key_heads(copies: KeyHeadCopies) -> jax.Array:
    """The key head that each group of a device's query heads reads."""
    group = copies.group_on_device
    first = lax.axis_index(copies.axes) * copies.heads
    return (first + jnp.arange(0, copies.heads, group)) // copies.group


def take_key_heads(operands: Any, layout: Layout) -> Any:
    """:func:`take_own_key_heads` for every operand with key heads."""
    if layout.key_head_copies is None:
        return operands

    def own(item: Item, names: str) -> Any:
        return take_own_key_heads(item.array, names.split(), layout)

    return mapped(own, operands, dims(operands))


UNALIGNABLE = (
    "mask: a bottom-right window together with lengths has a diagonal for each batch index, which "
    "a sequence sharded over devices does not support; align the window top-left, or pass no "
    "lengths"
)


def can_align(mask: Mask) -> bool:
    """Whether :func:`top_left` can align the mask's windows; the arrays may be types."""
    traced = any(window.alignment == "bottom_right" for window in mask.traced_windows)
    has_lengths = mask.query_lengths is not None or mask.key_lengths is not None
    return not (has_lengths and (traced or mask.bottom_right is not None))


def top_left(mask: Mask, rows: int, columns: int) -> Mask:
    """The same mask with top-left windows only.

    Args:
        mask: of the whole sequence.
        rows, columns: T and S of the whole sequence.

    Raises:
        ValueError: a bottom-right window comes with lengths.

    >>> top_left(Mask.causal("bottom_right"), rows=2, columns=5).top_left
    Window(left=None, right=3)
    """
    if not can_align(mask):
        raise ValueError(UNALIGNABLE)
    distance = columns - rows
    windows = (
        window.moved(distance) if window.alignment == "bottom_right" else window
        for window in mask.traced_windows
    )
    mask = dataclasses.replace(mask, traced_windows=tuple(windows))
    if mask.bottom_right is None:
        return mask
    left, right = mask.bottom_right.left, mask.bottom_right.right
    window = Window.of(
        None if left is None else left - distance, None if right is None else right + distance
    )
    return dataclasses.replace(mask, bottom_right=None) & Mask(top_left=window)
