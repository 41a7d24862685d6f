"""The dropout bits of a path, reconstructed from its results."""

from __future__ import annotations

import jax
import numpy as np
import oracle
from attention_case import Case, run_case

from jax_memeff._call import dropout


def kept_by_half(dropout_key: jax.Array, batch: int, heads: int, length: int) -> np.ndarray:
    """The elements that a rate of 0.5 keeps, bool[batch, heads, length, length]."""
    state = jax.tree.map(np.asarray, dropout.state(dropout_key, batch=batch, num_heads=heads))
    return oracle.kept_elements(state, dropout.threshold(0.5), length, length, None)


def assert_dropout_bits(case: Case) -> None:
    """Compares the bits in out, dq and dv of uniform probabilities with the oracle's definition."""
    operands, _, _ = case.arrays()
    assert operands.dropout is not None
    sizes = case.T, case.S, operands.position
    expected = oracle.kept_elements(operands.dropout, case.options.dropout_threshold, *sizes)
    expected &= oracle.valid_elements(operands.mask, case.B, case.N, *sizes)
    bias = None if operands.bias is None else np.zeros_like(operands.bias)
    uniform = operands._replace(query=np.zeros_like(operands.query), bias=bias)

    def one_hot(length, first):
        """An array [B, length, N, H] that is one where the row equals ``first`` plus the last
        index.
        """
        hot = np.eye(length, case.H, k=-first)[None, :, None, :]
        return np.broadcast_to(hot, (case.B, length, case.N, case.H)).astype(uniform.query.dtype)

    def results(dout, **changes):
        found = run_case(case, uniform._replace(**changes), dout, None)
        return jax.tree.map(lambda x: np.asarray(x, np.float32), found)

    flat = np.full_like(operands.query, 1 / case.H)
    ones = np.ones_like(operands.value)
    for first in range(0, case.S, case.H):
        columns = slice(first, min(first + case.H, case.S))
        width = columns.stop - first
        (out, _), _ = results(flat, value=one_hot(case.S, first))
        kept = out.transpose(0, 2, 1, 3)[..., :width] > 0
        np.testing.assert_array_equal(kept, expected[..., columns])
        # With dP = 1 everywhere dS is positive exactly at kept elements.
        _, (dq, *_) = results(flat, key=one_hot(case.S, first), value=ones)
        kept = dq.transpose(0, 2, 1, 3)[..., :width] > 0
        np.testing.assert_array_equal(kept, expected[..., columns])
    for first in range(0, case.T, case.H):
        rows = slice(first, min(first + case.H, case.T))
        _, (_, _, dv, *_) = results(one_hot(case.T, first))
        kept = dv.transpose(0, 2, 3, 1)[:, :, : rows.stop - first] > 0
        np.testing.assert_array_equal(kept, expected[:, :, rows])
