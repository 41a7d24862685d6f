"""Lists of keys on CUDA: a list is a row of a page table whose pages have one key.

Each query token becomes a sequence with one row. Its pages are the entries of its list, and the
keys, as they lie in memory, become the pool. So every kernel for pages of one key reads lists, and
no key is copied. If key heads have lists of their own, each token and key head is a sequence, and
each head of a key a page.

Kernels see the places of keys in a list, not their positions. Whatever removes elements (windows,
lengths, masks) is therefore applied to the lists before the kernel runs: the entry becomes a page
that does not exist, which kernels mask and never read. A call with anything else that depends on
positions takes its lists in bits (``bits.py``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise.functions import Coordinates, holds
from jax_memeff._call import sinks
from jax_memeff._call.divisors import (
    broadcastable,
    expanded,
    of_booleans,
    whole,
    with_values,
    without_divisors,
)
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.tiles import listed_elements
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import (
    FunctionState,
    NeedsGrad,
    Operands,
    QkvPackedOperands,
    is_packed,
)
from jax_memeff._call.options import Divisors, Options
from jax_memeff._call.sequences import INVARIANT_COLUMNS, Pages, Sequences, sequence_of_tokens


def gradients_in_pages(needs_grad: NeedsGrad | None) -> NeedsGrad | None:
    """The gradients that kernels compute in the call that :func:`in_pages` returns. XLA computes
    that of the sinks.
    """
    if needs_grad is None:
        return None
    return NeedsGrad(needs_grad.query, needs_grad.key, needs_grad.value, bias=False)


def in_pages(
    given: Operands | QkvPackedOperands,
    options: Options,
    copies_values: bool,
    is_backward: bool = False,
) -> tuple[Operands, Options]:
    """The call with pages that computes a call with lists.

    Its tokens are those of the call in the same order, once for each list of a token, and its heads
    are those that share a list: results have the same elements in the same order.

    Args:
        given: operands with lists, without anything that :func:`needed_positions` names.
        options: those of the call with lists.
        copies_values: whether values that are columns of the keys are copied to a pool of their
            own, for kernels that need one.
        is_backward: whether the keys need a gradient for each batch index. The sinks are then left
            out, because the logsumexp contains them.
    """
    own_options = dataclasses.replace(options, latent_dim=None, divisors=Divisors(), batch_axes=())
    latent_dim = options.latent_dim
    if copies_values or latent_dim is None:
        given, options = with_values(given, options)
        latent_dim = None
    assert isinstance(given, Operands)
    if is_backward:
        given = whole(given._replace(sinks=None), options)
        options = without_divisors(options)
    tokens = _Tokens.of(given)
    lists = _lists_of_tokens(given, options)
    _, heads, count = lists.shape
    valid = _valid(given, options, tokens, lists)
    rows = _key_rows(given, options, tokens, jnp.where(valid, lists, 0))
    valid &= rows >= 0
    table = jnp.where(valid, rows * heads + jnp.arange(heads)[:, None], -1).reshape(-1, count)
    # Kernels end at the last entry that is left: the end of a causal list may have none.
    lengths = jnp.max(jnp.where(valid, jnp.arange(1, count + 1), 0), 2, initial=0).reshape(-1)
    batch, pages = len(lengths), given.pages
    own_pages = Pages(table, None, None, page_size=1, latent_dim=latent_dim, tokens_each=1)
    if pages is not None:
        if pages.is_invariant:
            more = -count % INVARIANT_COLUMNS
            table = jnp.pad(table, ((0, 0), (0, more)), constant_values=-1)
        own_pages = dataclasses.replace(pages, table=table, page_size=1, tokens_each=1)

    own_sinks, query_lengths = given.sinks, lengths
    if own_sinks is not None:
        # A row without keys has its sink. Without sinks it is like a row that does not exist.
        query_lengths = jnp.repeat(tokens.exist.astype(jnp.int32), heads)
        if (own_sinks.shape[0], heads) != (1, 1):
            of_rows, _ = sinks.of_each_row(given, options)
            own_sinks = jnp.broadcast_to(of_rows, given.query.shape[:3]).reshape(batch, -1)
    position = functions = None
    if options.score_function is not None:
        assert given.functions is not None
        row, _ = _position(given, tokens)
        position = Position(jnp.repeat(row, heads), jnp.zeros((), jnp.int32))
        functions = FunctionState(
            jnp.repeat(given.functions.batch_index[tokens.batch], heads),
            given.functions.head_index[: given.query.shape[2] // heads],
        )
    key, value = _pools(given, options, heads)
    starts = jnp.arange(batch + 1, dtype=jnp.int32)
    operands = Operands(
        query=given.query.reshape(1, batch, -1, given.query.shape[3]),
        key=key,
        value=value,
        bias=None,
        mask=Mask(),
        dropout=None,
        position=position,
        sequences=Sequences(starts, starts, query_lengths, lengths, 1, own_pages.longest_key),
        sinks=own_sinks,
        functions=functions,
        captured=given.captured,
        pages=own_pages,
    )
    return operands, own_options


def needed_positions(types: Any, options: Options) -> list[str]:
    """The features of a call for which kernels would need the position of each key, by name."""
    mask, pages = types.mask, getattr(types, "pages", None)
    have_own_lists = mask.key_lists[0].indices.shape[2 if is_packed(types) else 1] != 1
    needs = {
        "a bias": types.bias is not None,
        "dropout": options.dropout_threshold > 0,
        "a boolean mask with an element for each head": any(x.shape[1] != 1 for x in mask.booleans),
        "a mask function of arrays that jax.vmap maps": any(x.shape[0] != 1 for x in mask.captured),
        "a mask function of the head": any(
            "head" in program.dependence(program.results[0]) for program in mask.functions
        ),
    }
    if (program := options.score_function) is not None:
        inputs = frozenset().union(*map(program.dependence, program.results))
        needs |= {
            "a score function of the column": "key" in inputs,
            "a score function of the head, if key heads have lists of their own": "head" in inputs
            and have_own_lists,
            "a score function of arrays that jax.vmap maps": any(
                x.shape[0] != 1 for x in types.captured
            ),
        }
    if pages is not None:
        scales = [x for x in (pages.key_scale, pages.value_scale) if x is not None]
        needs["scales for each page"] = any(x.shape[1] != 1 for x in scales)
        needs["scales, if key heads have lists of their own"] = have_own_lists and bool(scales)
    return [name for name, is_needed in needs.items() if is_needed]


class _Tokens(NamedTuple):
    """Where each query token is, int32[tokens] each."""

    batch: jax.Array
    """The batch index, or the packed sequence."""
    row: jax.Array
    """Counted from the first row of the batch index."""
    exist: jax.Array
    """bool[tokens]: whether the row is within the lengths."""
    query_length: jax.Array | None
    key_length: jax.Array | None

    @staticmethod
    def of(operands: Operands) -> _Tokens:
        batch, length, _, _ = operands.query.shape
        if (sequences := operands.sequences) is None:
            index, row = (
                lax.broadcasted_iota(jnp.int32, (batch, length), dim).reshape(-1) for dim in (0, 1)
            )
            lengths = operands.mask.query_lengths, operands.mask.key_lengths
        else:
            sequences = sequences.clamped
            index = sequence_of_tokens(sequences.query_starts, length)
            row = lax.iota(jnp.int32, length) - sequences.query_starts[index]
            lengths = sequences.query_lengths, sequences.key_lengths
        of_queries, of_keys = (None if x is None else x[index] for x in lengths)
        exist = row >= 0
        if of_queries is not None:
            exist &= row < of_queries
        return _Tokens(index, row, exist, of_queries, of_keys)

    def of_each(self, tree: Any) -> Any:
        """Numbers, or arrays [B], for each token."""
        return jax.tree.map(lambda x: x[self.batch] if x.ndim else x, tree)


def _lists_of_tokens(operands: Operands, options: Options) -> jax.Array:
    """int32[tokens, 1|K, n]"""
    indices = operands.mask.key_lists[0].indices
    if operands.sequences is not None:
        return indices[0]
    batch = operands.query.shape[0]
    lists = broadcastable(indices, options.divisors["mask.key_lists.0.indices"], batch)
    lists = jnp.swapaxes(lists, 1, 2)
    return jnp.broadcast_to(lists, (batch, *lists.shape[1:])).reshape(-1, *lists.shape[2:])


def _position(operands: Operands, tokens: _Tokens) -> Position:
    """The global index of each token's row and of column 0, int32[tokens] each."""
    first = operands.position
    first = Position(jnp.int32(0), jnp.int32(0)) if first is None else tokens.of_each(first)
    return Position(tokens.row + first.query, jnp.zeros_like(tokens.row) + first.key)


