"""Tangents of attention (forward mode) by the kernel of Hopper, against the definition."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import kernel_cases
import numpy as np
import pytest
from attention_case import Case
from kernel_cases import BOTTOM_RIGHT, CAUSAL, SHARED_KEYS, WINDOW
from tangent_case import TangentCase, assert_tangents_match

import jax_memeff
from jax_memeff._cuda import selection
from jax_memeff.codegen import gpu, strategy
from jax_memeff.codegen.spec import KernelSpec

DIMS = {(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128)}
"""Head dims of the cases on a GPU."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A case on the emulated machine."""

    made: TangentCase
    seed: int = 0
    multiprocessors: int = 2

    def __str__(self) -> str:
        return f"{self.made}-seed{self.seed}"

    def kernels(self) -> list[KernelSpec]:
        """The kernels that :func:`results` needs, so that the machine can compile several at a
        time.
        """
        with strategy.using(forward=strategy.PLAIN):
            return kernels(self.made)


def kernels(made: TangentCase) -> list[KernelSpec]:
    """The forward of a case on Hopper, and the kernel of its tangents."""
    operands, _ = made.passed(None)
    archs = (gpu.WGMMA_ARCH,)
    found = [
        selection.kernels(operands, made.case.options, None, archs),
        selection.kernels(operands, made.case.options, made.needs_grad, archs, is_tangent=True),
    ]
    return [spec for specs in found for spec in specs.values()]


LENGTHS = ((130, 150), (77, 33), (0, 150))
EMPTY = ((130, 150), (77, 0), (0, 150))
SEQUENCES = ((200, 270), (0, 100), (77, 0), (1, 1), (130, 33))
SMALL = functools.partial(Case, B=1, T=140, S=170, N=2, K=1)
RUNS = [
    Run(TangentCase(Case(B=2, T=300, S=270, N=4, K=2, **CAUSAL)), seed=seed) for seed in range(3)
]
RUNS += [Run(TangentCase(SMALL(H=H, **CAUSAL)), seed=1) for H in (32, 96, 128)]
RUNS += [
    Run(TangentCase(case), seed=2)
    for case in (
        SMALL(),
        SMALL(H=128, Hv=72, dtype="float16"),
        SMALL(H=40, Hv=24),
        SMALL(H=192, Hv=128, **CAUSAL),
        SMALL(H=256),
        SMALL(H=128, **WINDOW),
        SMALL(T=5, S=700, **BOTTOM_RIGHT),
        SMALL(T=300, S=40, H=128, **BOTTOM_RIGHT),
        Case(B=3, T=130, S=150, H=128, lengths=EMPTY),
        Case(B=3, T=130, S=150, N=4, K=2, lengths=LENGTHS, **WINDOW),
        Case(B=5, T=200, S=270, lengths=SEQUENCES, packed=True, **CAUSAL),
        Case(B=5, T=200, S=270, H=128, lengths=SEQUENCES, packed=True),
        SMALL(soft_cap=2.0, **CAUSAL),
        SMALL(H=128, dropout=0.2, lengths=((130, 150),)),
        SMALL(dropout=0.2, soft_cap=3.0, **WINDOW),
        SMALL(H=128, bias="1NTS", S=176),
        SMALL(bias="BN1S", bias_dtype="float32", soft_cap=2.0),
        SMALL(bias="1NT1", lengths=((100, 170),)),
        SMALL(sinks=True, **CAUSAL),
        Case(B=3, T=130, S=150, H=128, sinks=True, lengths=EMPTY),
        SMALL(segments=1, **CAUSAL),
        SMALL(T=400, S=530, N=3, H=128, boolean=("1N1S", "1NT1"), block=128, dropout=0.2),
        Case(B=6, T=70, S=90, K=1, shared=SHARED_KEYS),
        Case(B=3, T=200, S=152, position=((160, 0, 48), (128, 16, 0)), **CAUSAL),
        SMALL(scale=-0.1),
        SMALL(scale=1e-8, bias="1NTS"),
    )
]
RUNS += [
    Run(TangentCase(SMALL(H=128, lengths=((120, 150),), **CAUSAL), given), seed=3)
    for given in (
        ("query",),
        ("key",),
        ("value",),
        ("query", "key"),
        ("query", "value"),
        ("key", "value"),
    )
]


def results(run: Run) -> Any:
    """Runs in the process of ``machine``."""
    import emulator

    emulator.configure(gpu.WGMMA_ARCH, multiprocessors=run.multiprocessors, seed=run.seed)
    with strategy.using(forward=strategy.PLAIN):
        return jax.tree.map(np.asarray, run.made.run())


