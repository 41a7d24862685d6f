"""The method of MaxText's ``AttentionOp`` that computes attention, without storing the scores.

::

    from maxtext.layers.attention_op import AttentionOp
    from jax_memeff.clients.maxtext import apply_attention_dot

    AttentionOp.apply_attention_dot = apply_attention_dot

The signature, the attributes and their meaning are those of MaxText 0.2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_memeff._api import attention as api
from jax_memeff._call.mask import Mask

_KINDS = ("global", "full", "local_sliding", "chunk", "mla", "block_diffusion")


def apply_attention_dot(
    self: Any,
    query: jax.Array,
    key: Any,
    value: Any,
    decoder_segment_ids: jax.Array | None,
    model_mode: str = "train",
    previous_chunk: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
    bidirectional_mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    indexer_mask: jax.Array | None = None,
    compressed_mask: jax.Array | None = None,
    record_max_logits: bool = False,
    decoder_segment_ids_kv: jax.Array | None = None,
    *,
    qk_product_einsum: Callable[..., jax.Array],
    wv_product_einsum: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``AttentionOp.apply_attention_dot`` with memory linear in the lengths.

    Args:
      self: the ``AttentionOp``.
      query: ``[B, T, N, H]``, scaled already, as MaxText does.
      key, value: ``[B, S, K, H]``, or MaxText's quantized tensors of them.
      decoder_segment_ids: int ``[B, S]``: the document of each token; in ``autoregressive`` mode 1
        where a slot of the cache is in use.
      model_mode: ``train``, ``prefill`` or ``autoregressive``.
      previous_chunk: the keys of earlier chunks of a prefill; its length counts.
      segment_positions: refused under load-balanced context parallelism, else without effect.
      bidirectional_mask: ``[B, S]``, nonzero for tokens of images, which attend to each other.
      sinks: a logit for each head, ``[N]``.
      indexer_mask: ``[B, T, S]``, 0 where the sparse indexer keeps a key.
      compressed_mask: refused.
      record_max_logits: stores the largest score of each head in ``self.max_logits``.
      decoder_segment_ids_kv: the documents of the keys, if they differ.
      qk_product_einsum, wv_product_einsum: have no effect.

    Returns:
      The output ``[B, T, N, H]``, and a maximum and a sum ``[B, T, N, 1]`` for its scores, by which
      MaxText combines the parts of its cache.

    Raises:
      NotImplementedError: load-balanced context parallelism, compressed attention, MoBA, an unknown
        type of attention, or images in chunks or in decoding.
    """
    if segment_positions is not None and self._load_balanced_context_parallel():
        raise NotImplementedError("segment_positions of load-balanced context parallelism")
    if compressed_mask is not None:
        raise NotImplementedError("compressed_mask")
    if self.config.moba:
        raise NotImplementedError("moba=True")
    # The einsums multiply quantized caches; the kernels need the numbers.
    key, value = (x.dequant() if hasattr(x, "dequant") else x for x in (key, value))
    rows, columns = query.shape[1], key.shape[1]
    first = 0  # the column of the first row's own token
    if previous_chunk is not None:
        first = previous_chunk.shape[1]
    elif model_mode == "autoregressive" and rows == 1:
        first = columns - 1
    ids = (decoder_segment_ids, decoder_segment_ids_kv)
    mask = _mask(self, ids, model_mode, rows, first)
    if bidirectional_mask is not None:
        mask |= _same_image(bidirectional_mask, rows)
    if indexer_mask is not None:
        mask &= Mask.boolean(indexer_mask[:, None] == 0)
    drops = model_mode == "train" and self.config.enable_dropout
    rate = self.dropout_rate if drops else 0.0
    out, lse, *largest = api.dot_product_attention(
        query,
        key.astype(query.dtype),
        value.astype(query.dtype),
        mask=mask,
        scale=1.0,  # MaxText scales the projection of the query
        logits_soft_cap=self.attn_logits_soft_cap or None,
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        dropout_rate=rate,
        dropout_key=self.rngs.dropout() if rate else None,
        return_residual=True,
        return_max_logits=record_max_logits,  # type: ignore[arg-type]
        residual_checkpoint_name="context",
    )
    if record_max_logits:
        from flax import nnx

        self.max_logits = nnx.Intermediate(largest[0])
    return out, lse[..., None], jnp.ones_like(lse, query.dtype)[..., None]


def _mask(
    op: Any,
    documents: tuple[jax.Array | None, jax.Array | None],
    model_mode: str,
    rows: int,
    first: int,
) -> Mask:
    """What ``AttentionOp.generate_attention_mask`` allows, without an array of it.

    ``documents`` are those of queries and keys; if the keys have none, those of the queries.
    """
    ids, key_ids = documents
    kind = getattr(op.attention_type, "value", op.attention_type)
    if kind not in _KINDS:
        raise NotImplementedError(f"expected a known attention type, got {kind!r}")
    mask, decoding = Mask.window(None, None), model_mode == "autoregressive"
    if ids is not None and decoding:  # ids mark the slots of the cache that are in use
        mask &= Mask.boolean(ids[:, None, None] == 1)
    elif ids is not None:
        key_ids = ids if key_ids is None else key_ids
        mask &= Mask.segments(ids[:, first : first + rows], key_ids)
    if not decoding and kind not in ("full", "block_diffusion"):
        mask &= Mask.window(None, first)
    if kind == "local_sliding":
        mask &= Mask.window(op.sliding_window_size - 1 - first, first)
    if kind == "chunk":
        size = op.chunk_attn_window_size
        mask &= Mask.function(lambda b, h, q, k: (q + first) // size == k // size)
        mask &= Mask.window(None, first)
    if kind == "block_diffusion" and not decoding:
        block = op.causal_block_size
        mask &= Mask.function(lambda b, h, q, k: (q + first) // block >= k // block)
    return mask


def _same_image(tokens: jax.Array, rows: int) -> Mask:
    """Tokens of one image, a run of nonzero ``tokens`` ``[B, S]``, attend to each other."""
    if tokens.shape[1] != rows:
        raise NotImplementedError("bidirectional_mask in chunks or in decoding")
    tokens = jnp.asarray(tokens, bool)
    begins = tokens & ~jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    images = jnp.where(tokens, jnp.cumsum(begins, axis=1), -1)
    return Mask.segments(images, images)
