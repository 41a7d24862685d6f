"""``deterministic_backward=True``: its kernels, and on a GPU equal bits without deadlocks."""

from __future__ import annotations

import dataclasses
import threading

import attention_case
import jax
import jax.numpy as jnp
import pytest
from attention_case import Case
from kernel_cases import BIASES, CAUSAL, WINDOW

from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features import DETERMINISTIC, AskedBias
from jax_memeff.codegen.features.bias import gradient
from jax_memeff.codegen.problem import Problem

gpu = pytest.mark.gpu
RUNS = 200

REPEATED = [
    Case(B=2, T=1025, S=1023, N=4, K=4, H=128, **CAUSAL),
    Case(B=2, T=1025, S=1023, N=4, K=4),
    Case(B=2, T=1025, S=1023, N=8, K=2, H=128),
    Case(B=2, T=1025, S=1023, N=8, K=1, **CAUSAL),
    Case(B=2, T=1023, S=1025, N=4, K=2, **WINDOW),
    Case(B=3, T=1023, S=1025, lengths=((1023, 1025), (0, 7), (700, 300)), dropout=0.2, **CAUSAL),
    Case(B=2, T=700, S=700, N=2, H=256, **CAUSAL),
    Case(B=2, T=700, S=700, N=4, H=192, Hv=128, soft_cap=5.0),
    Case(B=3, T=700, S=700, lengths=((700, 600), (0, 9), (300, 700)), packed=True, **CAUSAL),
    # Key heads that take tickets in turn, and the remaining ones.
    Case(B=3, T=300, S=900, N=7, K=7, H=128, dropout=0.1),
    Case(B=9, T=300, S=500, N=4, K=2, H=128, soft_cap=3.0, **WINDOW),
    # More CTAs than any GPU runs at once.
    Case(B=4, T=2048, S=2048, N=16, K=16, **CAUSAL),
    Case(B=4, T=2048, S=2048, N=16, K=16),
    # They divide the query heads of a group.
    Case(B=4, T=2048, S=2048, N=32, K=4, H=128, **CAUSAL),
    *(Case(B=3, T=300, S=400, N=4, bias=bias, dropout=0.1) for bias in BIASES),
    *(Case(B=3, T=300, S=400, N=4, H=264, bias=bias, dropout=0.1) for bias in ("1NTS", "B1TS")),
    Case(B=3, T=300, S=400, N=4, H=320, dtype="float32", bias="11TS", **WINDOW),
    Case(B=3, T=300, S=400, N=4, bias="11TS", lengths=((300, 400), (0, 9), (200, 300)), **CAUSAL),
]


GRADIENTS = ("query", "key", "value", "bias")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "ordered", "bias_gradient"),
    [
        ({}, True, "none"),
        ({"needs_grad": ("key", "value")}, False, "none"),
        ({"bias": AskedBias("16"), "needs_grad": GRADIENTS}, True, "full"),
        ({"bias": AskedBias("16", "common"), "needs_grad": GRADIENTS}, True, "dbias_kernel"),
        ({"bias": AskedBias("16", "common"), "needs_grad": ("bias",)}, False, "dbias_kernel"),
        ({"bias": AskedBias("16", "columns"), "needs_grad": ("bias",)}, True, "columns"),
    ],
)
def test_deterministic_kernels_differ_only_if_they_add(changes, ordered, bias_gradient):
    needs_grad = changes.get("needs_grad", ())
    asked = {"deterministic": True, "bias": changes.get("bias")}
    spec = select.select(Problem("backward", "bf16", 64, 64, "sm_80", asked, needs_grad))
    assert (spec[DETERMINISTIC], gradient(spec)) == (ordered, bias_gradient)
    assert ("_deterministic_" in spec.name) == ordered
    source = emit.source(spec)
    assert f"kDeterministic = {str(ordered).lower()};" in source
    waits = ordered and "query" in changes.get("needs_grad", GRADIENTS)
    assert f"kDeterministicDq = {str(waits).lower()};" in source
    assert ("FmhaBackwardDbias<Config>" in source) == (bias_gradient == "dbias_kernel")


