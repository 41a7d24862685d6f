"""Eager validation of values, for debugging."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_memeff._api import attention as api
from jax_memeff._api import varlen
from jax_memeff._api.paged import attention as paged_api
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.operands import Operands
from jax_memeff._call.values import score_dtype, takes_objects


@takes_objects
def check(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    **arguments: Any,
) -> None:
    """Raise if a call to ``dot_product_attention`` with these arguments has bad values.

    Takes the arguments of :func:`jax_memeff.dot_product_attention`. If ``cu_seqlens_q`` is among
    them, it takes those of :func:`jax_memeff.varlen_attention`; if ``page_table`` is, those of
    :func:`jax_memeff.paged_attention`, with the pools as ``key`` and ``value``. It computes no
    attention, and copies the arrays to the host. In addition to the checks of the function itself,
    it checks device arrays:

    - lengths must be in [0, T] and [0, S] (the call itself would clamp them);
    - ``cu_seqlens_*`` must be in [0, tokens] and not decrease, and no sequence may be longer than
      ``max_seqlen_*`` (the call itself would shorten sequences);
    - ``kv_lengths`` must be within the table, ``query_starts`` must be in [0, tokens] and must not
      decrease (the call itself would clamp both), and the pages of a sequence must be in the pool
      (the call itself would mask their keys);
    - ``offsets`` must be in range (the call itself would clamp the positions);
    - query, key and value, and the scales of a float8 pool, must be finite within the lengths
      (beyond them they may hold anything);
    - bias must hold neither NaN nor +inf within the lengths, and sinks must not hold NaN;
    - the indices of ``Mask.keys`` must be in [-1, S) (the call itself would ignore others), and
      distinct within a list if ``unique_indices=True``;
    - a query's segment id must be negative, or the id of a key within the lengths of the same batch
      index (the call itself would give 0 for that row).

    Raises:
        ValueError: A value is wrong; the message names the argument, the index and, except
            for segment ids, the value.
        TypeError: A dtype is wrong, or an argument is traced: call it outside ``jax.jit``.

    >>> import jax.numpy as jnp, jax_memeff
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> jax_memeff.check(x, x, x, key_value_seq_lengths=jnp.array([5]))
    Traceback (most recent call last):
    ...
    ValueError: key_value_seq_lengths must be in [0, 4], got 5 at index 0
    """
    is_packed, is_paged = "cu_seqlens_q" in arguments, "page_table" in arguments
    if is_paged:
        call = inspect.signature(paged_api.paged_attention).bind(
            query, key, value, mask=mask, **_without_bias(bias, arguments)
        )
    else:
        function = varlen.varlen_attention if is_packed else api.dot_product_attention
        own = inspect.signature(function)
        call = own.bind(query, key, value, bias=bias, mask=mask, **arguments)
    call.apply_defaults()
    for name, argument in call.arguments.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(argument)):
            raise TypeError(
                f"{name} must hold concrete values, got a traced array; call jax_memeff.check "
                "outside jax.jit, jax.grad and jax.vmap"
            )
    if isinstance(jnp.zeros(()), Tracer):
        raise TypeError(
            "check must be called outside jax.jit, whose arrays have no values; got a call that is "
            "being traced"
        )
    named = dict(call.arguments)
    for name in ("return_residual", "return_max_logits"):
        named.pop(name, None)
    for name in _ON_HOST:
        if named.get(name) is not None:
            named[name] = _host(name, named[name])
    for name in ("mask", "offsets"):
        if isinstance(named.get(name), Mask | Offsets):
            named[name] = jax.tree.map(functools.partial(_host, name), named[name])
    if is_paged:
        _check_paged(named)
        _sinks(named["sinks"])
        return

    prepare: Any = varlen.prepare if is_packed else api.prepare
    canonical = prepare(**named)
    operands: Operands = canonical.operands
    _sinks(named["sinks"])
    _key_lists(named["mask"], operands.scores_shape[3])
    in_rows, in_columns = _rows_in_use(operands, "query"), _rows_in_use(operands, "key")
    for name, array, valid in (
        ("query", operands.query, in_rows),
        ("key", operands.key, in_columns),
        ("value", operands.value, in_columns),
    ):
        if array is None:
            continue
        host = np.asarray(array)
        if not canonical.batched:
            host, valid = host[0], valid[0]
        _refuse(name, host, ~np.isfinite(host) & valid[..., None, None], "finite")
    if operands.bias is not None:
        batch, _, rows, columns = operands.scores_shape
        lengths = operands.sequences or operands.mask
        in_rows = _within(lengths.query_lengths, batch, rows)
        in_columns = _within(lengths.key_lengths, batch, columns)
        host = np.asarray(operands.bias)
        valid = in_rows[:, None, :, None] & in_columns[:, None, None, :]
        shape = np.broadcast_shapes(host.shape, valid.shape)
        host, valid = np.broadcast_to(host, shape), np.broadcast_to(valid, shape)
        _refuse("bias", host, (np.isnan(host) | np.isposinf(host)) & valid, "finite or -inf")
    if operands.mask.segment_ids:
        _segments(operands)


def _host(name: str, value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} must hold numbers, got a random key of shape {value.shape}")
    return np.asarray(value)


_ON_HOST = (
    "query_seq_lengths",
    "key_value_seq_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "kv_lengths",
    "query_starts",
)


def _without_bias(bias: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a paged call, which has no bias."""
    if bias is not None:
        raise ValueError(
            f"bias must be None with page_table, got {type(bias).__name__}: pass score_mod"
        )
    return arguments