def _valid(operands: Operands, options: Options, tokens: _Tokens, lists: jax.Array) -> jax.Array:
    """Whether each entry is an index of a key to which the row attends, bool[tokens, 1|K, n]."""
    mask, scores_batch = operands.mask, operands.scores_shape[0]
    # Tokens are batch indices with one row.
    of_tokens = dataclasses.replace(
        mask,
        query_lengths=tokens.query_length,
        key_lengths=tokens.key_length,
        traced_windows=tokens.of_each(mask.traced_windows),
    )
    valid = listed_elements(
        of_tokens,
        (operands.scores_shape[2], operands.columns),
        tokens.row.reshape(-1, 1, 1, 1),
        lists[:, :, None],
        tokens.of_each(operands.position),
    )[:, :, 0]
    valid &= tokens.exist[:, None, None]
    columns = jnp.where(valid, lists, 0)
    if mask.segment_ids:
        keys = _first_key(operands, tokens, tokens.batch)[:, None, None] + columns
        for query_ids, key_ids in mask.segment_ids:
            segment = query_ids.reshape(-1, 1, 1)
            valid &= (segment == key_ids.reshape(-1)[keys]) & (segment >= 0)
    for array, divisor in zip(mask.booleans, of_booleans(mask, options.divisors), strict=True):
        indices = expanded(jnp.arange(array.shape[0]), divisor, scores_batch)[tokens.batch]
        places = indices[:, None, None], 0, tokens.row[:, None, None], columns
        own_places = zip(array.shape, places, strict=True)
        valid &= array.at[tuple(0 if size == 1 else place for size, place in own_places)].get(
            mode="clip"
        )
    for program in mask.functions:
        assert operands.functions is not None
        row, first_column = (x.reshape(-1, 1, 1, 1, 1) for x in _position(operands, tokens))
        batch_index = operands.functions.batch_index[tokens.batch].reshape(-1, 1, 1, 1, 1)
        column = columns[:, :, None, None] + first_column
        coordinates = Coordinates(batch_index, jnp.zeros((1,) * 5, jnp.int32), row, column)
        valid &= holds(program, coordinates, mask.captured)[:, :, 0, 0]
    return valid


