"""Machine code: register operands that a kernel loads once stay intact until the last iteration.

Each run compiles a sample, which changes every day (``daily.py``). NVRTC spends several seconds of
each run on headers, so it compiles the whole sample together.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import daily
import pytest
import sass
import together

from jax_memeff.codegen import select
from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.kernels.bases.families import WARPGROUP_ROWS, WARPGROUP_THREADS
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import SPEC_GRADIENTS, KernelSpec

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

LISTING = """
    Function : kernel
        /*0000*/       LDSM.16.M88.4 R8, [R2] ;
        /*0010*/       HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0020*/       F2FP.BF16.F32.PACK_AB R{packed}, R25, R24 ;
        /*0030*/  @!P0 BRA {target} ;
        /*0040*/       HGMMA.64x64x16.F32.BF16 R56, R12, gdesc[UR8], R56, gsb0 ;
        /*0050*/       EXIT ;
"""
LOADED, PACKED = "LDSM.16.M88.4", "F2FP.BF16.F32.PACK_AB"
GRADIENTS = [
    needs_grad
    for count in (1, 2, 3)
    for needs_grad in itertools.combinations(SPEC_GRADIENTS, count)
]
GRADIENTS_DRAWN = 1


@pytest.mark.parametrize(
    ("packed", "target", "wrong"),
    [
        (12, "0x10", []),
        (9, "0x10", [f"0x10: R9 is of {PACKED}, {LOADED}"]),
        (9, "0x0", []),  # loaded again
    ],
)
def test_an_operand_that_a_loop_overwrites_is_found(packed, target, wrong):
    (code,) = sass.parse(LISTING.format(packed=packed, target=target)).values()
    assert sass.overwritten_operands(code) == wrong


class Kernel(NamedTuple):
    """The compiled entry points of one spec."""

    spills: int
    """The largest spill of its entry points, in bytes."""
    code: dict[str, list[sass.Instruction]]
    """The instructions of each entry point."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The compiled kernels of today by their specs."""
    directory = tmp_path_factory.mktemp("machine_code")
    found = {}
    for batch, compiled in together.compiled(sample(), "sm_90a"):
        assert compiled.warnings == (), daily.MESSAGE
        spills = {resource.name: resource.spill_store for resource in compiled.resources}
        code = sass.functions(compiled.image, directory)
        for spec in batch:
            names = [entry.name for entry in spec.entry_points]
            own = {name: code[name] for name in names}
            found[spec] = Kernel(max(spills[name] for name in names), own)
    return found


def sample() -> list[KernelSpec]:
    """The kernels of all tests of today."""
    specs = [
        *itertools.chain.from_iterable(backwards(*case) for case in BACKWARDS),
        *latent_kernels(),
        *itertools.chain.from_iterable(map(large_forwards, LARGE_FORWARDS)),
        *map(large_backward, LARGE_BACKWARDS),
        *tangents(),
    ]
    # In the same order in each process, which finds what another one has compiled.
    return list(dict.fromkeys(specs))


BACKWARDS = tuple(itertools.product(("bf16", "f32"), (64, 128)))


def backwards(dtype, head_dim):
    problems = [
        Problem("backward", dtype, head_dim, head_dim, "sm_90a", needs_grad=needs_grad)
        for needs_grad in GRADIENTS
    ]
    every = list(map(select.select, problems))
    assert len(set(every)) == len(GRADIENTS)
    return daily.drawn(f"gradients of {head_dim}", every, GRADIENTS_DRAWN)


@pytest.mark.parametrize(("dtype", "head_dim"), BACKWARDS)
def test_backwards_of_some_gradients_keep_their_register_operands(dtype, head_dim, kernels):
    for spec in backwards(dtype, head_dim):
        kernel = kernels[spec]
        assert kernel.spills <= 8
        main_loops = [
            name for name in kernel.code if name.removeprefix(spec.name) in ("", "_dq", "_dkdv")
        ]
        assert main_loops
        for name, code in kernel.code.items():
            products = [line for line in code if line.operation.startswith("HGMMA")]
            assert bool(products) == (name in main_loops)
            assert sass.overwritten_operands(code) == [], (daily.MESSAGE, name)


LATENT = ({}, {"mask": "window", "soft_cap": True})


