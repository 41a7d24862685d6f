"""The sizes of one call, and how its work is divided over a GPU.

Sizes are known at lowering and are not part of a kernel's source. Calls with the same ``Problem``
may use different kernels, because one has few tiles; ``select.choose`` decides by the sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers on which the strategy and the sizes of workspaces depend.

    ``queries`` and ``keys`` are T and S, for packed sequences the longest ones. ``bias_gradient``
    holds the numbers of batch indices and of heads that have their own bias gradient.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int = 0
    value_dim: int = 0
    query_tokens: int | None = None
    """Rows of the query array if sequences are packed, else None."""
    key_tokens: int | None = None
    bias_gradient: tuple[int, int] = (1, 1)

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.query_tokens is not None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads if self.heads else 1

    def padded_queries(self, tile: int) -> int:
        """Rows of all query heads in a workspace whose tiles have ``tile`` rows."""
        return self.heads * self._padded_rows(self.query_tokens, self.queries, tile)

    def padded_keys(self, tile: int) -> int:
        """Rows of all key heads in a workspace whose tiles have ``tile`` rows."""
        return self.key_heads * self._padded_rows(self.key_tokens, self.keys, tile)

    def with_rows(self) -> Sizes:
        """The same sizes with at least one query and one key."""
        return dataclasses.replace(self, queries=max(self.queries, 1), keys=max(self.keys, 1))

    def _padded_rows(self, tokens: int | None, length: int, tile: int) -> int:
        """Rows of one head; layout/query_tiles.cuh lays out packed sequences."""
        if tokens is not None:
            return (tokens // tile + self.batch) * tile if self.batch else 0
        return self.batch * round_up(length, tile)


def ceil_div(size: int, tile: int) -> int:
    """The number of tiles of ``tile`` elements that cover ``size``.

    >>> ceil_div(65, 64), ceil_div(64, 64), ceil_div(0, 64)
    (2, 1, 0)
    """
    return -(-size // tile)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``.

    >>> round_up(65, 64), round_up(64, 64)
    (128, 64)
    """
    return ceil_div(size, multiple) * multiple


QueryRows = Literal["16", "32", "64", "128", "256", "consumer_groups"]
QUERY_ROWS: tuple[QueryRows, ...] = ("16", "32", "64", "128", "256", "consumer_groups")
_SPLIT_ROWS: tuple[QueryRows, ...] = ("16", "32", "64", "consumer_groups")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How one call divides its work; the default is one CTA for each tile.

    ``query_rows`` is set if a forward has few query rows, or too few tiles to fill the GPU:
    ``"16"``, ``"32"`` and ``"64"`` split the keys over CTAs, in tiles of this many rows (some GPUs
    have no tile of 32 and use that of 64); ``"consumer_groups"`` splits them over the consumer
    groups of one CTA. No kernel splits the keys of float32. ``"128"`` and ``"256"`` split nothing:
    they choose tiles of this many rows at the head dims that have them
    (``codegen/kernels/sm90/forward.py``).
    ``split_q`` lets several CTAs of a backward share a KV block. ``mma_sync`` excludes the wgmma
    kernels of float32.

    Raises ``ValueError`` for a ``query_rows`` that does not exist.
    """

    query_rows: QueryRows | None = None
    split_q: bool = False
    mma_sync: bool = False

    def __post_init__(self):
        if self.query_rows not in (None, *QUERY_ROWS):
            choices = ", ".join(map(repr, (None, *QUERY_ROWS)))
            raise ValueError(f"expected query_rows to be one of {choices}, got {self.query_rows!r}")

    @property
    def splits_keys(self) -> bool:
        """Whether CTAs or consumer groups divide the keys of a tile."""
        return self.query_rows in _SPLIT_ROWS

    def __str__(self) -> str:
        """The words that differ from the default."""
        words = [f"query_rows={self.query_rows}"] if self.query_rows else []
        flags = [name for name in ("split_q", "mma_sync") if getattr(self, name)]
        return ", ".join([*words, *flags])


PLAIN = Strategy()


def of_direction(direction: str) -> tuple[Strategy, ...]:
    """The strategies that a direction has besides the plain one."""
    of_float32 = Strategy(mma_sync=True)
    return {
        "forward": (*(Strategy(query_rows=rows) for rows in QUERY_ROWS), of_float32),
        "backward": (Strategy(split_q=True), of_float32),
    }.get(direction, ())


_forced: ContextVar[dict[str, Strategy]] = ContextVar("strategies")


@contextlib.contextmanager
def using(**strategies: Strategy) -> Iterator[None]:
    """Calls that are lowered in this context use ``strategies``, by direction, whatever their
    sizes. This serves to compare strategies, and to test each of them with small arrays. Programs
    that are already compiled keep theirs.

    >>> with using(forward=Strategy(query_rows="16")):
    ...     print(forced("forward"), forced("backward"))
    query_rows=16 None
    """
    token = _forced.set({**_forced.get({}), **strategies})
    try:
        yield
    finally:
        _forced.reset(token)


def forced(direction: str) -> Strategy | None:
    """The strategy that ``using`` names for a direction."""
    return _forced.get({}).get(direction)