@pytest.mark.rotating(5)
@pytest.mark.quick(str(RUNS[0]))
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_emulated_tangents_match_the_definition(run, machine):
    assert_tangents_match(run.made, machine.submit(results, run).result(timeout=600))


SLOPES = np.array([0.5, -0.25], np.float32)


def with_function(score, batch, head, row, column):
    """A score function whose derivative depends on the score, and that reads an array."""
    del batch
    return jax.numpy.tanh(score) * jax.numpy.asarray(SLOPES)[head] + 0.1 * (row - column) / 64


def in_blocks(batch, head, row, column):
    return (row // 64 + column // 64 + head + batch) % 3 != 0


def tangents_of_functions(seed: int) -> Any:
    """Output and logsumexp, their tangents, and arrays. Runs in the process of ``machine``."""
    import emulator

    emulator.configure(gpu.WGMMA_ARCH, multiprocessors=2, seed=seed)
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((6, 2, 150, 2, 64), np.float32).astype(jax.numpy.bfloat16)
    primals, directions = tuple(drawn[:3]), tuple(drawn[3:])

    @jax.jit
    def jvp(primals, directions):
        def attention(*arrays):
            function: Any = jax_memeff.dot_product_attention
            mask = jax_memeff.Mask.function(in_blocks)
            return function(*arrays, mask=mask, score_mod=with_function, return_residual=True)

        with jax_memeff.forward_mode():
            return jax.jvp(attention, primals, directions)

    lowered = jvp.lower(primals, directions)
    assert "@jax_memeff_tangent" in lowered.as_text()
    results = lowered.compile()(primals, directions)
    return jax.tree.map(np.asarray, results), primals, directions


@pytest.mark.rotating(3)
def test_score_functions_and_mask_functions(machine):
    (results, tangents), *arrays = machine.submit(tangents_of_functions, 4).result(timeout=600)
    primals, directions = jax.tree.map(lambda x: x.astype(np.float32), arrays)
    batch, head, row, column = np.ogrid[:2, :2, :150, :150]
    valid = in_blocks(batch, head, row, column)

    def attention(query, key, value):
        scores = jax.numpy.einsum("btnh,bsnh->bnts", query, key) / 8
        scores = with_function(scores, batch, head, row, column)
        scores = jax.numpy.where(valid, scores, -jax.numpy.inf)
        lse = jax.nn.logsumexp(scores, -1, keepdims=True)
        out = jax.numpy.einsum("bnts,bsnh->btnh", jax.numpy.exp(scores - lse), value)
        return out, lse[..., 0].swapaxes(1, 2)

    with jax.default_matmul_precision("highest"):
        expected = jax.jvp(attention, tuple(primals), tuple(directions))
    for got, want in zip(
        jax.tree.leaves((results, tangents)), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(got.astype(np.float32) - want)
        assert error <= 4e-3 * np.linalg.norm(want)


def gpu_cases() -> list[TangentCase]:
    """A third of the cases of the other kernels, and those of the emulated machine."""
    cases = [
        case
        for case in kernel_cases.cases()
        if case.dtype != "float32" and (case.H, case.value_dim) in DIMS and not case.projections
    ]
    made = [*map(TangentCase, cases[::3]), *(run.made for run in RUNS)]
    large = Case(B=2, T=2048, S=2048, N=16, K=4, H=128, **CAUSAL)
    made += [TangentCase(dataclasses.replace(large, H=H)) for H in (64, 128)]
    return list(dict.fromkeys(made))


@pytest.fixture(scope="module")
def compiled(compile_kernels, selected):
    """Compiles the kernels of the selected cases before the first one runs."""
    if not any(device.compute_capability == "9.0" for device in jax.devices("cuda")):
        pytest.skip("these are the kernels of Hopper")
    cases = dict.fromkeys(call["made"] for call in selected if "made" in call)
    compile_kernels({(spec, gpu.WGMMA_ARCH) for made in cases for spec in kernels(made)})


@pytest.mark.gpu
@pytest.mark.parametrize("made", gpu_cases(), ids=str)
def test_tangents_match_the_definition(made, compiled):
    assert_tangents_match(made, made.run())


def test_every_case_has_a_kernel_of_hopper():
    """Otherwise plain JAX would be compared with the definition."""
    for made in gpu_cases():
        assert kernels(made)[-1].direction == "tangent"
