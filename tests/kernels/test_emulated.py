"""The kernels without a GPU: the whole library on the machine of ``emulator/``.

The machine has its own process, because it replaces how JAX lowers for the CPU.
``JAX_MEMEFF_EMULATED_CASES=100`` adds 100 random cases of the GPU tests.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import emulated_runs
import emulator
import jax
import numpy as np
import pytest
import test_kernels
import wide_range
from attention_case import Case, passed, run_case
from emulated_runs import DETERMINISTIC, SM80, SM90, Run
from kernel_cases import BOTTOM_RIGHT
from oracle_checks import assert_results_match

from jax_memeff._call.operands import Operands

LARGEST_TILE = 128


def drawn(count: int) -> list[Run]:
    """Random cases of the GPU tests that take seconds on the emulated machine."""
    small = [
        case
        for case in test_kernels.CASES
        if case.B * case.T * case.S * case.N * max(case.H, case.value_dim) < 3e7
    ]
    generator = random.Random(0)
    return [
        Run(
            case,
            arch=generator.choice(["sm_80", "sm_86", "sm_90a"]),
            seed=generator.randrange(1000),
        )
        for case in generator.sample(small, min(count, len(small)))
    ]


CASES_DRAWN = int(os.environ.get("JAX_MEMEFF_EMULATED_CASES", "0"))
RUNS = [*emulated_runs.RUNS, *drawn(CASES_DRAWN)]


def without_unattended(case: Case, operands: Operands, *cotangents: Any) -> tuple:
    """The arrays with NaN in blocks of keys and values to which no row attends."""
    rows = operands.mask.as_array(case.B, case.N, case.T, case.S).any((1, 2))
    tiles = case.S // LARGEST_TILE
    attended = np.asarray(rows[:, : tiles * LARGEST_TILE]).reshape(case.B, tiles, -1).any(2)
    assert attended.any() and not attended.all()
    unattended = np.repeat(~attended, LARGEST_TILE, 1)
    key, value = np.array(operands.key), np.array(operands.value)
    for array in (key, value):
        array[:, : tiles * LARGEST_TILE][unattended] = np.nan
    return operands._replace(key=key, value=value), *cotangents


def results(run):
    """The results of ``run_case`` as NumPy arrays. Runs in the process of ``machine``."""
    from jax_memeff._op import primitives

    run.start()
    arrays = run.case.arrays()
    if run.unattended:
        arrays = without_unattended(run.case, *arrays)
    with run.strategy():
        if run.gradients:
            found = run_case(run.case, *arrays)
        else:
            operands, _, _ = passed(run.case, *arrays)
            forward = jax.jit(lambda operands: primitives.forward(operands, run.case.options))
            found = forward(operands), None
        return jax.tree.map(np.asarray, found)


@pytest.mark.rotating(5)
@pytest.mark.quick(str(SM90[0]))
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_matches_the_oracle(run, machine):
    found = machine.submit(results, run).result(timeout=600)
    assert_results_match(run.case, found)


@pytest.mark.rotating(5)
@pytest.mark.parametrize("run", DETERMINISTIC, ids=str)
def test_deterministic_gradients_have_the_same_bits_on_every_schedule(run, machine):
    first, other = (
        machine.submit(
            results, dataclasses.replace(run, seed=seed, multiprocessors=blocks)
        ).result()
        for seed, blocks in ((0, 1), (1, 9))
    )
    assert_results_match(run.case, first)
    jax.tree.map(np.testing.assert_array_equal, other, first)


# The first blocks have rows beyond the sequence, which hold NaN: one consumer zeros what both read.
# With each of these seeds it was late once.
SHORT = Case(B=1, T=70, S=90, N=1, K=1, H=512, lengths=((20, 90),))
SHORT_OF_GROUP = Case(
    B=3, T=70, S=90, N=2, K=1, H=576, Hv=512, lengths=((20, 90), (70, 30), (3, 1))
)


@pytest.mark.parametrize(
    "run",
    [
        *(Run(SHORT, "sm_90a", seed) for seed in (18, 49)),
        *(
            Run(SHORT_OF_GROUP, "sm_90a", seed, multiprocessors=1 + seed % 3)
            for seed in (9, 12, 35)
        ),
    ],
    ids=str,
)
def test_no_consumer_reads_rows_before_they_are_zero(run, machine):
    assert_results_match(run.case, machine.submit(results, run).result(timeout=600))


WIDE_RANGES = [Run(case, arch="sm_90a", gradients=False) for case in wide_range.cases()]


@pytest.mark.rotating(5)
@pytest.mark.parametrize("run", WIDE_RANGES, ids=str)
def test_float32_rows_of_any_size(run, machine):
    (out, _), _ = machine.submit(results, run).result(timeout=600)
    wide_range.assert_matches(run.case, out)


@dataclasses.dataclass(frozen=True)
class HugeSink(Case):
    """The first head has a sink that takes the whole row. Its gradient is that of the logsumexp."""

    sinks: bool = True
    sink: float = 1e9

    def draw_sinks(self, rng: np.random.Generator) -> Any:
        sinks = super().draw_sinks(rng)
        sinks[0, 0] = self.sink
        return sinks


@pytest.mark.rotating(3)
def test_a_sink_of_infinity_is_the_limit_of_huge_ones(machine):
    case = HugeSink(B=2, T=70, S=90, N=4, K=2, lengths=((70, 90), (33, 0)))
    infinite = dataclasses.replace(case, sink=np.inf)
    found, in_the_limit = (
        machine.submit(results, Run(each)).result(timeout=600) for each in (case, infinite)
    )
    assert_results_match(case, found)
    (out, _), gradients = found
    (out_in_the_limit, _), others = in_the_limit
    np.testing.assert_array_equal(out_in_the_limit, out)
    jax.tree.map(np.testing.assert_array_equal, others, gradients)


# The first ten rows of the second sequence have no keys, and share a tile with rows that have some.
WITHOUT_KEYS = Case(B=2, T=70, S=90, N=4, K=2, lengths=((70, 90), (60, 50)), **BOTTOM_RIGHT)


def gradients_of_nan(run):
    """The gradients with NaN in the cotangents of a row without keys. Runs in the process of
    ``machine`` too.
    """
    operands, dout, dlse = run.case.arrays()
    dout[1, 3, 0, 5] = dlse[1, 3, 0] = np.nan
    _, (*gradients, _, _) = run_case(run.case, operands, dout, dlse)
    return [np.asarray(x, np.float32) for x in gradients]


def gradients_of_nan_in_kernels(run):
    run.start()
    with run.strategy():
        return gradients_of_nan(run)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nan_in_the_cotangent_of_a_row_without_keys(arch, machine):
    """The row has probabilities of 0, and 0 * NaN is NaN: the same in kernels and in plain JAX."""
    run = Run(WITHOUT_KEYS, arch)
    found = machine.submit(gradients_of_nan_in_kernels, run).result(timeout=600)
    for got, want in zip(found, gradients_of_nan(run), strict=True):
        np.testing.assert_allclose(got, want, atol=0.05, equal_nan=True)
    dquery, dkey, dvalue = (np.argwhere(np.isnan(x)) for x in found)
    np.testing.assert_array_equal(np.unique(dquery[:, :3], axis=0), [[1, 3, 0]])
    for changed in (dkey, dvalue):  # of its head in its sequence
        np.testing.assert_array_equal(np.unique(changed[:, [0, 2]], axis=0), [[1, 0]])


def error_on_another_device(run, arch):
    """The error of a program that was compiled for another machine. Runs in the process of
    ``machine``.
    """
    from jax_memeff._op import primitives

    run.start()
    operands, _, _ = passed(run.case, *run.case.arrays())
    forward = jax.jit(lambda operands: primitives.forward(operands, run.case.options))
    program = forward.lower(operands).compile()
    emulator.configure(arch)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(program(operands))
    return str(raised.value)


def test_a_program_for_another_architecture_is_an_error(machine):
    error = machine.submit(error_on_another_device, SM80[0], "sm_90a").result()
    assert "was compiled for sm_80 and runs on a device of compute capability 9.0" in error
    assert "set JAX_MEMEFF_ARCHS" in error
