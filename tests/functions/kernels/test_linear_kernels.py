"""Kernels whose products add a linear score function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jax_memeff._functions.trace import traced_mask_function, traced_score_function
from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features import AskedBias
from jax_memeff.codegen.features.functions import AskedFunctions
from jax_memeff.codegen.problem import Problem

SLOPES = jnp.ones(4)
ALIBI, _ = traced_score_function(lambda s, b, h, q, k: s + SLOPES[h] * (k - q))
TABLE, _ = traced_score_function(lambda s, b, h, q, k: s + SLOPES[q - k])
DOCUMENTS, _ = traced_mask_function(lambda b, h, q, k: q // 40 == k // 40)
LINEAR = AskedFunctions(ALIBI, None)
IS_ON = "kLinearScores = true;"


def source(dtype: Any = "bf16", head_dim: int = 64, **features: Any) -> str:
    asked = {"functions": LINEAR, **features}
    return emit.source(
        select.select(Problem("forward", dtype, head_dim, head_dim, "sm_90a", asked))
    )


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_they_have_the_tile_of_a_call_without_a_function(head_dim, mask):
    plain, own = (
        select.select(Problem("forward", "bf16", head_dim, head_dim, "sm_90a", asked))
        for asked in ({"mask": mask}, {"mask": mask, "functions": LINEAR})
    )
    assert own.tile == plain.tile
    assert own.shared_bytes - plain.shared_bytes == own.tile.key * 64


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_other_masks_and_positions_leave_the_function_linear(dtype):
    assert IS_ON in source(dtype)
    assert IS_ON in source(dtype, packed=True, positions=True, mask="causal")
    assert IS_ON in source(dtype, functions=AskedFunctions(ALIBI, DOCUMENTS))


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "f32"},
        {"head_dim": 256},
        {"bias": AskedBias("16")},
        {"functions": AskedFunctions(TABLE, None)},
        {"functions": AskedFunctions(None, DOCUMENTS)},
    ],
    ids=["float32", "head dim 256", "bias", "table", "documents"],
)
def test_other_kernels_evaluate_functions_element_by_element(asked):
    assert "kLinearScores = false;" in source(**asked)
