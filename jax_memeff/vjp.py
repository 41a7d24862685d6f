"""The differentiable door to the primitives: one ``jax.custom_vjp``.

The residuals are the operands, the output and the logsumexp; the backward recomputes the scores
(FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1.2). Output and logsumexp carry the
names ``jax_memeff_out`` and ``jax_memeff_lse`` for the policies of ``jax.checkpoint``. They are
named inside the rule: a name put on the result outside is not the residual, so a policy that
saves it would still run the forward again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_memeff import primitives
from jax_memeff.options import Operands, Options, PackedOperands, Wants
from jax_memeff.sequences import token_indices

AnyOperands = Operands | PackedOperands


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Perturbed:
    """Which operands are differentiated; static, so it may stand among the residuals."""

    wants: Wants


class _Residuals(NamedTuple):
    operands: AnyOperands
    out: jax.Array
    lse: jax.Array
    perturbed: _Perturbed


def _attention(operands: AnyOperands, options: Options) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of canonical operands, differentiable in query, key, value and bias."""
    return primitives.forward(operands, options)


attention = jax.custom_vjp(_attention, nondiff_argnums=(1,))


def _forward(operands: Any, options: Options) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    is_packed = isinstance(operands, PackedOperands)
    differentiable: tuple[Any, ...] = tuple(operands)[:1] * 3 if is_packed else operands[:3]
    wants = Wants(
        *(array.perturbed for array in differentiable),
        bias=operands.bias is not None and operands.bias.perturbed,
    )
    values: AnyOperands = jax.tree.map(lambda primal: primal.value, operands)
    out, lse = primitives.forward(values, options)
    out = checkpoint_name(out, "jax_memeff_out")
    lse = checkpoint_name(lse, "jax_memeff_lse")
    return (out, lse), _Residuals(values, out, lse, _Perturbed(wants))


def _backward(options: Options, residuals: _Residuals, cotangents: Any) -> tuple[AnyOperands]:
    operands, out, lse, perturbed = residuals
    wants = perturbed.wants
    dout, dlse = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)

    gradients: dict[str, jax.Array | None] = {}
    row_bias = wants.bias and operands.bias is not None and operands.bias.shape[3] == 1
    in_kernel = wants._replace(bias=wants.bias and not row_bias)
    if any(in_kernel) and not (dout is None and dlse is None):
        dout = jnp.zeros_like(out) if dout is None else dout
        gradients = primitives.backward(
            operands, options, out, lse, dout, dlse, in_kernel
        )._asdict()
    if row_bias and dlse is not None:
        gradients["bias"] = _row_bias_gradient(operands, lse, dlse)

    none = type(operands)(*[None] * len(operands._fields))  # type: ignore[arg-type]
    return (none._replace(**gradients),)


def _row_bias_gradient(operands: Any, lse: jax.Array, dlse: jax.Array) -> jax.Array:
    """Gradient of a bias [b, n, t, 1] that is one number per row of the scores.

    ``ds = p * (dp - D)`` with ``D = rowsum(dout * out) - dlse`` sums over a row to dlse exactly,
    because ``sum(p * dp) = rowsum(dout * out)``, with dropout too: a shift of a whole row changes
    its logsumexp and nothing else.
    """
    bias = operands.bias
    if lse.size == 0:
        return jnp.zeros_like(bias)
    rows = jnp.where(jnp.isneginf(lse), 0, dlse)
    if isinstance(operands, Operands) and operands.sequences is not None:
        tokens = token_indices(
            operands.sequences.query_starts[:-1],
            operands.sequences.query_lengths,
            operands.scores[2],
            rows.shape[1],
        )
        rows = rows[0].at[tokens].get(mode="fill", fill_value=0)
    per_row = jnp.swapaxes(rows, 1, 2)[..., None]
    broadcast = tuple(dim for dim, size in enumerate(bias.shape) if size == 1)
    return jnp.sum(per_row, axis=broadcast, keepdims=True).astype(bias.dtype)


attention.defvjp(_forward, _backward, symbolic_zeros=True)
