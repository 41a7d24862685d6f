"""Pools of float8 in the kernels: every float8 number, and the range of the query."""

from __future__ import annotations

import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import Case, assert_matches
from paging import paged_attention

from jax_memeff.codegen import strategy
from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import explain, family_reasons, select

CODES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)


def each_number(arch: str | None, rows: str) -> tuple[np.ndarray, np.ndarray]:
    """Sequence b has one token: its key is number b and zeros, its value has all numbers."""
    if arch is not None:
        emulator.configure(arch, multiprocessors=5)
    key_pages = np.zeros((256, 16, 1, 64), np.uint8)
    key_pages[np.arange(256), 0, 0, np.arange(256) % 64] = np.arange(256)
    value_pages = np.full((256, 16, 1, 256), 0x7F, np.uint8)
    value_pages[:, 0, 0] = (np.arange(256) + np.arange(256)[:, None]) % 256
    pools = [jnp.asarray(pool.view(jnp.float8_e4m3fn)) for pool in (key_pages, value_pages)]
    chosen = strategy.Strategy(query_rows=rows)  # type: ignore[arg-type]
    with strategy.using(forward=chosen):
        call = jax.jit(
            functools.partial(
                paged_attention, scale=1.0, return_residual=True, implementation="cuda"
            )
        )
        query = jnp.ones((256, 1, 1, 64), jnp.float16)
        table, lengths = jnp.arange(256, dtype=jnp.int32)[:, None], jnp.ones(256, jnp.int32)
        found = call(query, *pools, table, lengths)
        return tuple(np.asarray(x, np.float32)[:, 0, 0] for x in found)  # type: ignore[return-value]


def assert_each_number(found: tuple[np.ndarray, np.ndarray]) -> None:
    out, lse = found
    numbers = CODES.astype(np.float32)
    is_nan = np.isnan(numbers)
    assert is_nan.sum() == 2
    np.testing.assert_allclose(lse[~is_nan], numbers[~is_nan], rtol=1e-6, atol=1e-7)
    assert np.isnan(lse[is_nan]).all()
    values = numbers[(np.arange(256) + np.arange(256)[:, None]) % 256]
    np.testing.assert_array_equal(out[~is_nan], values[~is_nan])


@pytest.mark.rotating(2)
@pytest.mark.parametrize("rows", ["16", "64"])
def test_emulated_conversion_of_each_number(rows, machine):
    assert_each_number(machine.submit(each_number, "sm_80", rows).result(600))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["16", "64"])
def test_conversion_of_each_number(rows):
    assert_each_number(each_number(None, rows))


def scaled_queries(arch: str | None, exponent: int) -> Any:
    """Scales queries by a power of two that the key scales undo."""
    if arch is not None:
        emulator.configure(arch, multiprocessors=5)
    rng = np.random.default_rng(0)
    pools = [jnp.asarray(rng.standard_normal((8, 16, 2, 64)), jnp.float8_e4m3fn) for _ in range(2)]
    query = jnp.asarray(rng.standard_normal((2, 3, 8, 64)), jnp.bfloat16)
    call = jax.jit(functools.partial(paged_attention, return_residual=True, implementation="cuda"))
    found = call(
        query * jnp.bfloat16(2.0**exponent),
        *pools,
        jnp.array([[3, 1], [7, 0]], jnp.int32),
        jnp.array([30, 5], jnp.int32),
        key_scale=jnp.full(2, 2.0**-exponent, jnp.float32),
    )
    return jax.tree.map(np.asarray, found)


def assert_equal_bits(found: list[Any]) -> None:
    (out, lse), *others = found
    assert np.isfinite(lse).all() and np.isfinite(out.astype(np.float32)).all()
    for other_out, other_lse in others:
        np.testing.assert_array_equal(other_out, out)
        np.testing.assert_array_equal(other_lse, lse)


EXPONENTS = (0, 100, -100)


def test_emulated_queries_have_the_range_of_bfloat16(machine):
    runs = [machine.submit(scaled_queries, "sm_80", exponent) for exponent in EXPONENTS]
    assert_equal_bits([run.result(600) for run in runs])


@pytest.mark.gpu
def test_queries_have_the_range_of_bfloat16():
    assert_equal_bits([scaled_queries(None, exponent) for exponent in EXPONENTS])


_HEADS, _PAGES = ("heads", "heads"), ("pages", "pages")
_D128: Any = {"heads": (8, 2), "dims": (128, 128)}
BATCHES = [
    Case((1000, 17, 1, 0, 4097), (1,) * 5, 64, scales=_HEADS, **_D128),
    Case((9000,), (1,), 64, scales=_HEADS, **_D128),
    Case((700, 3000, 64, 0), (700, 1, 1, 1), 64, scales=_HEADS, **_D128),
    Case((700, 300, 64), (700, 300, 64), 64, scales=_HEADS, **_D128),
    Case((1000, 17, 1, 500), (1,) * 4, 16, scales=_PAGES, **_D128),
    Case((1000, 17, 1, 500), (40, 5, 1, 60), 16, scales=_PAGES, **_D128),
    Case((1500, 33), (1, 1), 32, (4, 4), (256, 256), "float16", scales=("none", "none")),
    Case((2000, 33), (3, 2), 48, (12, 2), (64, 64), scales=("pages", "heads")),
    Case((2000, 33), (1, 1), 128, (4, 1), (192, 128), scales=("heads", "pages")),
    Case((130, 33), (1, 1), 16, (4, 1), (80, 48), "float16", scales=_HEADS),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_batches(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)


def problem(dtype: Any, head_dim: int, value_dim: int) -> Problem:
    pages = AskedPages(16, "f8e4m3", key_scale="heads")
    features = {"packed": True, "pages": pages}
    return Problem("forward", dtype, head_dim, value_dim, "sm_90a", features)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("f32", 64, 64), "queries of bfloat16 or float16, got f32: cast the query"),
        (("bf16", 72, 64), "head_dim is 72, and kernels read rows of float8 16 bytes at a time"),
        (("bf16", 64, 8), "value_dim is 8, and kernels read rows of float8 16 bytes at a time"),
        (("f16", 320, 64), "head_dim is 320, and kernels read pages of float8 up to head dim 256"),
    ],
)
def test_reasons(asked, reason):
    assert any(reason in line for line in family_reasons(problem(*asked)))


@pytest.mark.quick
@pytest.mark.parametrize("rows", [None, "16", "64", "consumer_groups"])
def test_the_split_forward_serves_every_strategy(rows):
    spec = select(problem("bf16", 192, 128), strategy.Strategy(query_rows=rows))
    assert spec.kernel.splits_keys
    assert spec.tile.query == (16 if rows == "16" else 64)


@pytest.mark.quick
def test_other_kernels_do_not_convert_float8():
    lines = [
        reason
        for spec, reasons in explain(problem("bf16", 64, 64))
        if spec.kernel.reads_pages and not spec.kernel.reads_float8_pages
        for reason in reasons
    ]
    assert "it does not convert float8" in lines


@pytest.mark.quick
def test_only_float8_has_scales():
    with pytest.raises(ValueError, match="expected no scale, because only float8 pages have it"):
        Problem("forward", "bf16", 64, 64, "sm_80", {"pages": AskedPages(16, key_scale="heads")})
