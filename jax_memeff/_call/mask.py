"""Which query rows attend to which key columns."""

from __future__ import annotations

import dataclasses
import operator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_memeff._call.offsets import Position

Alignment = Literal["top_left", "bottom_right"]

_UNBOUNDED = 2**31 - 1
"""No difference of a column and a row is as large, so it can stand for an infinite bound."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Row t attends to columns ``t + d - left <= s <= t + d + right``; None is no bound."""

    left: int | None
    right: int | None

    def __and__(self, other: Window) -> Window:
        def smaller(a: int | None, b: int | None) -> int | None:
            return min((x for x in (a, b) if x is not None), default=None)

        return Window(smaller(self.left, other.left), smaller(self.right, other.right))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """A set of conditions; an element is valid when all of them hold. ``Mask()`` has none.

    Masks are made by :meth:`causal`, :meth:`window`, :meth:`lengths`, :meth:`segments` and
    :meth:`boolean`, and combined by ``&``. A mask is a pytree: windows are static, arrays are
    leaves.

    >>> mask = Mask.causal() & Mask.lengths(key=jnp.array([2]))
    >>> mask.as_array(1, 1, 3, 3)[0, 0].astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 0]], dtype=int32)
    """

    top_left: Window | None = dataclasses.field(default=None, metadata={"static": True})
    """The window whose diagonal starts at row 0, column 0."""
    bottom_right: Window | None = dataclasses.field(default=None, metadata={"static": True})
    """The window whose diagonal ends at the last valid row and the last valid column."""
    query_lengths: jax.Array | None = None
    """[B]: rows beyond attend to nothing."""
    key_lengths: jax.Array | None = None
    """[B]: columns beyond are attended by nothing."""
    segment_ids: tuple[tuple[jax.Array, jax.Array], ...] = ()
    """Pairs of query ids [B, T] and key ids [B, S]; those of every pair must match."""
    booleans: tuple[jax.Array, ...] = ()
    """Arrays that broadcast to [B, N, T, S]; true attends."""

    @staticmethod
    def causal(alignment: Alignment = "top_left") -> Mask:
        """Row t attends to columns up to ``t + d``.

        ``d`` is 0 for ``"top_left"``, and ``key length - query length`` of the batch element for
        ``"bottom_right"``.
        """
        return Mask.window(None, 0, alignment)

    @staticmethod
    def window(left: int | None, right: int | None, alignment: Alignment = "top_left") -> Mask:
        """Row t attends to columns ``t + d - left`` to ``t + d + right``; None is no bound.

        ``d`` is 0 for ``"top_left"``, and ``key length - query length`` of the batch element for
        ``"bottom_right"``.

        Raises:
            TypeError: a bound is not a Python integer (a traced one is not supported).
            ValueError: the alignment is neither of the two.
        """
        window = Window(_bound("left", left), _bound("right", right))
        if alignment == "top_left":
            return Mask(top_left=window)
        if alignment == "bottom_right":
            return Mask(bottom_right=window)
        raise ValueError(f"alignment: expected 'top_left' or 'bottom_right', got {alignment!r}")

    @staticmethod
    def lengths(query: ArrayLike | None = None, key: ArrayLike | None = None) -> Mask:
        """Only the first ``query[b]`` rows attend, only to the first ``key[b]`` columns.

        Args:
            query: integer [B], or None for all rows.
            key: integer [B], or None for all columns.

        Values are clamped to [0, T] and [0, S]. Whatever stands beyond the lengths, NaN included,
        reaches no result.

        Raises:
            TypeError: an array is not of integers.
            ValueError: an array is not of rank 1.
        """
        return Mask(
            query_lengths=None if query is None else _integers("query lengths", query, (1,)),
            key_lengths=None if key is None else _integers("key lengths", key, (1,)),
        )

    @staticmethod
    def segments(query_ids: ArrayLike, key_ids: ArrayLike) -> Mask:
        """Equal ids attend; negative ids attend to nothing. Positions are not changed.

        Args:
            query_ids: integer [B, T] or [T].
            key_ids: integer [B, S] or [S].

        Raises:
            TypeError: an array is not of integers.
            ValueError: an array is not of rank 1 or 2.
        """
        pair = (
            _integers("query segment ids", query_ids, (1, 2)),
            _integers("key segment ids", key_ids, (1, 2)),
        )
        return Mask(segment_ids=(pair,))

    @staticmethod
    def boolean(array: ArrayLike) -> Mask:
        """Elements where ``array`` is true are valid.

        Args:
            array: bool, of rank at most 4, left-padded with dimensions of 1; every dimension is 1
                or that of [B, N, T, S].

        Raises:
            TypeError: the array is not boolean.
            ValueError: the array is of rank above 4.
        """
        array = _array(array)
        if array.dtype != bool:
            raise TypeError(
                f"boolean mask: expected dtype bool, got {array.dtype}; "
                "pass an additive mask as bias instead"
            )
        if array.ndim > 4:
            raise ValueError(f"boolean mask: expected rank <= 4, got shape {array.shape}")
        return Mask(booleans=(array,))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            top_left=_both(self.top_left, other.top_left, operator.and_),
            bottom_right=_both(self.bottom_right, other.bottom_right, operator.and_),
            query_lengths=_both(self.query_lengths, other.query_lengths, jnp.minimum),
            key_lengths=_both(self.key_lengths, other.key_lengths, jnp.minimum),
            segment_ids=self.segment_ids + other.segment_ids,
            booleans=self.booleans + other.booleans,
        )

    def kinds(self) -> frozenset[str]:
        """The conditions that are present, by name; ``Mask()`` has none.

        >>> sorted((Mask.causal() & Mask.boolean(True)).kinds())
        ['boolean', 'top_left']
        """
        present = {
            "top_left": self.top_left is not None,
            "bottom_right": self.bottom_right is not None,
            "query_lengths": self.query_lengths is not None,
            "key_lengths": self.key_lengths is not None,
            "segments": bool(self.segment_ids),
            "boolean": bool(self.booleans),
        }
        return frozenset(name for name, is_present in present.items() if is_present)

    def canonical(self, B: int, T: int, S: int) -> Mask:
        """The same mask in the one form that everything below the public functions reads.

        Lengths become int32[B] clamped to [0, T] and [0, S], segment ids int32[B, T] and
        int32[B, S], boolean arrays of rank 4.
        """

        def ids(x: jax.Array, size: int) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(x).astype(jnp.int32), (B, size))

        return dataclasses.replace(
            self,
            query_lengths=_clamped(self.query_lengths, B, T),
            key_lengths=_clamped(self.key_lengths, B, S),
            segment_ids=tuple((ids(q, T), ids(k, S)) for q, k in self.segment_ids),
            booleans=tuple(
                jnp.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape) for x in self.booleans
            ),
        )

    def as_array(
        self, B: int, N: int, T: int, S: int, position: Position | None = None
    ) -> jax.Array:
        """The whole mask, bool[B, N, T, S]: for tests and small problems.

        Args:
            position: global index of row 0 and column 0, which windows count from.
        """
        tile = self.canonical(B, T, S).tile((T, S), (0, 0), (T, S), position)
        return jnp.broadcast_to(True if tile is None else tile, (B, N, T, S))

    def tile(
        self,
        sizes: tuple[int, int],
        start: tuple[int | jax.Array, int | jax.Array],
        shape: tuple[int, int],
        position: Position | None,
    ) -> jax.Array | None:
        """The validity of one tile of a canonical mask.

        Args:
            sizes: (T, S).
            start: local row and column of the tile's first element.
            shape: rows and columns of the tile, which lies inside the score matrix.
            position: global index of local row 0 and column 0; None is 0, 0.

        Returns:
            bool, broadcasts to [B, N, *shape]; None when the mask has no conditions.
        """
        row = (start[0] + lax.iota(jnp.int32, shape[0]))[None, None, :, None]
        col = (start[1] + lax.iota(jnp.int32, shape[1]))[None, None, None, :]
        conditions = []
        for window, distance in self._windows(sizes, position):
            from_diagonal = (col - row) - distance
            if window.left is not None:
                conditions.append(from_diagonal >= -window.left)
            if window.right is not None:
                conditions.append(from_diagonal <= window.right)
        if self.query_lengths is not None:
            conditions.append(row < self.query_lengths[:, None, None, None])
        if self.key_lengths is not None:
            conditions.append(col < self.key_lengths[:, None, None, None])
        for query_ids, key_ids in self.segment_ids:
            query_tile = lax.dynamic_slice_in_dim(query_ids, start[0], shape[0], 1)
            key_tile = lax.dynamic_slice_in_dim(key_ids, start[1], shape[1], 1)
            query_tile, key_tile = query_tile[:, None, :, None], key_tile[:, None, None, :]
            conditions.append((query_tile == key_tile) & (query_tile >= 0))
        conditions += [slice_tile(array, start, shape) for array in self.booleans]
        valid = None
        for condition in conditions:
            valid = condition if valid is None else valid & condition
        return valid

    def may_attend(
        self,
        sizes: tuple[int, int],
        start: tuple[int | jax.Array, int | jax.Array],
        shape: tuple[int, int],
        position: Position | None,
    ) -> jax.Array | None:
        """Whether a tile can have valid elements, from its edges alone; arguments as of `tile`.

        Returns:
            bool[], false only when no element of any batch element is valid; None when nothing
            is known to be skippable.
        """
        last_row, last_col = start[0] + shape[0] - 1, start[1] + shape[1] - 1
        # Each condition is [1] or [B].
        conditions = []
        for window, distance in self._windows(sizes, position):
            distance = distance.reshape(-1)
            if window.left is not None:
                conditions.append((last_col - start[0]) - distance >= -window.left)
            if window.right is not None:
                conditions.append((start[1] - last_row) - distance <= window.right)
        if self.query_lengths is not None:
            conditions.append(start[0] < self.query_lengths)
        if self.key_lengths is not None:
            conditions.append(start[1] < self.key_lengths)
        for query_ids, key_ids in self.segment_ids:
            query_tile = lax.dynamic_slice_in_dim(query_ids, start[0], shape[0], 1)
            key_tile = lax.dynamic_slice_in_dim(key_ids, start[1], shape[1], 1)
            conditions.append(
                (jnp.max(query_tile, 1) >= jnp.maximum(jnp.min(key_tile, 1), 0))
                & (jnp.max(key_tile, 1) >= jnp.min(query_tile, 1))
            )
        if not conditions:
            return None
        possible = conditions[0]
        for condition in conditions[1:]:
            possible = possible & condition
        return jnp.any(possible)

    def _windows(
        self, sizes: tuple[int, int], position: Position | None
    ) -> list[tuple[Window, jax.Array]]:
        """The windows, each with the ``col - row`` of its diagonal, local: int32[1|B, 1, 1, 1]."""
        shift = jnp.zeros((), jnp.int32)
        if position is not None:
            shift = (position.query - position.key).astype(jnp.int32)
        windows = []
        if self.top_left is not None:
            windows.append((self.top_left, shift.reshape(1, 1, 1, 1)))
        if self.bottom_right is not None:
            query_lengths, key_lengths = self.query_lengths, self.key_lengths
            query_lengths = (
                jnp.full((1,), sizes[0], jnp.int32) if query_lengths is None else query_lengths
            )
            key_lengths = (
                jnp.full((1,), sizes[1], jnp.int32) if key_lengths is None else key_lengths
            )
            distance = shift + (key_lengths - query_lengths)
            windows.append((self.bottom_right, distance.reshape(-1, 1, 1, 1)))
        return windows


