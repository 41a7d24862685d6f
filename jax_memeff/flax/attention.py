"""``attention_fn`` for the attention modules of ``flax.linen`` and ``flax.nnx``.

Both call their ``attention_fn`` with arrays ``[batch..., length, heads, depth]`` and with the
keywords of Flax's own ``dot_product_attention``. Linen drops keywords that the function does not
name. Every keyword of either is therefore named here: an argument that cannot be honoured raises
and is never dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax.typing import ArrayLike, DTypeLike

from jax_memeff._api import attention as api
from jax_memeff._api.arrays import require_no_mask_or_function
from jax_memeff._api.call import require_no_text_or_function
from jax_memeff._call import dropout, values
from jax_memeff._call.functions import ScoreFunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.values import score_dtype
from jax_memeff.errors import UnsupportedError


@values.takes_objects
def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    *,
    promote_dtype: Callable[..., tuple[jax.Array, ...]] = dtypes.promote_dtype,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    sinks: ArrayLike | None = None,
    score_mod: ScoreFunction | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array:
    """Compute exact attention in linear memory, as the ``attention_fn`` of a Flax module.

    Pass it unchanged to ``flax.linen.MultiHeadDotProductAttention`` and
    ``flax.nnx.MultiHeadAttention``. Decoding with their caches works, too:

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_memeff.flax import attention_fn
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=32, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    ... )
    >>> layer(jnp.ones((2, 10, 32)), is_causal=True).shape
    (2, 10, 32)

    Args:
      query: ``[batch..., T, N, H]``, any number of batch dimensions, none included.
      key: ``[batch..., S, K, H]``; query head ``n`` reads key head ``n // (N // K)``.
      value: ``[batch..., S, K, Hv]``.
      bias: added to the scores; broadcasts to ``[batch..., N, T, S]``. A bias in the query's dtype
        or float32 is read as is; others are cast to float32 (float64 for a float64 query).
      mask: an array of any dtype that broadcasts to ``[batch..., N, T, S]``, in which nonzero means
        attend; or a :class:`jax_memeff.Mask`, whose batch index counts through all batch
        dimensions. A fully masked row gives 0, where Flax gives the mean of the values.
      broadcast_dropout: True drops the same elements of the ``[T, S]`` probabilities in every
        batch index and head, as Flax does. False draws bits for each separately.
      dropout_rng: the dropout key, required when dropout is on. The bits depend on this key only,
        and they are not the bits that Flax would draw.
      dropout_rate: realised as ``floor(256 * rate + 0.5) / 256``: 0.1 becomes 26/256 = 0.1016.
      deterministic: True turns dropout off.
      dtype: the dtype of the computation; None infers it from query, key and value.
      precision: None, ``"highest"``, ``jax.lax.Precision.HIGH`` and so on. If it is a pair, the
        higher one is used. It affects float32 inputs only.
      module: must be None: attention weights are never formed and cannot be sown.
      promote_dtype: casts the tuple (query, key, value) to one dtype, given ``dtype=``.
      is_causal: row ``t`` attends to columns ``s <= t``.
      force_fp32_for_softmax: no effect: the softmax is always computed in float32 (or float64).
      einsum_dot_general: must be None, like the two einsums: the products are part of the kernel.
      qk_attn_weights_einsum: must be None.
      attn_weights_value_einsum: must be None.
      sinks: ``[N]``, a logit per head that takes part in the softmax and has no value, as in
        :func:`jax_memeff.dot_product_attention`.
      score_mod: a function of the score, batch index, head, row and column to the new score, as
        in :func:`jax_memeff.dot_product_attention`; pass it with ``functools.partial``. The batch
        index counts through all batch dimensions.
      residual_checkpoint_name: the name by which a policy of ``jax.checkpoint`` saves what the
        backward reads, as in :func:`jax_memeff.dot_product_attention`; pass it with
        ``functools.partial``.

    Returns:
      ``[batch..., T, N, Hv]`` in the promoted dtype.

    Raises:
      UnsupportedError: ``module`` or one of the dot products is given, or no kernel supports the
        call on this platform.
      ValueError: a shape does not fit, the rate is outside [0, 1) or not realisable,
        ``dropout_rng`` is missing, or the precision is unknown.
    """
    del force_fp32_for_softmax
    replaced = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    refuse(module, [name for name, function in replaced.items() if function is not None])
    named = {"query": query, "key": key, "value": value}
    arrays = tuple(values.array(name, x) for name, x in named.items())
    conditions, array = separated(mask)
    return attend(
        *promote_dtype(arrays, dtype=dtype),
        bias=bias,
        mask=array,
        conditions=conditions,
        is_causal=is_causal,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        sinks=sinks,
        score_mod=score_mod,
        residual_checkpoint_name=residual_checkpoint_name,
    )


def separated(mask: ArrayLike | Mask | None) -> tuple[Mask, jax.Array | None]:
    """A user's mask as a ``Mask`` and an array, of which at most one is given."""
    if isinstance(mask, Mask):
        return mask, None
    if mask is None:
        return Mask(), None
    require_no_text_or_function(mask)
    array = jnp.asarray(values.array("mask", mask))
    _require_kind("mask", array, "numbers", jnp.number)
    return Mask(), array


