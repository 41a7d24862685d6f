"""``dot_product_attention``, which documents all arguments, and ``dot_product_attention_packed``.

The query, key and value of the latter are one array, as a fused projection produces it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_memeff._api.arguments import PaddedArguments, in_full, latent_dim, with_defaults
from jax_memeff._api.arrays import PADDED, QKV_PACKED, checked
from jax_memeff._api.call import AttentionCall, canonical, padded
from jax_memeff._call.divisors import with_values
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import Operands, QkvPackedOperands
from jax_memeff._call.values import flag, takes_objects


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[PaddedArguments],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[PaddedArguments],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: bool = False,
    return_max_logits: Literal[True],
    **arguments: Unpack[PaddedArguments],
) -> tuple[jax.Array, ...]: ...


@in_full
@takes_objects
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
    **arguments: Unpack[PaddedArguments],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Compute exact attention in memory that is linear in the sequence lengths.

    Takes the arguments of ``jax.nn.dot_product_attention``, and more. B is the batch size, T and S
    are the lengths of query and key, N and K their numbers of heads. In each row of scores::

        s   = scale * (q . k)             then, with a soft cap,  s = cap * tanh(s / cap)
        s   = score_mod(s, b, h, q, k)    if there is one
        s   = s + bias                    elements that a mask forbids are -inf
        lse = logsumexp(s)                natural logarithm, of s and the head's sink
        out = sum(keep * exp(s - lse) * v) / (1 - rate)         keep and rate: dropout

    Scores are accumulated in f32 (f64 for f64 inputs). The forward returns ``out`` and ``lse``; the
    backward recomputes the scores from them (FlashAttention-2, https://arxiv.org/abs/2307.08691,
    section 3.1).

    Args:
        query: ``[B, T, N, H]`` in float16, bfloat16, float32 or float64.
        key: ``[B, S, K, H]`` of query's dtype. N must be a multiple of K, and query head n reads
            key head ``n // (N // K)``: multi-query and grouped-query attention copy nothing.
        value: ``[B, S, K, Hv]`` of query's dtype. Hv may differ from H. None means that the values
            are the first ``value_dim`` columns of the keys (latent attention).
            Query, key and value may all lack B; then the result also lacks B.
        bias: Added to the scaled scores. Its rank is at most 4; it is left-padded with 1s, and each
            dim is 1 or that of ``[B, N, T, S]``. An element of -inf masks. The gradient has the
            bias's own shape and dtype. A bias in query's dtype or float32 is read as is; any other
            float dtype is first cast to that of the scores, which takes memory.
        mask: A boolean array of any shape that bias may have, True where the row attends to the
            column; or a :class:`jax_memeff.Mask`. All masking arguments are combined by "and".
            Three dims are ``[N, T, S]``; if B == N, they may also be ``[B, T, S]`` and raise.
        scale: A number, ``1/sqrt(H)`` by default. It may be 0 or negative; a magnitude other than 0
            must fit the dtype of the scores: 1.18e-38 to 8.51e+37 in f32. A traced scalar is
            differentiated; it becomes part of ``score_mod``, with the same requirements.
        is_causal: Row t attends to columns ``s <= t``. ``Mask.causal("bottom_right")`` aligns the
            last row with the last column instead.
        query_seq_lengths: ``[B]`` integers (or one, without B): rows beyond the length give 0.
        key_value_seq_lengths: ``[B]`` integers (or one, without B): columns beyond the length are
            masked. Nothing beyond the lengths, NaN included, affects a result.
        local_window_size: ``(left, right)``: row t attends to ``t - left <= s <= t + right``. One
            number sets both.
        logits_soft_cap: A static number > 0. It must fit the dtype of the scores: 1.18e-38 to
            1.01e+31 in f32; ``scale / logits_soft_cap`` must fit, too.
        score_mod: An ordinary JAX function that maps the score (float32, or float64 for float64
            inputs) and its batch index, query head, row and column (int32), all scalars, to the new
            score: ``lambda s, b, h, q, k: s + slopes[h] * (k - q)``. It may read elements of any
            arrays in scope, which are differentiated like other arguments. A result of -inf masks.
            With ``offsets`` the indices are those of the whole problem. See the guide on functions.
        sinks: ``[N]`` in float32 or query's dtype: a logit for each head that takes part in the
            softmax and has no value (gpt-oss; "attention sinks", https://arxiv.org/abs/2309.17453).
            The logsumexp includes the sink; a row without keys gives 0, with the sink as logsumexp
            (-inf beyond ``query_seq_lengths``).
            -inf means no sink, and inf takes the whole row: the output and the gradients of keys
            are 0. Sinks are differentiable; soft cap, bias, masks and dropout do not change them.
        dropout_rate: A static number in [0, 1), rounded to the nearest multiple of 1/256, which
            :func:`jax_memeff.dropout.realised_rate` returns. A rate above 0 that rounds to 0, or
            one that rounds to 1, raises an error.
        dropout_key: A key of ``jax.random.key`` or ``jax.random.PRNGKey``. The same key drops the
            same elements on every platform, tiling and sharding of the call.
        offsets: The place of these arrays in a larger problem, for windows and dropout: see
            :class:`jax_memeff.Offsets`.
        precision: How CUDA kernels multiply f32 inputs: with three TF32 or float16 products for
            None, ``"high"`` and ``"highest"`` (or the members of ``jax.lax.Precision``), with one
            TF32 product for ``"default"``.
        deterministic_backward: Every gradient is bit-equal from run to run. The output always is,
            and so are the gradients of key and value if N == K.
        value_dim: Hv if ``value`` is None, a Python integer. The columns are copied, except with
            ``Mask.keys``; :func:`jax_memeff.paged_attention` reads them in place.
        return_residual: Also return the logsumexp, which is differentiable.
        return_max_logits: Also return the largest valid score ``s`` of each head, as used by
            QK-clip (Kimi K2, https://arxiv.org/abs/2507.20534): after soft cap, bias and masks,
            before sinks. It is not differentiable.
        implementation: None uses the kernels on CUDA and the blockwise path elsewhere; ``"cuda"``
            requires the kernels; ``"xla"`` selects the blockwise path everywhere.
        residual_checkpoint_name: The name of output and logsumexp for policies of
            ``jax.checkpoint``. If a policy saves this name, the backward does not run the forward
            again. By default the names are ``jax_memeff_out`` and ``jax_memeff_lse``, and a policy
            must save both. Applying :func:`jax.ad_checkpoint.checkpoint_name` to the result does
            not help: the array that it names is not the one that the backward reads.

    Returns:
        The output ``[B, T, N, Hv]`` in query's dtype. If more is requested, it is the first element
        of a tuple: with ``return_residual`` the logsumexp ``[B, T, N]`` follows, and then with
        ``return_max_logits`` the largest scores ``[B, N]``, both in f32 (f64 for f64 inputs). A row
        that attends to nothing has output 0, logsumexp -inf, and gradients 0; a head without a
        valid score has -inf.

    Raises:
        ValueError: A shape, a static value, or a value of a NumPy array is wrong.
        TypeError: A dtype is wrong, or a value that must be static is traced.
        jax_memeff.UnsupportedError: No CUDA kernel supports the call; the message says why. Nothing
            falls back silently: ``implementation="xla"`` supports everything.

    Objects with ``__jax_array__`` (``flax.nnx.Param``, ``keras.Variable``) stand for the arrays
    that they hold, in every argument of every function of this package.

    Wrong values in device arrays do not raise: lengths are clamped to [0, T] and [0, S].
    :func:`jax_memeff.check` reports them.

    Intended differences from ``jax.nn.dot_product_attention``: a row without keys gives 0, not the
    mean of the values; the residual is f32 and differentiable; garbage beyond the lengths never
    affects a result; Hv may differ from H; lengths may have any integer dtype;
    ``implementation="cudnn"`` raises an error.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
    >>> out = jax_memeff.dot_product_attention(query, key, value, is_causal=True)
    >>> out.shape, out.dtype
    ((2, 128, 8, 64), dtype('float32'))
    >>> bool(jnp.allclose(out[:, 0], value[:, 0]))  # the first row attends to column 0 only
    True
    """
    with_residual = flag("return_residual", return_residual)
    with_max_logits = flag("return_max_logits", return_max_logits)
    call = prepare(
        query,
        key,
        value,
        bias,
        mask,
        value_dim,
        **arguments,
    )
    return call.run(with_residual, with_max_logits)


