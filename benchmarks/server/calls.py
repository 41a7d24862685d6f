"""The calls that are compared: one step with pages of several kinds, and parts of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from programs.inputs import Inputs

import jax_memeff
from server.steps import ELEMENT_BYTES, Step

DRAFTED = 5
"""The number of tokens of a speculative tree."""

_PARENTS = (-1, 0, 0, 1, 2)


class Tokens(NamedTuple):
    """All tokens of a step, one sequence after the other."""

    query: jax.Array
    """[new tokens, N, H]"""
    key: jax.Array
    """[tokens, K, H]"""
    value: jax.Array | None
    """[tokens, K, Hv]; None if the values are columns of the keys"""


def make(step: Step) -> Tokens:
    """Standard normal arrays in bfloat16."""
    keys = jax.random.split(jax.random.key(0), 3)
    new, tokens = sum(step.counts), sum(step.lengths)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    return Tokens(
        normal(keys[0], new, step.heads, step.head_dim),
        normal(keys[1], tokens, step.key_heads, step.head_dim),
        None if step.is_latent else normal(keys[2], tokens, step.key_heads, step.value_dim),
    )


def contiguous(step: Step, tokens: Tokens) -> Inputs:
    """The arrays of ``step.cell`` for implementations that read no pages."""
    batch = len(step.lengths)
    query, key, value = (x.reshape(batch, -1, *x.shape[1:]) for x in tokens if x is not None)
    return Inputs(query, key, value, cotangent=query, bias=None, dropout_key=None)


class Pages(NamedTuple):
    """The arguments of ``jax_memeff.paged_attention``; None if a call has no such array."""

    query: jax.Array
    key: jax.Array
    value: jax.Array | None
    table: jax.Array
    lengths: jax.Array
    starts: jax.Array | None = None
    scale: jax.Array | None = None
    """The scale of a float8 pool, for both keys and values."""
    tree: jax.Array | None = None
    """bool[DRAFTED, DRAFTED]: the drafted tokens that each one attends to."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of ``paged_attention``, in bfloat16 unless it says otherwise."""

    name: str
    label: str
    page_size: int = 64
    is_float8: bool = False
    is_invariant: bool = False
    is_tree: bool = False
    part: Callable[[Step], range] | None = None
    """Chooses the sequences that are computed; all of them by default."""

    @property
    def is_whole(self) -> bool:
        """Whether the call computes the new tokens of the step, all of them and no others."""
        return self.part is None and not self.is_tree

    def sequences(self, step: Step) -> range:
        """The sequences that are computed."""
        return range(len(step.lengths)) if self.part is None else self.part(step)

    def rows(self, step: Step) -> slice:
        """The new tokens of these sequences, among those of the step."""
        own, ends = self.sequences(step), np.cumsum((0, *step.counts))
        return slice(int(ends[own.start]), int(ends[own.stop]))

    def key_value_bytes(self, step: Step) -> int:
        """The bytes of the keys and values of these sequences."""
        own = slice(self.sequences(step).start, self.sequences(step).stop)
        part = dataclasses.replace(step, lengths=step.lengths[own], counts=step.counts[own])
        return part.key_value_bytes // (ELEMENT_BYTES if self.is_float8 else 1)

    def arrays(self, step: Step, tokens: Tokens) -> Pages:
        """The arguments, with keys and values in pages in random order.

        Raises ``ValueError`` if the call and the step do not go together.
        """
        if self.is_tree and set(step.counts) != {1}:
            raise ValueError(f"expected a step with one token per sequence, got {step.counts}")
        table = page_table(step.lengths, self.page_size)
        rows = rows_of_pages(step.lengths, table, self.page_size)
        pool = functools.partial(
            _pool, rows=rows, page_size=self.page_size, is_float8=self.is_float8
        )
        own = self.sequences(step)
        first, last = own.start, own.stop
        ends = np.cumsum((0, *step.counts))
        query, starts = tokens.query[self.rows(step)], None
        if self.is_tree:
            query = _drafts(query)
        elif set(step.counts) == {1}:
            query = query[:, None]
        else:
            starts = jnp.asarray(ends[first : last + 1] - ends[first], jnp.int32)
        return Pages(
            query,
            pool(tokens.key),
            None if tokens.value is None else pool(tokens.value),
            jnp.asarray(table[first:last]),
            jnp.asarray(step.lengths[first:last], jnp.int32),
            starts,
            jnp.ones(step.key_heads, jnp.float32) if self.is_float8 else None,
            jnp.asarray(_tree()) if self.is_tree else None,
        )

    def function(self, step: Step, implementation: Any) -> Callable[[Pages], jax.Array]:
        """The call as a function of its arguments."""
        most = max(step.counts[index] for index in self.sequences(step))

        def attention(pages: Pages) -> jax.Array:
            given: dict[str, Any] = {"key_scale": pages.scale}
            if pages.value is not None:  # latent values have the scale of the keys
                given["value_scale"] = pages.scale
            if (tree := pages.tree) is not None:
                first = pages.lengths - DRAFTED
                given["mask"] = jax_memeff.Mask.function(
                    lambda b, h, q, k: (
                        (k < first[b]) | tree[q - first[b], jnp.maximum(k - first[b], 0)]
                    )
                )
            return jax_memeff.paged_attention(
                pages.query,
                pages.key,
                pages.value,
                pages.table,
                pages.lengths,
                query_starts=pages.starts,
                max_query_length=None if pages.starts is None else most,
                value_dim=step.value_dim if step.is_latent else None,
                batch_invariant=self.is_invariant,
                implementation=implementation,
                **given,
            )

        return attention


