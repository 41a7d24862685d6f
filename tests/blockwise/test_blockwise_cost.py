"""The blockwise path computes and stores no more than necessary."""

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockwise_case import ALL, Case, make, run
from jaxprs import primitives_of

import jax_memeff
from jax_memeff._blockwise import forward as blockwise
from jax_memeff._call import dropout
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import NeedsGrad, Operands
from jax_memeff._call.options import Options
from jax_memeff._call.scaling import Scaling


@pytest.mark.parametrize(
    ("needs_grad", "products"),
    [
        (NeedsGrad(True, True, True, True), 5),
        (NeedsGrad(True, False, False, False), 3),
        (NeedsGrad(False, True, False, False), 3),
        (NeedsGrad(False, False, True, False), 2),
        (NeedsGrad(False, False, False, True), 2),
        (NeedsGrad(False, False, False, False), 0),
    ],
)
def test_gradients_that_are_not_needed_are_not_computed(needs_grad, products):
    operands, options, dout, dlse = make(Case(bias=("T", "S")))
    out, lse, everything = run(operands, options, dout, dlse)
    got = run(operands, options, dout, dlse, needs_grad)[2]
    *arrays, _ = zip(needs_grad, got, everything, strict=True)  # without captured arrays
    for want, gradient, full in arrays:
        assert (gradient is not None) == want
        if want:
            np.testing.assert_allclose(gradient, full, atol=1e-6)

    def f(operands, *arrays):
        return blockwise.backward(operands, options, *arrays, needs_grad=needs_grad)

    jaxpr = jax.make_jaxpr(f)(operands, out, lse, dout, dlse)
    names = [equation.primitive.name for equation in primitives_of(jaxpr.jaxpr)]
    assert names.count("dot_general") == products


@pytest.mark.quick
@pytest.mark.parametrize("bias", [None, (1, 1, 1, 16384), (1, 4, 16384, 1), (1, 1, 1, 1)])
def test_no_intermediate_is_quadratic(bias):
    B, T, N, H = 1, 16384, 4, 32
    array = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    options = Options(Scaling(0.25), dropout_threshold=20)
    bias = None if bias is None else jax.ShapeDtypeStruct(bias, jnp.bfloat16)

    def f(query, key, value, bias, out, lse, dout, dlse):
        state = dropout.state(jax.random.key(0), B, N)
        operands = Operands(query, key, value, bias, Mask.causal(), state, None)
        blockwise.forward(operands, options)
        return blockwise.backward(operands, options, out, lse, dout, dlse, ALL)

    jaxpr = jax.make_jaxpr(f)(array, array, array, bias, array, row, array, row)
    sizes = [
        variable.aval.size
        for equation in primitives_of(jaxpr.jaxpr)
        for variable in equation.outvars
        if hasattr(variable.aval, "size")
    ]
    assert max(sizes) == B * T * N * H


MEMORY_PROGRAM = """
import resource, sys, threading, time
import jax, jax.numpy as jnp
from jax_memeff._blockwise import forward as blockwise
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import Operands
from jax_memeff._call.operands import NeedsGrad
from jax_memeff._call.options import Options
from jax_memeff._call.scaling import Scaling

T = int(sys.argv[1])
page = resource.getpagesize()

def resident():
    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * page

def f(query, key, value, dout):
    operands = Operands(query, key, value, None, Mask(), None, None)
    options = Options(Scaling(0.125))
    out, lse = blockwise.forward(operands, options)
    needs_grad = NeedsGrad(True, True, True, False)
    return blockwise.backward(operands, options, out, lse, dout, None, needs_grad)

arrays = [jax.random.normal(jax.random.key(i), (1, T, 4, 64)) for i in range(4)]
compiled = jax.jit(f).lower(*arrays).compile()
jax.block_until_ready(arrays)
baseline = peak = resident()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident())

watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
jax.block_until_ready(compiled(*arrays))
seconds = time.perf_counter() - started
done.set()
watcher.join()
print((peak - baseline) / 2**20, seconds)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_memory_is_linear():
    """1 GiB at T = S = 16384 is 256 MiB at 4096, where one [N, T, S] buffer has 256 MiB."""
    program = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, "4096"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert program.returncode == 0, program.stderr
    mebibytes = float(program.stdout.split()[0])
    assert 0 < mebibytes < 256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_does_not_copy_all_keys(dtype):
    """Keys and values are transposed and widened tile by tile."""
    row, rows = (jax.ShapeDtypeStruct((4, length, 4, 64), dtype) for length in (1, 8192))
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)

    def attend(query, key, value, lengths):
        return jax_memeff.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation="xla"
        )

    analysis: Any = jax.jit(attend).lower(row, rows, rows, lengths).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 0.1 * 2 * rows.size * rows.dtype.itemsize


def test_a_constant_mask_is_not_copied_into_loops():
    """XLA's translation to HLO copies the constants that a loop reads into its body."""
    length = 1200
    query, key, value = (jax.ShapeDtypeStruct((1, length, 2, 8), "float32") for _ in range(3))
    mask = np.arange(length)[:, None] % 7 < np.arange(length)[None] % 5

    def loss(query, key, value):
        return jnp.sum(
            jax_memeff.dot_product_attention(query, key, value, mask=mask, implementation="xla")
        )

    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).as_text("hlo")
    assert " while(" in program
    assert len(re.findall(r"pred\[[1,]*1200,1200\]\S* constant\(", program)) == 1


@pytest.mark.quick
@pytest.mark.parametrize("rows", [1, 1100])
def test_tiles_that_a_boolean_mask_leaves_out_are_not_computed(rows):
    """Their values are NaN, which a product with a probability of 0 would keep."""
    query = jnp.ones((1, rows, 1, 8))
    key = jnp.ones((1, 2048, 1, 8))
    value = key.at[:, 100:1900].set(jnp.nan)
    mask = (np.arange(2048) < 50)[None, None, None]
    # The first and the last block of a row are computed, those between them are not.
    mask |= np.arange(2048) == 2047
    value = value.at[:, :512].set(1.0).at[:, 1536:].set(1.0)
    out = jax_memeff.dot_product_attention(query, key, value, mask=mask, implementation="xla")
    np.testing.assert_allclose(out, np.ones_like(out), atol=1e-6)
