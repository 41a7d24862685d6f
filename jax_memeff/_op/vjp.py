"""The differentiable entry point to the primitives, and their differentiation rules.

:func:`attention` is one ``jax.custom_vjp``. Its residuals are the operands, the output and the
logsumexp; the backward recomputes the scores (FlashAttention-2, https://arxiv.org/abs/2307.08691,
section 3.1.2). Output and logsumexp carry the names ``jax_memeff_out`` and ``jax_memeff_lse``, or
the user's ``residual_checkpoint_name``, for the policies of ``jax.checkpoint``. The names are given
inside the rule. Outside of it, the named array would not be the residual, and a policy that saves
it would still run the forward again.

The rules of the primitives are forward mode, and derivatives of derivatives:

- ``attention_fwd`` has the tangent ``attention_tangent``, linear in the operands' tangents;
- the transpose of ``attention_tangent`` is ``attention_bwd``, and vice versa;
- with respect to arguments in which they are not linear, both are differentiated through their
  plain JAX form (``_blockwise/derivatives.py``), any number of times.

JAX also refuses forward mode through a ``jax.custom_vjp``, but without the remedy, and often long
after the call: ``jax.jvp`` of a jitted function raises when the program is lowered, and
``jax.linearize`` when its linear function runs. So the tangents of the operands pass through a
primitive that can only be transposed (:func:`reverse_mode_only`). Reverse mode does nothing else
with it, and every way to forward mode meets it before it meets the ``jax.custom_vjp``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jax_memeff import _compat as compat
from jax_memeff._blockwise import derivatives as blockwise_derivatives
from jax_memeff._blockwise.packed import longest
from jax_memeff._blockwise.tiles import has_probabilities
from jax_memeff._call import divisors, sinks
from jax_memeff._call.operands import (
    AnyGradients,
    AnyOperands,
    NeedsGrad,
    Operands,
    array_of,
    differentiable,
    gradients_from,
    gradients_of,
    named_arrays,
    needs_grad_of,
    pages_of,
)
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import token_indices
from jax_memeff._compat import Primitive
from jax_memeff._op import contexts, primitives
from jax_memeff.errors import UnsupportedError


def named(results: tuple[jax.Array, ...], options: Options) -> tuple[jax.Array, ...]:
    """Output and logsumexp with the names for policies of ``jax.checkpoint``.

    The backward needs both, so a name that the user chooses applies to both: a policy that saves it
    saves all residuals. Row maxima are not a residual and have no name.
    """
    out, lse, *others = results
    chosen = options.residual_checkpoint_name
    return (
        checkpoint_name(out, chosen or "jax_memeff_out"),
        checkpoint_name(lse, chosen or "jax_memeff_lse"),
        *others,
    )


def _require_derivative(operands: AnyOperands) -> None:
    """Raise for calls that have no derivative.

    Raises:
        UnsupportedError: keys and values are in pages.
    """
    if pages_of(operands) is not None:
        raise UnsupportedError(
            ["differentiate varlen_attention, whose keys and values are contiguous"],
            summary="paged_attention has no derivative",
        )


def cotangents(
    operands: AnyOperands,
    options: Options,
    results: tuple[jax.Array, jax.Array],
    dout: jax.Array | None,
    dlse: jax.Array | None,
    needs_grad: NeedsGrad,
) -> AnyGradients:
    """The needed gradients for cotangents of the results; a cotangent that is None is zero.

    A gradient that is zero may be None.
    """
    out, lse = results
    gradients = gradients_of(operands)
    row_bias = needs_grad.bias and operands.bias is not None and operands.bias.shape[3] == 1
    in_kernel = needs_grad._replace(bias=needs_grad.bias and not row_bias)
    if dout is None and dlse is None:
        return gradients
    dout = jnp.zeros_like(out) if dout is None else dout
    if in_kernel._replace(sinks=False).names:
        gradients = primitives.backward(operands, options, out, lse, dout, dlse, in_kernel)
    elif in_kernel.sinks:
        delta = sinks.delta(out, dout, dlse)
        gradients = gradients._replace(sinks=sinks.gradient(operands, options, lse, delta))
    if row_bias:
        rows = jnp.zeros_like(lse) if dlse is None else dlse
        if operands.sinks is not None:
            probabilities = sinks.probabilities(operands, options, lse)
            rows = rows + probabilities * sinks.delta(out, dout, dlse)
        gradients = gradients._replace(bias=_row_bias_gradient(operands, options, lse, rows))
    return gradients


def _row_bias_gradient(
    operands: Any, options: Options, lse: jax.Array, rows: jax.Array
) -> jax.Array:
    """Gradient of a bias [b, n, t, 1], which has one number per row of the scores.

    ``ds = p * (dp - D)`` with ``D = rowsum(dout * out) - dlse`` sums over a row to dlse exactly,
    because ``sum(p * dp) = rowsum(dout * out)``, whether or not probabilities are dropped. Shifting
    a whole row changes only its logsumexp. A sink of probability ``p_s`` is not shifted, so the
    other probabilities sum to ``1 - p_s``, and the sum is ``dlse + p_s * D``.

    Args:
        rows: this sum, [B, T, N].
    """
    bias = operands.bias
    shape = divisors.gradient_shape("bias", bias.shape, operands, options.divisors)
    if lse.size == 0:
        return jnp.zeros(shape, bias.dtype)
    rows = jnp.where(has_probabilities(lse), rows, 0)
    if isinstance(operands, Operands) and operands.sequences is not None:
        tokens = token_indices(
            operands.sequences.query_starts[:-1],
            operands.sequences.query_lengths,
            longest(operands)[0],
            rows.shape[1],
        )
        rows = rows[0].at[tokens].get(mode="fill", fill_value=0)
    per_row = jnp.swapaxes(rows, 1, 2)[..., None]
    # Packed sequences have at most as many rows as there are tokens, but their bias may have more.
    rows_of_bias = 1 if shape[2] == 1 else per_row.shape[2]
    summed = divisors.summed(per_row, (*shape[:2], rows_of_bias, 1)).astype(bias.dtype)
    if rows_of_bias == shape[2]:
        return summed
    return jnp.zeros(shape, bias.dtype).at[:, :, :rows_of_bias].set(summed)


def _forward_jvp(primals: Any, tangents: Any, *, tree: Any, options: Options) -> Any:
    operands = jax.tree.unflatten(tree, primals)
    _require_derivative(operands)
    out, lse, *row_maxima = named(primitives.forward(operands, options), options)
    moving = jax.tree.unflatten(
        tree, [None if type(tangent) is ad.Zero else tangent for tangent in tangents]
    )
    given = {
        name: divisors.as_gradient(name, array_of(moving, name), operands, options.divisors)
        for name in differentiable(operands)
        if array_of(moving, name) is not None
    }
    tangents = gradients_of(operands, given)
    dout, dlse = primitives.tangent(operands, options, out, lse, tangents)
    return (out, lse, *row_maxima), (dout, dlse, *(ad.Zero(jax.typeof(x)) for x in row_maxima))


def _tangent_transpose(cts: Any, *leaves: Any, tree: Any, options: Options) -> list[Any]:
    operands, out, lse, _ = jax.tree.unflatten(tree, leaves)
    places = jax.tree.unflatten(tree, range(len(leaves)))[-1]
    linear = (
        name
        for name, place in named_arrays(places).items()
        if ad.is_undefined_primal(leaves[place])
    )
    needs_grad = needs_grad_of(operands, linear)
    dout, dlse = (None if type(ct) is ad.Zero else ct for ct in cts)
    gradients = cotangents(operands, options, (out, lse), dout, dlse, needs_grad)
    gradients_by_name = named_arrays(gradients)
    return _placed(
        leaves,
        ((place, gradients_by_name.get(name)) for name, place in named_arrays(places).items()),
    )


def _backward_transpose(
    cts: Any, *leaves: Any, tree: Any, options: Options, needs_grad: NeedsGrad
) -> list[Any]:
    operands, out, lse, _, _ = jax.tree.unflatten(tree, leaves)
    *_, dout_place, dlse_place = jax.tree.unflatten(tree, range(len(leaves)))
    given = (None if type(ct) is ad.Zero else ct for ct in cts)
    tangents = gradients_from(given, operands, needs_grad)
    dout, dlse = primitives.tangent(operands, options, out, lse, tangents)
    return _placed(leaves, [(dout_place, dout), (dlse_place, dlse)])


def _placed(leaves: Sequence[Any], gradients: Iterable[tuple[int | None, Any]]) -> list[Any]:
    """A cotangent for each undefined primal, None for other leaves."""
    cts = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in leaves]
    for place, gradient in gradients:
        if place is not None and gradient is not None and cts[place] is not None:
            cts[place] = gradient
    return cts


def _jvp(
    primitive: Primitive,
    in_jax: Callable[..., Sequence[jax.Array]],
    linear_in: int,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """JVP of a primitive that is linear in its last ``linear_in`` leaves together."""
    results = primitive.bind(*primals, **params)
    constants = len(primals) - linear_in
    parts = []
    if any(type(tangent) is not ad.Zero for tangent in tangents[constants:]):
        linear = map(ad.instantiate_zeros, tangents[constants:])
        parts.append(primitive.bind(*primals[:constants], *linear, **params))
    moving = tuple(i for i in range(constants) if type(tangents[i]) is not ad.Zero)
    if moving:
        directions = [tangents[i] for i in moving]
        parts.append(_directional(list(primals), directions, moving, in_jax, **params))
    return results, functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)


# Outside of jit each call would trace its loops anew, and JAX would compile them again. Not inline,
# because JAX keeps the transpose of a jitted function, but not that of a loop.
@functools.partial(jax.jit, static_argnames=("moving", "in_jax", "tree", "options", "needs_grad"))
def _directional(
    primals: list[jax.Array],
    directions: list[jax.Array],
    moving: tuple[int, ...],
    in_jax: Callable[..., Sequence[jax.Array]],
    **params: Any,
) -> list[jax.Array]:
    """The derivative of a primitive's plain JAX form as the leaves at ``moving`` change."""

    def function(*values: jax.Array) -> list[jax.Array]:
        leaves = list(primals)
        for place, value in zip(moving, values, strict=True):
            leaves[place] = value
        return list(in_jax(*leaves, **params))

    return jax.jvp(function, tuple(primals[i] for i in moving), tuple(directions))[1]


