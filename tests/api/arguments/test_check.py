"""``check`` reads the values of the arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import changed, zeros
from test_bad_input import B, H, K, N, S, T, good
from test_bad_varlen_input import good_varlen

import jax_memeff
from jax_memeff import Mask, Offsets


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query_seq_lengths": jnp.array([5, 6])}, ValueError, "query_seq.*got 6 at index 1"),
        ({"mask": Mask.lengths(key=jnp.array([-1, 0]))}, ValueError, "key lengths.*got -1 at"),
        (
            {"query": changed(zeros(B, T, N, H), (1, 2), np.nan)},
            ValueError,
            r"query.*nan.*\(1, 2, 0",
        ),
        ({"value": changed(zeros(B, S, K, H), (0, 6), np.inf)}, ValueError, "value must be finite"),
        ({"bias": changed(zeros(T, S), (0, 0), np.nan)}, ValueError, "bias must be finite or -inf"),
        ({"sinks": changed(zeros(N), 1, np.nan)}, ValueError, "sinks must not be NaN.* head 1;"),
        (
            {"mask": Mask.segments(jnp.array([0, 0, 1, 3, -1]), jnp.array([0, 0, 0, 1, 1, 2, -1]))},
            ValueError,
            r"query segment ids must occur among.*got one at index \(0, 3\)",
        ),
        (
            # Each id occurs among the keys, but no key has both ids.
            {
                "mask": Mask.segments(jnp.zeros(5, int), jnp.array([0, 0, 0, 0, 0, 0, 1]))
                & Mask.segments(jnp.ones(5, int), jnp.array([0, 0, 0, 0, 0, 0, 1]))
            },
            ValueError,
            r"query segment ids must occur among.*got one at index \(0, 0\)",
        ),
        (
            # The only key with the id is beyond the length.
            {
                "mask": Mask.segments(jnp.zeros(5, int), jnp.array([1, 1, 1, 1, 1, 1, 0])),
                "key_value_seq_lengths": jnp.array([7, 6]),
            },
            ValueError,
            r"query segment ids must occur among.*got one at index \(1, 0\)",
        ),
        ({"scale": np.nan}, ValueError, "scale must be finite"),
        ({"offsets": Offsets(query=jnp.int32(-1))}, ValueError, "offsets.query must be >= 0, got"),
        ({"offsets": Offsets(head=jnp.int32(1))}, ValueError, "offsets.num_heads must be at leas"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_check_reads_values(arguments, error, message):
    with pytest.raises(error, match=message):
        jax_memeff.check(**{**good(), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens_q": jnp.array([0, 3, 2])}, "cu_seqlens_q must not decrease, got 2 after 3"),
        ({"cu_seqlens_k": jnp.array([0, 4, 9])}, r"cu_seqlens_k must be in \[0, 7\].*got 9 at"),
        ({"cu_seqlens_q": jnp.array([0, 4, 5])}, "max_seqlen_q must be at least.*sequence 0 has 4"),
        ({"query": changed(zeros(T, N, H), 3, np.nan)}, r"query must be finite.*\(3, 0, 0\)"),
        ({"bias": changed(zeros(3, 4), (1, 3), np.nan)}, "bias must be finite or -inf"),
        (
            {"mask": Mask.segments(jnp.array([0, 0, 1, 3, -1]), jnp.array([0, 3, 0, 3, 1, 2, -1]))},
            r"query segment ids must occur among.*got one at index \(3,\)",
        ),
        (
            {
                "mask": Mask.segments(jnp.array([1, 1, 2, 2, 2]), jnp.array([0, 0, 0, 1, 2, 2, 2]))
                & Mask.lengths(key=jnp.array([3, 3]))
            },
            r"query segment ids must occur among.*got one at index \(0,\)",
        ),
    ],
)
def test_check_reads_packed_sequences(arguments, message):
    with pytest.raises(ValueError, match=message):
        jax_memeff.check(**{**good_varlen(), **arguments})


def test_check_accepts_valid_packed_sequences():
    garbage = changed(zeros(S, K, H), [0, 6], np.nan)
    starts = {"cu_seqlens_q": jnp.array([0, 3, 5]), "cu_seqlens_k": jnp.array([1, 1, 6])}
    bias = jnp.full((2, 1, 1, 6), -jnp.inf).at[1, :, :, 5].set(jnp.nan)
    arguments = good_varlen() | starts | {"max_seqlen_k": 6, "bias": bias}
    jax_memeff.check(**(arguments | {"key": garbage, "value": garbage}))


def test_check_accepts_valid_arguments():
    garbage = changed(zeros(B, S, K, H), np.s_[1, 3:], np.nan)
    jax_memeff.check(
        zeros(B, T, N, H),
        garbage,
        garbage,
        changed(zeros(T, S), (0, 1), -np.inf),
        key_value_seq_lengths=jnp.array([7, 3]),
        return_residual=True,
    )


def test_check_is_eager():
    with pytest.raises(TypeError, match=r"query must hold concrete values.*outside jax\.jit"):
        jax.jit(jax_memeff.check)(*good().values())


def test_check_of_constants_is_eager():
    x = zeros(B, T, N, H)
    with pytest.raises(TypeError, match=r"check must be called outside jax\.jit"):
        jax.jit(lambda slope: jax_memeff.check(x, x, x, score_mod=lambda s, b, h, q, k: s * slope))(
            1.0
        )


def test_indices_of_arrays_without_a_batch_dim():
    query, key = changed(zeros(T, N, H), (2, 1, 3), np.nan), zeros(S, K, H)
    with pytest.raises(ValueError, match=r"query .* at index \(2, 1, 3\) of shape"):
        jax_memeff.check(query, key, key)