def _within(lengths: Any, batch: int, size: int) -> np.ndarray:
    """bool[B, size]: the positions that lie within the lengths."""
    if lengths is None:
        return np.ones((batch, size), bool)
    return np.arange(size)[None, :] < np.asarray(lengths)[:, None]


def _refuse(name: str, array: np.ndarray, wrong: np.ndarray, expected: str) -> None:
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"{name} must be {expected} within the sequence lengths, got {array[index]} at index "
            f"{index} of shape {array.shape}"
        )


def _sinks(sinks: Any) -> None:
    if sinks is not None and (wrong := np.isnan(np.asarray(sinks))).any():
        raise ValueError(
            f"sinks must not be NaN, got nan for head {np.argmax(wrong)}; -inf means no sink"
        )


def _key_lists(mask: Any, columns: int) -> None:
    """Refuse indices of no key but -1, and keys that occur twice in a list of unique ones."""
    for lists in mask.key_lists if isinstance(mask, Mask) else ():
        indices = np.asarray(lists.indices)
        wrong = (indices < -1) | (indices >= columns)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"key indices must be in [-1, {columns}), got {indices[index]} at index {index}"
            )
        ordered = np.sort(indices, -1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if lists.is_unique and repeated.any():
            *index, place = (int(i) for i in np.argwhere(repeated)[0])
            raise ValueError(
                "key indices must be distinct with unique_indices=True, got "
                f"{ordered[(*index, place)]} twice in the list at index {tuple(index)}; leave "
                "unique_indices out"
            )


def _rows_in_use(operands: Operands, side: str) -> np.ndarray:
    """bool[B, T], or bool[1, tokens]: the rows of query or of key that take part."""
    shape = getattr(operands, side).shape[:2]
    if operands.sequences is None:
        return _within(getattr(operands.mask, f"{side}_lengths"), *shape)
    valid = np.zeros(shape, bool)
    starts, lengths = (
        np.asarray(getattr(operands.sequences, f"{side}_{what}")) for what in ("starts", "lengths")
    )
    for start, length in zip(starts[:-1], lengths, strict=True):
        valid[0, start : start + length] = True
    return valid


def _segments(operands: Operands) -> None:
    """Refuse queries whose ids no key of their batch index has.

    Large ids, and several masks, become several pairs of arrays. A key must match in all of them,
    and lie within the lengths.
    """
    query_ids, key_ids = (
        np.stack([np.asarray(ids) for ids in side], -1)
        for side in zip(*operands.mask.segment_ids, strict=True)
    )
    rows, columns = _rows_in_use(operands, "query"), _rows_in_use(operands, "key")
    for batch in range(operands.scores_shape[0]):
        row = 0
        if operands.sequences is None:
            queries, valid = query_ids[batch], rows[batch]
            keys = key_ids[batch, columns[batch]]
        else:
            row, end = operands.sequences.query_starts[batch : batch + 2]
            first, last = operands.sequences.key_starts[batch : batch + 2]
            queries, valid = query_ids[0, row:end], rows[0, row:end]
            keys = key_ids[0, first:last][columns[0, first:last]]
        # Give each distinct row of [queries and keys, pairs] one number.
        joined = np.concatenate([queries, keys])
        numbers = np.unique(joined, axis=0, return_inverse=True)[1].ravel()
        of_queries, of_keys = np.split(numbers, [len(queries)])
        lonely = (queries >= 0).all(1) & ~np.isin(of_queries, of_keys) & valid
        if lonely.any():
            index = int(np.argmax(lonely))
            where = (batch, index) if operands.sequences is None else (int(row) + index,)
            # A mask may hold numbers in place of the user's ids, so the message has no id.
            raise ValueError(
                f"query segment ids must occur among the key segment ids of their batch index, got "
                f"one at index {where} that no key has; mark padding by a negative id"
            )


def _check_paged(arguments: dict[str, Any]) -> None:
    """Raise if a call of ``paged_attention`` has bad values; :func:`jax_memeff.check` lists them.

    Args:
        arguments: all its arguments by name, concrete; lengths and starts on the host.

    Raises:
        ValueError, TypeError: the errors of ``check``.
    """
    paged = paged_api.prepare(**arguments)
    operands = paged.call.operands
    _table(operands)
    _key_lists(arguments["mask"], operands.scores_shape[3])
    sequences: Any = operands.sequences
    starts, counts = (np.asarray(x) for x in (sequences.query_starts, sequences.query_lengths))
    query = np.asarray(operands.query)[0]
    for start, count in zip(starts[:-1], counts, strict=True):
        _require_finite("query", query, np.arange(start, start + count), paged.rows)
    pages: Any = operands.pages
    lengths = np.asarray(sequences.key_lengths)
    table = np.asarray(pages.table)
    _scales(arguments, table[_in_use(operands)])
    pools = {"key_pages": operands.key, "value_pages": operands.value}
    if pages.latent_dim is not None:
        del pools["value_pages"]
    for name, pool in pools.items():
        # NumPy lacks bfloat16 and float8.
        wide = score_dtype(operands.query.dtype)
        host = np.asarray(pool[0].astype(wide))
        for row, length in zip(table, lengths, strict=True):
            columns = np.arange(length)
            rows = row[columns // pages.page_size] * pages.page_size + columns % pages.page_size
            _require_finite(name, host, rows, (len(host) // pages.page_size, pages.page_size))


def _table(operands: Operands) -> None:
    """Every page within the lengths must be in the pool."""
    pages, sequences = operands.pages, operands.sequences
    assert pages is not None and sequences is not None
    count = operands.key.shape[1] // pages.page_size
    table, lengths = np.asarray(pages.table), np.asarray(sequences.key_lengths)
    wrong = _in_use(operands) & ((table < 0) | (table >= count))
    if wrong.any():
        b, place = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"page_table must be in [0, {count}), the pages of the pool, within kv_lengths, got "
            f"{table[b, place]} at index ({b}, {place}), and sequence {b} has {lengths[b]} tokens"
        )


def _in_use(operands: Operands) -> np.ndarray:
    """bool[B, max_pages]: the entries of the table within the lengths."""
    pages, sequences = operands.pages, operands.sequences
    assert pages is not None and sequences is not None
    counts = -(-np.asarray(sequences.key_lengths) // pages.page_size)
    return np.arange(pages.table.shape[1]) < counts[:, None]


def _scales(arguments: dict[str, Any], pages: np.ndarray) -> None:
    """The scales of these pages must be finite."""
    for name in ("key_scale", "value_scale"):
        if arguments[name] is None:
            continue
        scale = np.asarray(arguments[name])
        is_of_pages = scale.ndim == 2
        is_used = np.isin(np.arange(len(scale)), pages)[:, None] if is_of_pages else pages.size > 0
        wrong = ~np.isfinite(scale) & is_used
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"{name} must be finite for pages within kv_lengths, got {scale[index]} at index "
                f"{index}"
            )


def _require_finite(
    name: str, array: np.ndarray, rows: np.ndarray, leading: tuple[int, ...]
) -> None:
    """Every number in these rows must be finite; rows are the user's ``leading`` dims."""
    wrong = ~np.isfinite(array[rows])
    if wrong.any():
        place, *index = (int(i) for i in np.argwhere(wrong)[0])
        row = int(rows[place])
        at = (*(int(i) for i in np.unravel_index(row, leading)), *index)
        raise ValueError(
            f"{name} must be finite within kv_lengths, got {array[(row, *index)]} at index {at}"
        )
