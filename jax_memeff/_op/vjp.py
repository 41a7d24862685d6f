"""The differentiable entry point to the primitives: one ``jax.custom_vjp``.

The residuals are the operands, the output and the logsumexp; the backward recomputes the scores
(FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1.2). Output and logsumexp carry the
names ``jax_memeff_out`` and ``jax_memeff_lse``, or the user's ``residual_checkpoint_name``, for the
policies of ``jax.checkpoint``. The names are given inside the rule. Outside of it, the named array
would not be the residual, and a policy that saves it would still run the forward again.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from jax_memeff import _compat as compat
from jax_memeff._call.gradients import NeedsGrad, array_of, differentiable, needs_grad_of
from jax_memeff._call.operands import AnyOperands, pages_of
from jax_memeff._call.options import Options
from jax_memeff._op import contexts, derivatives, primitives
from jax_memeff._op.reverse_mode import reverse_mode_only


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Perturbed:
    """The operands that are differentiated; static, so that it can be a residual."""

    needs_grad: NeedsGrad


def perturbed(operands: Any) -> NeedsGrad:
    """The needed gradients, from operands whose leaves are the primals of a custom_vjp rule."""
    primals = {name: array_of(operands, name) for name in differentiable(operands)}
    moving = (name for name, primal in primals.items() if primal is not None and primal.perturbed)
    return needs_grad_of(operands, moving)


class _Residuals(NamedTuple):
    operands: AnyOperands
    out: jax.Array
    lse: jax.Array
    static: Perturbed


def forward_mode() -> AbstractContextManager[None]:
    """A context in which calls of attention have forward-mode derivatives.

    By default attention has derivatives in reverse mode only, and ``jax.jvp``, ``jax.jacfwd`` and
    ``jax.linearize`` raise an error when a tangent is computed. Calls that are traced in this
    context have both. Results, gradients, reverse mode and ``jax.checkpoint`` are the same as
    outside.

    On Hopper a kernel computes the tangents of 16-bit calls (docs/guide/transforms.md). Other
    tangents are computed on the blockwise path, on every platform, with linear memory.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    >>> with jax_memeff.forward_mode():
    ...     out, tangent = jax.jvp(
    ...         lambda query: jax_memeff.dot_product_attention(query, key, value), [query], [key]
    ...     )
    >>> tangent.shape
    (1, 16, 2, 8)
    """
    return contexts.forward_mode(True)


def is_forward_mode() -> bool:
    """Whether calls are traced in the context of :func:`forward_mode`."""
    return contexts.forward_mode.value


def attention(operands: AnyOperands, options: Options) -> tuple[jax.Array, ...]:
    """(out, lse) of canonical operands, differentiable in the arrays of ``Gradients``.

    With ``options.row_maxima`` also the row maxima, which have no derivative.
    """
    with compat.located_here():
        if is_forward_mode() or pages_of(operands) is not None:
            # Paged calls have no derivative in either mode; the rule of the primitive says so.
            return primitives.forward(operands, options)
        return _in_reverse_mode(operands, options)


@compat.compiled_in_eager_shard_map
def _in_reverse_mode(operands: Any, options: Options) -> tuple[jax.Array, ...]:
    return _attention(reverse_mode_only(operands), options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: AnyOperands, options: Options) -> tuple[jax.Array, ...]:
    return primitives.forward(operands, options)


def _forward(operands: Any, options: Options) -> tuple[tuple[jax.Array, ...], _Residuals]:
    needs_grad = perturbed(operands)
    values: AnyOperands = jax.tree.map(lambda primal: primal.value, operands)
    results = derivatives.named(primitives.forward(values, options), options)
    out, lse = results[:2]
    return results, _Residuals(values, out, lse, Perturbed(needs_grad))


def _backward(options: Options, residuals: _Residuals, cotangents: Any) -> tuple[AnyOperands]:
    operands, out, lse, static = residuals
    dout, dlse = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents[:2])

    gradients = derivatives.cotangents(operands, options, (out, lse), dout, dlse, static.needs_grad)
    none = type(operands)(*[None] * len(operands._fields))  # type: ignore[arg-type]
    return (none._replace(**gradients._asdict()),)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
