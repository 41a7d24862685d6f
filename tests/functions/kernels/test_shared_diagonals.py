"""Hopper kernels whose producer reads what a score function reads along diagonals."""

from __future__ import annotations

import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask
from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features.functions import AskedFunctions
from jax_memeff.codegen.problem import Problem

B, T, S, N, K = 2, 400, 420, 2, 1
TABLE, ROWS = jnp.ones(900), jnp.ones(700)
READS = {
    "one": lambda s, b, h, q, k: s + TABLE[q - k],
    "two": lambda s, b, h, q, k: s + TABLE[q - k] * TABLE[k - q + 3],
    "three": lambda s, b, h, q, k: s + TABLE[q - k] * TABLE[k - q + 3] * TABLE[k - q + 4],
    "tanh": lambda s, b, h, q, k: jnp.tanh(s * TABLE[q - k]),
    "none": lambda s, b, h, q, k: s + TABLE[k],
    "query": lambda s, b, h, q, k: s + TABLE[q - k] * ROWS[q],
}
MASKS = {
    "none": Mask,
    "causal": Mask.causal,
    "window": lambda: Mask.window(60, 20),
    "lengths": lambda: Mask.lengths(np.array([130, T]), np.array([S, 7])),
    "documents": lambda: Mask.function(lambda b, h, q, k: q // 150 == k // 150),
}


def forward(score: Any, head_dim: int = 128, dtype: Any = "bf16", **features: Any) -> Any:
    return selected("forward", score, head_dim, dtype, **features)


def selected(
    direction: Any, score: Any, head_dim: int, dtype: Any, gradients: Any = (), **features: Any
) -> Any:
    asked = {**features}
    if score is not None:
        program = traced_score_function(score)[0]
        asked["functions"] = AskedFunctions(program, None, gradients=gradients)
    return select.select(Problem(direction, dtype, head_dim, head_dim, "sm_90a", asked))


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "shares"),
    [
        ("one", 64, "bf16", True),
        ("one", 128, "f16", True),
        ("two", 128, "bf16", True),
        ("tanh", 128, "bf16", True),
        ("three", 128, "bf16", False),
        ("none", 128, "bf16", False),
        ("one", 256, "bf16", False),
        ("one", 64, "f32", False),
    ],
)
def test_up_to_two_reads_are_shared(name, head_dim, dtype, shares):
    source = emit.source(forward(READS[name], head_dim, dtype))
    assert ("kSharedDiagonals = true;" in source) == shares


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_an_added_table_has_the_tile_of_a_call_without_a_function(head_dim, mask):
    plain = forward(None, head_dim, mask=mask).tile
    assert forward(READS["one"], head_dim, mask=mask).tile == plain
    assert (forward(READS["tanh"], head_dim, mask=mask).tile == plain) == (head_dim != 96)


@pytest.mark.parametrize(("head_dim", "shares"), [(64, False), (96, True), (128, True)])
def test_backwards_with_few_queries_share_reads(head_dim, shares):
    source = emit.source(selected("backward", READS["one"], head_dim, "bf16"))
    assert ("kSharedDiagonals = true;" in source) == shares


@pytest.mark.parametrize(
    ("name", "head_dim", "features", "adds"),
    [
        ("one", 64, {}, False),
        ("one", 96, {}, True),
        ("one", 128, {}, True),
        ("one", 128, {"deterministic": True}, False),
        ("tanh", 128, {}, True),
        ("query", 128, {}, False),
    ],
)
def test_a_warp_of_the_producer_adds_up_diagonals(name, head_dim, features, adds):
    gradients = (0, 1) if name == "query" else (0,)
    spec = selected("backward", READS[name], head_dim, "bf16", gradients, **features)
    assert ("kProducerAddsStrips = true;" in emit.source(spec)) == adds


def arrays(head_dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = {
        "query": (B, T, N, head_dim),
        "key": (B, S, K, head_dim),
        "value": (B, S, K, head_dim),
    }
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    found = {name: x.astype(jnp.bfloat16) for name, x in drawn.items()}
    return found | {"table": rng.standard_normal((N, T + S)).astype(np.float32)}


def score_of(name: str, table: Any) -> Any:
    if name == "one":
        return lambda s, b, h, q, k: s + table[h, q - k + S]
    return lambda s, b, h, q, k: s * table[h, k - q + T] + jnp.cos(table[0, q - k + S])


def results(function: Any, drawn: Any) -> Any:
    """Output, logsumexp and the gradients of all arrays."""
    (out, lse), pullback = jax.vjp(function, drawn)
    return out, lse, pullback(cotangents(out, lse))


def cotangents(out: Any, lse: Any) -> Any:
    rng = np.random.default_rng(6)
    return tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (out, lse))


def lower(name: str, head_dim: int, mask: str, multiprocessors: int) -> jax.stages.Lowered:
    emulator.configure("sm_90a", multiprocessors=multiprocessors)

    def attention(drawn: Any) -> Any:
        return jax_memeff.dot_product_attention(
            drawn["query"],
            drawn["key"],
            drawn["value"],
            score_mod=score_of(name, drawn["table"]),
            mask=MASKS[mask](),
            return_residual=True,
        )

    return jax.jit(functools.partial(results, attention)).lower(arrays(head_dim))


def emulated(name: str, head_dim: int, mask: str, multiprocessors: int, seed: int) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, name, head_dim, mask, multiprocessors)
    emulator.configure("sm_90a", multiprocessors=multiprocessors, seed=seed)
    return jax.tree.map(np.asarray, lowered.compile()(arrays(head_dim)))


@functools.cache
def defined(name: str, head_dim: int, mask: str) -> Any:
    def attention(drawn: Any) -> Any:
        key, value = (jnp.repeat(drawn[name], N // K, axis=2) for name in ("key", "value"))
        scores = jnp.einsum("btnh,bsnh->bnts", drawn["query"], key) * head_dim**-0.5
        index = jnp.meshgrid(*map(jnp.arange, scores.shape), indexing="ij")
        flat = (x.ravel() for x in (scores, *index))
        scores = jax.vmap(score_of(name, drawn["table"]))(*flat).reshape(scores.shape)
        allowed = MASKS[mask]().as_array(*scores.shape)
        some = allowed.any(-1)  # rows without keys have output 0 and logsumexp -inf
        lse = jax.nn.logsumexp(jnp.where(allowed, scores, -jnp.inf), -1)
        lse = jnp.where(some, lse, 0.0)
        shares = jnp.where(allowed, jnp.exp(scores - lse[..., None]), 0.0)
        out = jnp.einsum("bnts,bsnh->btnh", shares, value)
        return out, jnp.where(some, lse, -jnp.inf).swapaxes(1, 2)

    with jax.enable_x64(True):
        drawn = {name: jnp.asarray(x.astype(np.float64)) for name, x in arrays(head_dim).items()}
        return jax.tree.map(np.asarray, jax.jit(functools.partial(results, attention))(drawn))


CALLS = [
    ("one", 64, "causal", 2),
    ("two", 128, "documents", 2),
    ("one", 128, "window", 3),
    ("one", 96, "lengths", 2),
    ("two", 64, "none", 100),  # consumer groups
    ("one", 128, "none", 2),
]


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """All calls are lowered before the first one runs, so their kernels are compiled together."""
    calls = dict.fromkeys(case["call"] for case in selected if "call" in case)
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_match_the_definition(call, seed, machine, assert_close):
    found = machine.submit(emulated, *call, seed).result(timeout=600)
    assert_close(found, defined(*call[:3]), 2e-2)
