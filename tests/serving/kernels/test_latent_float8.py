"""Latent attention with pools of float8: on the emulated machine, and on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import Case, assert_matches
from paging import paged_attention

from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select
from jax_memeff.errors import UnsupportedError

LATENT = Case(
    (100, 17, 1, 0, 64),
    (1, 1, 1, 1, 1),
    page_size=64,
    heads=(16, 1),
    dims=(576, 512),
    is_latent=True,
    scales=("heads", "heads"),
)
LONG = dataclasses.replace(LATENT, lengths=(700, 65, 0, 300), counts=(1, 1, 1, 1))
SEVERAL = dataclasses.replace(LATENT, lengths=(300, 70, 5, 0, 129), counts=(5, 3, 7, 2, 1))
NONE, PAGES = ("none", "none"), ("pages", "pages")
EMULATED = [
    (5, LATENT),
    (7, dataclasses.replace(LONG, heads=(128, 1), page_size=32, scales=PAGES)),
    (11, dataclasses.replace(LONG, heads=(64, 1), page_size=16, is_missing=True, scales=PAGES)),
    (1, dataclasses.replace(LONG, features=("is_causal", "sinks"), page_size=80, scales=NONE)),
    (4, dataclasses.replace(SEVERAL, features=("sinks", "logits_soft_cap"), dims=(544, 480))),
    (12, dataclasses.replace(SEVERAL, heads=(96, 2), page_size=48, scales=PAGES)),
    (3, dataclasses.replace(SEVERAL, features=("is_causal", "score_mod", "mask"), scales=NONE)),
    (6, dataclasses.replace(LONG, features=("prefix",), is_missing=True, scales=PAGES)),
    (9, dataclasses.replace(LATENT, lengths=(150, 260), counts=(20, 70), page_size=128)),
    (5, dataclasses.replace(SEVERAL, features=("is_causal", "batch_invariant"), scales=PAGES)),
]


def lower(case: Case, multiprocessors: int) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    # Each case has another order of warps, copies and products.
    emulator.configure("sm_90a", multiprocessors=multiprocessors, seed=multiprocessors)
    return case.lowered(case.batch())


def emulated(case: Case, multiprocessors: int) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case, multiprocessors)
    emulator.configure("sm_90a", multiprocessors=multiprocessors, seed=multiprocessors)
    return case.found(case.batch(), lowered)


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all cases before the first one runs."""
    names = ("case", "multiprocessors")
    calls = [tuple(map(call.get, names)) for call in selected if {*names} <= {*call}]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("multiprocessors", "case"), EMULATED, ids=str)
def test_emulated_kernels(multiprocessors, case, machine, assert_close):
    found = machine.submit(emulated, case, multiprocessors).result(timeout=600)
    assert_matches(found, case, assert_close)


_MANY = tuple(map(int, np.random.default_rng(3).integers(0, 3000, 40)))
_LARGE = [
    dataclasses.replace(LATENT, lengths=(100, 17, 1, 0, 64, 65), counts=(1,) * 6, heads=(128, 1)),
    dataclasses.replace(LATENT, lengths=(4096, 1000, 3, 2047), counts=(1,) * 4, page_size=16),
    dataclasses.replace(LATENT, lengths=_MANY, counts=(1,) * 40, heads=(128, 1), scales=PAGES),
    dataclasses.replace(LATENT, lengths=_MANY, counts=(1,) * 40, page_size=16, scales=PAGES),
    dataclasses.replace(LATENT, lengths=(4096,) * 32, counts=(1,) * 32, heads=(128, 1)),
    dataclasses.replace(LATENT, lengths=(20000, *[100] * 30), counts=(1,) * 31, scales=NONE),
    dataclasses.replace(LATENT, lengths=(900, 300), counts=(130, 300), page_size=48, scales=PAGES),
    dataclasses.replace(SEVERAL, lengths=(700, 5, 1500, 9, 77), heads=(128, 1), scales=NONE),
]


def _invariant(case: Case) -> Case:
    return dataclasses.replace(case, features=(*case.features, "batch_invariant"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*(c for _, c in EMULATED), *_LARGE, *map(_invariant, _LARGE)], ids=str
)
def test_kernels(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("scales", [NONE, PAGES], ids="-".join)
def test_pools_without_a_spare_page(scales, assert_close):
    case = dataclasses.replace(SEVERAL, scales=scales, page_size=16, is_exact=True)
    assert_matches(case.found(case.batch()), case, assert_close)


NUMBERS = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


def each_number(arch: str | None, scale: float) -> np.ndarray:
    """Sequences of one token. The key of the first one has all finite numbers, and that of the
    second one has NaN too.
    """
    if arch is not None:
        emulator.configure(arch, multiprocessors=5)
    pool = np.zeros((2, 16, 1, 576), np.float32)
    pool[:, 0, 0, :256] = np.nan_to_num(NUMBERS), NUMBERS
    call = jax.jit(functools.partial(paged_attention, value_dim=512, implementation="cuda"))
    found = call(
        jnp.zeros((2, 1, 16, 576), jnp.bfloat16),
        jnp.asarray(pool, jnp.float8_e4m3fn),
        None,
        jnp.arange(2, dtype=jnp.int32)[:, None],
        jnp.ones(2, jnp.int32),
        key_scale=jnp.full(1, scale, jnp.float32),
    )
    return np.asarray(found, np.float32)[:, 0, 0]


def assert_each_number(found: np.ndarray, scale: float) -> None:
    """Values are products with the scale, rounded once."""
    want = np.nan_to_num(NUMBERS) * np.float32(scale)
    np.testing.assert_array_equal(found[0, :256], want.astype(jnp.bfloat16).astype(np.float32))
    assert not found[0, 256:].any() and np.isnan(found[1]).all()


SCALES = (1.0, 2.0**-20, 0.37)


@pytest.mark.parametrize("scale", SCALES)
def test_emulated_conversion_of_each_number(scale, machine):
    assert_each_number(machine.submit(each_number, "sm_90a", scale).result(600), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
def test_conversion_of_each_number(scale):
    assert_each_number(each_number(None, scale), scale)


def latent(arch: str = "sm_90a", dtype: Any = "bf16", **pages: Any) -> Problem:
    asked = AskedPages(64, "f8e4m3", is_latent=True, **pages)
    return Problem("forward", dtype, 576, 512, arch, {"varlen": True, "pages": asked})


@pytest.mark.quick
def test_the_latent_kernel_converts():
    spec = select(latent(key_scale="pages"))
    assert spec.kernel.stem == "fmha_fwd_latent_sm90"
    assert not spec.tensor_maps


@pytest.mark.quick
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (latent("sm_80"), "it reads values from a separate array"),
        (latent(dtype="f16"), "it converts latent keys from float8 to bfloat16 only"),
    ],
    ids=str,
)
def test_what_it_refuses(problem, reason):
    with pytest.raises(UnsupportedError, match=reason):
        select(problem)


@pytest.mark.quick
def test_latent_values_have_the_scale_of_the_keys():
    with pytest.raises(ValueError, match="expected no scale of values"):
        latent(value_scale="heads")
