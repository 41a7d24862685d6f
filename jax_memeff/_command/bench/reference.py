"""Attention by its definition in float32, in plain JAX, for a part of a call: the first sequence,
and the query heads of its first key head. No gradient of the part depends on the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._command.cases.case import Case
from jax_memeff._command.cases.programs import Given, Program, mask_function, score_function

_ROWS = 128
"""Rows whose scores are in memory at a time."""

_HIGHEST = jax.lax.Precision.HIGHEST


def program(case: Case, gradients: bool) -> Program:
    """Maps the arrays of a case to the part of ``out`` and, on request, of the gradients of query,
    key and value: float32[T or S, heads, H or Hv].
    """

    def run(arrays: Given) -> dict[str, jax.Array]:
        inputs = _part(case, {name: arrays[name] for name in ("query", "key", "value")})
        key, value = inputs["key"][:, 0], inputs["value"][:, 0]

        def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            def head(n: jax.Array) -> jax.Array:
                row = jax.checkpoint(_row(case, arrays, key, value, n))
                rows = (query[:, n], jnp.arange(case.T))
                return jax.lax.map(lambda x: row(*x), rows, batch_size=_ROWS)

            return jnp.swapaxes(jax.lax.map(head, jnp.arange(case.N // case.K)), 0, 1)

        if not gradients:
            return {"out": attention(inputs["query"], key, value)}
        out, transpose = jax.vjp(attention, inputs["query"], key, value)
        dquery, dkey, dvalue = transpose(_part(case, {"dout": arrays["dout"]})["dout"])
        return {"out": out, "query": dquery, "key": dkey[:, None], "value": dvalue[:, None]}

    return run


def difference(case: Case, found: Given, reference: Given) -> float:
    """The largest difference of an element, relative to the largest element of its array."""
    part = _part(case, {name: found[name] for name in reference})
    differences = [
        float(jnp.abs(part[name] - expected).max() / jnp.abs(expected).max())
        for name, expected in reference.items()
    ]
    return float(np.max(differences))  # NaN stays NaN


def _part(case: Case, arrays: Given) -> dict[str, jax.Array]:
    heads = {"key": 1, "value": 1}
    return {
        name: x[0, :, : heads.get(name, case.N // case.K)].astype(jnp.float32)
        for name, x in arrays.items()
    }


def _row(
    case: Case, arrays: Given, key: jax.Array, value: jax.Array, n: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    columns = jnp.arange(case.S)

    def row(query: jax.Array, t: jax.Array) -> jax.Array:
        scores = jnp.matmul(key, query, precision=_HIGHEST) * case.H**-0.5
        if case.soft_cap:
            scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
        if function := score_function(case, arrays.get("captured")):
            scores = jax.vmap(function, (0, None, None, None, 0))(scores, 0, n, t, columns)
        if case.bias:
            scores = scores + _row_of(arrays["bias"], n, t).astype(jnp.float32)
        valid = jnp.full(case.S, True)
        if case.causal:
            valid &= columns <= t
        if case.window:
            valid &= (columns >= t - case.window[0]) & (columns <= t + case.window[1])
        if case.segments:
            valid &= arrays["query_ids"][0, t] == arrays["key_ids"][0]
        if case.boolean:
            valid &= _row_of(arrays["boolean"], n, t)
        if function := mask_function(case):
            valid &= jax.vmap(function, (None, None, None, 0))(0, n, t, columns)
        scores = jnp.where(valid, scores, -jnp.inf)
        largest = jax.lax.stop_gradient(jnp.max(scores))
        terms = jnp.exp(scores - jnp.where(largest > -jnp.inf, largest, 0))
        return jnp.matmul(terms, value, precision=_HIGHEST) / jnp.maximum(terms.sum(), 1e-30)

    return row


def _row_of(array: jax.Array, n: jax.Array, t: jax.Array) -> jax.Array:
    """The row of an array that broadcasts to [B, N, T, S]."""
    _, heads, rows, _ = array.shape
    return array[0, n if heads > 1 else 0, t if rows > 1 else 0]
