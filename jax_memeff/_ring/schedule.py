"""The part of the scores that each device of a ring computes at each step; all of it static.

Each of the n devices of a ring has one or two *chunks* of the sequence: runs of consecutive
positions. After ``hops`` hops a device has the keys of the device that many places before it. The
scores of one chunk of queries and one chunk of keys are a *product*. Products that a window masks
entirely are dropped, and so are steps without products.

Ring attention is by Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context" (arXiv:2310.01889). Brandon et al., "Striped Attention: Faster Ring Attention
for Causal Transformers" (arXiv:2311.09431), observed that a causal mask leaves half of the devices
idle unless each has positions from the whole sequence. They interleave single tokens. Two chunks
per device, called zigzag, balance the work as well and keep a window in few products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from jax_memeff._call.mask import Window
from jax_memeff._call.values import static_integer, takes_objects

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: dict[str, int] = {"contiguous": 1, "zigzag": 2}
"""The number of chunks of each device."""

Array = TypeVar("Array", np.ndarray, jax.Array)


def chunks_of_devices(layout: Layout, devices: int) -> np.ndarray:
    """The chunks of each device in its own order, int[devices, chunks].

    >>> chunks_of_devices("zigzag", 3).tolist()
    [[0, 5], [1, 4], [2, 3]]
    """
    rank = np.arange(devices)
    if layout == "contiguous":
        return rank[:, None]
    return np.stack([rank, 2 * devices - 1 - rank], 1)


@takes_objects
def zigzag(x: Array, axis: int, n: int) -> Array:
    """Reorder a sequence so that its n equal parts are the zigzag layout of a ring of n devices.

    The sequence is cut into 2n chunks, and part r is chunks r and 2n - 1 - r, which balances the
    work under a causal mask. Reorder everything that has one element per position alike: tokens,
    segment ids, positions of a rotary embedding, the rows of a bias. Once at the input is enough:
    the layers of the model need no change.

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
    return _take_chunks(x, axis, n, lambda chunks: chunks)


@takes_objects
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
    return _take_chunks(x, axis, n, np.argsort)


def _take_chunks(x: Any, axis: int, n: int, order: Callable[[np.ndarray], np.ndarray]) -> Any:
    """``x`` cut into 2n chunks, which are taken in an order that is made of the zigzag's."""
    if not isinstance(x, (np.ndarray, jax.Array)):
        raise TypeError(f"x must be an array of JAX or NumPy, got {type(x).__name__}")
    axis = static_integer("axis", axis, "a Python integer", "make it static")
    n = static_integer("n", n, "a Python integer", "make it static")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be a dim of x, got {axis} for shape {x.shape}")
    axis %= x.ndim
    length = x.shape[axis]
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if length % (2 * n):
        raise ValueError(
            f"x must have a multiple of 2n = {2 * n} positions along axis {axis}, got {length}; "
            "pad the sequence, and mask the padding with key_value_seq_lengths"
        )
    chunks = x.reshape(*x.shape[:axis], 2 * n, length // (2 * n), *x.shape[axis + 1 :])
    taken = order(chunks_of_devices("zigzag", n).ravel())
    return chunks.take(taken, axis=axis).reshape(x.shape)


class Product(NamedTuple):
    """The position of the scores of one chunk of queries and one of keys: integers, or arrays."""

    row: Any
    """First row among those of the device."""
    column: Any
    """First column among those that the device has at this step."""
    first_row: Any
    """First row in the whole sequence."""
    first_column: Any
    """First column in the whole sequence."""


class Step(NamedTuple):
    hops: int
    products: Product
    """Fields of np.int32[devices, products]; entries beyond a device's count are unused."""
    counts: np.ndarray
    """np.int32[devices]: the number of products of each device."""

    @property
    def count(self) -> int | None:
        """The number of products of every device; None if devices have different numbers."""
        return int(self.counts[0]) if (self.counts == self.counts[0]).all() else None


@functools.lru_cache
def steps(
    layout: Layout, devices: int, rows: int, columns: int, window: Window | None
) -> tuple[Step, ...]:
    """The steps of a ring, in the order of the hops.

    Args:
        rows, columns: numbers of them on each device.
        window: of the whole scores, with its diagonal at row 0 and column 0; None masks nothing.

    >>> ring = steps("zigzag", devices=4, rows=64, columns=64, window=Window(None, 0))
    >>> [(step.hops, step.count) for step in ring]
    [(0, 3), (1, 2), (2, 2), (3, 2)]
    """
    owned = chunks_of_devices(layout, devices)
    planned = (
        _step(owned, hops, rows // owned.shape[1], columns // owned.shape[1], window)
        for hops in range(devices)
    )
    return tuple(step for step in planned if step.counts.any())


def _step(owned: np.ndarray, hops: int, rows: int, columns: int, window: Window | None) -> Step:
    """One step; ``rows`` and ``columns`` are those of a chunk."""
    chunks = owned.shape[1]
    first_row = np.repeat(owned * rows, chunks, 1)
    first_column = np.tile(np.roll(owned, hops, 0) * columns, (1, chunks))
    # The range of column - row in a product, intersected with the window.
    lowest = first_column - (first_row + rows - 1)
    highest = first_column + columns - 1 - first_row
    if window is not None and window.left is not None:
        lowest = np.maximum(lowest, -window.left)
    if window is not None and window.right is not None:
        highest = np.minimum(highest, window.right)
    needed = lowest <= highest
    chunk = np.arange(chunks)
    # Needed products first; columns that no device needs are dropped.
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
