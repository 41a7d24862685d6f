"""The Hopper kernels with random delays of their warps: equal bits in every run.

A random sleep may follow each wait, arrival and barrier of these kernels (random_sleep() of
``arch/thread.cuh``). A buffer that is read or released too early is then read or written at a
different time in every run. With one stage every copy waits for a reader; with three the copies run
far ahead.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing

import jax
import lateness
import numpy as np
import pytest
from attention_case import Case, run_case
from kernel_cases import CAUSAL
from oracle_checks import assert_results_match

from jax_memeff._call.gradients import Gradients, gradients_of
from jax_memeff._op import primitives
from jax_memeff.codegen import emit
from jax_memeff.codegen.gpu import WGMMA_ARCH
from jax_memeff.codegen.kernels.sm90 import backward
from jax_memeff.codegen.toolchain import compile as compiler

gpu = pytest.mark.gpu
REPEATS = 1000
EVERYTHING = {"bias": "1NTS", "dropout": 0.2}


@dataclasses.dataclass(frozen=True)
class Hunt:
    """A case, and its number of stages as in lateness.py."""

    case: Case
    stages: int | None

    def __str__(self) -> str:
        return f"{'consumer_groups' if self.stages is None else f'{self.stages}stages'}-{self.case}"


def hunt(H: int, stages: int | None, **features) -> Hunt:
    return Hunt(Case(B=60, T=257, S=304, N=2, K=1, H=H, **features), stages)


HUNTS = [
    made
    for H in (64, 128)
    for made in (
        hunt(H, 1, **CAUSAL),
        hunt(H, 2, deterministic=True, **CAUSAL),
        # Three stages at head dim 128 leave no shared memory for a bias.
        hunt(H, 3 if H == 64 else 2, deterministic=True, **EVERYTHING),
        hunt(H, None, **(CAUSAL if H == 64 else EVERYTHING)),
    )
]
HUNTS += [hunt(64, 3, **CAUSAL), hunt(64, 1, **EVERYTHING)]
HUNTS += [hunt(128, 3, deterministic=True, dropout=0.2)]
# CTAs begin at different Q blocks.
HUNTS += [hunt(64, 2), hunt(96, 2), hunt(96, 3), hunt(128, 2)]
# Too small for the GPU: consumer groups in the forward, split-Q in the backward.
HUNTS += [Hunt(Case(B=4, T=1000, S=1000, H=H, **CAUSAL), None) for H in (64, 128)]
# CTAs divide the query heads of a group.
HUNTS += [Hunt(Case(B=6, T=700, S=1000, N=16, K=2, H=H, **CAUSAL), None) for H in (64, 128)]
HUNTS += [hunt(256, stages, **CAUSAL) for stages in (1, 2, 3)] + [hunt(256, 2, **EVERYTHING)]
# One buffer of queries: TMA overwrites it as soon as it is released.
HUNTS += [hunt(192, stages, Hv=128, **CAUSAL) for stages in (1, 2)]
# One buffer of P between the consumers of a backward.
HUNTS += [hunt(192, 2, **CAUSAL)]
FLOAT32 = {"dtype": "float32"}
HUNTS += [hunt(H, stages, **FLOAT32, **CAUSAL) for H, stages in ((64, 2), (128, 1), (128, 2))]
HUNTS += [hunt(64, 3, **FLOAT32, soft_cap=2.0)]
# Block masks: the producer skips KV blocks and Q blocks without valid elements.
SEGMENTS = {"segments": 3, "block": 40}
HUNTS += [hunt(64, stages, **SEGMENTS, **CAUSAL) for stages in (1, 3, None)]
HUNTS += [hunt(128, stages, deterministic=True, **SEGMENTS) for stages in (1, 2)]
HUNTS += [hunt(256, 2, **SEGMENTS, **CAUSAL), hunt(192, 1, Hv=128, **SEGMENTS)]
HUNTS += [hunt(128, None, boolean=("BNTS",), block=40), hunt(64, 1, boolean=("11TS",), block=40)]
# Clusters: the CTAs of a pair run at different speeds, and T 257 leaves half of the last pair idle.
HUNTS += [hunt(H, stages, **CAUSAL) for H in (320, 512) for stages in (1, 2)]
HUNTS += [hunt(576, 1, Hv=512), hunt(384, 2, soft_cap=2.0, **SEGMENTS)]
# Two CTAs add up scores of their columns in one buffer.
HUNTS += [hunt(1024, stages, **CAUSAL) for stages in (1, 2)] + [hunt(768, 1, soft_cap=2.0)]
# Only deterministic float32 calls add the gradient of a broadcast bias in a fixed order.
HUNTS += [hunt(128, 1, deterministic=True, **FLOAT32, **EVERYTHING)]


@pytest.fixture(scope="module")
def compiled(selected, share_of_worker):
    """Compiles the kernels of the selected hunts before the first one begins."""
    lateness.skip_without_hopper()
    specs = set()
    for made in (call["made"] for call in selected if "made" in call):
        with lateness.set_stages(made.stages):
            specs.update(lateness.kernels(made.case))
    # NVRTC holds a lock, so threads would compile one after the other.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as processes:
        ordered = sorted(specs, key=lambda spec: (spec.sort_key, spec.name))
        list(processes.map(compile_late, share_of_worker(ordered)))


def compile_late(spec):
    """Compiles a kernel into the cache on disk."""
    with pytest.MonkeyPatch.context() as patch:
        lateness.make_late(patch)
        compiler.compile(spec, WGMMA_ARCH)


def results(case, arrays, zero):
    """The results that must have the same bits in every run, by name."""
    operands, dout, dlse = arrays
    operands = operands._replace(query=operands.query + zero.astype(operands.query.dtype))
    out, lse = primitives.forward(operands, case.options)
    gradients = primitives.backward(operands, case.options, out, lse, dout, dlse, case.needs_grad)
    assert isinstance(gradients, Gradients)
    found = {"out": out, "lse": lse, "dk": gradients.key, "dv": gradients.value}
    if lateness.has_tangents(case):
        directions = {name: getattr(operands, name)[::-1] for name in lateness.TANGENTS}
        given = gradients_of(operands, directions)
        found["dout"], found["dlse"] = primitives.tangent(operands, case.options, out, lse, given)
    if case.deterministic or max(backward.TILES) < case.H:
        found["dq"] = gradients.query
    return found if gradients.bias is None else {**found, "dbias": gradients.bias}


@gpu
@pytest.mark.parametrize("made", HUNTS, ids=str)
def test_bits_are_equal_in_every_run(made, compiled, monkeypatch):
    run = functools.partial(results, made.case)
    with lateness.set_stages(made.stages):
        lateness.assert_equal_runs(monkeypatch, run, made.case.arrays(), REPEATS)


@pytest.mark.parametrize("made", HUNTS, ids=str)
def test_every_hunt_has_kernels_of_hopper(made):
    with lateness.set_stages(made.stages):
        assert {spec.family for spec in lateness.kernels(made.case)} == {"sm90"}


@pytest.mark.rotating(4 * len(HUNTS))
@pytest.mark.parametrize("made", HUNTS, ids=str)
def test_kernels_with_delays_compile(made, monkeypatch):
    """A number of stages that kernels do not allow would end a hunt on a GPU. Compiling takes 20 s,
    so there is a hunt every fourth day, and all of them before a release.
    """
    with lateness.set_stages(made.stages):
        specs = lateness.kernels(made.case)
    lateness.make_late(monkeypatch)
    for spec in specs:
        compiler.compile_source(
            emit.source(spec), WGMMA_ARCH, [entry.name for entry in spec.entry_points]
        )


def emulated(made):
    """Runs in the process of ``machine``."""
    import emulator

    emulator.configure(WGMMA_ARCH, seed=made.stages or 0)
    with pytest.MonkeyPatch.context() as patch, lateness.set_stages(made.stages):
        lateness.make_late(patch)
        return jax.tree.map(np.asarray, run_case(made.case, *made.case.arrays()))


@pytest.mark.rotating(3)
@pytest.mark.parametrize(("H", "stages"), [(64, 1), (64, 3), (320, 1)])
def test_any_number_of_stages_matches_the_oracle(H, stages, machine):
    made = Hunt(Case(B=1, T=200, S=300, N=2, K=1, H=H, **CAUSAL), stages)
    assert_results_match(made.case, machine.submit(emulated, made).result(timeout=600))