def is_nonzero(mask: jax.Array) -> jax.Array:
    """Users may forbid comparisons of bool with int (``jax_numpy_dtype_promotion="strict"``)."""
    return mask if mask.dtype == bool else mask != 0


def promoted_sinks(sinks: ArrayLike | None, query: jax.Array) -> jax.Array | None:
    """Sinks in the dtype of the scores: a model's parameters may have been cast to another one."""
    if sinks is None:
        return None
    array = jnp.asarray(values.array("sinks", sinks))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array  # attention refuses it
    return array.astype(score_dtype(query.dtype))


def _require_kind(name: str, array: jax.Array, expected: str, *kinds: Any) -> None:
    """Raise ``TypeError`` for an array of another kind, such as one of random keys."""
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.bool_, *kinds)):
        raise TypeError(f"{name} must be an array of {expected}, got {array.dtype}")


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: ArrayLike | None,
    mask: jax.Array | None,
    conditions: Mask,
    is_causal: bool,
    dropout_rate: float,
    dropout_rng: jax.Array | None,
    broadcast_dropout: bool,
    precision: Any,
    sinks: ArrayLike | None = None,
    score_mod: ScoreFunction | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array:
    """``attention_fn`` for arrays of a single dtype, with ``conditions`` in addition to the mask.

    The arrays in ``conditions`` have one batch dimension, the product of the batch dimensions.
    """
    batch_shape = batch_dims(query, key, value)
    if bias is not None:
        require_no_mask_or_function(bias)
        bias = _bias_dtype(jnp.asarray(values.array("bias", bias)), query)
        bias = _flatten_score_batch("bias", bias, batch_shape)
    if mask is not None:
        conditions &= Mask.boolean(_flatten_score_batch("mask", is_nonzero(mask), batch_shape))
    rate = dropout.checked_rate(dropout_rate)
    if rate > 0 and dropout_rng is None:
        raise ValueError(
            f"dropout_rng must be given when dropout_rate is {rate} and deterministic is False,"
            " got None; pass a jax.random key or deterministic=True"
        )
    call = api.prepare(
        _flatten_batch("query", query),
        _flatten_batch("key", key),
        _flatten_batch("value", value),
        bias,
        conditions,
        is_causal=is_causal,
        dropout_rate=rate,
        dropout_key=dropout_rng,
        precision=_precision(precision),
        sinks=promoted_sinks(sinks, query),
        score_mod=score_mod,
        residual_checkpoint_name=residual_checkpoint_name,
    )
    if broadcast_dropout:
        call = call._replace(operands=dropout.broadcast(call.operands))
    out = call.run(with_residual=False)
    return out if len(batch_shape) == 1 else _unflatten_batch(out, query)


