"""Lists of keys on CUDA: a list is a row of a page table whose pages have one key.

Each query token becomes a sequence with one row. Its pages are the entries of its list, and the
keys as they are become the pool. So every kernel for pages of one key reads lists, and nothing of
the keys is copied. If the key heads have lists of their own, there is a sequence for each token and
key head, and a key in the pool for each head.

Kernels see the places of keys in a list, and not their positions. Whatever removes an element
(windows, lengths, masks) is therefore applied to the lists before the kernel: the entry becomes a
page that does not exist, which kernels mask and never read. A call with anything else that depends
on positions has no kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise.functions import Coordinates, holds
from jax_memeff._call import sinks
from jax_memeff._call.divisors import broadcastable, expanded, of_booleans, with_values
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.tiles import listed_elements
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import FunctionState, Operands, QkvPackedOperands
from jax_memeff._call.options import Divisors, Options
from jax_memeff._call.sequences import INVARIANT_COLUMNS, Pages, Sequences, sequence_of_tokens
from jax_memeff.codegen.functions.program import Program
from jax_memeff.errors import UnsupportedError

_XLA = "pass implementation='xla'"


def have_backward(avals: Sequence[Any], *, tree: Any, **_: Any) -> bool:
    """Whether kernels compute the backward of a call. There is none for lists yet."""
    return not jax.tree.unflatten(tree, avals)[0].mask.key_lists


class Lists(NamedTuple):
    """How a call with lists becomes one with pages."""

    options: Options
    """Those of the call with pages."""
    copies_values: bool
    """Whether values that are columns of the keys are copied to a pool of their own."""

    def in_pages(self, given: Operands | QkvPackedOperands, options: Options) -> Operands:
        """The call with pages. Results are reshaped by :func:`as_in_lists`.

        Args:
            given: operands with lists, whose call :func:`require_no_positions` accepts.
            options: those of the call with lists.
        """
        latent_dim = options.latent_dim
        if self.copies_values or isinstance(given, QkvPackedOperands):
            latent_dim = None
            given, options = with_values(given, options)
        tokens = _Tokens.of(given)
        lists = _lists_of_tokens(given, options)
        count, heads = lists.shape[2], lists.shape[1]
        valid = _valid(given, options, tokens, lists)
        rows = _key_rows(given, options, tokens, jnp.where(valid, lists, 0))
        valid &= rows >= 0
        table = jnp.where(valid, rows * heads + jnp.arange(heads)[:, None], -1)
        lengths = jnp.max(jnp.where(valid, jnp.arange(1, count + 1), 0), 2, initial=0)
        table, lengths = table.reshape(-1, count), lengths.reshape(-1)
        batch = table.shape[0]
        is_invariant = given.pages is not None and given.pages.is_invariant
        if is_invariant:
            table = jnp.pad(table, ((0, 0), (0, -count % INVARIANT_COLUMNS)), constant_values=-1)

        def of_sequences(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, heads)

        rows_each = lengths
        own_sinks = given.sinks
        if own_sinks is not None:
            # A row without keys has its sink.
            rows_each = of_sequences(tokens.exist.astype(jnp.int32))
            if own_sinks.shape[0] != 1 or heads != 1:
                each, _ = sinks.of_each_row(given, options)
                each = jnp.broadcast_to(each, given.query.shape[:3])
                own_sinks = each.reshape(batch, -1)
        position = functions = None
        if options.score_function is not None:
            assert given.functions is not None
            first, _ = _position(given, tokens)
            position = Position(of_sequences(first), jnp.zeros((), jnp.int32))
            functions = FunctionState(
                of_sequences(given.functions.batch_index[tokens.batch]),
                given.functions.head_index[: given.query.shape[2] // heads],
            )
        key, value = _pools(given, options, heads)
        scales = (None, None)
        if given.pages is not None:
            latent_dim = given.pages.latent_dim
            scales = given.pages.key_scale, given.pages.value_scale
        starts = jnp.arange(batch + 1, dtype=jnp.int32)
        return Operands(
            query=given.query.reshape(1, batch, -1, given.query.shape[3]),
            key=key,
            value=key if value is None else value,
            bias=None,
            mask=Mask(),
            dropout=None,
            position=position,
            sequences=Sequences(starts, starts, rows_each, lengths, 1, table.shape[1]),
            sinks=own_sinks,
            functions=functions,
            captured=given.captured,
            pages=Pages(table, *scales, 1, latent_dim, 1, is_invariant),
        )


def in_pages(types: Any, options: Options, copies_values: bool) -> tuple[Lists, Operands]:
    """How a call becomes one with pages, and the types of the latter's operands.

    Raises:
        UnsupportedError: kernels would need the positions of keys.
    """
    require_no_positions(types, options)
    paged = dataclasses.replace(options, latent_dim=None, divisors=Divisors(), batch_axes=())
    lists = Lists(paged, copies_values)
    return lists, jax.eval_shape(lambda given: lists.in_pages(given, options), types)


def as_in_lists(results: Sequence[jax.Array], shapes: Sequence[Any]) -> list[jax.Array]:
    """The results of a call with pages in the shapes of the call with lists."""
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]


def require_no_positions(types: Any, options: Options) -> None:
    """Raise for a call whose kernels would have to know the position of each key.

    Raises:
        UnsupportedError: the message says what needs it.
    """
    mask, heads = types.mask, types.mask.key_lists[0].indices.shape
    is_packed = getattr(types, "sequences", None) is not None
    own_lists = heads[2 if is_packed else 1] != 1
    needs = []
    if getattr(types, "bias", None) is not None:
        needs.append("the bias")
    if options.dropout_threshold:
        needs.append("dropout")
    needs += [
        "a boolean mask with a row for each head"
        for x in mask.booleans
        if x.shape[1] != 1
    ]
    for program in mask.functions:
        if "head" in program.dependence(program.results[0]):
            needs.append("a mask function of the head")
        if any(x.shape[0] != 1 for x in mask.captured):
            needs.append("a mask function of arrays that jax.vmap maps")
    if (program := options.score_function) is not None:
        read = _inputs(program)
        if "key" in read:
            needs.append("a score function of the key's position")
        if "head" in read and own_lists:
            needs.append("a score function of the head, and each key head has its own lists")
        if any(x.shape[0] != 1 for x in types.captured):
            needs.append("a score function of arrays that jax.vmap maps")
    pages = getattr(types, "pages", None)
    if pages is not None:
        for scale in (pages.key_scale, pages.value_scale):
            if scale is not None and (scale.shape[1] != 1 or own_lists):
                needs.append("a scale for each page, or for each key head with lists of its own")
    if needs:
        raise UnsupportedError(
            [
                "kernels read lists of keys (Mask.keys) without the positions of keys, and cannot "
                f"combine them with: {'; '.join(dict.fromkeys(needs))}",
                _XLA,
            ]
        )


def _inputs(program: Program) -> frozenset[str]:
    return frozenset().union(*map(program.dependence, program.results))


class _Tokens(NamedTuple):
    """The place of each query token, int32[tokens] each."""

    batch: jax.Array
    """The batch index, or the packed sequence."""
    row: jax.Array
    exist: jax.Array
    """bool[tokens]: whether the row is within the lengths."""
    query_length: jax.Array | None
    key_length: jax.Array | None

    @staticmethod
    def of(operands: Operands) -> _Tokens:
        batch, length, _, _ = operands.query.shape
        if (sequences := operands.sequences) is None:
            index = lax.broadcasted_iota(jnp.int32, (batch, length), 0).reshape(-1)
            row = lax.broadcasted_iota(jnp.int32, (batch, length), 1).reshape(-1)
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

    def of_each(self, x: Any) -> Any:
        """The element of each token of scalars, or of arrays [B]."""
        return jax.tree.map(lambda leaf: leaf[self.batch] if leaf.ndim else leaf, x)


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
    """The global index of each token's row, int32[tokens], and of its column 0, int32[tokens]."""
    if operands.position is None:
        return Position(tokens.row, jnp.zeros_like(tokens.row))
    first = tokens.of_each(operands.position)
    return Position(tokens.row + first.query, jnp.zeros_like(tokens.row) + first.key)


