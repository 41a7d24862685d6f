"""The differentiable entry point to the primitives: one ``jax.custom_vjp``.

The residuals are the operands, the output and the logsumexp; the backward recomputes the scores
(FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1.2). Output and logsumexp carry the
names ``jax_memeff_out`` and ``jax_memeff_lse``, or the user's ``residual_checkpoint_name``, for the
policies of ``jax.checkpoint``. The names are given inside the rule. Outside of it, the named array
would not be the residual, and a policy that saves it would still run the forward again.

JAX also refuses forward mode through a ``jax.custom_vjp``, but without the remedy, and often long
after the call: ``jax.jvp`` of a jitted function raises when the program is lowered, and
``jax.linearize`` when its linear function runs. So the tangents of the operands pass through a
primitive that can only be transposed (:func:`reverse_mode_only`). Reverse mode does nothing else
with it, and every way to forward mode meets it before it meets the ``jax.custom_vjp``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jax_memeff import _compat as compat
from jax_memeff._call.gradients import NeedsGrad, array_of, differentiable, needs_grad_of
from jax_memeff._call.operands import AnyOperands, pages_of
from jax_memeff._call.options import Options
from jax_memeff._compat import Primitive
from jax_memeff._op import contexts, derivatives, primitives


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


Pytree = TypeVar("Pytree")


def reverse_mode_only(operands: Pytree) -> Pytree:
    """The same operands, for a call without forward mode.

    Programs that use their tangents for anything but reverse mode raise ``TypeError``.
    """
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, _operands_p.bind(*leaves))


def _no_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "attention: expected reverse mode (jax.grad, jax.vjp, jax.jacrev), got forward mode "
        "(jax.jvp, jax.jacfwd, jax.linearize, or a solver that uses them); trace the call inside "
        "`with jax_memeff.forward_mode():`"
    )


def _identity(name: str) -> Primitive:
    """A primitive whose results have the types of its operands."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals: avals)
    return primitive


_operands_p = _identity("reverse_mode_operands")
_operands_p.def_impl(lambda *operands: operands)
mlir.register_lowering(_operands_p, lambda ctx, *operands: operands)
batching.primitive_batchers[_operands_p] = lambda operands, dims: (
    _operands_p.bind(*operands),
    dims,
)
derivatives.refuse_taylor_mode(_operands_p)

_tangents_p = _identity("reverse_mode_tangents")
_tangents_p.def_impl(_no_forward_mode)
mlir.register_lowering(_tangents_p, _no_forward_mode)
batching.primitive_batchers[_tangents_p] = _no_forward_mode
ad.primitive_jvps[_tangents_p] = _no_forward_mode
ad.primitive_transposes[_tangents_p] = lambda cotangents, *_: cotangents


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    passed = iter(_tangents_p.bind(*(x for x in tangents if type(x) is not ad.Zero)))
    # The primals are not bound again, so that residuals are the arrays of the user.
    return list(primals), [x if type(x) is ad.Zero else next(passed) for x in tangents]


ad.primitive_jvps[_operands_p] = _jvp