def latent_kernels():
    return [
        select.select(
            Problem(
                "forward",
                "bf16",
                576,
                512,
                "sm_90a",
                {"varlen": True, "pages": AskedPages(16, is_latent=True), **asked},
            )
        )
        for asked in daily.drawn("latent", LATENT)
    ]


def test_latent_attention_computes_matrix_descriptors_in_uniform_registers(kernels):
    """Otherwise each product needs two or more moves, and descriptors take vector registers."""
    for spec in latent_kernels():
        assert spec.kernel.reads_latent
        assert kernels[spec].spills == 0
        code = kernels[spec].code[spec.name]
        assert sass.overwritten_operands(code) == []
        products = [line for line in code if line.operation.startswith("HGMMA")]
        moves = [line for line in code if line.operation.startswith("R2UR")]
        assert products and len(moves) < 2 * len(products), (daily.MESSAGE, spec.name)


LARGE_DIMS = ((320, 320), (512, 512), (576, 512))
LARGE_FORWARDS = daily.drawn("large dims", LARGE_DIMS)
LARGE_BACKWARDS = daily.drawn("large dims of backwards", LARGE_DIMS)


def large_forwards(dims):
    head_dim, value_dim = dims
    return [
        select.select(Problem("forward", "bf16", head_dim, value_dim, "sm_90a", asked))
        for asked in daily.drawn(f"masks of {dims}", ({}, {"mask": "causal"}))
    ]


@pytest.mark.parametrize("dims", LARGE_FORWARDS)
def test_the_softmax_of_large_head_dims_runs_under_a_product(dims, kernels):
    for spec in large_forwards(dims):
        assert spec.kernel.stem == "fmha_fwd_large_dim_sm90"
        assert share_of_exponentials_under_a_product(spec, 0, kernels) > 2 / 3


def large_backward(dims):
    head_dim, value_dim = dims
    return select.select(
        Problem("backward", "bf16", head_dim, value_dim, "sm_90a", needs_grad=SPEC_GRADIENTS)
    )


@pytest.mark.parametrize("dims", LARGE_BACKWARDS)
def test_the_exponentials_of_large_head_dims_run_under_the_sums_of_a_backward(dims, kernels):
    """They follow the start of the sum of the block before, which nothing has waited for."""
    spec = large_backward(dims)
    assert spec.kernel.stem.endswith("fmha_bwd_large_dim_sm90")
    assert kernels[spec].spills == 0
    for suffix in ("dq", "dkdv"):
        listing = kernels[spec].code[f"{spec.name}_{suffix}"]
        assert sass.overwritten_operands(listing) == []
        marks = ("HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2")
        found = [mark for line in listing for mark in marks if line.operation.startswith(mark)]
        under = 0
        is_running = False
        for mark in found:
            is_running = mark == "HGMMA" if mark != "MUFU.EX2" else is_running
            under += is_running and mark == "MUFU.EX2"
        assert under * WARPGROUP_THREADS / WARPGROUP_ROWS**2 > 2 / 3, suffix


def share_of_exponentials_under_a_product(spec, spilled, kernels):
    """The share of a consumer's exponentials of a KV block that lie between the wait for its scores
    and the wait for the product that they overlap.
    """
    print(daily.MESSAGE, spec.name)  # pytest shows it if the test fails
    assert kernels[spec].spills <= spilled
    code = kernels[spec].code[spec.name]
    assert sass.overwritten_operands(code) == []
    # A wait that leaves one product in flight has the scores; one that leaves none has added the
    # values.
    waits = [place for place, line in enumerate(code) if line.operation == "WARPGROUP.DEPBAR.LE"]
    (begin,) = (place for place in waits if code[place].operands[1] == "0x1")
    end = min(place for place in waits if place > begin)
    assert code[end].operands[1] == "0x0"
    exponentials = [line for line in code[begin:end] if line.operation == "MUFU.EX2"]
    return len(exponentials) * WARPGROUP_THREADS / (WARPGROUP_ROWS * spec.tile.key)


def tangents():
    return [
        select.select(Problem("tangent", "bf16", head_dim, head_dim, "sm_90a"))
        for head_dim in daily.drawn("tangents", (64, 128))
    ]


def test_the_exponentials_of_tangents_run_under_a_product(kernels):
    """ptxas would sink them below the wait for the tangents of the scores."""
    for spec in tangents():
        assert share_of_exponentials_under_a_product(spec, 0, kernels) > 3 / 4
