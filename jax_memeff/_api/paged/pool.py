"""Tracks on the host which pages of a pool belong to which sequences."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from jax_memeff._call.values import size, static_integer
from jax_memeff.codegen.features.pages import SIZES, is_size
from jax_memeff.errors import OutOfPagesError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_INT32_MAX = np.iinfo(np.int32).max
"""Page tables and ``kv_lengths`` are int32."""


class PageCopy(NamedTuple):
    """A page that you must copy on the device before the next token is written:
    ``key_pages = key_pages.at[target].set(key_pages[source])``, and the values likewise."""

    source: int
    target: int


class Fork(NamedTuple):
    """A sequence that begins like another one."""

    sequence: int
    copy: PageCopy | None
    """The copy of the partial last page; None if all pages are full."""


class _Sequence:
    def __init__(self, pages: list[int], length: int):
        self.pages, self.length = pages, length


def _exclusive(
    method: Callable[Concatenate[PagePool, _P], _R],
) -> Callable[Concatenate[PagePool, _P], _R]:
    """A method that no other thread interrupts: two would take the same page."""

    @functools.wraps(method)
    def locked(self: PagePool, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class PagePool:
    """The pages of a pool and the sequences that own them: host-side bookkeeping, no device arrays.

    Sequences are named by integers, which are never reused. Full pages may belong to several
    sequences (:meth:`fork`); the page that a sequence's next token is written to belongs to that
    sequence only. A method that raises changes nothing. Threads may share a pool.

    Args:
        pages: The number of pages, the first dim of ``key_pages``.
        page_size: The number of keys per page: 1, 2, 4, 8 or a multiple of 16.

    Raises:
        ValueError, TypeError: an argument is wrong.

    >>> pool = PagePool(pages=4, page_size=16)
    >>> prompt = pool.allocate(20)
    >>> child, copy = pool.fork(prompt)  # the first page is shared, the second is copied
    >>> pool.table([prompt, child], max_pages=3).tolist(), copy
    ([[0, 1, -1], [0, 2, -1]], PageCopy(source=1, target=2))
    >>> pool.grow(child, 13)
    >>> pool.lengths([prompt, child]).tolist(), pool.free_pages
    ([20, 33], 0)
    >>> pool.grow(prompt, 13)
    Traceback (most recent call last):
    ...
    jax_memeff.errors.OutOfPagesError: the pool is 1 page short, with 1 needed and 0 free: \
