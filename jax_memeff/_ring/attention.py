"""Ring attention on the primitives: its forward, its backward, and their derivatives.

The forward merges the products of :mod:`jax_memeff._ring.schedule` by their logsumexps. The
backward passes the output and the logsumexp of the whole row to every product. The recomputed
probabilities are then the final ones, and gradients only have to be added (Liu, Zaharia and
Abbeel, arXiv:2310.01889, appendix A). The gradients of key and value travel with their keys and
return to their device at the end. All sums are float32 (float64 for float64 inputs) and rounded
once.

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
from jax_memeff._blockwise.tiles import write_block
from jax_memeff._call import sinks
from jax_memeff._call.operands import (
    Gradients,
    NeedsGrad,
    Operands,
    array_of,
    gradients_of,
    named_arrays,
    replaced,
)
from jax_memeff._call.values import score_dtype
from jax_memeff._op import primitives
from jax_memeff._op.vjp import Perturbed, is_forward_mode, named, perturbed, reverse_mode_only
from jax_memeff._ring.products import Keys, Ring, RingCall, Sums
from jax_memeff._ring.schedule import Product


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
    return compat.compiled_in_eager_shard_map(_in_reverse_mode)(operands, ring)


def _in_reverse_mode(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    return _attention(reverse_mode_only(operands), ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    return forward(operands, ring)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _forward(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    return forward(operands, ring)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _backward(arrays: tuple[Any, ...], ring: Ring, needs_grad: NeedsGrad) -> Gradients:
    # Without the barrier XLA may notice that the forward made the same transfers and keep their
    # results: every device would then hold the keys of the whole sequence.
    operands, out, lse, dout, dlse = arrays
    operands, dout = lax.optimization_barrier((operands, dout))
    return backward(operands, ring, out, lse, dout, dlse, needs_grad)


@_forward.defjvp
def _forward_jvp(ring: Ring, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _forward(primals[0], ring), _tangents(forward, ring, primals, tangents)


@_backward.defjvp
def _backward_jvp(
    ring: Ring, needs_grad: NeedsGrad, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    def of_arrays(arrays: tuple[Any, ...], ring: Ring) -> Gradients:
        operands, out, lse, dout, dlse = arrays
        return backward(operands, ring, out, lse, dout, dlse, needs_grad)

    return _backward(primals[0], ring, needs_grad), _tangents(of_arrays, ring, primals, tangents)


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


def forward(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    """Output [B, T local, N, Hv] in the query's dtype, and logsumexp [B, T local, N].

    With ``Options.row_maxima`` also the maxima of these rows, over the columns of all devices.
    """
    call = RingCall(operands, ring)

    def add_product(keys: Keys, product: Product, sums: Sums) -> Sums:
        part = primitives.forward(call.part(keys, product), ring.options)
        out, lse, *row_maxima = (call.of_rows(x, product) for x in sums.rows)
        merged = (*_merge((out, lse), part[:2]), *map(jnp.maximum, row_maxima, part[2:]))
        rows = (write_block(x, y, (1, product.row)) for x, y in zip(sums.rows, merged, strict=True))
        return sums._replace(rows=tuple(rows))

    rows = operands.query.shape[:3]
    empty = call.zeros((*rows, operands.value.shape[3])), call.zeros(rows) - jnp.inf
    if operands.sinks is not None:
        # Every row starts with its sink, before any key.
        empty = sinks.joined(*empty, operands.sinks[:, None], valid_rows(operands, ring))
    row_maxima = (call.zeros(rows) - jnp.inf,) if ring.options.row_maxima else ()
    out, lse, *row_maxima = call.run(add_product, Sums((*empty, *row_maxima), ())).rows
    return out.astype(operands.query.dtype), lse, *row_maxima


def valid_rows(operands: Operands, ring: Ring) -> jax.Array | bool:
    """Whether a row of this device, [B, T local, 1], is within the lengths."""
    lengths = operands.mask.query_lengths
    if lengths is None:
        return True
    chunks = jnp.asarray(ring.chunks, lengths.dtype)[lax.axis_index(ring.axis_name)]
    rows = operands.query.shape[1] // chunks.size
    positions = chunks[:, None] * rows + jnp.arange(rows, dtype=lengths.dtype)[None]
    return (positions.reshape(1, -1) < lengths[:, None])[..., None]


def _merge(
    merged: tuple[jax.Array, ...], part: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Merge (out, lse) over two sets of columns, either of which may be empty."""
    (out, lse), (part_out, part_lse) = merged, part
    # In a row without columns, -inf - -inf would be NaN, in derivatives too.
    has_columns = (lse != -jnp.inf) | (part_lse != -jnp.inf)  # NaN must reach the results
    lse, part_lse = (jnp.where(has_columns, x, 0) for x in (lse, part_lse))
    total = jnp.where(has_columns, jnp.logaddexp(lse, part_lse), -jnp.inf)
    # Not exp(x - total): if the whole row has a bias of -1e9, total has no digits left to differ
    # from lse and part_lse, and both weights would be 1.
    part_weight = jax.nn.sigmoid(part_lse - lse)[..., None]
    return (1 - part_weight) * out + part_weight * part_out.astype(out.dtype), total


