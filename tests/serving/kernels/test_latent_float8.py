"""Pools of float8 in latent attention: every float8 number, and what the kernel refuses."""

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

SEVERAL = Case(
    (300, 70, 5, 0, 129),
    (5, 3, 7, 2, 1),
    heads=(16, 1),
    dims=(576, 512),
    is_latent=True,
    is_exact=True,
)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ["none", "pages"])
def test_pools_without_a_spare_page(layout, assert_close):
    case = dataclasses.replace(SEVERAL, scales=(layout, layout))
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
    return Problem("forward", dtype, 576, 512, arch, {"packed": True, "pages": asked})


@pytest.mark.quick
def test_the_latent_kernel_converts():
    spec = select(latent(key_scale="pages"))
    assert spec.kernel.stem == "sm90/latent"
    assert not spec.tensor_maps


@pytest.mark.quick
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (latent("sm_80"), "it reads values from a separate array"),
        (latent(dtype="f16"), "it converts latent keys from float8 to bfloat16 only"),
        (latent(dtype="f32"), "queries of bfloat16 or float16, got f32: cast the query"),
        (
            dataclasses.replace(latent(), value_dim=500),
            "value_dim is 500, and kernels read rows of float8 16 bytes at a time: pad it to a mul",
        ),
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
