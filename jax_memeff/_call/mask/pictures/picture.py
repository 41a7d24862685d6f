"""A picture of one (batch, head) slice of the scores."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

from jax_memeff._call import values
from jax_memeff._call.mask import checks, expression
from jax_memeff._call.mask.kv_blocks import BlockTable
from jax_memeff._call.mask.pictures import figure, text, tile_classes
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.offsets import checked as offsets_of_call
from jax_memeff._call.values import size

if TYPE_CHECKING:
    from jax_memeff._call.mask.mask import Mask

MOST_ELEMENTS = 512
"""The most rows, and the most columns, of a picture. If a mask has more, the picture samples this
many, evenly spaced."""

MOST_TILES = 2**26
"""The most tiles of a picture, which take a few bytes each: a million rows and columns in tiles of
128 x 128."""


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """Which scores of one (batch, head) slice are valid, and what kernels do with each tile.

    ``str(picture)`` is a drawing in characters, :meth:`show` prints it, and :meth:`plot` draws it
    with matplotlib.
    """

    sizes: tuple[int, int]
    """T and S."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""
    classes: np.ndarray
    """uint8 [Q blocks, KV blocks]: 0 for a skipped tile, 1 for a full one, 2 for a partial one."""
    rows: np.ndarray
    """int [r]: the local indices of the sampled rows: all of them, or 512."""
    columns: np.ndarray
    """int [c], likewise for columns."""
    valid: np.ndarray
    """bool [r, c]: whether these elements are valid: no mask, score function or bias masks them."""
    values: np.ndarray | None = None
    """float [r, c]: a score of 0 after the score function and the bias, if there are any."""
    title: str = ""

    def __str__(self) -> str:
        return text.drawing(self)

    def show(self) -> None:
        """Print the drawing in characters."""
        print(self)

    def plot(self, axes: Any = None) -> Any:
        """Draw with matplotlib.

        Args:
            axes: a ``matplotlib.axes.Axes``; None makes a figure with ``pyplot``.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError: ``axes`` is not an Axes.
        """
        return figure.drawing(self, axes)


def of_mask(
    mask: Mask,
    sizes: tuple[Any, Any],
    tile: tuple[int, int],
    *,
    batch: int = 0,
    head: int = 0,
    offsets: Offsets | None = None,
) -> Picture:
    """The picture of a mask, which need not be canonical.

    Raises:
        TypeError: the mask is traced, or a size is not an integer.
        ValueError: a size is below 1, or ``batch`` or ``head`` is beyond the arrays of the mask.
    """
    T, S = sizes if sizes[1] is not None else (sizes[0], sizes[0])
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        raise TypeError(f"tile must be (rows, columns), got {tile!r:.80}")
    named = {"T": T, "S": S, "rows of tile": tile[0], "columns of tile": tile[1]}
    rows, columns, *own_tile = (size(name, value, 1) for name, value in named.items())
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((mask, offsets))):
        raise TypeError(
            "a picture needs a mask with concrete values, got a traced one; draw it outside "
            "jax.jit, jax.grad and jax.vmap"
        )
    counts = [
        _count(name, index, sizes)
        for (name, index), sizes in zip(
            {"batch": batch, "head": head}.items(), _slices(mask), strict=True
        )
    ]
    scores = counts[0], counts[1], rows, columns
    # A mask that is the same for all batch indices may have one offset for each of them.
    of_batch: list[Any] = [getattr(offsets, name, None) for name in ("query", "key")]
    batches = [counts[0], *(x.size for x in of_batch if getattr(x, "ndim", 0) == 1)]
    offsets = offsets_of_call(offsets, max(batches), counts[1])
    mask = checks.of_mask(mask.without_block_masks(), scores, clamps=True)
    return of_canonical(
        mask.canonical(counts[0], rows, columns),
        scores,
        (own_tile[0], own_tile[1]),
        batch=batch,
        head=head,
        offsets=offsets,
    )


