"""Which part of the scores each device of a ring computes at each step; all of it static.

A ring has n devices, and each holds one or two *chunks* of the sequence: runs of neighbouring
positions. After ``hops`` hops a device holds the keys of the device that many places before it. The
scores of one chunk of queries and one chunk of keys are a *product*; those that a window masks as a
whole are in no step, and a step that has none is left out.

Ring attention is by Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context" (arXiv:2310.01889). That a causal mask leaves half of its devices idle, and
that giving each device positions from both ends of the sequence repairs it, was observed by Brandon
et al., "Striped Attention: Faster Ring Attention for Causal Transformers" (arXiv:2311.09431), who
interleave single tokens; two chunks a device, called zigzag, keep windows in few products.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from jax_memeff._call.mask import Window

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: dict[str, int] = {"contiguous": 1, "zigzag": 2}
"""How many chunks of the sequence a device holds."""

Array = TypeVar("Array", np.ndarray, jax.Array)


def chunks_of_devices(layout: Layout, devices: int) -> np.ndarray:
    """The chunks that each device holds, in its order, int[devices, chunks]; chunk 0 is the first.

    >>> chunks_of_devices("zigzag", 3).tolist()
    [[0, 5], [1, 4], [2, 3]]
    """
    rank = np.arange(devices)
    if layout == "contiguous":
        return rank[:, None]
    return np.stack([rank, 2 * devices - 1 - rank], 1)


def zigzag(x: Array, axis: int, n: int) -> Array:
    """Reorder a sequence so that its n equal parts are the zigzag layout of a ring of n devices.

    The sequence is cut into 2n chunks, and part r is chunks r and 2n - 1 - r: with a causal mask
    every device then has the same work. Everything that has one element per position is reordered
    alike: tokens, segment ids, positions of a rotary embedding, the rows of a bias. Do it once, to
    the tokens; the layers in between do not see it.

    Args:
        x: an array of JAX or NumPy; its dim ``axis`` is the whole sequence in natural order.
        axis: which dim that is; negative ones count from the end.
        n: the number of devices of the ring.

    Raises:
        ValueError: the sequence is not a multiple of 2n long, or x has no such axis.

    >>> zigzag(np.arange(8), axis=0, n=2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> unzigzag(zigzag(np.arange(8), axis=0, n=2), axis=0, n=2)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _take_chunks(x, axis, n, chunks_of_devices("zigzag", n).ravel())


def unzigzag(x: Array, axis: int, n: int) -> Array:
    """The inverse of :func:`zigzag`: back to the natural order.

    Args:
        x: an array of JAX or NumPy whose dim ``axis`` is a whole sequence in zigzag order.
        axis: which dim that is; negative ones count from the end.
        n: the number of devices of the ring.

    Raises:
        ValueError: the sequence is not a multiple of 2n long, or x has no such axis.

    >>> unzigzag(np.array([0, 3, 1, 2]), axis=0, n=2)
    array([0, 1, 2, 3])
    """
    return _take_chunks(x, axis, n, np.argsort(chunks_of_devices("zigzag", n).ravel()))


def _take_chunks(x: Any, axis: int, n: int, order: np.ndarray) -> Any:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be a dim of x, got {axis} for shape {x.shape}")
    axis %= x.ndim
    length = x.shape[axis]
    if n < 1 or length % (2 * n):
        raise ValueError(
            f"x must have a multiple of 2n = {2 * n} positions along axis {axis}, got {length}; "
            "pad the sequence, and mask what is padded by key_value_seq_lengths"
        )
    chunks = x.reshape(*x.shape[:axis], 2 * n, length // (2 * n), *x.shape[axis + 1 :])
    return chunks.take(order, axis=axis).reshape(x.shape)


class Product(NamedTuple):
    """Where the scores of one chunk of queries and one of keys stand: integers, or arrays."""

    row: Any
    """First row among those of the device."""
    column: Any
    """First column among those that the device holds at this step."""
    first_row: Any
    """First row in the whole sequence."""
    first_column: Any
    """First column in the whole sequence."""


class Step(NamedTuple):
    hops: int
    products: Product
    """Of np.int32[devices, products]; where devices have different numbers, the last are idle."""
    counts: np.ndarray
    """np.int32[devices]: how many products each device has."""

    @property
    def count(self) -> int | None:
        """How many products every device has; None when they have different numbers."""
        return int(self.counts[0]) if (self.counts == self.counts[0]).all() else None


@functools.lru_cache
def steps(
    layout: Layout, devices: int, rows: int, columns: int, window: Window | None
) -> tuple[Step, ...]:
    """The steps of a ring, in the order of the hops.

    Args:
        rows, columns: how many of each a device holds.
        window: of the whole scores, with its diagonal at row 0 and column 0; None masks nothing.

    >>> ring = steps("zigzag", devices=4, rows=64, columns=64, window=Window(None, 0))
    >>> [(step.hops, step.count) for step in ring]
    [(0, 3), (1, 2), (2, 2), (3, 2)]
    """
    held = chunks_of_devices(layout, devices)
    planned = (
        _step(held, hops, rows // held.shape[1], columns // held.shape[1], window)
        for hops in range(devices)
    )
    return tuple(step for step in planned if step.counts.any())


def _step(held: np.ndarray, hops: int, rows: int, columns: int, window: Window | None) -> Step:
    """One step in chunks of so many rows and columns."""
    chunks = held.shape[1]
    first_row = np.repeat(held * rows, chunks, 1)
    first_column = np.tile(np.roll(held, hops, 0) * columns, (1, chunks))
    # What column - row can be in a product, and what a window lets it be.
    lowest = first_column - (first_row + rows - 1)
    highest = first_column + columns - 1 - first_row
    if window is not None and window.left is not None:
        lowest = np.maximum(lowest, -window.left)
    if window is not None and window.right is not None:
        highest = np.minimum(highest, window.right)
    needed = lowest <= highest
    chunk = np.arange(chunks)
    # The needed ones first, and what no device needs is cut off.
    counts = needed.sum(1)
    order = np.argsort(~needed, axis=1, kind="stable")[:, : counts.max()]
    chunk = np.arange(chunks)
    products = (
        np.broadcast_to(np.repeat(chunk, chunks) * rows, needed.shape),
        np.broadcast_to(np.tile(chunk, chunks) * columns, needed.shape),
        first_row,
        first_column,
    )
    chosen = (np.take_along_axis(x, order, 1).astype(np.int32) for x in products)
    return Step(hops, Product(*chosen), counts.astype(np.int32))