def _first_key(operands: Operands, tokens: _Tokens, batch: jax.Array) -> jax.Array:
    """The first key of each token's sequence among those of all sequences, int32[tokens].

    Args:
        operands: whose keys are not in pages.
        tokens: those of the queries.
        batch: int32[tokens], the batch index of padded keys.
    """
    if operands.sequences is not None:
        return operands.sequences.key_starts[tokens.batch]
    return batch * operands.columns


def _key_rows(
    operands: Operands, options: Options, tokens: _Tokens, columns: jax.Array
) -> jax.Array:
    """The row of each entry's key among those of all sequences, or of the user's pool;
    int32[tokens, 1|K, n]. It is -1 for a page that does not exist.
    """
    if (pages := operands.pages) is not None:
        page = pages.table[tokens.batch[:, None, None], columns // pages.page_size]
        exists = (page >= 0) & (page < operands.key.shape[1] // pages.page_size)
        # The page is selected before the multiplication, which could overflow.
        first = jnp.where(exists, page, 0) * pages.page_size
        return jnp.where(exists, first + lax.rem(columns, jnp.int32(pages.page_size)), -1)
    indices, divisor = _batch_of_pools(operands, options)
    batch = expanded(jnp.arange(indices), divisor, operands.scores_shape[0])[tokens.batch]
    return _first_key(operands, tokens, batch)[:, None, None] + columns


def _batch_of_pools(operands: Operands, options: Options) -> tuple[int, int]:
    """The batch indices of padded keys and values, and their divisor. Those of the whole batch, if
    a ``jax.vmap`` maps only one of the two arrays.
    """
    if operands.sequences is not None:
        return 1, 1
    pairs = {
        (array.shape[0], options.divisors[name])
        for name, array in (("key", operands.key), ("value", operands.value))
        if array is not None
    }
    return pairs.pop() if len(pairs) == 1 else (operands.query.shape[0], 1)


def _pools(operands: Operands, options: Options, heads: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values as pools of pages of one key, [1, rows * heads, K / heads, .]. Without an
    array of values they are the same pool.
    """
    batch = _batch_of_pools(operands, options)

    def pool(name: str, array: jax.Array) -> jax.Array:
        if operands.sequences is None and (array.shape[0], options.divisors[name]) != batch:
            array = expanded(array, options.divisors[name], batch[0])
        return array.reshape(1, -1, array.shape[2] // heads, array.shape[3])

    key = pool("key", operands.key)
    return key, key if operands.value is None else pool("value", operands.value)
