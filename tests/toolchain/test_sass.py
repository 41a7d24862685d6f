"""Machine code: register operands that a kernel loads once stay intact until the last iteration.

Each run compiles a sample, which changes every day (``daily.py``). NVRTC spends several seconds of
each run on headers, so it compiles the whole sample together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import daily
import pytest
import sass
import together

from jax_memeff.codegen import select
from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.kernels.sm90 import backward
from jax_memeff.codegen.kernels.sm90.base import WARPGROUP_ROWS, WARPGROUP_THREADS
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
MOST_SPILL = 8
RECORDED_SPILLS = {
    "fmha_bwd_bf16_d64_128x128_sm90": backward.TILES[64][0].spill_bytes,
    "fmha_bwd_bf16_d128_80x128_dkdv_sm90": 12,  # by NVRTC 13.5, for keys and values only
}
"""Bytes by the names of backwards that spill more."""


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
def kernels(tmp_path_factory, selected):
    """The compiled kernels of today by their specs."""
    directory = tmp_path_factory.mktemp("machine_code")
    names = [call["kind"] for call in selected if "kind" in call]
    # The same order in each process, so that each finds what another one has compiled.
    specs = dict.fromkeys(spec for name in names for spec in KINDS[name].specs)
    found = {}
    for batch, compiled in together.compiled(specs, "sm_90a"):
        assert compiled.warnings == (), daily.MESSAGE
        spills = {resource.name: resource.spill_store for resource in compiled.resources}
        code = sass.functions(compiled.image, directory)
        for spec in batch:
            names = [entry.name for entry in spec.entry_points]
            own = {name: code[name] for name in names}
            found[spec] = Kernel(max(spills[name] for name in names), own)
    return found


def backwards(dtype, head_dim):
    problems = [
        Problem("backward", dtype, head_dim, head_dim, "sm_90a", needs_grad=needs_grad)
        for needs_grad in GRADIENTS
    ]
    every = list(map(select.select, problems))
    assert len(set(every)) == len(GRADIENTS)
    return daily.drawn(f"gradients of {head_dim}", every, GRADIENTS_DRAWN)


def keeps_register_operands(spec, kernel):
    assert kernel.spills <= RECORDED_SPILLS.get(spec.name, MOST_SPILL), (daily.MESSAGE, spec.name)
    main_loops = [
        name for name in kernel.code if name.removeprefix(spec.name) in ("", "_dq", "_dkdv")
    ]
    assert main_loops
    for name, code in kernel.code.items():
        products = [line for line in code if line.operation.startswith("HGMMA")]
        assert bool(products) == (name in main_loops)
        assert sass.overwritten_operands(code) == [], (daily.MESSAGE, name)


LATENT = tuple(
    {"pages": AskedPages(16, is_latent=True, is_invariant=is_invariant), **features}
    for is_invariant in (False, True)
    for features in ({}, {"mask": "window", "soft_cap": True})
)


def latent_forwards():
    asked = [{"packed": True, **features} for features in daily.drawn("latent", LATENT)]
    problems = [Problem("forward", "bf16", 576, 512, "sm_90a", features) for features in asked]
    return list(map(select.select, problems))


def latent_attention_computes_matrix_descriptors_in_uniform_registers(spec, kernel):
    """Otherwise each product needs two or more moves, and descriptors take vector registers."""
    assert spec.kernel.reads_latent
    assert kernel.spills == 0
    code = kernel.code[spec.name]
    assert sass.overwritten_operands(code) == []
    products = [line for line in code if line.operation.startswith("HGMMA")]
    moves = [line for line in code if line.operation.startswith("R2UR")]
    assert products and len(moves) < 2 * len(products)


LARGE_DIMS = ((320, 320), (512, 512), (576, 512), (1024, 1024))


def large_forwards():
    return [
        select.select(Problem("forward", "bf16", head_dim, value_dim, "sm_90a", asked))
        for head_dim, value_dim in daily.drawn("large dims", LARGE_DIMS)
        for asked in daily.drawn(f"masks of {head_dim, value_dim}", ({}, {"mask": "causal"}))
    ]


def softmax_of_large_head_dims_runs_under_a_product(spec, kernel):
    assert spec.kernel.stem == "sm90/large_dim_forward"
    assert share_of_exponentials_under_a_product(spec, 0, kernel) > 2 / 3


def large_backwards():
    return [
        select.select(
            Problem("backward", "bf16", head_dim, value_dim, "sm_90a", needs_grad=SPEC_GRADIENTS)
        )
        for head_dim, value_dim in daily.drawn("large dims of backwards", LARGE_DIMS)
    ]


def exponentials_of_large_head_dims_run_under_the_sums_of_a_backward(spec, kernel):
    """They follow the start of the sum of the block before, which nothing has waited for."""
    assert spec.kernel.stem == "sm90/large_dim_backward"
    assert kernel.spills == 0
    for suffix in ("dq", "dkdv"):
        listing = kernel.code[f"{spec.name}_{suffix}"]
        assert sass.overwritten_operands(listing) == []
        marks = ("HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2")
        found = [mark for line in listing for mark in marks if line.operation.startswith(mark)]
        under = 0
        is_running = False
        for mark in found:
            is_running = mark == "HGMMA" if mark != "MUFU.EX2" else is_running
            under += is_running and mark == "MUFU.EX2"
        assert under * WARPGROUP_THREADS / WARPGROUP_ROWS**2 > 2 / 3, suffix


def share_of_exponentials_under_a_product(spec, spilled, kernel):
    """The share of a consumer's exponentials of a KV block that lie between the wait for its scores
    and the wait for the product that they overlap.
    """
    print(daily.MESSAGE, spec.name)  # pytest shows it if the test fails
    assert kernel.spills <= spilled
    code = kernel.code[spec.name]
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


def exponentials_of_tangents_run_under_a_product(spec, kernel):
    """ptxas would sink them below the wait for the tangents of the scores."""
    assert share_of_exponentials_under_a_product(spec, 0, kernel) > 3 / 4


class Kind(NamedTuple):
    """Kernels of today, and a check that holds for each."""

    specs: list[KernelSpec]
    check: Callable[[KernelSpec, Kernel], None]


# Neighbours run on different days; the large backward and those of float32 take longest.
KINDS = {
    "backward bf16 64": Kind(backwards("bf16", 64), keeps_register_operands),
    "backward f32 64": Kind(backwards("f32", 64), keeps_register_operands),
    "backward f32 128": Kind(backwards("f32", 128), keeps_register_operands),
    "large forward": Kind(large_forwards(), softmax_of_large_head_dims_runs_under_a_product),
    "large backward": Kind(
        large_backwards(), exponentials_of_large_head_dims_run_under_the_sums_of_a_backward
    ),
    "latent": Kind(
        latent_forwards(), latent_attention_computes_matrix_descriptors_in_uniform_registers
    ),
    "backward bf16 128": Kind(backwards("bf16", 128), keeps_register_operands),
    "tangent": Kind(tangents(), exponentials_of_tangents_run_under_a_product),
}


@pytest.mark.rotating(4)
@pytest.mark.parametrize("kind", KINDS)
def test_machine_code(kind, kernels):
    specs, check = KINDS[kind]
    for spec in specs:
        check(spec, kernels[spec])
