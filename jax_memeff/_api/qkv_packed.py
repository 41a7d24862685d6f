"""Self-attention whose query, key and value are one array, as one projection makes them."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._api import validate, validate_packed
from jax_memeff._api.canonical import Call, PrecisionLike, lengths, shared
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.operands import QkvPackedOperands
from jax_memeff._call.options import Implementation


@overload
def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    offsets: Offsets | None = None,
    precision: PrecisionLike = None,
    deterministic_backward: bool = False,
    return_residual: Literal[False] = False,
    implementation: Implementation | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array: ...


@overload
def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    offsets: Offsets | None = None,
    precision: PrecisionLike = None,
    deterministic_backward: bool = False,
    return_residual: Literal[True],
    implementation: Implementation | None = None,
    residual_checkpoint_name: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    offsets: Offsets | None = None,
    precision: PrecisionLike = None,
    deterministic_backward: bool = False,
    return_residual: bool = False,
    implementation: Implementation | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """:func:`jax_memeff.dot_product_attention` of ``qkv[:, :, 0]``, ``[:, :, 1]``, ``[:, :, 2]``.

    The kernels read query, key and value where they are, and write the gradient as one array of
    qkv's shape: nothing is sliced, and nothing is concatenated.

    Args:
        qkv: ``[B, T, 3, N, H]`` in float16, bfloat16, float32 or float64; B may be missing. It is
            what ``x @ w`` with a weight of ``3 * N * H`` columns, reshaped, is.
        bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size,
            logits_soft_cap, dropout_rate, dropout_key, offsets, precision, deterministic_backward,
            return_residual, implementation, residual_checkpoint_name: as of
            ``dot_product_attention``, with S = T.

    Returns:
        The output ``[B, T, N, H]`` in qkv's dtype; with ``return_residual`` the pair of it and the
        logsumexp ``[B, T, N]`` in f32 (f64 for f64 inputs).

    Raises:
        ValueError: A shape, a static value, or a value of a NumPy array is wrong.
        TypeError: A dtype is wrong, or a traced value stands where a static one must.
        jax_memeff.UnsupportedError: No CUDA kernel does what is asked for; the text says why.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> qkv = jax.random.normal(jax.random.key(0), (2, 128, 3, 8, 64))
    >>> out = jax_memeff.dot_product_attention_packed(qkv, is_causal=True)
    >>> query, key, value = jnp.unstack(qkv, axis=2)
    >>> separate = jax_memeff.dot_product_attention(query, key, value, is_causal=True)
    >>> bool(jnp.array_equal(out, separate))
    True
    """
    with_residual = validate.flag("return_residual", return_residual)
    call = prepare(
        qkv,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        offsets=offsets,
        precision=precision,
        deterministic_backward=deterministic_backward,
        implementation=implementation,
        residual_checkpoint_name=residual_checkpoint_name,
    )
    return call.run(with_residual)


def prepare(
    qkv: Any,
    bias: Any,
    mask: Any,
    *,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    **features: Any,
) -> Call[QkvPackedOperands]:
    """Check the arguments of ``dot_product_attention_packed`` and bring them into canonical form.

    Raises:
        ValueError, TypeError: as ``dot_product_attention_packed`` says.
    """
    qkv = jnp.asarray(validate.array("qkv", qkv))
    validate_packed.projections(qkv)
    batched = qkv.ndim == 5
    if not batched:
        qkv = qkv[None]
    batch, length, _, heads, head_dim = qkv.shape
    options, bias, combined, state, position = shared(
        qkv.dtype, head_dim, (batch, heads, length, length), bias, mask, **features
    )
    combined &= Mask.lengths(
        query=lengths("query_seq_lengths", query_seq_lengths, batch, length, batched),
        key=lengths("key_value_seq_lengths", key_value_seq_lengths, batch, length, batched),
    )
    combined = combined.canonical(batch, length, length)
    return Call(QkvPackedOperands(qkv, bias, combined, state, position), options, batched)
