"""Attention over packed sequences: no padding, any lengths."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, Unpack, cast, overload

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike

from jax_memeff._api.arguments import (
    CommonArguments,
    in_full,
    latent_dim,
    max_seqlen,
    with_defaults,
)
from jax_memeff._api.arrays import PACKED, checked
from jax_memeff._api.call import AttentionCall, canonical
from jax_memeff._call.divisors import with_values
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.operands import Operands
from jax_memeff._call.sequences import Sequences, starts_and_lengths
from jax_memeff._call.values import INT32_MAX, flag, is_host, takes_objects


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[CommonArguments],
) -> jax.Array: ...


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[CommonArguments],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: bool = False,
    return_max_logits: Literal[True],
    **arguments: Unpack[CommonArguments],
) -> tuple[jax.Array, ...]: ...


@in_full
@takes_objects
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    value_dim: int | None = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
    **arguments: Unpack[CommonArguments],
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute exact attention over B packed sequences, stored back to back without padding.

    Sequence i has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` (exclusive) and the
    keys ``cu_seqlens_k[i]`` to ``cu_seqlens_k[i + 1]``, and attends only to itself. Its results are
    those of batch index i of :func:`jax_memeff.dot_product_attention` with these lengths, and every
    other argument has the same meaning as in that function. Thus windows, causal masks, bias and
    dropout count positions within the sequence; the dropout bits are those of the padded call; and
    a ``"bottom_right"`` mask ends at the sequence's own last row and column.

    Args:
        query: ``[total_q, N, H]`` in float16, bfloat16, float32 or float64.
        key: ``[total_k, K, H]`` of query's dtype. N must be a multiple of K.
        value: ``[total_k, K, Hv]`` of query's dtype. None means that the values are the first
            ``value_dim`` columns of the keys (latent attention).
        cu_seqlens_q: ``[B + 1]`` integers, which may be traced. Tokens before the first, after the
            last, and past the first ``max_seqlen_q`` of a sequence belong to no sequence: they have
            output 0, logsumexp -inf and gradients 0, and nothing in them, NaN included, affects a
            result. A sequence may be empty.
        cu_seqlens_k: ``[B + 1]`` integers, likewise.
        max_seqlen_q: A Python integer. Memory and run time hardly depend on it, except that a block
            mask (segment ids, boolean masks, mask functions) has tiles for so many positions of
            every sequence.
        max_seqlen_k: A Python integer, likewise.
        bias: As in ``dot_product_attention``, but T is ``max_seqlen_q`` and S is ``max_seqlen_k``.
        mask: Likewise, with the same B, T and S; lengths of a ``Mask`` shorten the sequences, and
            segment ids are ``[total_q]`` and ``[total_k]``, lists of keys ``[total_q, K, n]``.
        value_dim: As in ``dot_product_attention``.
        return_residual: Likewise.
        return_max_logits: Likewise, of each sequence.
        other arguments: Likewise. The rows and columns of ``offsets`` count within every sequence;
            an array ``[B]`` has one entry per sequence.

    Returns:
        The output ``[total_q, N, Hv]`` in query's dtype. The logsumexp ``[total_q, N]`` and the
        largest scores ``[B, N]`` follow if requested, in f32 (f64 for f64 inputs).

    Raises:
        ValueError: A shape, a static value, or a value of a NumPy array is wrong.
        TypeError: A dtype is wrong, or a value that must be static is traced.
        jax_memeff.UnsupportedError: No CUDA kernel supports the call; the message says why.

    Wrong values in device arrays do not raise. ``cu_seqlens_*`` are clamped to the number of
    tokens, and a value below an earlier one is raised to it, so that sequences never overlap.
    :func:`jax_memeff.check` reports such values.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 10, 4, 32))
    >>> starts = jnp.array([0, 3, 3, 9])  # sequences of 3, 0 and 6 tokens; one token is left over
    >>> out = jax_memeff.varlen_attention(query, key, value, starts, starts, 6, 6, is_causal=True)
    >>> out.shape, float(jnp.abs(out[9]).max())
    ((10, 4, 32), 0.0)
    >>> bool(jnp.allclose(out[3], value[3]))  # a sequence's first row attends to its column 0
    True
    """
    with_residual = flag("return_residual", return_residual)
    with_max_logits = flag("return_max_logits", return_max_logits)
    call = prepare(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
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
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    bias: Any,
    mask: Any,
    value_dim: Any = None,
    **arguments: Unpack[CommonArguments],
) -> AttentionCall[Operands]:
    """Check the arguments of ``varlen_attention`` and convert them to canonical form.

    Raises:
        ValueError, TypeError: as ``varlen_attention`` says.
    """
    named = with_defaults(CommonArguments, arguments)
    arrays, sizes, _ = checked(
        PACKED,
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    values_dim = latent_dim(value_dim, value is not None, sizes["H"], ("key", "value"))
    query, key, value, cu_seqlens_q, cu_seqlens_k = arrays.values()
    total_q, total_k = sizes["total_q"], sizes["total_k"]
    longest_q = max_seqlen("max_seqlen_q", max_seqlen_q)
    longest_k = max_seqlen("max_seqlen_k", max_seqlen_k)
    _cu_seqlens_in_range("cu_seqlens_q", cu_seqlens_q, total_q, longest_q)
    _cu_seqlens_in_range("cu_seqlens_k", cu_seqlens_k, total_k, longest_k)

    scores_shape = (sizes["B"], sizes["N"], longest_q, longest_k)
    if isinstance(mask, Mask):
        mask = mask.without_block_masks()
    tokens = (total_q, total_k)
    options, combined, others = canonical(
        query.dtype, sizes["H"], scores_shape, sizes["K"], bias, mask, named, tokens
    )
    query_starts, query_lengths = starts_and_lengths(jnp.asarray(cu_seqlens_q), longest_q, total_q)
    key_starts, key_lengths = starts_and_lengths(jnp.asarray(cu_seqlens_k), longest_k, total_k)
    combined &= Mask.lengths(query_lengths, key_lengths)
    combined = combined.canonical(sizes["B"], longest_q, longest_k, tokens)
    frame = Frame.of(combined, (longest_q, longest_k), named["offsets"])
    combined = compiled(combined, frame._replace(query_starts=query_starts, key_starts=key_starts))
    operands = Operands(
        query=query[None],
        key=key[None],
        value=None if value is None else value[None],
        mask=dataclasses.replace(combined, query_lengths=None, key_lengths=None),
        **others,
        sequences=Sequences(
            query_starts,
            key_starts,
            cast(jax.Array, combined.query_lengths),
            cast(jax.Array, combined.key_lengths),
            longest_q,
            longest_k,
        ),
    )
    options = dataclasses.replace(options, latent_dim=values_dim)
    if not operands.mask.key_lists:
        operands, options = with_values(operands, options)
    return AttentionCall(operands, options, batched=False)


def _cu_seqlens_in_range(name: str, value: Any, total: int, longest: int) -> None:
    """Raise unless NumPy starts go from 0 to the number of tokens, never decrease, and leave no
    sequence too long.
    """
    if not is_host(value):
        return
    numbers = [int(x) for x in value]
    most = INT32_MAX if export.is_symbolic_dim(total) else total
    for index, number in enumerate(numbers):
        if not 0 <= number <= most:
            raise ValueError(
                f"{name} must be in [0, {total}], the number of tokens, got {number} at index "
                f"{index}"
            )
    for index, (start, end) in enumerate(itertools.pairwise(numbers)):
        if end < start:
            raise ValueError(
                f"{name} must not decrease, got {end} after {start} at index {index + 1}"
                + ("; of lengths, pass np.cumsum([0, *lengths])" if numbers[0] else "")
            )
        if end - start > longest:
            raise ValueError(
                f"{name.replace('cu_', 'max_').replace('seqlens', 'seqlen')} must be at least the "
                f"length of every sequence, got {longest}, and sequence {index} has {end - start}"
            )
