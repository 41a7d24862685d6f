"""The blockwise path for packed sequences, which computes them one after the other.

Each sequence is gathered from the tokens, computed as a batch of one, and scattered back. Only one
padded sequence is in memory at a time, and it is never longer than all tokens together, however
large ``max_seqlen`` is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from jax_memeff._blockwise import forward as blockwise
from jax_memeff._blockwise.pages import Pools
from jax_memeff._call.divisors import gradient_shape, without_divisors
from jax_memeff._call.operands import (
    Gradients,
    Item,
    NeedsGrad,
    Operands,
    array_of,
    captured_name,
    gradients_needed,
    gradients_of,
    mapped,
    replaced,
)
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import Sequences, token_indices
from jax_memeff._call.values import score_dtype
from jax_memeff._compat import InconclusiveDimensionOperation


def forward(operands: Operands, options: Options, dtype: Any = None) -> tuple[jax.Array, ...]:
    """Like :func:`jax_memeff._blockwise.forward.forward`, for packed sequences.

    Returns:
        out: [1, tokens, N, Hv], 0 for tokens of no sequence.
        lse: [1, tokens, N], -inf for tokens of no sequence.
        maxima: like lse, only with ``options.row_maxima``.
    """
    _, tokens, heads, _ = operands.query.shape
    accumulator = score_dtype(operands.query.dtype)
    nothing = jnp.full((1, tokens, heads), -jnp.inf, accumulator)
    results = (
        jnp.zeros((1, tokens, heads, operands.value_dim), dtype or operands.query.dtype),
        *[nothing] * (2 if options.row_maxima else 1),
    )
    if _is_empty(operands):
        return results
    _require_sequences(_sequences(operands).query_starts.shape[0])
    operands = operands._replace(sequences=_sequences(operands).clamped)
    own_options, pools = without_divisors(options), Pools.of(operands)

    def sequence(index: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows, columns = tokens_of(operands, index)
        part = sequence_of(operands, options, index, rows, columns)
        one = blockwise.forward(part, own_options, dtype, pools)
        return tuple(_put(result, rows, part) for result, part in zip(results, one, strict=True))

    return lax.fori_loop(0, operands.scores_shape[0], sequence, results)


def backward(
    operands: Operands,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    needs_grad: NeedsGrad,
) -> Gradients:
    """Like :func:`jax_memeff._blockwise.backward.backward`, for packed sequences."""
    own_options = without_divisors(options)
    zeros = {
        name: jnp.zeros(
            gradient_shape(name, array_of(operands, name).shape, operands, options.divisors),
            array_of(operands, name).dtype,
        )
        for name in gradients_needed(operands, needs_grad)
    }
    sums = gradients_of(operands, zeros)
    if _is_empty(operands):
        return sums
    operands = operands._replace(sequences=_sequences(operands).clamped)
    # Gradients that are sums over sequences; accumulating in 16 bits would round every addition.
    over_sequences = [name for name in ("bias", *_captured_names(operands)) if name in zeros]
    widened = {name: _widened(array_of(operands, name)) for name in over_sequences}
    operands = replaced(operands, widened)
    sums = replaced(sums, {name: _widened(zeros[name]) for name in over_sequences})
    needs_grad = needs_grad._replace(bias="bias" in zeros)

    def sequence(index: jax.Array, sums: Gradients) -> Gradients:
        rows, columns = tokens_of(operands, index)
        part = blockwise.backward(
            sequence_of(operands, options, index, rows, columns),
            own_options,
            _take(out, rows),
            jnp.take(lse, rows, 1, mode="fill", fill_value=-jnp.inf),
            _take(dout, rows),
            None if dlse is None else _take(dlse, rows),
            needs_grad,
        )
        added = {
            name: _added(
                array_of(sums, name), array_of(part, name), index, operands.scores_shape[0]
            )
            for name in over_sequences
        }
        return replaced(sums, added)._replace(
            query=_put(sums.query, rows, part.query),
            key=_put(sums.key, columns, part.key),
            value=_put(sums.value, columns, part.value),
        )

    sums = lax.fori_loop(0, operands.scores_shape[0], sequence, sums)
    rounded = {name: array_of(sums, name).astype(zeros[name].dtype) for name in over_sequences}
    return replaced(sums, rounded)


def _sequences(operands: Operands) -> Sequences:
    assert operands.sequences is not None
    return operands.sequences


def _require_sequences(starts: Any) -> None:
    """Raise for a symbolic number of starts that may be 1, because JAX cannot index an empty array.

    Raises:
        ValueError: the number may be 1; the message names ``cu_seqlens_q`` and the remedy.
    """
    try:
        bool(starts >= 2)
    except InconclusiveDimensionOperation as error:
        raise ValueError(
            f"cu_seqlens_q must have at least 2 elements, got a symbolic number of them, {starts}, "
            f"which may be less; pass {starts} + 1, or constraints=['{starts} >= 2'] to "
            "jax.export.symbolic_shape"
        ) from error


def _captured_names(operands: Operands) -> list[str]:
    return [captured_name(index) for index in range(len(operands.captured))]


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(score_dtype(x.dtype))


def _added(total: jax.Array, part: jax.Array, index: jax.Array, sequences: int) -> jax.Array:
    """A gradient [1|B, ...] plus that of a sequence, [1, ...], whose other dims may be smaller."""
    place = (index // (sequences // total.shape[0]), *(slice(size) for size in part.shape[1:]))
    return total.at[place].add(part[0])


def _is_empty(operands: Operands) -> bool:
    return 0 in (*operands.scores_shape, operands.query.shape[1], operands.key.shape[1])


def longest(operands: Operands) -> tuple[int, int]:
    """The most rows and columns of a sequence: T and S, or all tokens if those are fewer."""
    _, _, rows, columns = operands.scores_shape

    def at_most(size: int, tokens: Any) -> int:
        # An exported program may have a symbolic number of tokens.
        return size if export.is_symbolic_dim(tokens) else min(size, tokens)

    if operands.pages is not None:
        # A page may occur several times in the table, so there may be more keys than pool rows.
        return at_most(rows, operands.query.shape[1]), columns
    return at_most(rows, operands.query.shape[1]), at_most(columns, operands.key.shape[1])


def tokens_of(operands: Operands, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tokens of a sequence's queries, [rows], and of its keys, [columns].

    The numbers of rows and columns are those of :func:`longest`. With pages the keys are counted
    from 0, because the table gives their places.
    """
    sequences: Any = operands.sequences
    rows, columns = longest(operands)
    return (
        token_indices(
            sequences.query_starts[index],
            sequences.query_lengths[index],
            rows,
            operands.query.shape[1],
        ),
        token_indices(
            sequences.key_starts[index],
            sequences.key_lengths[index],
            columns,
            operands.key.shape[1],
        ),
    )


