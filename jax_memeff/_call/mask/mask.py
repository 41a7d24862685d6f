"""Which query rows attend to which key columns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_memeff._call import values
from jax_memeff._call.mask import arguments, block_mask, checks, tiles
from jax_memeff._call.mask.conditions import (
    Alignment,
    Bound,
    Conditions,
    KeyLists,
    KvBlocks,
    TracedWindow,
    Window,
    intersection,
    is_beyond_block_masks,
    with_boolean_lists,
)
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.mask.pictures import Picture, picture_of_mask
from jax_memeff._call.offsets import Offsets, Position, checked
from jax_memeff._call.values import methods_take_objects
from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_mask_function


@methods_take_objects
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Mask(Conditions):
    """A set of conditions. An element is valid if all of them hold; ``Mask()`` has none.

    :meth:`causal`, :meth:`window`, :meth:`lengths`, :meth:`segments`, :meth:`boolean`,
    :meth:`kv_blocks`, :meth:`keys` and :meth:`function` create masks; ``&``, ``|`` and ``~``
    combine them. A mask is a pytree: windows and functions are static, arrays are leaves.

    Lengths combined by ``&`` alone bound what is loaded, and determine which rows and columns
    exist: no other mask makes a row or column beyond them valid, and a ``"bottom_right"`` window
    ends at them. Under ``|`` or ``~``, lengths test elements like any other mask.

    Masks without arrays are equal if their windows and functions are, and can be static arguments
    of ``jax.jit``. Masks with arrays have no ordering, no hash and no ``==``.

    >>> import jax.numpy as jnp
    >>> mask = Mask.causal() & Mask.lengths(key=jnp.array([2]))
    >>> mask.as_array(1, 1, 3, 3)[0, 0].astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 0]], dtype=int32)
    >>> mask
    Mask(key_lengths, top_left=(None, 0))
    """

    def __repr__(self) -> str:
        """The kinds of conditions, and the bounds of windows, without the arrays."""
        windows = {"top_left": self.top_left, "bottom_right": self.bottom_right}
        bounds = [f"{name}=({w.left}, {w.right})" for name, w in windows.items() if w is not None]
        return f"Mask({', '.join(sorted(self.kinds() - windows.keys()) + bounds)})"

    @staticmethod
    def causal(alignment: Alignment = "top_left") -> Mask:
        """Row t attends to columns up to ``t + d``.

        ``d`` is 0 for ``"top_left"``, and ``key length - query length`` of the batch index for
        ``"bottom_right"``.

        Raises:
            ValueError: the alignment is neither of the two.
        """
        return Mask.window(None, 0, alignment)

    @staticmethod
    def window(left: Bound, right: Bound, alignment: Alignment = "top_left") -> Mask:
        """Row t attends to columns ``t + d - left`` to ``t + d + right``; None means no bound.

        ``d`` is 0 for ``"top_left"``, and ``key length - query length`` of the batch index for
        ``"bottom_right"``. Bounds may be negative: with ``Mask.window(4, -2)``, row t attends to
        ``t - 4`` to ``t - 2``, and with ``Mask.window(-1, 0)`` to nothing: FlashAttention's -1 is
        None here. They may be traced, so that layers of one ``jax.lax.scan`` can have different
        windows; a large number then means no bound.

        Raises:
            TypeError: a bound is not an integer.
            ValueError: the alignment is neither of the two, or a traced bound is not a scalar.

        >>> Mask.window(1, 0).as_array(1, 1, 3, 3)[0, 0].astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]], dtype=int32)
        """
        name = alignment if isinstance(alignment, str) else ""  # arrays compare by element
        if name in ("top_left", "bottom_right"):
            traced = TracedWindow.of(left, right, alignment)
            fixed = (
                None if isinstance(bound, Tracer) else arguments.bound(side, bound)
                for side, bound in (("left", left), ("right", right))
            )
            window = Window.of(*fixed)
            mask = Mask(top_left=window) if name == "top_left" else Mask(bottom_right=window)
            if traced is None:
                return mask
            mask = Mask() if window == Window(None, None) else mask
            return mask & Mask(traced_windows=(traced,))
        raise ValueError(f"alignment: expected 'top_left' or 'bottom_right', got {alignment!r:.80}")

    @staticmethod
    def lengths(query: ArrayLike | None = None, key: ArrayLike | None = None) -> Mask:
        """Only the first ``query[b]`` rows attend, and only to the first ``key[b]`` columns.

        Args:
            query: integer [B], or None for all rows.
            key: integer [B], or None for all columns.

        Values are clamped to [0, T] and [0, S], but out-of-range NumPy values raise an error in
        attention functions. Nothing beyond the lengths, NaN included, affects a result.

        Raises:
            TypeError: an array does not have an integer dtype.
            ValueError: an array does not have rank 1.

        >>> Mask.lengths(key=[2]).as_array(1, 1, 1, 4).astype(int)
        Array([[[[1, 1, 0, 0]]]], dtype=int32)
        """
        return Mask(
            query_lengths=None if query is None else arguments.lengths("query lengths", query),
            key_lengths=None if key is None else arguments.lengths("key lengths", key),
        )

    @staticmethod
    def segments(query_ids: ArrayLike, key_ids: ArrayLike) -> Mask:
        """Equal ids attend to each other; negative ids attend to nothing. Positions do not change.

        Args:
            query_ids: [B, T] or [T], any integer dtype. Ids compare by value, so 64-bit hashes
                work. On a device, 64-bit ids (with ``jax_enable_x64``) cost three comparisons
                instead of one, and uint32 ids two.
            key_ids: [B, S] or [S], likewise.

        Raises:
            TypeError: an array does not have an integer dtype.
            ValueError: an array does not have rank 1 or 2.

        >>> Mask.segments([7, 2**40], [2**40, 7, -1]).as_array(1, 1, 2, 3)[0, 0].astype(int)
        Array([[0, 1, 0],
               [1, 0, 0]], dtype=int32)
        """
        return Mask(
            segment_ids=arguments.segment_ids(
                arguments.integers("query segment ids", query_ids, (1, 2)),
                arguments.integers("key segment ids", key_ids, (1, 2)),
            )
        )

    @staticmethod
    def boolean(array: ArrayLike) -> Mask:
        """Elements are valid if ``array`` is true there.

        Args:
            array: bool, of rank at most 4, left-padded with dimensions of 1; every dimension is 1
                or matches [B, N, T, S]. Rank 3 raises an error in calls with B == N.

        Raises:
            TypeError: the array is not boolean.
            ValueError: the array has a rank above 4.
        """
        return Mask(booleans=(arguments.boolean(array),))

    @staticmethod
    def kv_blocks(
        indices: ArrayLike,
        counts: ArrayLike | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
    ) -> Mask:
        """Each Q block attends to the KV blocks in its list.

        Args:
            indices: ``[B, N, Q blocks, n]`` integers: the indices of KV blocks. B and N may be 1 or
                absent. There are ``ceil(T / rows)`` Q blocks. Out-of-range indices are ignored, so
                pad with -1; a repeated index counts once.
            counts: ``[B, N, Q blocks]`` integers: the number of valid indices in each list, clamped
                to [0, n]. None means all of them.
            block_size: The rows of a Q block and the columns of a KV block: one number for both, or
                ``(rows, columns)``. The kernels skip blocks that are not listed. If both sizes are
                multiples of 128, they test no elements of listed blocks either.

        Each query head has its own list. If you have one list per key head, pass
        ``jnp.repeat(indices, N // K, 1)``. Lists may be traced. Use ``&`` for masks within blocks,
        such as :meth:`causal`.

        Raises:
            TypeError: an array does not have an integer dtype, or a block size is not an integer.
            ValueError: ranks, or the shapes of indices and counts, do not match; attention
                functions raise it if lists do not match the call.

        >>> import jax.numpy as jnp
        >>> lists = jnp.array([[0, -1], [0, 2]])  # of two Q blocks
        >>> Mask.kv_blocks(lists, block_size=(2, 1)).as_array(1, 1, 4, 3)[0, 0].astype(int)
        Array([[1, 0, 0],
               [1, 0, 0],
               [1, 0, 1],
               [1, 0, 1]], dtype=int32)
        """
        return Mask(block_lists=(KvBlocks.of(indices, counts, block_size),))

    @staticmethod
    def keys(indices: ArrayLike, *, unique_indices: bool = False) -> Mask:
        """Each row attends to the keys in its list.

        The blockwise path gathers these keys and no others: work and memory are proportional to the
        lists, forward and backward.

        Args:
            indices: ``[B, K, T, n]`` integers, a list of columns for each row of a key head; all
                query heads of a key head share it. B and K may be 1 or absent. With packed
                sequences (``varlen_attention``, and ``paged_attention`` with ``query_starts``)
                ``[tokens, K, n]``, where K may be 1; columns are then positions in the sequence.
                The order is free. Indices outside of [0, S) are ignored, so pad with -1.
            unique_indices: Whether each key occurs once in a list. If False, lists are sorted, and
                a repeated key counts once. If True, they are read as they are, and a repeated key
                gives wrong results; :func:`jax_memeff.check` reports it.

        Lists may be traced, and have no gradient. They refer to the arrays of the call, so
        ``offsets`` do not shift them, while windows, functions and dropout see the position of each
        key. ``&`` combines lists with any mask, and two lists to the keys that are in both.

        Raises:
            TypeError: the indices are not integers, or ``unique_indices`` is not True or False.
            ValueError: the indices do not have two to four dims; attention functions raise it if
                lists do not match the call. ``|``, ``~`` and ``ring_attention`` raise it, too.

        >>> import jax.numpy as jnp
        >>> lists = jnp.array([[0, -1], [1, 0], [0, 2]])  # of three rows
        >>> (Mask.keys(lists) & Mask.window(1, 0)).as_array(1, 1, 3, 3)[0, 0].astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [0, 0, 1]], dtype=int32)
        """
        return Mask(key_lists=(KeyLists.of(indices, unique_indices),))

    @staticmethod
    def function(function: Callable[..., Any]) -> Mask:
        """Elements are valid if ``function(b, h, q, k)`` is true.

        Args:
            function: maps four int32 scalars, the batch index, the query head, the row and the
                column, to a bool scalar. It is an ordinary JAX function of scalars, and may read
                elements of any arrays in scope (``document[q] == document[k]``), traced ones
                included. The indices are those of the whole problem (:class:`jax_memeff.Offsets`,
                ring attention); with packed sequences, the batch index is the sequence, and row and
                column count within it.

        The function is traced here, once, so later changes to arrays and Python variables have no
        effect. The arrays have no gradient.

        Raises:
            TypeError: it is not a function of four arguments, or its result is not a bool scalar.
            jax_memeff.UnsupportedError: it is not a function of scalars; the message says why.

        >>> import jax.numpy as jnp
        >>> prefix = jnp.array([2])
        >>> mask = Mask.causal() | Mask.function(lambda b, h, q, k: k < prefix[b])
        >>> mask.as_array(1, 1, 3, 3)[0, 0].astype(int)
        Array([[1, 1, 0],
               [1, 1, 0],
               [1, 1, 1]], dtype=int32)
        """
        program, arrays = traced_mask_function(function)
        return Mask(functions=(program,), captured=tuple(arrays))

    def __invert__(self) -> Mask:
        """Valid where this mask is not, within the lengths of what it is combined with."""
        if self.key_lists:
            raise ValueError(
                "mask: Mask.keys cannot be under | or ~, because only listed keys are read; put "
                "all keys of a row into one list (jnp.concatenate), or combine masks with &"
            )
        if len(self.excluded) == 1 and not dataclasses.replace(self, excluded=()).kinds():
            return cast("Mask", self.excluded[0])
        return Mask(excluded=(self.without_block_masks(),))

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise arguments.not_a_mask(other)
        return ~(~self & ~other)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise arguments.not_a_mask(other)
        block_masks = self.block_masks + other.block_masks
        is_beyond = is_beyond_block_masks(self) or is_beyond_block_masks(other)
        ours, theirs = self.all_lengths(), other.all_lengths()
        lengths = itertools.zip_longest(ours[0] + theirs[0], ours[1] + theirs[1])
        (query_lengths, key_lengths), *more = list(lengths) or [(None, None)]
        return Mask(
            top_left=intersection(self.top_left, other.top_left),
            bottom_right=intersection(self.bottom_right, other.bottom_right),
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            segment_ids=self.segment_ids + other.segment_ids,
            booleans=self.booleans + other.booleans,
            more_lengths=tuple(more),
            functions=self.functions + other.functions,
            captured=self.captured + other.captured,
            excluded=self.excluded + other.excluded,
            traced_windows=self.traced_windows + other.traced_windows,
            block_lists=self.block_lists + other.block_lists,
            key_lists=self.key_lists + other.key_lists,
            block_masks=block_masks,
            beyond_block_masks=bool(block_masks) and is_beyond,
        )

    __array_ufunc__ = None  # otherwise NumPy would combine each element of an array with the mask

    def __ror__(self, other: object) -> Mask:
        raise arguments.not_a_mask(other)

    __rand__ = __ror__

    def blocks(self, query: Any, key: Any, offsets: Offsets | None = None) -> Mask:
        """Compute this mask's block mask once, for many layers.

        Kernels use a block mask to skip tiles. A call normally computes it in its forward and again
        in its backward; calls with the returned mask read the precomputed one instead. Call this
        method before the layers if they run in ``jax.lax.scan`` or under ``jax.checkpoint``, where
        XLA does not merge identical computations.

        Args:
            query, key: ``[B, T, N, H]`` and ``[B, S, K, H]`` as in the calls, or without B. Only
                their shapes are read.
            offsets: the offsets of the calls.

        Returns:
            An equivalent mask for calls with these shapes and offsets. ``&`` may still add windows
            and lengths. A bottom-right window with traced bounds, or under ``|`` or ``~``, ends at
            the lengths of this mask, not at lengths that ``&`` adds later. Packed sequences and
            rings compute their own block masks. A mask with only windows and lengths, or with lists
            of keys, needs no block mask and is returned unchanged.

        Raises:
            TypeError: ``query`` or ``key`` is not an array, or ``offsets`` are not Offsets.
            ValueError: their shapes do not match each other or an array of the mask, or a length
                or an offset is out of range.

        >>> import jax.numpy as jnp
        >>> query = key = jnp.ones((1, 256, 2, 8))
        >>> documents = jnp.arange(256) // 100
        >>> mask = Mask.function(lambda b, h, q, k: documents[q] == documents[k])
        >>> mask.blocks(query, key).block_masks[0][0, 0]  # 1: all elements, 2: some
        Array([[1, 2, 0, 0],
               [2, 2, 2, 2],
               [0, 2, 1, 2],
               [0, 2, 2, 2]], dtype=uint8)
        """
        shape = arguments.scores_shape(query, key)
        mask = checks.checked(self.without_block_masks(), shape)
        offsets = checked(offsets, *shape[:2])
        return mask if mask.key_lists else block_mask.with_blocks(mask, shape, offsets)

    def picture(
        self,
        T: int,
        S: int | None = None,
        *,
        tile: tuple[int, int] = (128, 128),
        batch: int = 0,
        head: int = 0,
        offsets: Offsets | None = None,
    ) -> Picture:
        """A picture of one (batch, head) slice: :meth:`show` and :meth:`plot` draw it.

        Args:
            T, S: rows and columns; S is T by default.
            tile: rows and columns of a tile. Kernels have tiles of 64 to 192 rows and 32 to 256
                columns, which ``python -m jax_memeff explain`` shows; a tile is *skipped* and never
                loaded, *full* if no element needs a test, or *partial*.
            batch, head: the slice.
            offsets: those of the call.

        Raises:
            TypeError: the mask is traced, or a size is not an integer.
            ValueError: a size is below 1, an array of the mask does not have these sizes, or the
                mask has no such batch index or head.

        >>> Mask.causal().picture(512).classes
        array([[2, 0, 0, 0],
               [1, 2, 0, 0],
               [1, 1, 2, 0],
               [1, 1, 1, 2]], dtype=uint8)
        """
        return picture_of_mask(self, (T, S), tile, batch=batch, head=head, offsets=offsets)

    def show(self, T: int, S: int | None = None, **options: Any) -> None:
        """Print a text drawing; the arguments are those of :meth:`picture`.

        It draws the elements of a small mask, and the tiles of a large one.

        >>> Mask.window(3, 0).show(8, tile=(4, 4))
        T 8, S 8, tiles of 4 x 4: 1 skipped, 3 partial, 0 full; 75% computed
        ■ valid, · masked, blank: skipped tile
        ■ · · · │
        ■ ■ · · │
        ■ ■ ■ · │
        ■ ■ ■ ■ │
        ────────┼─────────
        · ■ ■ ■ │ ■ · · ·
        · · ■ ■ │ ■ ■ · ·
        · · · ■ │ ■ ■ ■ ·
        · · · · │ ■ ■ ■ ■
        """
        self.picture(T, S, **options).show()

    def plot(self, T: int, S: int | None = None, *, axes: Any = None, **options: Any) -> Any:
        """Draw with matplotlib and return the axes; the other arguments are those of
        :meth:`picture`.

        Args:
            axes: a ``matplotlib.axes.Axes``; None makes a figure.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError: ``axes`` is not an Axes.
        """
        return self.picture(T, S, **options).plot(axes)

    def as_array(
        self, B: int, N: int, T: int, S: int, position: Position | None = None
    ) -> jax.Array:
        """The full mask, bool[B, N, T, S], for tests and small problems.

        Args:
            position: global index of row 0 and column 0, from which windows count: the result of
                ``Offsets(...).position()``.

        Raises:
            TypeError: a size is not a Python integer, or ``position`` is something else.
            ValueError: a size is negative, or an array of the mask does not have these sizes.
        """
        B, N, T, S = (
            values.size(name, value) for name, value in zip("BNTS", (B, N, T, S), strict=True)
        )
        if not isinstance(position, Position | None):
            raise TypeError(
                "position must be None or the result of Offsets(...).position(), got "
                f"{position!r:.80}"
            )
        mask = checks.checked(self, (B, N, T, S), clamps=True).canonical(B, T, S)
        mask = with_boolean_lists(mask, N, S)
        mask = compiled(mask, Frame.of(mask, (T, S))._replace(position=position))
        valid = tiles.valid_elements(mask, (T, S), (0, 0), (T, S), position)
        valid = jnp.broadcast_to(True if valid is None else valid, (B, N, T, S))
        for program in mask.functions:
            batch, head, row, column = jnp.ix_(*(jnp.arange(size) for size in (B, N, T, S)))
            if position is not None:
                row = row + position.query.reshape(-1, 1, 1, 1)
                column = column + position.key.reshape(-1, 1, 1, 1)
            arrays = tuple(x[0] for x in mask.captured)
            b, h, q, k = (x.astype(jnp.int32) for x in (batch, head, row, column))
            valid &= evaluate(program, None, b, h, q, k, arrays)
        return valid