def _tangent_jvp(primals: Any, tangents: Any, *, tree: Any, **params: Any) -> tuple[Any, Any]:
    *_, linear = jax.tree.unflatten(tree, primals)
    return _jvp(
        primitives.attention_tangent_p,
        primitives.tangent_in_jax,
        len(jax.tree.leaves(linear)),
        primals,
        tangents,
        tree=tree,
        **params,
    )


def _backward_in_jax(
    *leaves: jax.Array, tree: Any, options: Options, needs_grad: NeedsGrad
) -> list[jax.Array]:
    operands, out, lse, dout, dlse = jax.tree.unflatten(tree, leaves)
    return blockwise_derivatives.backward(operands, options, out, lse, dout, dlse, needs_grad)


def _backward_jvp(primals: Any, tangents: Any, *, tree: Any, **params: Any) -> tuple[Any, Any]:
    *_, dout, dlse = jax.tree.unflatten(tree, primals)
    return _jvp(
        primitives.attention_bwd_p,
        _backward_in_jax,
        len(jax.tree.leaves((dout, dlse))),
        primals,
        tangents,
        tree=tree,
        **params,
    )


ad.primitive_jvps[primitives.attention_fwd_p] = _forward_jvp
ad.primitive_jvps[primitives.attention_tangent_p] = _tangent_jvp
ad.primitive_jvps[primitives.attention_bwd_p] = _backward_jvp
ad.primitive_transposes[primitives.attention_tangent_p] = _tangent_transpose
ad.primitive_transposes[primitives.attention_bwd_p] = _backward_transpose


