"""The attention function of Levanter, on named arrays of haliax.

::

    import levanter.layers.attention
    from jax_memeff.clients.levanter import dot_product_attention

    levanter.layers.attention.dot_product_attention = dot_product_attention

The signature and the meaning of the arguments are those of Levanter's main branch in 2026.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jax_memeff._api import attention as api
from jax_memeff._call.mask import Mask

if TYPE_CHECKING:
    from haliax import Axis, NamedArray

FIELDS = frozenset(
    {
        *("is_causal", "causal_offset", "explicit_mask", "segment_ids", "sliding_window"),
        *("bidirectional_window", "prefix_length", "prefix_lengths", "prefix_mask"),
    }
)
"""The fields of an ``AttentionMask`` that are translated; others raise if they are set."""


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: Any = None,
    bias: NamedArray | None = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: Any = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: jax.Array | None = None,
    attn_sink: NamedArray | None = None,
) -> NamedArray:
    """``levanter.layers.attention.dot_product_attention`` with memory linear in the lengths.

    The axes of the query before its position are the batch. The axes after it are heads: those that
    the keys have too are the key heads, and the others are the query heads of each key head.

    Args:
      QPos, KPos, Key: the axes of query positions, of key positions and of a head, or their names.
      query: any float dtype, with the axes batch, ``QPos``, heads and ``Key``.
      key: the axes batch, ``KPos``, key heads and ``Key``, in any order.
      value: as ``key``, with an axis of any size in place of ``Key``.
      mask: an ``AttentionMask``, or a named array of any dtype in which nonzero means attend.
      bias: a named array, added to the scores after the soft cap; Levanter adds it before.
      attention_dtype: the dtype in which the call computes; None means that of ``query``.
      precision: as in :func:`jax_memeff.dot_product_attention`.
      use_flash, attn_backend, flash_block_size: have no effect.
      dropout: the rate, a multiple of 1/256, if ``inference`` is false.
      logits_soft_cap, scaling_factor: as in Levanter.
      inference: whether nothing is dropped.
      prng: the key of the dropout.
      attn_sink: a logit for each head.

    Returns:
      An array with the dtype of ``query`` and the axes batch, ``QPos``, key heads, query heads of a
      key head, and the last axis of ``value``.

    Raises:
      ValueError: ``dropout`` without ``prng``.
      NotImplementedError: a field of ``mask`` is set that is not in ``FIELDS``.
    """
    import haliax

    rows, columns = query.resolve_axis(QPos), key.resolve_axis(KPos)
    depth, at = query.resolve_axis(Key), query.axes.index(rows)
    batch, heads = query.axes[:at], [axis for axis in query.axes[at + 1 :] if axis != depth]
    key_heads = [axis for axis in heads if axis in key.axes]
    heads.sort(key=lambda axis: axis not in key_heads)
    (width,) = (axis for axis in value.axes if axis not in (*batch, columns, *key_heads))
    dtype = attention_dtype or query.dtype
    rate = 0.0 if inference else dropout
    if rate and prng is None:
        raise ValueError("dropout needs prng, got None; pass prng, or inference=True")
    out = api.dot_product_attention(
        _flat(query, batch, [rows], heads, [depth]).astype(dtype),
        _flat(key, batch, [columns], key_heads, [depth]).astype(dtype),
        _flat(value, batch, [columns], key_heads, [width]).astype(dtype),
        bias=None if bias is None else _flat(bias, batch, heads, [rows], [columns]),
        mask=_structured(mask, batch, heads, rows, columns),
        scale=scaling_factor,
        logits_soft_cap=logits_soft_cap,
        sinks=None if attn_sink is None else _flat(attn_sink, heads),
        dropout_rate=rate,
        dropout_key=prng if rate else None,
        precision=precision,
    )
    axes = (*batch, rows, *heads, width)
    return haliax.named(out.reshape([axis.size for axis in axes]).astype(query.dtype), axes)


def _flat(x: NamedArray, *groups: Sequence[Axis]) -> jax.Array:
    """An array with a dim for each group of axes, of size 1 if ``x`` has no axis of the group."""
    for group in groups:
        if any(axis in x.axes for axis in group):
            x = x.broadcast_axis(tuple(group))
    x = x.rearrange([axis for group in groups for axis in group if axis in x.axes])
    sizes = [math.prod(axis.size for axis in group if axis in x.axes) for group in groups]
    return x.array.reshape(sizes)


def _structured(
    mask: Any, batch: Sequence[Axis], heads: Sequence[Axis], rows: Axis, columns: Axis
) -> Mask | None:
    """A ``Mask`` for Levanter's ``AttentionMask``, or for a named array."""
    if mask is None:
        return None
    if hasattr(mask, "axes"):
        return _allowed(mask, batch, heads, rows, columns)
    if unknown := {name for name, x in vars(mask).items() if x is not None} - FIELDS:
        raise NotImplementedError(f"expected a mask with known fields, got {sorted(unknown)}")
    seen = [*_limits(mask, batch), *_prefixes(mask, batch, rows, columns)]
    found = functools.reduce(operator.or_, seen) if seen else Mask.window(None, None)
    if (ids := mask.segment_ids) is not None:
        query_ids, key_ids = ids if isinstance(ids, tuple) else (ids, ids)
        key_ids = key_ids.rename({rows.name: columns.name})
        query_ids, key_ids = query_ids.broadcast_axis(batch), key_ids.broadcast_axis(batch)
        found &= Mask.segments(_flat(query_ids, batch, [rows]), _flat(key_ids, batch, [columns]))
    if mask.explicit_mask is not None:
        found &= _allowed(mask.explicit_mask, batch, heads, rows, columns)
    return found


def _allowed(
    mask: NamedArray, batch: Sequence[Axis], heads: Sequence[Axis], rows: Axis, columns: Axis
) -> Mask:
    """A ``Mask`` for a named array, in which nonzero means attend."""
    return Mask.boolean(_flat(mask, batch, heads, [rows], [columns]).astype(bool))


def _limits(mask: Any, batch: Sequence[Axis]) -> list[Mask]:
    """The causal mask and the windows as one mask; empty without any of them."""
    found = []
    if mask.is_causal:
        offset = mask.causal_offset
        if offset is None or not offset.axes:
            found.append(Mask.window(None, 0 if offset is None else offset.array))
        else:
            offsets = _flat(offset.broadcast_axis(batch), batch)
            found.append(Mask.function(lambda b, h, q, k: k <= q + offsets[b]))
    if mask.sliding_window is not None:
        found.append(Mask.window(mask.sliding_window - 1, 0))
    if (radius := getattr(mask, "bidirectional_window", None)) is not None:
        found.append(Mask.window(radius, radius))
    return [functools.reduce(operator.and_, found)] if found else []


def _prefixes(mask: Any, batch: Sequence[Axis], rows: Axis, columns: Axis) -> Iterator[Mask]:
    """Masks of the keys that every query sees; only some versions of Levanter have them."""
    if (length := getattr(mask, "prefix_length", None)) is not None:
        yield Mask.function(lambda b, h, q, k: k < length)
    if (lengths := getattr(mask, "prefix_lengths", None)) is not None:
        yield Mask.lengths(key=_flat(lengths.broadcast_axis(batch), batch))
    if (keys := getattr(mask, "prefix_mask", None)) is not None:
        keys = keys.rename({rows.name: columns.name})
        yield Mask.boolean(_flat(keys, batch, [], [], [columns]).astype(bool))
