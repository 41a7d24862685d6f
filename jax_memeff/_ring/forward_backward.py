"""The forward and the backward of ring attention, on the primitives.

The forward merges the products of :mod:`jax_memeff._ring.schedule` by their logsumexps. The
backward passes the output and the logsumexp of the whole row to every product. The recomputed
probabilities are then the final ones, and gradients only have to be added (Liu, Zaharia and
Abbeel, arXiv:2310.01889, appendix A). The gradients of key and value travel with their keys and
return to their device at the end.

All sums are float32 (float64 for float64 inputs) and rounded once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._blockwise.tiles import write_block
from jax_memeff._call import sinks
from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.operands.gradients import (
    Gradients,
    NeedsGrad,
    array_of,
    gradients_of,
    named_arrays,
    replaced,
)
from jax_memeff._call.values import score_dtype
from jax_memeff._op import primitives
from jax_memeff._ring.products import Keys, Ring, RingCall, Sums
from jax_memeff._ring.schedule import Product


def forward(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    """Output [B, T local, N, Hv] in the query's dtype, and logsumexp [B, T local, N].

    With ``Options.row_maxima`` also the maxima of these rows, over the columns of all devices.
    """
    call = RingCall(operands, ring)

    def add_product(keys: Keys, product: Product, sums: Sums) -> Sums:
        part = primitives.forward(call.part(keys, product), ring.options)
        out, lse, *maxima = (call.of_rows(x, product) for x in sums.rows)
        merged = (*_merge((out, lse), part[:2]), *map(jnp.maximum, maxima, part[2:]))
        rows = (write_block(x, y, (1, product.row)) for x, y in zip(sums.rows, merged, strict=True))
        return sums._replace(rows=tuple(rows))

    rows = operands.query.shape[:3]
    empty = call.zeros((*rows, operands.value.shape[3])), call.zeros(rows) - jnp.inf
    if operands.sinks is not None:
        # Every row starts with its sink, before any key.
        empty = sinks.joined(*empty, operands.sinks[:, None], valid_rows(operands, ring))
    maxima = (call.zeros(rows) - jnp.inf,) if ring.options.row_maxima else ()
    out, lse, *maxima = call.run(add_product, Sums((*empty, *maxima), ())).rows
    return out.astype(operands.query.dtype), lse, *maxima


def valid_rows(operands: Operands, ring: Ring) -> jax.Array | bool:
    """Whether a row of this device, [B, T local, 1], is within the lengths."""
    lengths = operands.mask.query_lengths
    if lengths is None:
        return True
    own = jnp.asarray(ring.chunks, lengths.dtype)[lax.axis_index(ring.axis_name)]
    rows = operands.query.shape[1] // own.size
    positions = own[:, None] * rows + jnp.arange(rows, dtype=lengths.dtype)[None]
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
