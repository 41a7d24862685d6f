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
from jax_memeff.options import Gradients, Operands, Options, Wants


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Perturbed:
    """Which operands are differentiated; static, so it may stand among the residuals."""

    wants: Wants


class _Residuals(NamedTuple):
    operands: Operands
    out: jax.Array
    lse: jax.Array
    perturbed: _Perturbed


def _attention(operands: Operands, options: Options) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of canonical operands, differentiable in query, key, value and bias."""
    return primitives.forward(operands, options)


attention = jax.custom_vjp(_attention, nondiff_argnums=(1,))


def _forward(operands: Any, options: Options) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    wants = Wants(
        query=operands.query.perturbed,
        key=operands.key.perturbed,
        value=operands.value.perturbed,
        bias=operands.bias is not None and operands.bias.perturbed,
    )
    values: Operands = jax.tree.map(lambda primal: primal.value, operands)
    out, lse = primitives.forward(values, options)
    out = checkpoint_name(out, "jax_memeff_out")
    lse = checkpoint_name(lse, "jax_memeff_lse")
    return (out, lse), _Residuals(values, out, lse, _Perturbed(wants))


def _backward(options: Options, residuals: _Residuals, cotangents: Any) -> tuple[Operands]:
    operands, out, lse, perturbed = residuals
    wants = perturbed.wants
    dout, dlse = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)

    gradients = Gradients(None, None, None, None)
    row_bias = wants.bias and operands.bias is not None and operands.bias.shape[3] == 1
    in_kernel = wants._replace(bias=wants.bias and not row_bias)
    if any(in_kernel) and not (dout is None and dlse is None):
        dout = jnp.zeros_like(out) if dout is None else dout
        gradients = primitives.backward(operands, options, out, lse, dout, dlse, in_kernel)
    if row_bias and dlse is not None:
        gradients = gradients._replace(bias=_row_bias_gradient(operands.bias, lse, dlse))

    none = Operands(*[None] * len(Operands._fields))  # type: ignore[arg-type]
    return (none._replace(**gradients._asdict()),)


def _row_bias_gradient(bias: Any, lse: jax.Array, dlse: jax.Array) -> jax.Array:
    """Gradient of a bias [b, n, t, 1] that is one number per row of the scores.

    ``ds = p * (dp - D)`` with ``D = rowsum(dout * out) - dlse`` sums over a row to dlse exactly,
    because ``sum(p * dp) = rowsum(dout * out)``, with dropout too: a shift of a whole row changes
    its logsumexp and nothing else.
    """
    rows = jnp.where(jnp.isneginf(lse), 0, dlse)
    per_row = jnp.swapaxes(rows, 1, 2)[..., None]
    broadcast = tuple(dim for dim, size in enumerate(bias.shape) if size == 1)
    return jnp.sum(per_row, axis=broadcast, keepdims=True).astype(bias.dtype)


attention.defvjp(_forward, _backward, symbolic_zeros=True)
