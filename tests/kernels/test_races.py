"""Kernels with random delays of their warps: equal bits in every run.

A random sleep may follow each wait, arrival and barrier of these kernels (random_sleep() of
``arch/thread.cuh``). A buffer that is read or released too early is then read or written at a
different time in every run. With one stage every copy of a Hopper kernel waits for a reader; with
three the copies run far ahead. The mma.sync kernels run as PTX on any GPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
from typing import Any, ClassVar

import jax
import lateness
import numpy as np
import pytest
from attention_case import Case, passed, run_case
from kernel_cases import CAUSAL, WINDOW
from oracle_checks import assert_results_match

from jax_memeff._call.operands import Gradients, gradients_of
from jax_memeff._cuda import selection
from jax_memeff._op import primitives
from jax_memeff.codegen import emit
from jax_memeff.codegen.gpu import WGMMA_ARCH
from jax_memeff.codegen.kernels import sm80
from jax_memeff.codegen.kernels.sm90 import backward
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import QueryRows, Strategy, using
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import nvrtc

gpu = pytest.mark.gpu
SIZES: Any = {"B": 60, "T": 257, "S": 304, "N": 2, "K": 1}
EVERYTHING = {"bias": "1NTS", "dropout": 0.2}


@dataclasses.dataclass(frozen=True)
class Hunt:
    """A case in Hopper kernels, and its number of stages as in lateness.py."""

    case: Case
    stages: int | None

    arch: ClassVar[str] = WGMMA_ARCH
    repeats: ClassVar[int] = 1000

    def __str__(self) -> str:
        return f"{'consumer_groups' if self.stages is None else f'{self.stages}stages'}-{self.case}"

    def strategy(self) -> contextlib.AbstractContextManager[None]:
        return lateness.set_stages(self.stages)

    def kernels(self) -> list[KernelSpec]:
        with self.strategy():
            return lateness.kernels(self.case)

    def arrays(self) -> Any:
        return self.case.arrays()

    def results(self, arrays: Any, zero: jax.Array) -> dict[str, jax.Array]:
        """The results that must have the same bits in every run, by name."""
        case = self.case
        operands, (out, lse), gradients = run_late(case, arrays, zero)
        found = {"out": out, "lse": lse, "dk": gradients.key, "dv": gradients.value}
        if lateness.has_tangents(case):
            directions = {name: getattr(operands, name)[::-1] for name in lateness.TANGENTS}
            given = gradients_of(operands, directions)
            tangents = primitives.tangent(operands, case.options, out, lse, given)
            found["dout"], found["dlse"] = tangents
        if case.deterministic or max(backward.TILES) < case.H:
            found["dq"] = gradients.query
        return found if gradients.bias is None else {**found, "dbias": gradients.bias}


@dataclasses.dataclass(frozen=True)
class MmaHunt:
    """A case in mma.sync kernels, which are PTX. With ``rows`` it is a forward that splits its
    keys, with so many rows in a tile.
    """

    case: Case
    arch: str = "compute_80"
    rows: QueryRows | None = None

    # With the delays a run takes 3 ms at most by estimate: that of the bias gradient, whose CTAs
    # iterate over the batch. A hunt should take less than two seconds. The delays of each of
    # hundreds of CTAs differ, so these are 100,000 tries.
    repeats: ClassVar[int] = 500

    def __str__(self) -> str:
        return "-".join([self.arch, *([f"rows{self.rows}"] if self.rows else []), str(self.case)])

    def strategy(self) -> contextlib.AbstractContextManager[None]:
        return using(forward=Strategy(query_rows=self.rows))

    def kernels(self) -> list[KernelSpec]:
        operands, _, _ = passed(self.case, *self.case.arrays(None))
        found = []
        with self.strategy():
            for needs_grad in (None,) if self.rows else (None, self.case.needs_grad):
                chosen = selection.kernels(operands, self.case.options, needs_grad, (self.arch,))
                found += chosen.values()
        return found

    def arrays(self) -> Any:
        return passed(self.case, *self.case.arrays())

    def results(self, arrays: Any, zero: jax.Array) -> dict[str, jax.Array]:
        """The results that must have the same bits in every run, by name."""
        case = self.case
        if self.rows:
            out, lse = primitives.forward(late_query(arrays[0], zero), case.options)
            return {"out": out, "lse": lse}
        _, (out, lse), gradients = run_late(case, arrays, zero)
        found = {"out": out, "lse": lse, "dk": gradients.key, "dv": gradients.value}
        if case.deterministic or case.H > 256:
            found["dq"] = gradients.query
        # CTAs add to the gradient of a broadcast bias in the order in which they finish.
        if gradients.bias is not None and (case.deterministic or case.bias == "BNTS"):
            found["dbias"] = gradients.bias
        return found


def late_query(operands: Any, zero: jax.Array) -> Any:
    """The operands, such that XLA cannot see that they are the same in every run."""
    return operands._replace(query=operands.query + zero.astype(operands.query.dtype))


def run_late(case: Case, arrays: Any, zero: jax.Array) -> tuple[Any, Any, Gradients]:
    operands, dout, dlse = arrays
    operands = late_query(operands, zero)
    out, lse = primitives.forward(operands, case.options)
    gradients = primitives.backward(operands, case.options, out, lse, dout, dlse, case.needs_grad)
    assert isinstance(gradients, Gradients)
    return operands, (out, lse), gradients


def hunt(H: int, stages: int | None, **features) -> Hunt:
    return Hunt(Case(H=H, **SIZES, **features), stages)


def mma(H: int, arch: str = "compute_80", **features) -> MmaHunt:
    return MmaHunt(Case(**{**SIZES, "H": H, **features}), arch)


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


ORDERED: Any = {"deterministic": True, **CAUSAL}
ORDERED_SUMS: Any = {"deterministic": True, **EVERYTHING}
RNG = np.random.default_rng(5)
LENGTHS = ((257, 304), (0, 90), (70, 0), *map(tuple, RNG.integers(1, (258, 305), (57, 2)).tolist()))
PACKED: Any = {"lengths": LENGTHS, "packed": True, "deterministic": True}
MMA_HUNTS = [
    *(mma(H, **ORDERED) for H in (32, 64, 128, 192)),
    *(mma(H, **ORDERED_SUMS) for H in (64, 128, 256)),
    # Statistics wait in shared memory during products.
    mma(96, soft_cap=2.0, deterministic=True, **WINDOW),
    # Pairs of warps exchange maxima, P and halves of S and dP.
    mma(256, **ORDERED),
    # Threads copy rows in pieces of four bytes, and write the gradient of every score.
    mma(66, S=303, bias="BNTS", deterministic=True),
    # Without an order of the sums of dq.
    mma(64, dropout=0.2),
    # Block masks.
    mma(64, **SEGMENTS, **ORDERED),
    mma(128, boolean=("BNTS",), block=40, deterministic=True),
    mma(64, **PACKED),
    mma(256, **PACKED, **CAUSAL),
    mma(64, **FLOAT32, **ORDERED),
    mma(128, **FLOAT32, **ORDERED_SUMS),
    mma(320, **CAUSAL),
    mma(264, **ORDERED_SUMS),
    # One buffer of queries, which copies overwrite during the product dQ.
    *(mma(H, "compute_86", **ORDERED) for H in (64, 128, 256)),
    mma(96, "compute_86", **ORDERED_SUMS),
    mma(64, "compute_86", **FLOAT32, **ORDERED),
    mma(320, "compute_86", **CAUSAL),
    # Each kernel starts before the last CTAs of the one before have ended.
    mma(128, "compute_90", **ORDERED_SUMS),
]
STEPS: Any = {"B": 30, "S": 2000, "N": 8, "K": 2}
MMA_HUNTS += [
    MmaHunt(Case(T=4, H=128, **STEPS), rows="16"),
    MmaHunt(Case(T=30, H=64, **STEPS), rows="64"),
    MmaHunt(Case(T=4, H=64, **STEPS), "compute_86", rows="16"),
]
ALL_HUNTS: list[Hunt | MmaHunt] = [*HUNTS, *MMA_HUNTS]


@pytest.fixture(scope="module")
def compiled(selected, share_of_worker):
    """Compiles the kernels of the selected hunts before the first one begins."""
    hunts = (call["made"] for call in selected if "made" in call)
    jobs = {(spec, x.arch) for x in hunts if lateness.has_gpu(x.arch) for spec in x.kernels()}
    # NVRTC holds a lock, so threads would compile one after the other.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as processes:
        ordered = sorted(jobs, key=lambda job: (job[0].sort_key, job[0].name, job[1]))
        list(processes.map(compile_late, share_of_worker(ordered)))


def compile_late(job):
    """Compiles a kernel into the cache on disk."""
    with pytest.MonkeyPatch.context() as patch:
        lateness.make_late(patch)
        compiler.compile(*job)


@gpu
@pytest.mark.parametrize("made", ALL_HUNTS, ids=str)
def test_bits_are_equal_in_every_run(made, compiled, monkeypatch):
    with made.strategy():
        lateness.assert_equal_runs(
            monkeypatch, made.results, made.arrays(), made.repeats, made.arch
        )


@pytest.mark.parametrize("made", HUNTS, ids=str)
def test_every_hunt_has_kernels_of_hopper(made):
    assert {spec.family for spec in made.kernels()} == {"sm90"}


def test_the_other_hunts_have_every_mma_sync_kernel():
    found = {spec.kernel.stem for made in MMA_HUNTS for spec in made.kernels()}
    assert found == {kernel.stem for kernel in sm80.KERNELS}


@pytest.mark.rotating(4 * len(HUNTS))
@pytest.mark.parametrize("made", HUNTS, ids=str)
def test_kernels_with_delays_compile(made, monkeypatch):
    """A number of stages that kernels do not allow would end a hunt on a GPU. Compiling takes 20 s,
    so there is a hunt every fourth day, and all of them before a release.
    """
    specs = made.kernels()
    lateness.make_late(monkeypatch)
    for spec in specs:
        compiler.compile_source(
            emit.source(spec), WGMMA_ARCH, [entry.name for entry in spec.entry_points]
        )


# A hunt a day.
@pytest.mark.rotating(len(MMA_HUNTS))
@pytest.mark.parametrize("made", MMA_HUNTS, ids=str)
def test_mma_sync_kernels_have_a_delay_at_every_barrier(made, monkeypatch):
    specs = made.kernels()
    usual = {spec: emit.source(spec) for spec in specs}
    lateness.make_late(monkeypatch)
    for spec in specs:
        source = emit.source(spec)
        assert source != usual[spec]
        ptx, _ = nvrtc.compile(source, made.arch, spec.name)
        delays, barriers, waits = map(ptx.count, (b"nanosleep", b"bar.sync", b"cp.async.wait"))
        assert delays >= barriers + waits > 0


# Kernels, and barriers that must not be missing, by the comment behind them.
RACES = (
    ("sm80/forward", "keys have arrived"),
    ("sm80/forward", "values have arrived"),
    ("sm80/backward", "operands have arrived"),
    ("sm80/backward", "P and dS are complete"),
    ("sm80/backward", "every thread has read dO"),
    ("sm80/split", "the query tile is in shared memory"),
)


def hunt_with_race(stem: str) -> MmaHunt:
    if stem == "sm80/split":
        return MmaHunt(Case(B=2, T=4, S=2000, N=8, K=2), rows="16")
    return MmaHunt(Case(B=2, T=257, S=304, N=2, K=1, **CAUSAL))


# On a GPU the copies of the queries begin before the first delay, and have always arrived.
@gpu
@pytest.mark.parametrize(("stem", "barrier"), RACES[:-1])
def test_a_hunt_finds_a_missing_barrier(stem, barrier, monkeypatch):
    made = hunt_with_race(stem)
    lateness.remove_barrier(monkeypatch, stem, barrier)
    with made.strategy():
        counts = lateness.count_other_runs(
            monkeypatch, made.results, made.arrays(), made.repeats, made.arch
        )
    assert any(counts.values())


def emulated_race(stem, barrier):
    """The results with the barrier and without it. Runs in the process of ``machine``."""
    import emulator

    made = hunt_with_race(stem)

    def results(seed):
        emulator.configure("sm_80", seed=seed)
        return jax.tree.map(np.asarray, jax.jit(made.results)(made.arrays(), np.int32(0)))

    with pytest.MonkeyPatch.context() as patch, made.strategy():
        right = results(seed=0)
        lateness.remove_barrier(patch, stem, barrier)
        return right, [results(seed) for seed in range(4)]


@pytest.mark.rotating(3)
@pytest.mark.parametrize(("stem", "barrier"), RACES)
def test_the_emulator_finds_a_missing_barrier(stem, barrier, machine):
    right, found = machine.submit(emulated_race, stem, barrier).result(timeout=600)
    assert any(each[name].tobytes() != right[name].tobytes() for each in found for name in right)


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