def _valid(
    operands: Operands, options: Options, tokens: _Tokens, lists: jax.Array
) -> jax.Array:
    """Whether each entry is an index of a key to which the row attends, bool[tokens, 1|K, n]."""
    mask, columns = operands.mask, lists[:, :, None]
    _, _, *sizes = operands.scores_shape
    of_tokens = dataclasses.replace(
        mask,
        query_lengths=tokens.query_length,
        key_lengths=tokens.key_length,
        traced_windows=tokens.of_each(mask.traced_windows),
    )
    position = tokens.of_each(operands.position)
    rows, columns_of_mask = tokens.row.reshape(-1, 1, 1, 1), (sizes[0], operands.columns)
    valid = listed_elements(of_tokens, columns_of_mask, rows, columns, position)[:, :, 0]
    valid &= tokens.exist[:, None, None]
    columns = jnp.where(valid, lists, 0)
    batch, row = (x[:, None, None] for x in (tokens.batch, tokens.row))
    if mask.segment_ids:
        keys = _first_keys(operands, tokens, tokens.batch) + columns
        for query_ids, key_ids in mask.segment_ids:
            own = query_ids.reshape(-1, 1, 1)
            valid &= (own == key_ids.reshape(-1)[keys]) & (own >= 0)
    for array, divisor in zip(
        mask.booleans, of_booleans(mask, options.divisors), strict=True
    ):
        indices = expanded(
            jnp.arange(array.shape[0]), divisor, operands.scores_shape[0]
        )
        places = (
            0 if size == 1 else place
            for size, place in zip(
                array.shape, (indices[batch], 0, row, columns), strict=True
            )
        )
        valid &= array.at[tuple(places)].get(mode="clip")
    for program in mask.functions:
        assert operands.functions is not None
        first, column = _position(operands, tokens)
        coordinates = Coordinates(
            operands.functions.batch_index[tokens.batch].reshape(-1, 1, 1, 1, 1),
            jnp.zeros((1,) * 5, jnp.int32),
            first.reshape(-1, 1, 1, 1, 1),
            (columns + column[:, None, None])[:, :, None, None],
        )
        valid &= holds(program, coordinates, mask.captured)[:, :, 0, 0]
    return valid


