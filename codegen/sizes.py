"""The sizes of one call, which are known at lowering and are not part of a kernel's source."""

from __future__ import annotations

import dataclasses


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
