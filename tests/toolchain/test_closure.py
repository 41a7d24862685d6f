"""A sample of all kernels, compiled for each architecture: no spills, no serialized wgmma, and no
overwritten register operands.

The sample changes every day; ``daily.py`` says how to repeat it, and how to compile every kernel.
"""

from __future__ import annotations

import functools
import itertools

import daily
import pytest
import sass
import together

from jax_memeff.codegen import select
from jax_memeff.codegen.features import (
    BIAS,
    BOOLEAN,
    DELTA_FROM_SCORES,
    DROPOUT,
    FEATURES,
    FUNCTIONS,
    KEYS,
    LENGTHS,
    PACKED,
    SEGMENTS,
)
from jax_memeff.codegen.kernels import KERNELS
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import SPEC_DTYPES

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
COVERED = "sm_90a"
COVERED_IN = 8
"""The number of days after which the samples of that architecture have had every module and every
feature.
"""
DIMS_DRAWN = 4
LARGEST_SPILL = 64
"""A tile that spills more than a few registers per thread is wrong, however fast it was
measured.
"""


ODD_DIMS = ((7, 7), (66, 66), (100, 100), (255, 33))
"""Head dims whose rows begin at multiples of 2, 4 and 8 bytes."""


@functools.cache
def sample(arch):
    """A sample that depends on the architecture and the day.

    Hopper compiles every kernel module, so today's sample is a part of one that has each module
    and each feature. The other architectures share the modules of sm_80. Each has one kernel, and
    both directions occur.
    """
    if arch == COVERED:
        return daily.part(covering_sample(), COVERED_IN)
    generator = daily.generator(arch)
    dims = [*select.CLOSURE_DIMS, *ODD_DIMS]
    if not daily.EVERYTHING:
        dims = generator.sample(dims, DIMS_DRAWN)
    specs = list(select.closure(arch, dims=dims))
    if daily.EVERYTHING:
        return specs
    generator.shuffle(specs)
    return [next(spec for spec in specs if spec.direction == direction_of(arch))]


@functools.cache
def covering_sample():
    """Hopper kernels that have every module and feature; the same for ``COVERED_IN`` days."""
    specs = list(select.closure(COVERED, dims=[*select.CLOSURE_DIMS, *ODD_DIMS]))
    if daily.EVERYTHING:
        return specs
    daily.generator(COVERED, days=COVERED_IN).shuffle(specs)
    return list(chosen(specs, covered))


def direction_of(arch):
    """The direction of an architecture's kernel: that of its neighbours in ARCHS is the other."""
    (first,) = daily.drawn("direction", (0, 1))
    return ("forward", "backward")[(first + ARCHS.index(arch)) % 2]


def chosen(specs, covers):
    """A subset of the specs with the same coverage. Greedy: the one that adds most comes next."""
    missing = set().union(*map(covers, specs))
    while missing:
        best = max(specs, key=lambda spec: len(covers(spec) & missing))
        missing -= covers(best)
        yield best


def covered(spec):
    """The module of a kernel, its dtype, and the features that it has."""
    on = {name for name, value in spec.features if value not in (None, False, "none")}
    return {spec.kernel.stem, f"{spec.direction} of {spec.dtype}", *on}


def allowed_spill(spec):
    """The spill that the tile's row records, or a few registers for features besides window and
    soft cap and for rows that are copied by 4 or 8 bytes.
    """
    features = any(spec[feature] for feature in (BIAS, DROPOUT, SEGMENTS, BOOLEAN, PACKED))
    features = features or spec.alignment < 16
    return LARGEST_SPILL if features else spec.tile.spill_bytes


def other_launches(spec, resources):
    """Hazard: kernels with a producer whose registers at launch differ from those that
    consumer_registers() of warpgroup_gemm.cuh distributes. setmaxnreg would hang the GPU.
    """
    registers = 2**16 // spec.threads // 8 * 8
    return [
        f"{resource.name} begins with {resource.registers} registers a thread, not {registers}"
        for entry, resource in zip(spec.entry_points, resources, strict=True)
        if entry.threads == spec.threads and resource.registers != registers
    ]


@pytest.mark.parametrize("arch", [COVERED])
def test_kernels_keep_their_accumulators_in_registers(arch, tmp_path):
    assert_registers_suffice(arch, tmp_path)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != COVERED])
def test_kernels_of_other_architectures(arch, tmp_path):
    assert_registers_suffice(arch, tmp_path)


def assert_registers_suffice(arch, directory):
    wrong = []
    for specs, compiled in together.compiled(sample(arch), arch):
        resources = {resource.name: resource for resource in compiled.resources}
        assert tuple(resources) == compiled.names
        wrong += compiled.warnings
        for spec in specs:
            own, allowed = (
                [resources[entry.name] for entry in spec.entry_points],
                allowed_spill(spec),
            )
            wrong += [
                f"{resource.name} spills {resource.spill_store} bytes, {allowed} allowed"
                for resource in own
                if resource.spill_store > allowed
            ]
            if spec.family == "sm90":
                wrong += other_launches(spec, own)
        if any(spec.family == "sm90" for spec in specs):
            for name, code in sass.functions(compiled.image, directory).items():
                wrong += [f"{name}, {operand}" for operand in sass.overwritten_operands(code)]
    assert not wrong, "\n".join([f"on {arch}, {daily.MESSAGE}:", *wrong])


def test_the_samples_of_a_cycle_have_every_module_and_every_feature():
    specs = covering_sample()
    assert {spec.kernel.stem for spec in specs} == {kernel.stem for kernel in KERNELS}
    # Every kernel has lengths, none reads lists of keys, and kernels of functions, which alone have
    # the delta kernel, cannot be listed; tests/functions has those.
    others = {LENGTHS.name, KEYS.name, FUNCTIONS.name, DELTA_FROM_SCORES.name}
    compiled = {feature.name for feature in FEATURES} - others
    assert compiled <= set().union(*map(covered, specs))


@pytest.mark.quick
@pytest.mark.parametrize("arch", ARCHS)
def test_allowed_spills_are_small(arch):
    for kernel, dtype in itertools.product(KERNELS, SPEC_DTYPES):
        for row in kernel.rows(Problem(kernel.direction, dtype, 64, 64, arch)):
            assert 0 <= row.tile.spill_bytes <= LARGEST_SPILL
