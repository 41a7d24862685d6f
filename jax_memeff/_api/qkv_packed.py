"""Self-attention whose query, key and value are one array, as a fused projection produces it."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_memeff._api.arguments import PaddedArguments, in_full, with_defaults
from jax_memeff._api.arrays import QKV_PACKED, checked
from jax_memeff._api.call import AttentionCall, of_arguments, padded
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import QkvPackedOperands
from jax_memeff._call.values import flag, takes_objects


@overload
def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[False] = False,
    **arguments: Unpack[PaddedArguments],
) -> jax.Array: ...


@overload
def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[True],
    **arguments: Unpack[PaddedArguments],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: bool = False,
    return_max_logits: Literal[True],
    **arguments: Unpack[PaddedArguments],
) -> tuple[jax.Array, ...]: ...


@in_full
@takes_objects
def dot_product_attention_packed(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: bool = False,
    return_max_logits: bool = False,
    **arguments: Unpack[PaddedArguments],
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute :func:`jax_memeff.dot_product_attention` of query, key and value in one array.

    They are ``qkv[:, :, 0]``, ``qkv[:, :, 1]`` and ``qkv[:, :, 2]``. The kernels read them in
    place, and write the gradient as one array of qkv's shape: nothing is sliced or concatenated.

    Args:
        qkv: ``[B, T, 3, N, H]`` in float16, bfloat16, float32 or float64; B may be missing. A fused
            projection produces it: ``x @ w`` with a weight of ``3 * N * H`` columns, reshaped.
        bias: As in ``dot_product_attention`` with S = T, like all other arguments.
        mask: Likewise.
        return_residual: Likewise.
        return_max_logits: Likewise.
        other arguments: Likewise.

    Returns:
        The output ``[B, T, N, H]`` in qkv's dtype; with ``return_residual`` or
        ``return_max_logits`` a tuple, as in ``dot_product_attention``.

    Raises:
        ValueError: A shape, a static value, or a value of a NumPy array is wrong.
        TypeError: A dtype is wrong, or a value that must be static is traced.
        jax_memeff.UnsupportedError: No CUDA kernel supports the call; the message says why.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> qkv = jax.random.normal(jax.random.key(0), (2, 128, 3, 8, 64))
    >>> out = jax_memeff.dot_product_attention_packed(qkv, is_causal=True)
    >>> query, key, value = jnp.unstack(qkv, axis=2)
    >>> separate = jax_memeff.dot_product_attention(query, key, value, is_causal=True)
    >>> bool(jnp.array_equal(out, separate))
    True
    """
    with_residual = flag("return_residual", return_residual)
    with_max_logits = flag("return_max_logits", return_max_logits)
    call = prepare(
        qkv,
        bias,
        mask,
        **arguments,
    )
    return call.run(with_residual, with_max_logits)


def prepare(
    qkv: Any,
    bias: Any,
    mask: Any,
    **arguments: Unpack[PaddedArguments],
) -> AttentionCall[QkvPackedOperands]:
    """Check the arguments of ``dot_product_attention_packed`` and convert them to canonical form.

    Raises:
        ValueError, TypeError: as ``dot_product_attention_packed`` says.
    """
    named = with_defaults(PaddedArguments, arguments)
    arrays, sizes, batched = checked(QKV_PACKED, qkv=qkv)
    qkv = arrays["qkv"]
    scores_shape = (sizes["B"], sizes["N"], sizes["T"], sizes["T"])
    common = of_arguments(qkv.dtype, sizes["H"], scores_shape, bias, mask, named)
    mask = padded(common, scores_shape, named, batched)
    operands = QkvPackedOperands(qkv, mask=mask, **common.arrays)
    return AttentionCall(operands, common.options, batched)
