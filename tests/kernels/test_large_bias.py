"""Rows in which every element has a large bias: their output is an average, their gradient 0."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_emulated
from attention_case import run_case
from emulated_runs import LENGTHS, Run
from jax.sharding import PartitionSpec as P
from kernel_cases import BOTTOM_RIGHT, CAUSAL, WINDOW
from large_bias import LargeBias, assert_matches
from ring_case import compiled, normal, ring_mesh

import jax_memeff


def on_blocks(case: LargeBias) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_memeff._blockwise.tiles.LONGEST_BLOCK", 32)
        return run_case(case, *case.arrays())


@pytest.mark.parametrize("large", [-1e4, -1e9, -1e30, 1e10])
@pytest.mark.parametrize("bias", ["1NTS", "11T1"])
def test_blockwise(bias, large):
    case = LargeBias(B=1, T=40, S=70, H=16, bias=bias, bias_dtype="float32", large=large)
    assert_matches(case, on_blocks(case))


# Most kernels of these cases are those of test_emulated.py and are not compiled again.
hopper = functools.partial(Run, arch="sm_90a", multiprocessors=2, seed=1)
split = functools.partial(Run, splits=True, gradients=False)
packed = {"B": 3, "T": 130, "S": 150, "lengths": LENGTHS, "packed": True}
EMULATED = [
    Run(LargeBias(T=70, S=90, dtype="float32", bias="BN1S", lengths=((70, 90), (33, 50)))),
    Run(LargeBias(H=264, bias="1NTS", scale=0.25, **packed)),
    split(LargeBias(B=1, T=5, S=700, N=4, K=1, bias="1NTS", parts=True, **BOTTOM_RIGHT)),
    hopper(LargeBias(bias="BNTS", large=-1e9, **packed)),
    hopper(LargeBias(T=140, S=200, K=1, bias="11TS", bias_dtype="float32", soft_cap=2.0, **WINDOW)),
    hopper(LargeBias(T=140, S=150, K=1, H=256, bias="1NTS", dropout=0.2, lengths=LENGTHS[:2])),
    hopper(
        LargeBias(B=3, T=200, S=150, H=128, bias="1NTS", dropout=0.2, lengths=LENGTHS, **CAUSAL)
    ),
    split(
        LargeBias(T=130, S=450, H=128, bias="1NTS", scale=0.125, dropout=0.2, **WINDOW),
        arch="sm_90a",
        seed=1,
    ),
]


@pytest.mark.rotating(5)
@pytest.mark.parametrize("run", EMULATED, ids=str)
def test_emulated_kernels(run, machine):
    assert_matches(run.case, machine.submit(test_emulated.results, run).result(timeout=600))


def operands(dtype, rows=16, columns=24):
    """Query, key and value."""
    shapes = ((2, rows, 2, 8), (2, columns, 2, 8), (2, columns, 2, 8))
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def test_other_derivatives_are_those_of_masked_rows(assert_close):
    arrays = *operands(np.float32), normal(3, 2, 2, 16, 24)
    tangents = tuple(normal(4 + index, *x.shape) for index, x in enumerate(arrays))
    attention = functools.partial(jax_memeff.dot_product_attention, return_residual=True)

    def loss(*arrays):
        out, lse = attention(*arrays)
        return jnp.sum(jnp.sin(out[:, 4:])) + jnp.sum(out[:, :4]) + jnp.sum(jnp.sin(lse[:, 4:]))

    def squares(*arrays):
        return sum(jnp.sum(x**2) for x in jax.grad(loss, range(4))(*arrays))

    @compiled
    def derivatives(rows):
        primals = *arrays[:3], arrays[3].at[:, :, :4].set(rows)
        with jax_memeff.forward_mode():
            _, forward = jax.jvp(attention, primals, tangents)
        return forward, jax.grad(squares, range(4))(*primals)

    want = derivatives(-jnp.inf)
    for large in (-1e9, 1e10):
        assert_close(derivatives(large), want)


def test_float64_has_digits_for_the_scores(assert_close, x64):
    arrays = *operands(np.float64), np.zeros((2, 2, 16, 24))

    @compiled
    @functools.partial(jax.grad, argnums=range(4))
    def gradients(query, key, value, bias):
        return jnp.sum(jnp.sin(jax_memeff.dot_product_attention(query, key, value, bias)))

    shifted = *arrays[:3], arrays[3] - 1e9
    assert_close(gradients(*shifted), gradients(*arrays), 1e-6)


def test_a_ring_averages():
    """The parts of a row on its devices each have a logsumexp near -1e9."""
    query, key, value = operands(np.float32)
    bias = normal(3, 2, 2, 16, 24).at[:, :, :4].set(-1e9)
    sequence = P(None, "ring")
    ring = jax.shard_map(
        functools.partial(jax_memeff.ring_attention, axis_name="ring"),
        mesh=ring_mesh(jax.devices("cpu")[:2]),
        in_specs=(sequence, sequence, sequence, P(None, None, "ring")),
        out_specs=sequence,
    )

    def loss(*arrays):
        out = ring(*arrays)
        return jnp.sum(out), out

    gradient, out = compiled(jax.grad(loss, has_aux=True))(query, key, value, bias)
    mean = np.broadcast_to(value.mean(1, keepdims=True), out[:, :4].shape)
    np.testing.assert_allclose(out[:, :4], mean, atol=1e-6)
    np.testing.assert_array_equal(gradient[:, :4], 0)
    assert np.isfinite(out).all() and np.isfinite(gradient).all()