def refuse_taylor_mode(primitive: Primitive) -> None:
    """Let ``jax.experimental.jet`` raise an error with the remedy for a primitive."""
    compat.set_taylor_rule(primitive, _no_taylor_mode)


def _no_taylor_mode(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        [
            "expected jax.jvp, nested once for each order, inside `with "
            "jax_memeff.forward_mode():`, got jax.experimental.jet"
        ],
        summary="attention has no Taylor mode",
    )


for _primitive in (
    primitives.attention_fwd_p,
    primitives.attention_tangent_p,
    primitives.attention_bwd_p,
):
    refuse_taylor_mode(_primitive)


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
        if is_forward_mode() or operands.pages is not None:
            # Paged calls have no derivative in either mode; the rule of the primitive says so.
            return primitives.forward(operands, options)
        return compat.compiled_in_eager_shard_map(_in_reverse_mode)(operands, options)


def _in_reverse_mode(operands: Any, options: Options) -> tuple[jax.Array, ...]:
    return _attention(reverse_mode_only(operands), options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: AnyOperands, options: Options) -> tuple[jax.Array, ...]:
    return primitives.forward(operands, options)


def _forward(operands: Any, options: Options) -> tuple[tuple[jax.Array, ...], _Residuals]:
    needs_grad = perturbed(operands)
    values: AnyOperands = jax.tree.map(lambda primal: primal.value, operands)
    results = named(primitives.forward(values, options), options)
    out, lse = results[:2]
    return results, _Residuals(values, out, lse, Perturbed(needs_grad))


def _backward(
    options: Options, residuals: _Residuals, result_cotangents: Any
) -> tuple[AnyOperands]:
    operands, out, lse, static = residuals
    dout, dlse = (None if isinstance(ct, SymbolicZero) else ct for ct in result_cotangents[:2])

    gradients = cotangents(operands, options, (out, lse), dout, dlse, static.needs_grad)
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
refuse_taylor_mode(_operands_p)

_tangents_p = _identity("reverse_mode_tangents")
_tangents_p.def_impl(_no_forward_mode)
mlir.register_lowering(_tangents_p, _no_forward_mode)
batching.primitive_batchers[_tangents_p] = _no_forward_mode
ad.primitive_jvps[_tangents_p] = _no_forward_mode
ad.primitive_transposes[_tangents_p] = lambda cotangents, *_: cotangents


def _operands_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    passed = iter(_tangents_p.bind(*(x for x in tangents if type(x) is not ad.Zero)))
    # The primals are not bound again, so that residuals are the arrays of the user.
    return list(primals), [x if type(x) is ad.Zero else next(passed) for x in tangents]


ad.primitive_jvps[_operands_p] = _operands_jvp