def _first_keys(operands: Operands, tokens: _Tokens, batch: jax.Array) -> jax.Array:
    """The first key of each token's sequence among those of all, int32[tokens, 1, 1].

    Args:
        operands: whose keys are not in pages.
        tokens: of the queries.
        batch: int32[tokens], the batch index of the arrays of keys for each token.
    """
    if operands.sequences is not None:
        return operands.sequences.key_starts[tokens.batch][:, None, None]
    return (batch * operands.columns)[:, None, None]


def _key_batch(operands: Operands, options: Options) -> tuple[int, int]:
    """The batch indices of the pool, and their divisor. ``jax.vmap`` may map only one of keys and
    values; both are then copied for the whole batch.
    """
    of_key, of_value = (
        None if x is None else (x.shape[0], options.divisors[name])
        for name, x in (("key", operands.key), ("value", operands.value))
    )
    assert of_key is not None
    if of_value is None or of_key[0] == of_value[0] and of_key == of_value:
        return of_key
    return operands.scores_shape[0], 1


def _key_rows(
    operands: Operands, options: Options, tokens: _Tokens, columns: jax.Array
) -> jax.Array:
    """The row of each entry's key among the keys of all sequences, or in the pool of the user, where
    -1 is a page that does not exist; int32[tokens, 1|K, n].
    """
    if (pages := operands.pages) is None:
        indices, divisor = _key_batch(operands, options)
        batch = expanded(jnp.arange(indices), divisor, operands.scores_shape[0])
        if operands.sequences is not None:
            batch = jnp.zeros_like(tokens.batch)
        else:
            batch = batch[tokens.batch]
        return _first_keys(operands, tokens, batch) + columns
    page = pages.table[tokens.batch[:, None, None], columns // pages.page_size]
    exists = (page >= 0) & (page < operands.key.shape[1] // pages.page_size)
    place = lax.rem(columns, jnp.int32(pages.page_size))
    return jnp.where(exists, jnp.where(exists, page, 0) * pages.page_size + place, -1)


def _pools(
    operands: Operands, options: Options, heads: int
) -> tuple[jax.Array, jax.Array | None]:
    """Keys and values as pools of pages of one key, [1, rows * heads, K / heads, H]."""
    indices, divisor = _key_batch(operands, options)

    def pool(name: str, x: jax.Array) -> jax.Array:
        if operands.sequences is None and (x.shape[0], options.divisors[name]) != (indices, divisor):
            x = expanded(x, options.divisors[name], indices)
        return x.reshape(1, -1, x.shape[2] // heads, x.shape[3])

    value = operands.value
    return pool("key", operands.key), None if value is None else pool("value", value)
