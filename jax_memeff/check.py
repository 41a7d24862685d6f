"""Eager validation of values, for debugging."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_memeff import api
from jax_memeff.mask import Mask


def check(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    **arguments: Any,
) -> None:
    """Raise if a call of ``dot_product_attention`` with these arguments has bad values.

    Takes the arguments of :func:`jax_memeff.dot_product_attention`, computes no attention, and
    copies the arrays to the host. Beside what that function checks, it reads device arrays:

    - lengths must be in [0, T] and [0, S] (the call itself would clamp them);
    - query, key and value must be finite within the lengths (beyond them anything may stand);
    - bias must hold neither NaN nor +inf within the lengths;
    - a query's segment id must be one of the keys' of its batch element, or negative (the call
      itself would give 0 for that row).

    Raises:
        ValueError: A value is wrong; the message names the argument, the index and the value.
        TypeError: A dtype is wrong, or an argument is traced: call it outside ``jax.jit``.

    >>> import jax.numpy as jnp, jax_memeff
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> jax_memeff.check(x, x, x, key_value_seq_lengths=jnp.array([5]))
    Traceback (most recent call last):
    ...
    ValueError: key_value_seq_lengths must be in [0, 4], got 5 at index 0
    """
    call = inspect.signature(api.dot_product_attention).bind(
        query, key, value, bias, mask, **arguments
    )
    call.apply_defaults()
    for name, argument in call.arguments.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(argument)):
            raise TypeError(
                f"{name} must hold concrete values, got a traced array; call jax_memeff.check "
                "outside jax.jit, jax.grad and jax.vmap"
            )
    named = dict(call.arguments)
    named.pop("return_residual")
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if named[name] is not None:
            named[name] = np.asarray(named[name])
    if isinstance(mask, Mask):
        named["mask"] = jax.tree.map(np.asarray, mask)

    operands = api.prepare(**named).operands
    batch, rows, _, _ = operands.query.shape
    columns = operands.key.shape[1]
    in_rows = _within(operands.mask.query_lengths, batch, rows)
    in_columns = _within(operands.mask.key_lengths, batch, columns)
    for name, array, valid in (
        ("query", operands.query, in_rows),
        ("key", operands.key, in_columns),
        ("value", operands.value, in_columns),
    ):
        host = np.asarray(array)
        _refuse(name, host, ~np.isfinite(host) & valid[:, :, None, None], "finite")
    if operands.bias is not None:
        host = np.asarray(operands.bias)
        valid = in_rows[:, None, :, None] & in_columns[:, None, None, :]
        shape = np.broadcast_shapes(host.shape, valid.shape)
        host, valid = np.broadcast_to(host, shape), np.broadcast_to(valid, shape)
        _refuse("bias", host, (np.isnan(host) | np.isposinf(host)) & valid, "finite or -inf")
    for query_ids, key_ids in operands.mask.segment_ids:
        _segments(np.asarray(query_ids), np.asarray(key_ids), in_rows)


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


def _segments(query_ids: np.ndarray, key_ids: np.ndarray, in_rows: np.ndarray) -> None:
    for element, (queries, keys) in enumerate(zip(query_ids, key_ids, strict=True)):
        lonely = (queries >= 0) & ~np.isin(queries, keys) & in_rows[element]
        if lonely.any():
            row = int(np.argmax(lonely))
            raise ValueError(
                f"query segment ids must occur among the key segment ids of their batch element, "
                f"got {queries[row]} at index ({element}, {row}); mark padding by a negative id"
            )
