"""Differentiation rules of the primitives: forward mode, and derivatives of derivatives.

- ``attention_fwd`` has the tangent ``attention_tangent``, linear in the operands' tangents;
- the transpose of ``attention_tangent`` is ``attention_bwd``, and vice versa;
- with respect to arguments in which they are not linear, both are differentiated through their
  plain JAX form (``_blockwise/derivatives.py``), any number of times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_memeff import _compat as compat
from jax_memeff._blockwise import derivatives as blockwise_derivatives
from jax_memeff._blockwise.packed import longest
from jax_memeff._blockwise.tiles import has_probabilities
from jax_memeff._call import divisors, sinks
from jax_memeff._call.gradients import (
    AnyGradients,
    NeedsGrad,
    array_of,
    differentiable,
    gradients_from,
    gradients_of,
    named_arrays,
    needs_grad_of,
)
from jax_memeff._call.operands import AnyOperands, Operands, pages_of
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import token_indices
from jax_memeff._compat import Primitive
from jax_memeff._op import primitives
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
            own = sinks.probabilities(operands, options, lse)
            rows = rows + own * sinks.delta(out, dout, dlse)
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
    found = named_arrays(gradients)
    return _placed(
        leaves, ((place, found.get(name)) for name, place in named_arrays(places).items())
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
