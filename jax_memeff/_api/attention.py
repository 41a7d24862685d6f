"""The public function: its documentation, its defaults, and its own checks."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

from jax_memeff._api import validate
from jax_memeff._api.canonical import Call, PrecisionLike, lengths, projections, shared
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Implementation


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
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
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
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


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
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
    r"""Exact attention with memory linear in the sequence lengths.

    Arguments are those of ``jax.nn.dot_product_attention``, and some more. With B the batch size,
    T and S the query's and the key's length, N query heads and K key heads, per row of scores::

        s   = scale * (q . k)             then, with a soft cap,  s = cap * tanh(s / cap)
        s   = s + bias                    elements that a mask forbids are -inf
        lse = logsumexp(s)                natural logarithm
        out = sum(keep * exp(s - lse) * v) / (1 - rate)         keep and rate: dropout

    Scores are accumulated in f32 (f64 for f64 inputs). The forward returns ``out`` and ``lse``; the
    backward recomputes the scores from them (FlashAttention-2, https://arxiv.org/abs/2307.08691,
    section 3.1).

    Args:
        query: ``[B, T, N, H]`` in float16, bfloat16, float32 or float64.
        key: ``[B, S, K, H]`` of query's dtype. N must be a multiple of K, and query head n reads
            key head ``n // (N // K)``: multi-query and grouped-query attention copy nothing.
        value: ``[B, S, K, Hv]`` of query's dtype. Hv may differ from H.
            Query, key and value may all lack B; so does the result then.
        bias: Added to the scaled scores; of rank <= 4, left-padded with 1s, each dim 1 or that of
            ``[B, N, T, S]``; of query's dtype or float32. An element of -inf masks. Its gradient
            has its own shape.
        mask: A boolean array of the shapes that bias may have, True where an element takes part; or
            a :class:`jax_memeff.Mask`. Everything that masks is combined by "and".
        scale: A static number, ``1/sqrt(H)`` by default; negative ones are allowed. For a traced
            one multiply query by it.
        is_causal: Row t attends to columns ``s <= t``. ``Mask.causal("bottom_right")`` aligns the
            last row with the last column instead.
        query_seq_lengths: ``[B]`` integers (or one, without B): rows beyond give 0.
        key_value_seq_lengths: ``[B]`` integers (or one, without B): columns beyond take no part.
            What stands beyond the lengths, NaN included, reaches no result.
        local_window_size: ``(left, right)``: row t attends to ``t - left <= s <= t + right``. One
            number stands for both.
        logits_soft_cap: A static number > 0.
        dropout_rate: A static number in [0, 1), realised as the nearest multiple of 1/256:
            :func:`jax_memeff.dropout.realised_rate` tells which.
        dropout_key: A key of ``jax.random.key`` or ``jax.random.PRNGKey``. The same key drops the
            same elements on every platform, tiling and sharding of the call.
        offsets: Where these arrays stand in a larger problem, for windows and dropout: see
            :class:`jax_memeff.Offsets`.
        precision: Of products of f32 inputs on CUDA: None, ``"high"`` and ``"highest"`` (or the
            members of ``jax.lax.Precision``) are 3xTF32 or 3xFP16, ``"default"`` is TF32.
        deterministic_backward: Every gradient is bit-equal from run to run. Output always is, and
            the gradients of key and value are where N == K.
        return_residual: Also return the logsumexp, which is differentiable.
        implementation: None is the kernels on CUDA and the blockwise path elsewhere; ``"cuda"``
            insists on the kernels; ``"xla"`` is the blockwise path everywhere.
        residual_checkpoint_name: The name of output and logsumexp for the policies of
            ``jax.checkpoint``. A policy that saves it spares the backward a second forward.
            By default they are ``jax_memeff_out`` and ``jax_memeff_lse``, and a policy has to save
            both. :func:`jax.ad_checkpoint.checkpoint_name` of the result does not do this: the
            array that it names is not the one that the backward reads.

    Returns:
        The output ``[B, T, N, Hv]`` in query's dtype; with ``return_residual`` the pair of it and
        the logsumexp ``[B, T, N]`` in f32 (f64 for f64 inputs). A row that attends to nothing has
        output 0, logsumexp -inf, and gradients 0.

    Raises:
        ValueError: A shape, a static value, or a value of a NumPy array is wrong.
        TypeError: A dtype is wrong, or a traced value stands where a static one must.
        jax_memeff.UnsupportedError: No CUDA kernel does what is asked for; the text says why.
            Nothing falls back silently: ``implementation="xla"`` does everything.

    Values of device arrays do not raise: lengths are clamped to [0, T] and [0, S].
    :func:`jax_memeff.check` reports them.

    Differences from ``jax.nn.dot_product_attention``, on purpose: a row without keys gives 0, not
    the mean of the values; the residual is f32 and differentiable; garbage beyond the lengths never
    shows; Hv is free; lengths may be of any integer dtype; bias and mask are left-padded to rank 4;
    ``implementation="cudnn"`` is an error.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
    >>> out = jax_memeff.dot_product_attention(query, key, value, is_causal=True)
    >>> out.shape, out.dtype
    ((2, 128, 8, 64), dtype('float32'))
    >>> bool(jnp.allclose(out[:, 0], value[:, 0]))  # the first row sees the first column only
    True
    """
    with_residual = validate.flag("return_residual", return_residual)
    call = prepare(
        query,
        key,
        value,
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
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    **features: Any,
) -> Call[Operands]:
    """Check the arguments of ``dot_product_attention`` and bring them into canonical form.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    query, key, value = projections(query, key, value)
    validate.query_key_value(query, key, value)
    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    batch, rows, heads, head_dim = query.shape
    columns = key.shape[1]
    scores = (batch, heads, rows, columns)
    options, bias, combined, state, position = shared(
        query.dtype, head_dim, scores, bias, mask, **features
    )
    combined &= Mask.lengths(
        query=lengths("query_seq_lengths", query_seq_lengths, batch, rows, batched),
        key=lengths("key_value_seq_lengths", key_value_seq_lengths, batch, columns, batched),
    )
    combined = combined.canonical(batch, rows, columns)
    operands = Operands(query, key, value, bias, combined, state, position)
    return Call(operands, options, batched)