def number_of_tiles(sizes: tuple[int, int], tile: tuple[int, int]) -> int:
    """The number of tiles that cover this many rows and columns.

    >>> number_of_tiles((300, 64), (128, 64))
    3
    """
    return math.prod(-(-count // own) for count, own in zip(sizes, tile, strict=True))


def of_canonical(
    mask: Mask,
    scores: tuple[int, int, int, int],
    tile: tuple[int, int],
    *,
    batch: int,
    head: int,
    offsets: Offsets | None,
) -> Picture:
    """The picture of a canonical mask for a call of (B, N, T, S).

    Raises:
        ValueError: it would have more than ``MOST_TILES`` tiles.
    """
    offsets = Offsets() if offsets is None else offsets
    sizes = scores[2:]
    tiles = number_of_tiles(sizes, tile)
    if tiles > MOST_TILES:
        raise ValueError(
            f"tile: a picture must have at most {MOST_TILES} tiles, got {tiles} tiles of "
            f"{tile[0]} x {tile[1]} for {sizes[0]} rows and {sizes[1]} columns; pass larger tiles"
        )
    rows, columns = (_sample(size) for size in sizes)
    frame = expression.Frame.of(mask, sizes, offsets)
    compiled = expression.compiled(mask, frame)
    return Picture(
        sizes=sizes,
        tile=tile,
        classes=tile_classes.of_slice(compiled, scores, tile, offsets, batch, head),
        rows=rows,
        columns=columns,
        valid=_valid(mask, frame, elements(rows, columns, batch, head, offsets)),
    )


def elements(
    rows: np.ndarray, columns: np.ndarray, batch: int, head: int, offsets: Offsets
) -> expression.Element:
    """The user's indices, int32[], int32[], int32 [r, 1] and int32 [1, c], of a picture's elements.

    Args:
        rows, columns: local indices.
        batch, head: local indices of the slice.
        offsets: those of the call.
    """
    first = (np.asarray(x).reshape(-1) for x in (offsets.query, offsets.key))
    own = (int(x[batch % x.size]) for x in first)
    query, key = (
        np.asarray(index + start, np.int32)
        for index, start in zip((rows[:, None], columns[None]), own, strict=True)
    )
    place = (np.int32(x) + np.int32(y) for x, y in ((batch, offsets.batch), (head, offsets.head)))
    # NumPy arrays instead of JAX's: a picture compiles nothing.
    return expression.Element(*place, query, key)  # type: ignore[arg-type]


def _valid(mask: Mask, frame: expression.Frame, element: expression.Element) -> np.ndarray:
    """Whether each element is valid, bool [r, c]."""
    sizes = element.query.shape[0], element.key.shape[1]
    if not mask.kinds():
        return np.ones(sizes, bool)

    def of_row(row: jax.Array) -> jax.Array:
        place = element.batch, element.head, row
        return jax.vmap(
            lambda column: expression.holds(mask, expression.Element(*place, column), frame)
        )(element.key[0])

    return np.asarray(jax.jit(jax.vmap(of_row))(element.query[:, 0]))


def _sample(size: int) -> np.ndarray:
    if size <= MOST_ELEMENTS:
        return np.arange(size)
    return np.arange(MOST_ELEMENTS) * size // MOST_ELEMENTS


def _count(name: str, index: Any, sizes: set[int]) -> int:
    """The number of batch indices, or of heads, of the call that is drawn."""
    index = values.static_integer(name, index, "a Python integer", "draw it outside of jax.jit")
    count = max(sizes, default=1)
    if count == 1 and 0 <= index < values.INT32_MAX:
        return index + 1
    if not 0 <= index < count:
        raise ValueError(f"{name} must be in [0, {count}), the size of the mask, got {index}")
    return count


def _slices(mask: Mask) -> tuple[set[int], set[int]]:
    """The sizes that the arrays of a mask have along the batch and along the heads."""
    batches: set[int] = set()
    heads: set[int] = set()
    lengths = [(mask.query_lengths, mask.key_lengths), *mask.more_lengths]
    batches |= {x.shape[0] for pair in lengths for x in pair if x is not None}
    batches |= {x.shape[0] for pair in mask.segment_ids for x in pair if x.ndim == 2}
    shapes = [x.shape for x in mask.booleans]
    shapes += [x.listed.shape if isinstance(x, BlockTable) else x.shape for x in mask.block_lists]
    for shape in shapes:
        first, second, *_ = (1,) * (4 - len(shape)) + tuple(shape)
        batches.add(first)
        heads.add(second)
    for excluded in mask.excluded:
        own = _slices(excluded)
        batches |= own[0]
        heads |= own[1]
    return batches, heads
