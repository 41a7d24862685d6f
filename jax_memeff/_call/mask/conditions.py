"""The conditions of a mask, and their canonical form, without the ways to make and combine them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

from jax_memeff._call import values
from jax_memeff._call.mask import arguments, key_lists
from jax_memeff._call.mask.key_lists import KeyLists
from jax_memeff._call.mask.kv_blocks import BlockTable, KvBlocks
from jax_memeff._call.mask.window import TracedWindow, Window
from jax_memeff.codegen.functions.program import Program

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

    def _is_beyond_block_masks(self) -> bool:
        kinds = {"segments", "boolean"} & self.kinds() or self.has_function()
        return self.beyond_block_masks or (bool(kinds) and not self.block_masks)

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
            key_lists=key_lists.canonical(self.key_lists, S, tokens is not None),
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