def backward(
    operands: Operands,
    ring: Ring,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    needs_grad: NeedsGrad,
) -> Gradients:
    """The needed gradients, in the shapes and dtypes of the local operands."""
    call = RingCall(operands, ring)

    def add_product(keys: Keys, product: Product, sums: Sums) -> Sums:
        out_rows, lse_rows, dout_rows, dlse_rows = (
            call.of_rows(x, product) for x in (out, lse, dout, dlse)
        )
        part = primitives.backward(
            call.part(keys, product),
            ring.options,
            out_rows,
            lse_rows,
            dout_rows,
            dlse_rows,
            needs_grad._replace(sinks=False),
        )
        (dquery, dbias, dcaptured), (dkey, dvalue) = sums
        local = Gradients(
            call.of_rows(dquery, product),
            call.of_columns(dkey, product),
            call.of_columns(dvalue, product),
            call.of_scores(dbias, product),
            captured=dcaptured,
        )
        local = jax.tree.map(lambda total, x: total + x.astype(total.dtype), local, part)
        rows, columns = (1, product.row), (1, product.column)
        return Sums(
            (
                write_block(dquery, local.query, rows),
                write_block(dbias, local.bias, (2, product.row), (3, product.first_column)),
                local.captured,
            ),
            (write_block(dkey, local.key, columns), write_block(dvalue, local.value, columns)),
        )

    def zeros(is_needed: bool, like: jax.Array) -> jax.Array | None:
        dtype = score_dtype(like.dtype)
        return call.zeros(like.shape, dtype) if is_needed else None

    query, key, value = operands[:3]
    dsinks = None
    if needs_grad.sinks:
        delta = sinks.delta(out, dout, dlse)
        dsinks = sinks.gradient(operands, ring.options, lse, delta)
    none = gradients_of(operands)
    if not needs_grad._replace(sinks=False).names:
        return none._replace(sinks=dsinks)
    empty = Sums(
        (
            zeros(needs_grad.query, query),
            _bias_sums(call) if needs_grad.bias else None,
            tuple(map(zeros, needs_grad.captured, operands.captured)),
        ),
        (zeros(needs_grad.key, key), zeros(needs_grad.value, value)),
    )
    (dquery, dbias, dcaptured), (dkey, dvalue) = call.run(add_product, empty)
    total = Gradients(dquery, dkey, dvalue, dbias, captured=dcaptured)
    rounded = {
        name: x.astype(array_of(operands, name).dtype) for name, x in named_arrays(total).items()
    }
    return replaced(none, rounded)._replace(sinks=dsinks)


def _bias_sums(call: RingCall) -> jax.Array | None:
    """Zeros for the bias gradient, in its own dtype if each element gets only one term."""
    bias = call.operands.bias
    return (
        None if bias is None else call.zeros(bias.shape, None if bias.shape[2] == 1 else bias.dtype)
    )
