"""The conditions of a mask, and their canonical form, without the ways to make and combine them.

Three conditions have types of their own: windows are the columns around the diagonal that a row
attends to; block-sparse attention lists the KV blocks that each Q block attends to; and lists of
keys for each query row are top-k attention with the keys that an indexer chooses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_memeff._call import values
from jax_memeff._call.mask import arguments
from jax_memeff._call.values import INT32_MAX
from jax_memeff.codegen.functions.program import Program

Bound = int | jax.Array | None
"""A bound of a window; an array is a traced scalar."""

Alignment = Literal["top_left", "bottom_right"]
"""Whether the diagonal of a window starts at row 0, column 0 or ends at the last valid ones."""

_MOST_TRACED = 2**30
"""No column minus row reaches this bound, and its sum with the shift of a diagonal fits int32."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Row t attends to columns ``t + d - left <= s <= t + d + right``; None is no bound."""

    left: int | None
    right: int | None

    def __and__(self, other: Window) -> Window:
        def smaller(a: int | None, b: int | None) -> int | None:
            return min((x for x in (a, b) if x is not None), default=None)

        return Window(smaller(self.left, other.left), smaller(self.right, other.right))

    def traced(self) -> TracedWindow:
        """The same window with bounds that are data, aligned top-left."""
        clamped = self.clamped(_MOST_TRACED)
        left, right = (None if x is None else jnp.int32(x) for x in (clamped.left, clamped.right))
        return TracedWindow(left, right, "top_left")

    def clamped(self, most: int) -> Window:
        """The window with bounds in [-most, most]."""

        def fitting(bound: int | None) -> int | None:
            return None if bound is None else max(-most, min(bound, most))

        return Window(fitting(self.left), fitting(self.right))

    @staticmethod
    def of(left: int | None, right: int | None) -> Window:
        """The window with bounds clamped to int32.

        This changes no mask, because no column minus row reaches the clamped bounds.
        """
        return Window(left, right).clamped(INT32_MAX)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TracedWindow(values.HoldsArrays):
    """A window whose bounds are data: int32[], or [B] after a ``jax.vmap``."""

    left: jax.Array | None
    right: jax.Array | None
    alignment: Alignment = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(left: Any, right: Any, alignment: Alignment) -> TracedWindow | None:
        """The window of those bounds that are traced; None if none of them is."""
        if not isinstance(left, Tracer) and not isinstance(right, Tracer):
            return None
        return TracedWindow(_traced("left", left), _traced("right", right), alignment)

    def moved(self, distance: int | jax.Array) -> TracedWindow:
        """The same window, aligned top-left; its diagonal is ``distance`` further to the right."""
        return TracedWindow(
            None if self.left is None else self.left - distance,
            None if self.right is None else self.right + distance,
            "top_left",
        )


def _traced(name: str, bound: Any) -> jax.Array | None:
    if not isinstance(bound, Tracer):
        return None
    array = values.integers(f"window {name}", bound)
    if array.ndim:
        raise ValueError(f"window {name} must be one integer, got an array of shape {array.shape}")
    return jnp.asarray(values.clipped(array, -_MOST_TRACED, _MOST_TRACED))


