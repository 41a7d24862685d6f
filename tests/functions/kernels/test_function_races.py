"""The Hopper kernels with users' functions and random delays: equal bits in every run.

``tests/kernels/test_races.py`` says how the delays find a race. Here the threads also read the
captured arrays, skip KV blocks by the block mask of a mask function, and sum the gradients of the
captured arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lateness
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask
from jax_memeff.codegen import gpu

REPEATS = 1000
B, T, S, N, K = 60, 257, 304, 2, 1
SHAPES = {
    "slopes": (N,),
    "table": (N, T + S),
    "rows": (B, T),
    "columns": (S,),
    "buckets": (16, N),
}


def alibi(a: Any) -> Any:
    return lambda s, b, h, q, k: s + a["slopes"][h] * (k - q) / 32


def elements(a: Any) -> Any:
    return lambda s, b, h, q, k: (
        s * (1 + a["columns"][k]) + a["table"][h, q - k + S] + a["rows"][b, q]
    )


def buckets(a: Any) -> Any:
    """Many elements of a tile read one element of the array."""
    return lambda s, b, h, q, k: s + a["buckets"][jnp.clip((q - k) // 8 + 8, 0, 15), h]


def documents() -> Mask:
    return Mask.function(lambda b, h, q, k: (q + 7 * b) // 90 == (k + 7 * b) // 90)


def listed() -> Mask:
    lists = np.random.default_rng(1).integers([0, -1], [5, 5], (1, N, 5, 2))
    return Mask.kv_blocks(lists, block_size=64)


@dataclasses.dataclass(frozen=True)
class Hunt:
    """A case, and its number of stages as in lateness.py."""

    head_dim: int
    stages: int | None
    mask: Callable[[], Mask] = Mask.causal
    score: Callable[[Any], Any] | None = None
    arrays: tuple[str, ...] = ()
    deterministic: bool = True
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        score = "score" if self.score is None else self.score.__name__
        words = [score, self.mask.__name__, f"H{self.head_dim}", self.dtype, f"{self.stages}stages"]
        return "-".join([*words, *(["deterministic"] if self.deterministic else [])])

    def drawn(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(11)
        heads = {"query": (B, T, N), "key": (B, S, K), "value": (B, S, K), "dout": (B, T, N)}
        found = {
            name: rng.standard_normal((*shape, self.head_dim)).astype(jnp.dtype(self.dtype))
            for name, shape in heads.items()
        }
        own = {name: rng.standard_normal(SHAPES[name]) for name in self.arrays}
        return found | {name: x.astype(np.float32) for name, x in own.items()}


def results(hunt: Hunt, drawn: Any, zero: jax.Array) -> dict[str, jax.Array]:
    """The results that must have the same bits in every run, by name."""
    arrays = {name: x for name, x in drawn.items() if name != "dout"}
    arrays["query"] += zero.astype(arrays["query"].dtype)

    def attention(arrays: Any) -> Any:
        return jax_memeff.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            mask=hunt.mask(),
            score_mod=None if hunt.score is None else hunt.score(arrays),
            deterministic_backward=hunt.deterministic,
            return_residual=True,
            implementation="cuda",
        )

    (out, lse), pullback = jax.vjp(attention, arrays)
    (gradients,) = pullback((drawn["dout"], jnp.ones_like(lse)))
    if not hunt.deterministic:
        gradients = {name: gradients[name] for name in ("key", "value")}
    return {"out": out, "lse": lse, **gradients}


HUNTS = [
    *(
        Hunt(head_dim, stages, score=score, arrays=arrays)
        for score, arrays, head_dim, stages in (
            (alibi, ("slopes",), 64, 1),
            (alibi, ("slopes",), 128, None),
            (elements, ("table", "rows", "columns"), 64, 3),
            (elements, ("table", "rows", "columns"), 128, 2),
            (elements, ("table", "rows", "columns"), 256, 2),
            (buckets, ("buckets",), 64, 2),
            (buckets, ("buckets",), 128, 1),
        )
    ),
    *(Hunt(64, stages, documents, deterministic=False) for stages in (1, 3, None)),
    Hunt(128, 2, documents, elements, ("table", "rows", "columns")),
    Hunt(256, 2, documents, deterministic=False),
    Hunt(64, 2, listed, alibi, ("slopes",)),
    Hunt(128, 1, listed, deterministic=False),
    Hunt(128, 2, documents, alibi, ("slopes",), dtype="float16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("hunt", HUNTS, ids=str)
def test_bits_are_equal_in_every_run(hunt, monkeypatch):
    run = functools.partial(results, hunt)
    with lateness.set_stages(hunt.stages):
        lateness.assert_equal_runs(monkeypatch, run, hunt.drawn(), REPEATS)


@pytest.mark.rotating(5)
@pytest.mark.parametrize("hunt", HUNTS, ids=str)
def test_every_hunt_has_kernels_of_hopper(hunt, monkeypatch, fake_compiler):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", gpu.WGMMA_ARCH)
    with lateness.set_stages(hunt.stages):
        run = jax.jit(functools.partial(results, hunt))
        run.trace(hunt.drawn(), jnp.int32(0)).lower(lowering_platforms=("cuda",))
    families = {spec.direction: spec.family for spec, _ in fake_compiler}
    # At head dim 256 the backward that sums elements of arrays is of the sm80 family.
    own = {"sm80"} if hunt.head_dim == 256 and hunt.arrays else {"sm90"}
    assert families.pop("forward") == "sm90"
    assert {*families.values()} == own
