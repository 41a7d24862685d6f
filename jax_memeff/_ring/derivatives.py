"""The derivatives of ring attention: reverse mode, forward mode and second derivatives.

The entry point is a ``jax.custom_vjp``, as for an unsharded call. Its forward and its backward are
each a ``jax.custom_jvp``, whose tangents come from a version that JAX can differentiate
(``Ring.is_differentiable``). That gives second derivatives, and first ones in forward mode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_memeff import _compat as compat
from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.operands.gradients import Gradients, NeedsGrad
from jax_memeff._op.derivatives import named
from jax_memeff._op.reverse_mode import reverse_mode_only
from jax_memeff._op.vjp import Perturbed, is_forward_mode, perturbed
from jax_memeff._ring import forward_backward
from jax_memeff._ring.products import Ring


def attention(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    """(out, lse) of a device's rows, differentiable in query, key, value, bias and sinks; and with
    ``Options.row_maxima`` the maxima of these rows, which have no derivative.

    Args:
        operands: those of the device; all vary over the same mesh axes, including the ring's. The
            mask's windows are top-left, and a bias has more than one column.
        ring: the static part.
    """
    if is_forward_mode():
        return _forward(operands, ring)
    return _in_reverse_mode(operands, ring)


@compat.compiled_in_eager_shard_map
def _in_reverse_mode(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    return _attention(reverse_mode_only(operands), ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    return forward_backward.forward(operands, ring)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _forward(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    return forward_backward.forward(operands, ring)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _backward(arrays: tuple[Any, ...], ring: Ring, needs_grad: NeedsGrad) -> Gradients:
    # Without the barrier XLA may notice that the forward made the same transfers and keep their
    # results: every device would then hold the keys of the whole sequence.
    operands, out, lse, dout, dlse = arrays
    operands, dout = lax.optimization_barrier((operands, dout))
    return forward_backward.backward(operands, ring, out, lse, dout, dlse, needs_grad)


@_forward.defjvp
def _forward_jvp(ring: Ring, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _forward(primals[0], ring), _tangents(forward_backward.forward, ring, primals, tangents)


@_backward.defjvp
def _backward_jvp(
    ring: Ring, needs_grad: NeedsGrad, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    def backward(arrays: tuple[Any, ...], ring: Ring) -> Gradients:
        operands, out, lse, dout, dlse = arrays
        return forward_backward.backward(operands, ring, out, lse, dout, dlse, needs_grad)

    return _backward(primals[0], ring, needs_grad), _tangents(backward, ring, primals, tangents)


def _tangents(function: Callable[..., Any], ring: Ring, primals: Any, tangents: Any) -> Any:
    ring = dataclasses.replace(ring, is_differentiable=True)
    return jax.jvp(lambda arrays: function(arrays, ring), primals, tangents)[1]


def _forward_rule(operands: Any, ring: Ring) -> tuple[tuple[jax.Array, ...], Any]:
    needs_grad = perturbed(operands)
    values: Operands = jax.tree.map(lambda primal: primal.value, operands)
    results = named(_forward(values, ring), ring.options)
    return results, (values, *results[:2], Perturbed(needs_grad))


def _backward_rule(ring: Ring, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse, static = residuals
    dout, dlse = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents[:2])
    none = Operands(*[None] * len(Operands._fields))  # type: ignore[arg-type]
    if not static.needs_grad.names or (dout is None and dlse is None):
        return (none,)
    dout = jnp.zeros_like(out) if dout is None else dout
    gradients = _backward((operands, out, lse, dout, dlse), ring, static.needs_grad)
    return (none._replace(**gradients._asdict()),)


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