def sequence_of(
    operands: Operands, options: Options, index: jax.Array, rows: jax.Array, columns: jax.Array
) -> Operands:
    """One sequence as a batch of one; rows and columns come from :func:`tokens_of`."""

    def of_sequence(item: Item) -> Any:
        x = item.array
        has_batch = item.operand.packed_dims[0].startswith("sequences") and x.ndim > 0
        if not has_batch or x.shape[0] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, index // options.divisors[item.name] % x.shape[0], 1)

    def of_scores(x: Any) -> Any:
        return None if x is None else x[:, :, : rows.size, : columns.size]

    one = mapped(of_sequence, operands)
    mask, sequences = one.mask, one.sequences
    # The pages of a tile are gathered when it is read.
    is_paged = operands.pages is not None
    return one._replace(
        query=_take(operands.query, rows),
        key=operands.key if is_paged else _take(operands.key, columns),
        value=operands.value if is_paged else _take(operands.value, columns),
        bias=of_scores(one.bias),
        mask=dataclasses.replace(
            mask,
            query_lengths=sequences.query_lengths,
            key_lengths=sequences.key_lengths,
            segment_ids=tuple(
                (_take(query_ids, rows), _take(key_ids, columns))
                for query_ids, key_ids in mask.segment_ids
            ),
            booleans=tuple(map(of_scores, mask.booleans)),
            key_lists=tuple(
                dataclasses.replace(lists, indices=jnp.swapaxes(_take(lists.indices, rows), 1, 2))
                for lists in mask.key_lists
            ),
            traced_windows=jax.tree.map(lambda x: x[index] if x.ndim else x, mask.traced_windows),
        ),
        position=jax.tree.map(lambda x: x[index] if x.ndim else x, operands.position),
        sequences=None,
    )


def _take(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows of a sequence, padded with zeros."""
    return jnp.take(x, tokens, 1, mode="fill", fill_value=0)


def _put(x: Any, tokens: jax.Array, rows: Any) -> Any:
    """``x`` with the rows of a sequence replaced; rows beyond its length are dropped."""
    if x is None or rows is None:
        return None
    return x.at[:, tokens].set(rows, mode="drop")