def slice_tile(
    array: jax.Array, start: tuple[int | jax.Array, int | jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """The tile of an array [b, n, t, s] whose last two dimensions are full or 1 (broadcast)."""
    for axis, first, size in zip((2, 3), start, shape, strict=True):
        if array.shape[axis] != 1:
            array = lax.dynamic_slice_in_dim(array, first, size, axis)
    return array


def _both(a, b, combine):
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


def _bound(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, Tracer):
        raise TypeError(
            f"window {name}: expected a Python integer or None, got a traced value; "
            "make it static, or express the window as a boolean mask"
        )
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(
            f"window {name}: expected a Python integer or None, got {type(value).__name__}"
        ) from None
    return max(-_UNBOUNDED, min(value, _UNBOUNDED))


def _array(x: ArrayLike) -> jax.Array:
    """``x`` as it is when it has a dtype (so that NumPy values can be checked), else an array."""
    return x if hasattr(x, "dtype") else np.asarray(x)  # type: ignore[return-value]


def _integers(name: str, x: ArrayLike, ranks: tuple[int, ...]) -> jax.Array:
    array = _array(x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer array, got dtype {array.dtype}")
    if array.ndim not in ranks:
        expected = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{name}: expected rank {expected}, got shape {array.shape}")
    return array


def _clamped(lengths: jax.Array | None, batch: int, size: int) -> jax.Array | None:
    if lengths is None:
        return None
    # Small integer types cannot hold `size`, and int32 cannot hold every length of a larger type:
    # widen, clamp, then narrow.
    if lengths.dtype.itemsize < 4:
        lengths = lengths.astype(np.int32)
    lengths = lengths.clip(0, size).astype(np.int32)
    return jnp.broadcast_to(jnp.asarray(lengths), (batch,))
