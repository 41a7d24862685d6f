"""Eager validation of the values of a paged call."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_memeff._api.paged.attention import prepare
from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.values import score_dtype


def check_paged(arguments: dict[str, Any]) -> None:
    """Raise if a call of ``paged_attention`` has bad values; :func:`jax_memeff.check` lists them.

    Args:
        arguments: all its arguments by name, concrete; lengths and starts on the host.

    Raises:
        ValueError, TypeError: the errors of ``check``.
    """
    paged = prepare(**arguments)
    operands = paged.call.operands
    _table(operands)
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