@pytest.mark.parametrize(
    ("changes", "ordered"),
    [
        ({}, True),
        ({"features": {"mask": "causal", "packed": True, "dropout": True}}, True),
        ({"head_dim": 64, "value_dim": 64, "features": {"mask": "window"}}, True),
        ({"needs_grad": ("key", "value")}, False),
        ({"head_dim": 192}, False),
        ({"head_dim": 256, "value_dim": 256}, False),
    ],
)
def test_hopper_kernels_order_gradients_without_an_owner(changes, ordered):
    asked = dataclasses.replace(Problem("backward", "bf16", 128, 128, "sm_90a"), **changes)
    plain = select.select(asked)
    asked = dataclasses.replace(asked, features={**dict(asked.features), "deterministic": True})
    spec = select.select(asked)
    assert spec.family == "sm90"
    changed = {**dict(plain.features), "deterministic": ordered}
    assert spec == dataclasses.replace(plain, features=tuple(changed.items()))
    assert spec.deterministic_dq == ordered
    assert f"kDeterministicDq = {str(ordered).lower()};" in emit.source(spec)


@pytest.mark.quick
def test_forwards_are_the_same_kernels():
    plain = Problem("forward", "bf16", 64, 64, "sm_80")
    asked = dataclasses.replace(plain, features={"deterministic": True})
    assert select.select(asked) == select.select(plain)


def bits(array):
    return array.view({2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])


def runner(case):
    """A function that runs the case, and one that compares the bits of two results."""
    case = dataclasses.replace(case, deterministic=True)
    operands, dout, dlse = jax.tree.map(jnp.asarray, case.arrays())

    @jax.jit
    def equal(first, second):
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        return jnp.all(jnp.array([jnp.array_equal(bits(x), bits(y)) for x, y in pairs]))

    return lambda: attention_case.run(operands, case.options, dout, dlse), equal


@gpu
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_every_gradient_is_bit_equal_in_every_run(case):
    run, equal = runner(case)
    first = run()
    assert all(bool(equal(run(), first)) for _ in range(RUNS))


class Occupant:
    """A kernel that repeatedly occupies SMs on its own stream."""

    SOURCE = """
    extern "C" __global__ void occupy(long long clocks) {
      extern __shared__ char shared[];
      long long const start = clock64();
      while (clock64() - start < clocks) shared[threadIdx.x] = 0;
    }
    """

    def __init__(self, blocks: int):
        core = pytest.importorskip("cuda.core")
        self.core, self.device = core, core.Device(0)
        self.device.set_current()
        arch = f"sm_{''.join(map(str, self.device.compute_capability))}"
        options = core.ProgramOptions(arch=arch)
        program = core.Program(self.SOURCE, "c++", options=options).compile("cubin")
        self.kernel = program.get_kernel("occupy")
        self.config = core.LaunchConfig(grid=blocks, block=128, shmem_size=48 * 1024)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        self.device.set_current()
        stream = self.device.create_stream()
        clocks = 50_000
        while not self.stop.is_set():
            for _ in range(20):
                self.core.launch(stream, self.config, self.kernel, clocks)
                clocks = clocks * 7 % 300_007  # so that blocks begin and end at odd times
            stream.sync()

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


@gpu
@pytest.mark.parametrize("blocks", [20, 131, 1000])
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_it_neither_hangs_nor_changes_with_a_concurrent_kernel(blocks, mask):
    """SMs become free irregularly, so CTAs start in unusual orders; a wrong semaphore would
    hang.
    """
    run, equal = runner(Case(B=2, T=4096, S=4096, N=8, K=4, **mask))
    first = jax.block_until_ready(run())
    with Occupant(blocks):
        for _ in range(50):
            assert bool(equal(run(), first))