def prepare(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    value_dim: Any = None,
    **arguments: Unpack[PaddedArguments],
) -> AttentionCall[Operands]:
    """Check the arguments of ``dot_product_attention`` and convert them to canonical form.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    named = with_defaults(PaddedArguments, arguments)
    arrays, sizes, batched = checked(PADDED, query=query, key=key, value=value)
    names = ("key", "value")
    values_dim = latent_dim(value_dim, value is not None, sizes["H"], names)
    scores_shape = (sizes["B"], sizes["N"], sizes["T"], sizes["S"])
    dtype, dim = arrays["query"].dtype, sizes["H"]
    common = canonical(dtype, dim, scores_shape, sizes["K"], bias, mask, named)
    mask = padded(common, scores_shape, named, batched)
    operands = Operands(**arrays, mask=mask, **common.arrays)
    options = dataclasses.replace(common.options, latent_dim=values_dim)
    if values_dim is not None and not mask.key_lists:
        operands, options = with_values(operands, options)
    return AttentionCall(operands, options, batched)


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
    call = prepare_qkv(
        qkv,
        bias,
        mask,
        **arguments,
    )
    return call.run(with_residual, with_max_logits)


def prepare_qkv(
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
    common = canonical(qkv.dtype, sizes["H"], scores_shape, sizes["N"], bias, mask, named)
    mask = padded(common, scores_shape, named, batched)
    operands = QkvPackedOperands(qkv, mask=mask, **common.arrays)
    return AttentionCall(operands, common.options, batched)
