"""The arrays of a call, as pytrees."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.pages import Pages
from jax_memeff._call.sequences import Sequences


class DropoutState(NamedTuple):
    """The inputs of an element's keep bit other than its row and column."""

    key_words: jax.Array
    """uint32[B, 2]: the two words of the Philox key, per batch index."""
    batch_base: jax.Array
    """uint32[B]: ``batch index * number of query heads``."""
    head_index: jax.Array
    """uint32[N]: the query head index added to ``batch_base``."""


class FunctionState(NamedTuple):
    """The inputs of the user's functions other than score, row and column."""

    batch_index: jax.Array
    """int32[B]: the user's index of each batch index, or of each packed sequence."""
    head_index: jax.Array
    """int32[N]: the user's index of each query head."""


class Operands(NamedTuple):
    """The arrays of a call; a pytree. An absent operand is None.

    With packed ``sequences``, B is their number, query, key and value are [1, tokens, ...], and
    segment ids [1, tokens]. The mask then has no lengths, because the sequences have them.
    """

    query: jax.Array
    """[B, T, N, H]"""
    key: jax.Array
    """[B, S, K, H], or with fewer batch indices: :class:`jax_memeff._call.options.Divisors`"""
    value: jax.Array
    """[B, S, K, Hv], likewise"""
    bias: jax.Array | None
    """[1|B, 1|N, 1|T, 1|S], likewise, of the query's dtype or float32"""
    mask: Mask
    dropout: DropoutState | None
    position: Position | None
    sequences: Sequences | None = None
    sinks: jax.Array | None = None
    """[1|B, N], or with fewer batch indices, of the dtype of the logsumexp"""
    functions: FunctionState | None = None
    """Present if the call has a score function or a mask function."""
    captured: tuple[jax.Array, ...] = ()
    """The arrays that ``Options.score_function`` reads, in the order of ``Program.arrays``:
    [1|B, ...], or with fewer batch indices. ``jax.vmap`` adds the first dim, unseen by the user."""
    pages: Pages | None = None
    """Present if key and value are pools of pages; ``sequences`` is then present, too."""

    @property
    def value_dim(self) -> int:
        """Hv"""
        if self.pages is not None and self.pages.latent_dim is not None:
            return self.pages.latent_dim
        return self.value.shape[3]

    @property
    def columns(self) -> int:
        """The number of keys; without packed sequences, of each batch index."""
        return self.key.shape[1] if self.pages is None else self.pages.longest_key

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """(B, N, T, S)"""
        batch, rows, heads, _ = self.query.shape
        if self.sequences is None:
            return batch, heads, rows, self.columns
        batch = self.sequences.query_starts.shape[0] - 1
        return batch, heads, self.sequences.longest_query, self.sequences.longest_key


class QkvPackedOperands(NamedTuple):
    """``Operands`` of a call whose query, key and value are one array."""

    query_key_value: jax.Array
    """[B, T, 3, N, H]"""
    bias: jax.Array | None
    mask: Mask
    dropout: DropoutState | None
    position: Position | None
    sinks: jax.Array | None = None
    functions: FunctionState | None = None
    captured: tuple[jax.Array, ...] = ()

    def separate(self) -> Operands:
        """The same call with three arrays."""
        query, key, value = (self.query_key_value[:, :, index] for index in range(3))
        others = self._asdict()
        del others["query_key_value"]
        return Operands(query, key, value, **others)


AnyOperands = Operands | QkvPackedOperands


def is_varlen(operands: Any) -> bool:
    """Whether the sequences are packed."""
    return getattr(operands, "sequences", None) is not None


def pages_of(operands: Any) -> Pages | None:
    """The pages of a call if its keys and values are in pages, else None."""
    return getattr(operands, "pages", None)


def batch_of(operands: Any) -> int:
    """B, for operands whose leaves have a shape."""
    if isinstance(operands, QkvPackedOperands):
        return operands.query_key_value.shape[0]
    return operands.scores[0]