def _flatten_batch(name: str, array: jax.Array) -> jax.Array:
    """``[batch..., length, heads, depth]`` with one batch dimension.

    One flat dimension can be sharded over the axes of the outermost batch dimensions only.

    Raises:
      ValueError: an explicit mesh axis shards a batch dimension that follows an unsharded one.
    """
    spec, first_whole = jax.typeof(array).sharding.spec[:-3], None
    if not any(spec):
        spec = ()  # sizes may be symbolic, and cannot be compared
    for dim, axes in enumerate(spec):
        if axes is None and array.shape[dim] > 1:
            first_whole = dim if first_whole is None else first_whole
        elif axes is not None and first_whole is not None:
            raise ValueError(
                f"{name}: expected explicit mesh axes on the outermost of the batch dimensions"
                f" {array.shape[:-3]}, which become one, got {axes!r} on dimension {dim} and none"
                f" on dimension {first_whole}: move the sharded dimension to the front with"
                " jnp.moveaxis, or reshard it"
            )
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _unflatten_batch(out: jax.Array, query: jax.Array) -> jax.Array:
    """``[B, T, N, Hv]`` with the batch dimensions of ``query``, sharded as ``query`` is."""
    shape, sharding = query.shape[:-1] + out.shape[-1:], jax.typeof(query).sharding
    if sharding.mesh.empty or not any(sharding.spec):
        return out.reshape(shape)
    # Without it JAX refuses to divide a dimension that several mesh axes shard.
    return jnp.reshape(out, shape, out_sharding=sharding)


def refuse(module: Any, replaced: list[str]) -> None:
    """Raise ``UnsupportedError`` for requests that memory-efficient attention cannot serve."""
    reasons = []
    if module is not None:
        reasons.append(
            "module (sow_weights=True) requests the attention weights, which are never formed: call"
            " the layer with sow_weights=False, or inspect a layer that has Flax's own"
            " dot_product_attention as attention_fn"
        )
    if replaced:
        reasons.append(
            f"{', '.join(replaced)}: the matrix products are part of the kernel and cannot be"
            " replaced: leave them None, or use Flax's own dot_product_attention as attention_fn"
        )
    if reasons:
        raise UnsupportedError(reasons, "memory-efficient attention cannot do this")


def batch_dims(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    """The batch dimensions, which query, key and value must have in common."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3:
            raise ValueError(
                f"{name} must be [batch..., length, heads, depth], got shape {array.shape}"
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have the batch dimensions of query, {query.shape[:-3]}, got shape"
                f" {array.shape}"
            )
    return query.shape[:-3]


def _bias_dtype(bias: jax.Array, query: jax.Array) -> jax.Array:
    """``bias`` in a dtype that the score computation accepts."""
    _require_kind("bias", bias, "real numbers", jnp.floating, jnp.integer)
    if bias.dtype in (query.dtype, jnp.float32):
        return bias
    return bias.astype(score_dtype(query.dtype))


def _flatten_score_batch(name: str, array: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Reshape ``[batch..., N, T, S]`` with any broadcast dimensions to rank 4.

    Heads, rows and columns stay broadcast. The batch is materialized only if some, but not all, of
    its dimensions are broadcast, because one flat dimension cannot express that.
    """
    rank = len(batch_shape) + 3
    if array.ndim > rank:
        raise ValueError(
            f"{name} must have rank <= {rank} to broadcast to [batch..., heads, query length, key"
            f" length] with the batch dimensions {batch_shape}, got shape {array.shape}"
        )
    shape = (1,) * (rank - array.ndim) + array.shape
    batch, rest = shape[:-3], shape[-3:]
    if any(size not in (1, full) for size, full in zip(batch, batch_shape, strict=True)):
        raise ValueError(
            f"{name} must have batch dimensions that broadcast to {batch_shape}, got shape"
            f" {array.shape}"
        )
    if math.prod(batch) == 1:
        return array.reshape((1, *rest))
    full = jnp.broadcast_to(array.reshape(shape), batch_shape + rest)
    return full.reshape((math.prod(batch_shape), *rest))


def _precision(precision: Any) -> jax.lax.Precision | None:
    """One ``jax.lax.Precision`` for a Flax precision, which is None, a name, or a pair."""
    if precision is None:
        return None
    parts = precision if isinstance(precision, tuple) else (precision,)
    try:
        return max((jax.lax.Precision(part) for part in parts), key=lambda part: part.value)
    except ValueError as error:
        raise ValueError(
            "precision must be None, a jax.lax.Precision, its name, or a pair of them, got"
            f" {precision!r}"
        ) from error