free a sequence, or wait until one ends
    >>> pool.free(child)
    >>> pool.free_pages
    2
    """

    def __init__(self, pages: int, page_size: int):
        self._pages = _count("pages", pages, 1, _INT32_MAX)
        self._page_size = _count("page_size", page_size, 1)
        if not is_size(self._page_size):
            raise ValueError(f"page_size must be {SIZES}, got {self._page_size}")
        if (keys := self._pages * self._page_size) > _INT32_MAX:
            raise ValueError(
                f"pages must have at most {_INT32_MAX} keys together, got {keys} in {self._pages} "
                f"pages of {self._page_size}; use several pools"
            )
        # A stack: pages are first taken in ascending order, and freed pages are reused first.
        self._free = list(range(self._pages - 1, -1, -1))
        self._owners = [0] * self._pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        # Reentrant, because an argument may be a generator that asks this pool.
        self._lock = threading.RLock()

    @_exclusive
    def __getstate__(self) -> dict[str, Any]:
        return deepcopy({name: x for name, x in vars(self).items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

    def __copy__(self) -> PagePool:
        # With common lists, a page that one pool gives away would still be free in the other.
        return deepcopy(self)

    @property
    def pages(self) -> int:
        """The number of pages."""
        return self._pages

    @property
    def page_size(self) -> int:
        """The number of keys per page."""
        return self._page_size

    @property
    def free_pages(self) -> int:
        """The number of pages that belong to no sequence."""
        return len(self._free)

    @property
    @_exclusive
    def sequences(self) -> tuple[int, ...]:
        """The names of all sequences, in the order of their creation."""
        return tuple(self._sequences)

    @_exclusive
    def allocate(self, tokens: int = 0) -> int:
        """Create a sequence of ``tokens`` tokens, allocate its pages, and return its name.

        Raises:
            OutOfPagesError: there are too few free pages.
            ValueError: there are more tokens than int32 can count.
        """
        tokens = _length(_count("tokens", tokens))
        return self._new(self._take(self._pages_for(tokens)), tokens)

    @_exclusive
    def grow(self, sequence: int, tokens: int = 1) -> None:
        """Add tokens to a sequence, and new pages if its last page is full.

        Raises:
            OutOfPagesError: there are too few free pages.
            ValueError: there is no such sequence, or it would have more tokens than int32 can
                count.
        """
        own = self._sequence(sequence)
        length = _length(own.length + _count("tokens", tokens))
        own.pages += self._take(self._pages_for(length) - len(own.pages))
        own.length = length

    @_exclusive
    def shrink(self, sequence: int, tokens: int) -> PageCopy | None:
        """Remove the last tokens of a sequence, such as rejected speculative tokens.

        Pages without tokens are freed. If the last remaining page is partial and also belongs to
        other sequences, this sequence gets a copy of it.

        Returns:
            The page to copy, or None.

        Raises:
            OutOfPagesError: there is no page for the copy: none is free, and this call frees none.
            ValueError: there is no such sequence, or it has fewer tokens.
        """
        own = self._sequence(sequence)
        tokens = _count("tokens", tokens)
        if tokens > own.length:
            raise ValueError(
                f"tokens must be at most the length of sequence {sequence}, {own.length}, got "
                f"{tokens}"
            )
        length = own.length - tokens
        kept = self._pages_for(length)
        needs_copy = length % self._page_size and self._owners[own.pages[kept - 1]] > 1
        surplus = own.pages[kept:]
        # The copy may go to a page that this call gives back.
        if needs_copy and not self._free and all(self._owners[page] > 1 for page in surplus):
            raise OutOfPagesError(1, 0)
        self._give_back(surplus)
        del own.pages[kept:]
        own.length = length
        if not needs_copy:
            return None
        (target,) = self._take(1)
        copy = PageCopy(own.pages[-1], target)
        self._give_back([copy.source])
        own.pages[-1] = target
        return copy

    @_exclusive
    def fork(self, sequence: int, length: int | None = None) -> Fork:
        """Create a sequence with the first tokens of another one; both share its full pages.

        Args:
            sequence: the other sequence, which does not change.
            length: the number of tokens; by default all.

        Raises:
            OutOfPagesError: there is no free page for a copy of the partial last page.
            ValueError: there is no such sequence, or it is shorter than ``length``.
        """
        parent = self._sequence(sequence)
        length = parent.length if length is None else _count("length", length)
        if length > parent.length:
            raise ValueError(
                f"length must be at most that of sequence {sequence}, {parent.length}, got {length}"
            )
        full, rest = divmod(length, self._page_size)
        own = self._take(1 if rest else 0)
        for page in parent.pages[:full]:
            self._owners[page] += 1
        copy = PageCopy(parent.pages[full], own[0]) if rest else None
        return Fork(self._new(parent.pages[:full] + own, length), copy)

    @_exclusive
    def free(self, sequence: int) -> None:
        """End a sequence, and free the pages that no other sequence owns.

        Raises:
            ValueError: there is no such sequence.
        """
        self._give_back(self._sequence(sequence).pages)
        del self._sequences[int(sequence)]

    @_exclusive
    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its tokens."""
        return tuple(self._sequence(sequence).pages)

    @_exclusive
    def table(self, sequences: Iterable[int], max_pages: int) -> np.ndarray:
        """The ``page_table`` of these sequences, int32[B, max_pages]; -1 beyond their pages.

        Keep ``max_pages`` fixed, so that the compiled step is not recompiled.

        Raises:
            ValueError: a sequence has more than ``max_pages`` pages, there is no such sequence, or
                a row has more keys than int32 can count.
        """
        names = _names(sequences)
        width = _count("max_pages", max_pages, most=_INT32_MAX // self._page_size)
        found = np.full((len(names), width), -1, np.int32)
        for row, name in zip(found, names, strict=True):
            pages = self._sequence(name).pages
            if len(pages) > len(row):
                raise ValueError(
                    f"max_pages must be at least the pages of sequence {name}, {len(pages)}, got "
                    f"{len(row)}"
                )
            row[: len(pages)] = pages
        return found

    @_exclusive
    def lengths(self, sequences: Iterable[int]) -> np.ndarray:
        """The ``kv_lengths`` of these sequences, int32[B]."""
        return np.array([self._sequence(name).length for name in _names(sequences)], np.int32)

    def _new(self, pages: list[int], length: int) -> int:
        name = self._next
        self._next += 1
        self._sequences[name] = _Sequence(pages, length)
        return name

    def _sequence(self, name: int) -> _Sequence:
        number = static_integer("sequence", name, "a Python integer", "the pool is on the host")
        found = self._sequences.get(number)
        if found is None:
            raise ValueError(
                f"sequence must be one of the {len(self._sequences)} sequences of this pool, got "
                f"{name!r:.80}, which was never allocated or has been freed"
            )
        return found

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPagesError(count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def _give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)


def _names(sequences: Iterable[int]) -> list[int]:
    if not isinstance(sequences, Iterable):
        raise TypeError(
            f"sequences must be a list of names of sequences, got {sequences!r:.80}; pass [name]"
        )
    return list(sequences)


def _length(tokens: int) -> int:
    """The length of a sequence, if int32 ``kv_lengths`` can hold it."""
    if tokens > _INT32_MAX:
        raise ValueError(
            f"tokens: a sequence must have at most {_INT32_MAX} tokens together, got {tokens}: "
            "kv_lengths are int32"
        )
    return tokens


def _count(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    number = size(name, value, least, most=None, instead="the pool is on the host")
    if most is not None and number > most:
        raise ValueError(
            f"{name} must be at most {most}, got {number}: page tables and kv_lengths are int32"
        )
    return number