def intersection(a: Window | None, b: Window | None) -> Window | None:
    """The columns in both windows; None means all columns."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KvBlocks(values.HoldsArrays):
    """The lists as the user passes them."""

    indices: jax.Array
    """[..., Q blocks, n], integers of rank 2 to 4."""
    counts: jax.Array | None
    """[..., Q blocks], integers of one rank less; None if all n indices are valid."""
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})
    """Rows of a Q block and columns of a KV block."""

    @staticmethod
    def of(indices: ArrayLike, counts: ArrayLike | None, block_size: Any) -> KvBlocks:
        """Check the arguments, except for the sizes that only a call determines.

        Raises:
            TypeError: an array does not have an integer dtype, or a block size is not an integer.
            ValueError: ranks or sizes do not match, or a block size is below 1 or beyond int32.
        """
        sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        if len(sizes) != 2:
            raise ValueError(
                f"block_size must be one number, or (rows, columns), got {block_size!r:.80}"
            )
        rows, columns = (_size(size) for size in sizes)
        array = values.integers("KV block indices", indices)
        if not 2 <= array.ndim <= 4:
            raise ValueError(
                "KV block indices must have shape [B, N, Q blocks, n], where B and N may be 1 or "
                f"absent, got {tuple(array.shape)}"
            )
        numbers = None if counts is None else values.integers("KV block counts", counts)
        if numbers is not None and numbers.shape != array.shape[:-1]:
            raise ValueError(
                f"KV block counts must have one number for each list, shape "
                f"{tuple(array.shape[:-1])}, got {tuple(numbers.shape)}"
            )
        return KvBlocks(array, numbers, (rows, columns))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the indices, left-padded with 1s to rank 4."""
        shape = self.indices.shape
        first, second, blocks, count = (1,) * (4 - len(shape)) + tuple(shape)
        return first, second, blocks, count

    def table(self, columns: int) -> BlockTable:
        """The lists as a table of all KV blocks of ``columns`` columns.

        Indices out of range are ignored, and repeated ones count once.

        >>> lists = KvBlocks.of(np.array([[1, 0], [2, 2], [-1, 7]]), np.array([1, 9, 2]), 64)
        >>> lists.table(192).listed[0, 0].astype(int)
        Array([[0, 1, 0],
               [0, 0, 1],
               [0, 0, 0]], dtype=int32)
        """
        batch, heads, blocks, count = self.shape
        key_blocks = -(-columns // self.block_size[1])
        indices = jnp.asarray(values.clipped(self.indices, -1, key_blocks)).reshape(self.shape)
        is_listed = (indices >= 0) & (indices < key_blocks)
        if self.counts is not None:
            counts = jnp.asarray(values.clipped(self.counts, 0, count)).reshape(self.shape[:3])
            is_listed &= lax.broadcasted_iota(jnp.int32, self.shape, 3) < counts[..., None]
        # An index beyond the table is dropped.
        indices = jnp.where(is_listed, indices, key_blocks)
        sharding = jax.typeof(indices).sharding
        if any(sharding.spec):
            # Every device reads the table with the indices of the whole call.
            indices = jax.sharding.reshard(indices, NamedSharding(sharding.mesh, PartitionSpec()))
        place = jnp.ogrid[:batch, :heads, :blocks]
        table = jnp.zeros((batch, heads, blocks, key_blocks), bool)
        listed = table.at[*(x[..., None] for x in place), indices].set(True, mode="drop")
        return BlockTable(listed, self.block_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockTable:
    """Whether each KV block is listed for each Q block; canonical masks have tables."""

    listed: jax.Array
    """bool[1|B, 1|N, Q blocks, KV blocks]"""
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def holds(self, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """Whether the block of the element with these local indices, int32[], is listed."""
        blocks = (
            lax.div(jnp.asarray(x), jnp.asarray(size, jnp.int32))
            for x, size in zip((row, column), self.block_size, strict=True)
        )
        if not self.listed.size:  # JAX cannot index it, and the call has no element that reads it
            return jnp.bool_(False)
        place = (batch, head, *blocks)
        index = tuple(
            x if axis >= 2 or size != 1 else 0
            for axis, (x, size) in enumerate(zip(place, self.listed.shape, strict=True))
        )
        return self.listed.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _size(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"block_size must be static integers, got {size!r:.80}")
    if size < 1:
        raise ValueError(f"block_size must be at least 1, got {size}")
    if size > values.INT32_MAX:
        raise ValueError(f"block_size must be at most {values.INT32_MAX}, got {size}")
    return int(size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KeyLists(values.HoldsArrays):
    """The lists of a mask. A canonical mask has at most one, whose entries are distinct."""

    indices: jax.Array
    """Integers ``[B | 1, K | 1, T, n]`` with 1s on the left left out, or ``[tokens, K | 1, n]`` for
    packed sequences. In a canonical mask int32 ``[B | 1, K | 1, T, n]`` or ``[1, tokens, K | 1,
    n]``; entries that are no index of a key are nothing."""
    is_unique: bool = dataclasses.field(metadata={"static": True})
    """Whether the entries of a row that are indices of keys are distinct."""

    @staticmethod
    def of(indices: ArrayLike, unique_indices: Any) -> KeyLists:
        """Check the arguments, except for the sizes that only a call determines.

        Raises:
            TypeError: the indices are not integers, or ``unique_indices`` is not True or False.
            ValueError: the rank is not 2, 3 or 4.
        """
        array = values.integers("key indices", indices)
        if not 2 <= array.ndim <= 4:
            raise ValueError(
                "key indices must have shape [B, K, T, n], where B and K may be 1 or absent, or "
                f"[tokens, K, n] for packed sequences, got {tuple(array.shape)}"
            )
        return KeyLists(array, values.flag("unique_indices", unique_indices))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of padded lists, left-padded with 1s to rank 4."""
        shape = self.indices.shape
        first, second, rows, count = (1,) * (4 - len(shape)) + tuple(shape)
        return first, second, rows, count

    def distinct(self, columns: int, is_packed: bool) -> jax.Array:
        """The indices in the form of a canonical mask of so many columns.

        >>> lists = KeyLists.of([[2, 0, 2, 7, -1]], False)
        >>> lists.distinct(columns=4, is_packed=False).tolist()
        [[[[-1, 0, -1, 2, 4]]]]
        """
        indices = self.indices
        if values.is_host(indices) or indices.dtype != jnp.int32:
            indices = jnp.asarray(values.clipped(indices, -1, columns))
        indices = indices[None] if is_packed and indices.ndim == 3 else indices
        indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
        if self.is_unique:
            return indices
        ordered = jnp.sort(indices, -1)
        return jnp.where(_equals_next(ordered), -1, ordered)

    def listed(self, columns: int) -> jax.Array:
        """Whether each column is in the list of each row, bool[B | 1, K | 1, T, columns]."""
        indices = self.distinct(columns, is_packed=False)
        is_key = (indices >= 0) & (indices < columns)
        place = (x[..., None] for x in jnp.ogrid[tuple(map(slice, indices.shape[:3]))])
        table = jnp.zeros((*indices.shape[:3], columns), bool)
        return table.at[(*place, jnp.where(is_key, indices, columns))].set(True, mode="drop")


def common_list(lists: Sequence[KeyLists], columns: int, is_packed: bool) -> tuple[KeyLists, ...]:
    """One list with the entries that all lists have, or none.

    Args:
        lists: those of a mask.
        columns: S of the call.
        is_packed: whether the lists have a row for each token.
    """
    if not lists:
        return ()
    common = functools.reduce(_common, (x.distinct(columns, is_packed) for x in lists))
    return (KeyLists(common, is_unique=True),)


def _common(a: jax.Array, b: jax.Array) -> jax.Array:
    """The entries of both lists, each of which has distinct entries."""
    rows = jnp.broadcast_shapes(a.shape[:3], b.shape[:3])
    both = [jnp.broadcast_to(x, (*rows, x.shape[3])) for x in (a, b)]
    ordered = jnp.sort(jnp.concatenate(both, -1), -1)
    return jnp.where(_equals_next(ordered), ordered, -1)


def _equals_next(ordered: jax.Array) -> jax.Array:
    """Whether each entry of a sorted list equals the next one."""
    return jnp.pad(ordered[..., :-1] == ordered[..., 1:], [(0, 0)] * 3 + [(0, 1)])


Lengths = tuple[jax.Array | None, jax.Array | None]
"""The lengths of queries and of keys, each [B]."""


@dataclasses.dataclass(frozen=True, eq=False)
class Conditions(values.HoldsArrays):
    """The fields of a :class:`jax_memeff.Mask`. An element is valid if all conditions hold."""

    top_left: Window | None = dataclasses.field(default=None, metadata={"static": True})
    """The window whose diagonal starts at row 0, column 0."""
    bottom_right: Window | None = dataclasses.field(default=None, metadata={"static": True})
    """The window whose diagonal ends at the last valid row and the last valid column."""
    query_lengths: jax.Array | None = None
    """[B]: rows beyond these lengths attend to nothing."""
    key_lengths: jax.Array | None = None
    """[B]: no row attends to columns beyond these lengths."""
    segment_ids: tuple[tuple[jax.Array, jax.Array], ...] = ()
    """Pairs of query ids [B, T] and key ids [B, S]; the ids of every pair must match."""
    booleans: tuple[jax.Array, ...] = ()
    """Arrays that broadcast to [B, N, T, S]; true means attend."""
    more_lengths: tuple[Lengths, ...] = ()
    """Lengths of masks that ``&`` added. They stay separate, so that each can be checked."""
    functions: tuple[Program, ...] = dataclasses.field(default=(), metadata={"static": True})
    """Functions of (batch, head, row, column) that must hold."""
    captured: tuple[jax.Array, ...] = ()
    """The arrays that the functions read, grouped by function in the same order."""
    excluded: tuple[Conditions, ...] = ()
    """Masks of which no element may be valid: ``~a`` excludes a, and ``a | b`` excludes a mask that
    excludes both."""
    traced_windows: tuple[TracedWindow, ...] = ()
    block_lists: tuple[KvBlocks | BlockTable, ...] = ()
    """Lists of KV blocks, which are tables in a canonical mask."""
    key_lists: tuple[KeyLists, ...] = ()
    """Lists of keys; a canonical mask has at most one."""
    bits: jax.Array | None = None
    """Lists of keys and boolean arrays as kernels read them: uint32[1|B, 1|N, T, words], or
    [1, 1|N, tokens, words] for packed sequences."""
    block_masks: tuple[jax.Array, ...] = ()
    """One block mask per call of :meth:`blocks`, uint8[1|B, 1|N, T / 64, S / 64], rounded up."""
    beyond_block_masks: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether ``&`` added arrays or functions that no block mask covers."""

    def __post_init__(self) -> None:
        for name in ("top_left", "bottom_right"):
            if not isinstance(getattr(self, name), Window | None):
                raise TypeError(
                    f"Mask.{name} must be a Window or None, got {getattr(self, name)!r}; use "
                    "Mask.causal() or Mask.window(left, right)"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Conditions):
            return NotImplemented
        return self is other or self._without_arrays("compare") == other._without_arrays("compare")

    def __hash__(self) -> int:
        return hash(self._without_arrays("hash"))

    def _without_arrays(self, action: str) -> tuple[Any, ...]:
        if jax.tree.leaves(self):
            raise TypeError(
                f"cannot {action} a Mask that holds arrays (only masks of windows can be, and of "
                "functions that read no arrays); compare mask.as_array(B, N, T, S) instead, and do "
                "not make the mask a static argument of jax.jit"
            )
        return self.top_left, self.bottom_right, self.functions, self.excluded

    def __bool__(self) -> bool:
        raise TypeError(
            "a Mask has no truth value: combine masks with &, | and ~ instead of and, or and not, "
            "and compare with None by `is`"
        )

    def kinds(self) -> frozenset[str]:
        """The conditions that are present, by name; ``Mask()`` has none.

        >>> from jax_memeff import Mask
        >>> sorted((Mask.causal() & Mask.boolean(True)).kinds())
        ['boolean', 'top_left']
        """
        query_lengths, key_lengths = self.all_lengths()
        present = {
            "top_left": self.top_left is not None,
            "bottom_right": self.bottom_right is not None,
            "query_lengths": bool(query_lengths),
            "key_lengths": bool(key_lengths),
            "segments": bool(self.segment_ids),
            "boolean": bool(self.booleans) or self.bits is not None,
            "function": bool(self.functions or self.excluded),
            "traced_window": bool(self.traced_windows),
            "kv_blocks": bool(self.block_lists),
            "keys": bool(self.key_lists),
        }
        return frozenset(name for name, is_present in present.items() if is_present)

    def all_lengths(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The lengths of every combined mask: those of queries, and those of keys."""
        pairs = [(self.query_lengths, self.key_lengths), *self.more_lengths]
        queries, keys = ([x for x in side if x is not None] for side in zip(*pairs, strict=True))
        return queries, keys

    def has_function(self) -> bool:
        """Whether the kernels, or the blockwise path, evaluate a function for each element."""
        return bool({"function", "traced_window", "kv_blocks"} & self.kinds())

    def without_block_masks(self) -> Self:
        """The same mask without block masks, so that each call computes its own."""
        return dataclasses.replace(self, block_masks=(), beyond_block_masks=False)

    def canonical(self, B: int, T: int, S: int, tokens: tuple[int, int] | None = None) -> Self:
        """The same conditions in the canonical form that internal code reads.

        Lengths become int32[B] clamped to [0, T] and [0, S], at most one of queries and one of
        keys; segment ids become int32[B, T] and int32[B, S]; boolean arrays get rank 4; lists of
        blocks become tables, and lists of keys one list. :func:`expression.compiled` turns tables
        and the results of ``|`` and ``~`` into one function.

        Args:
            tokens: of query and of key, if sequences are packed: segment ids are then [1, tokens],
                and lists of keys have a row for each token.
        """
        batch, rows, columns = (B, T, S) if tokens is None else (1, *tokens)
        query_lengths, key_lengths = self.all_lengths()
        pairs = [pair for ids in self.segment_ids for pair in arguments.segment_ids(*ids)]
        return dataclasses.replace(
            self,
            query_lengths=_smallest(query_lengths, B, T),
            key_lengths=_smallest(key_lengths, B, S),
            segment_ids=tuple(
                (_broadcast(query_ids, batch, rows), _broadcast(key_ids, batch, columns))
                for query_ids, key_ids in pairs
            ),
            booleans=tuple(
                jnp.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape) for x in self.booleans
            ),
            more_lengths=(),
            excluded=tuple(other.canonical(B, T, S, tokens) for other in self.excluded),
            block_lists=tuple(
                x.table(S) if isinstance(x, KvBlocks) else x for x in self.block_lists
            ),
            key_lists=common_list(self.key_lists, S, tokens is not None),
        )


AnyMask = TypeVar("AnyMask", bound=Conditions)


def with_boolean_lists(mask: AnyMask, N: int, S: int) -> AnyMask:
    """A canonical mask with boolean arrays in place of lists of keys; for small masks."""
    listed = (lists.listed(S) for lists in mask.key_lists)
    booleans = (jnp.repeat(x, N // x.shape[1], 1) if x.shape[1] != 1 else x for x in listed)
    return dataclasses.replace(mask, booleans=(*mask.booleans, *booleans), key_lists=())


def _smallest(lengths: Sequence[jax.Array], batch: int, size: int) -> jax.Array | None:
    """The minimum of several lengths, int32[B] in [0, size]."""
    if not lengths:
        return None
    clamped = (_broadcast(values.clipped(x, 0, size), batch) for x in lengths)
    return functools.reduce(jnp.minimum, clamped)


def _broadcast(x: Any, *shape: int) -> jax.Array:
    """A device array of this shape."""
    return jnp.broadcast_to(jnp.asarray(x), shape)


def is_beyond_block_masks(mask: Conditions) -> bool:
    """Whether arrays or functions mask elements that no block mask covers."""
    kinds = {"segments", "boolean"} & mask.kinds() or mask.has_function()
    return mask.beyond_block_masks or (bool(kinds) and not mask.block_masks)