def _first_prompt(step: Step) -> int:
    """Sequences with one new token come first."""
    return next(index for index, count in enumerate(step.counts) if count > 1)


CALLS = {
    call.name: call
    for call in (
        Call("pages64", "pages of 64"),
        Call("pages16", "pages of 16", page_size=16),
        Call("float8", "float8 pages", is_float8=True),
        Call("invariant", "batch-invariant", is_invariant=True),
        Call("tree", f"{DRAFTED} tokens, tree mask", is_tree=True),
        Call("steps", "decode steps alone", part=lambda step: range(_first_prompt(step))),
        Call(
            "prompts",
            "prompts alone",
            part=lambda step: range(_first_prompt(step), len(step.counts)),
        ),
    )
}


def page_table(lengths: tuple[int, ...], page_size: int) -> np.ndarray:
    """A table [B, max_pages] of the pages of a pool that has no page to spare, in random order.

    >>> table = page_table((33, 16), 16)
    >>> table.shape, sorted(table[table >= 0].tolist())
    ((2, 3), [0, 1, 2, 3])
    """
    needed = [-(-length // page_size) for length in lengths]
    order = np.random.default_rng(0).permutation(sum(needed)).astype(np.int32)
    table = np.full((len(lengths), max(needed)), -1, np.int32)
    for row, pages in zip(table, np.split(order, np.cumsum(needed)[:-1]), strict=True):
        row[: len(pages)] = pages
    return table


def rows_of_pages(lengths: tuple[int, ...], table: np.ndarray, page_size: int) -> np.ndarray:
    """The token, of all sequences one after the other, in each row of the pool; 0 in unused rows.

    >>> rows_of_pages((3, 17), np.array([[1, -1], [2, 0]]), 16)[[0, 1, 16, 18, 32]].tolist()
    [19, 0, 0, 2, 3]
    """
    rows = np.zeros(((table >= 0).sum(), page_size), np.int64)
    first = 0
    for length, own in zip(lengths, table, strict=True):
        for place in range(-(-length // page_size)):
            tokens = np.arange(place * page_size, min((place + 1) * page_size, length))
            rows[own[place], : len(tokens)] = first + tokens
        first += length
    return rows.ravel()


def _pool(tokens: jax.Array, rows: np.ndarray, page_size: int, is_float8: bool) -> jax.Array:
    dtype = jnp.float8_e4m3fn if is_float8 else tokens.dtype
    pages = tokens.reshape(-1, *tokens.shape[-2:]).astype(dtype)[jnp.asarray(rows)]
    return pages.reshape(-1, page_size, *pages.shape[1:])


def _drafts(query: jax.Array) -> jax.Array:
    """[B, N, H] to [B, DRAFTED, N, H]"""
    return jnp.stack([jnp.roll(query, token, 0) for token in range(DRAFTED)], 1)


def _tree() -> np.ndarray:
    sees = np.eye(DRAFTED, dtype=bool)
    for token, parent in enumerate(_PARENTS):
        if parent >= 0:
            sees[token] |= sees[parent]
    return sees
