"""Tiles of Hopper backwards with functions that need few registers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_memeff._functions.trace import traced_mask_function, traced_score_function
from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features import AskedBias
from jax_memeff.codegen.features.functions import AskedDelta, AskedFunctions
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.toolchain import compile as compiler

SLOPES = jnp.ones(4)
IDS = np.arange(500) // 40
ALIBI, _ = traced_score_function(lambda s, b, h, q, k: s + SLOPES[h] * (k - q))
TABLE, _ = traced_score_function(lambda s, b, h, q, k: s + SLOPES[q - k])
GAIN, _ = traced_score_function(lambda s, b, h, q, k: jnp.tanh(s * SLOPES[q - k]))
PLACES, _ = traced_score_function(lambda s, b, h, q, k: s + SLOPES[q * 2 - k])
WINDOW, _ = traced_mask_function(lambda b, h, q, k: (k <= q) & (q - k <= 100))
DOCUMENTS, _ = traced_mask_function(lambda b, h, q, k: jnp.asarray(IDS)[q] == jnp.asarray(IDS)[k])
ON, OFF = "kLinearScores = true;", "kLinearScores = false;"


def backward(score, where=None, head_dim=64, gradients=(), arch="sm_90a", **features):
    asked = {"functions": AskedFunctions(score, where, gradients=gradients), **features}
    needs_grad = ("query", "key", "value", *(("captured",) if gradients else ()))
    problem = Problem("backward", "bf16", head_dim, head_dim, arch, asked, needs_grad)
    return select.select(problem)


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_linear_functions_have_the_tile_of_a_call_without_a_function(head_dim, mask):
    plain = select.select(
        Problem(
            "backward",
            "bf16",
            head_dim,
            head_dim,
            "sm_90a",
            {"mask": mask},
            ("query", "key", "value"),
        )
    )
    own = backward(ALIBI, head_dim=head_dim, mask=mask)
    assert own.tile == plain.tile
    assert ON in emit.source(own)


@pytest.mark.parametrize(
    "spec",
    [backward(ALIBI, bias=AskedBias("16")), backward(TABLE), backward(ALIBI, head_dim=256)],
    ids=["bias", "table", "head dim 256"],
)
def test_other_kernels_evaluate_functions_element_by_element(spec):
    source = emit.source(spec)
    assert OFF in source or "kLinearScores" not in source


@pytest.mark.parametrize(
    ("score", "where", "gradients", "queries"),
    [
        (TABLE, None, (), 128),
        (TABLE, None, (0,), 128),
        (None, WINDOW, (), 128),
        (TABLE, WINDOW, (0,), 128),
        (ALIBI, WINDOW, (), 128),
        (ALIBI, None, (0,), 64),
        (GAIN, None, (), 64),
        (PLACES, None, (), 64),
        (None, DOCUMENTS, (), 64),
        (TABLE, DOCUMENTS, (), 64),
    ],
)
def test_light_functions_have_larger_tiles_at_head_dim_64(score, where, gradients, queries):
    assert backward(score, where, gradients=gradients).tile.query == queries


@pytest.mark.rotating(5)
@pytest.mark.parametrize(
    ("arch", "head_dim", "features"),
    [
        ("sm_90a", 64, {"packed": True}),
        ("sm_90a", 128, {"bias": AskedBias("16"), "dropout": True, "mask": "causal"}),
        ("sm_80", 64, {"bias": AskedBias("32"), "dropout": True}),
    ],
)
def test_kernels_of_delta_have_registers_for_features(arch, head_dim, features):
    """The samples of all kernels have none with functions."""
    pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")
    delta = AskedDelta(has_sinks=False)
    spec = backward(
        ALIBI, head_dim=head_dim, gradients=(0,), arch=arch, delta_from_scores=delta, **features
    )
    compiled = compiler.compile(spec, arch)
    (own,) = (x for x in compiled.resources if x.name == f"{spec.name}_delta")
    assert own.spill_store == 0
    assert compiled.warnings == ()
