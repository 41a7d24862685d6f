"""Gradients of latent attention over lists of keys in the kernel, on the emulated machine and on a
GPU, compared with NumPy's in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import lateness
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask

TOLERANCES = {"bfloat16": 6e-3, "float16": 1e-3}
WINDOW = 30
dot_product_attention: Any = jax_memeff.dot_product_attention
varlen_attention: Any = jax_memeff.varlen_attention


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose values are columns of the keys, padded by default."""

    batch: int = 2
    queries: int = 3
    keys: int = 150
    count: int = 100
    heads: tuple[int, int] = (128, 1)
    has_own_lists: bool = False
    """Whether each key head has lists of its own."""
    dims: tuple[int, int] = (576, 512)
    dtype: str = "bfloat16"
    features: tuple[str, ...] = ()
    needed: tuple[str, ...] = ("query", "key")
    scale: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        sizes = (self.batch, self.queries, self.keys, self.count, *self.heads, *self.dims)
        words = ["x".join(map(str, sizes)), self.dtype, *self.features]
        words += ["own"] if self.has_own_lists else []
        words += list(self.needed) if len(self.needed) == 1 else []
        return "-".join([*words, f"seed{self.seed}"])

    def arrays(self) -> dict[str, np.ndarray]:
        """Keys that no list has are NaN. The first token has an empty list."""
        rng = np.random.default_rng(self.seed)
        heads, kv_heads = self.heads
        head_dim, value_dim = self.dims
        rows = self.batch, self.queries, heads
        lists_shape = self.batch, kv_heads if self.has_own_lists else 1, self.queries, self.count
        lists = rng.integers(-1, self.keys + 2, lists_shape).astype(np.int32)
        lists[rng.random(lists_shape) < 0.1] = -1
        odd = rng.random(lists_shape) < 0.03
        lists[odd] = rng.choice([-(2**31), 2**31 - 1, -2], odd.sum())
        lists[0, :, 0] = -1
        key = rng.normal(size=(self.batch, self.keys, kv_heads, head_dim))
        for b, k in np.ndindex(self.batch, kv_heads):
            own = lists[b, k if self.has_own_lists else 0]
            key[b, np.setdiff1d(np.arange(self.keys), own), k] = np.nan
        return {
            "query": rng.normal(size=(*rows, head_dim)),
            "key": key,
            "sinks": np.linspace(-1, 2, heads),
            "lists": lists,
            "dout": rng.normal(size=(*rows, value_dim)),
            "dlse": rng.normal(size=rows),
        }

    @property
    def used_scale(self) -> float:
        return self.dims[0] ** -0.5 if self.scale is None else self.scale

    def rounded(self) -> dict[str, Any]:
        names = {"query": self.dtype, "key": self.dtype, "lists": "int32"}
        arrays = self.arrays()
        return {name: jnp.asarray(x, names.get(name, "float32")) for name, x in arrays.items()}

    def attention(self, query: Any, key: Any, *, mask: Mask, **settings: Any) -> Any:
        """The function of padded or of packed sequences."""
        if "packed" not in self.features:
            return dot_product_attention(query, key, None, mask=mask, **settings)
        (lists,) = mask.key_lists
        lists = jnp.swapaxes(lists.indices, 1, 2).reshape(-1, lists.indices.shape[1], self.count)
        mask = dataclasses.replace(mask, key_lists=()) & Mask.keys(lists)
        tokens = (x.reshape(-1, *x.shape[2:]) for x in (query, key))
        starts = (np.arange(self.batch + 1) * size for size in (self.queries, self.keys))
        sizes = self.queries, self.keys
        out, lse = varlen_attention(*tokens, None, *starts, *sizes, mask=mask, **settings)
        rows = query.shape[:2]
        return out.reshape(*rows, *out.shape[1:]), lse.reshape(*rows, *lse.shape[1:])

    def program(self, query: Any, key: Any, sinks: Any, lists: Any, dout: Any, dlse: Any) -> Any:
        mask = Mask.keys(lists)
        if "window" in self.features:
            mask &= Mask.window(WINDOW, WINDOW)

        def loss(given: dict[str, Any]) -> jax.Array:
            out, lse = self.attention(
                given["query"],
                given["key"],
                value_dim=self.dims[1],
                scale=self.used_scale,
                mask=mask,
                sinks=given["sinks"] if "sinks" in self.features else None,
                return_residual=True,
                deterministic_backward="deterministic" in self.features,
            )
            total = (out.astype(jnp.float32) * dout).sum()
            if "lse" not in self.features:
                return total
            return total + (jnp.where(jnp.isfinite(lse), lse, 0) * dlse).sum()

        given = {"query": query, "key": key, "sinks": sinks}
        others = {name: x for name, x in given.items() if name not in self.needed}
        return jax.grad(lambda own: loss({**others, **own}))(
            {name: given[name] for name in self.needed}
        )

    def lowered(self) -> jax.stages.Lowered:
        return jax.jit(self.program).lower(**self.rounded())

    def found(self, lowered: jax.stages.Lowered | None = None) -> dict[str, np.ndarray]:
        run = (lowered or self.lowered()).compile()
        return jax.tree.map(np.asarray, run(**self.rounded()))

    def want(self) -> dict[str, np.ndarray]:
        """By the definition, one list at a time (FlashAttention-2, section 2.2)."""
        given = {name: np.asarray(x).astype(np.float64) for name, x in self.rounded().items()}
        query, key, dout = given["query"], given["key"], given["dout"]
        found = {name: np.zeros_like(given[name]) for name in ("query", "key", "sinks")}
        heads, kv_heads = self.heads
        group, values = heads // kv_heads, self.dims[1]
        lists = self.arrays()["lists"]
        for b, t, k in np.ndindex(self.batch, self.queries, kv_heads):
            own = np.unique(lists[b, k if self.has_own_lists else 0, t])
            own = own[(own >= 0) & (own < self.keys)]
            if "window" in self.features:
                own = own[abs(own - t) <= WINDOW]
            of_heads = slice(k * group, (k + 1) * group)
            rows, keys, d_rows = query[b, t, of_heads], key[b, own, k], dout[b, t, of_heads]
            scores = rows @ keys.T * self.used_scale
            sinks = given["sinks"][of_heads, None] if "sinks" in self.features else None
            every = scores if sinks is None else np.concatenate([scores, sinks], 1)
            if not every.size:
                continue
            weights = np.exp(every - every.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            probabilities = weights[:, : len(own)]
            out = probabilities @ keys[:, :values]
            delta = (d_rows * out).sum(1, keepdims=True)
            if "lse" in self.features:
                delta -= given["dlse"][b, t, of_heads, None]
            dscores = probabilities * (d_rows @ keys[:, :values].T - delta)
            found["query"][b, t, of_heads] = dscores @ keys * self.used_scale
            np.add.at(found["key"], (b, own, k), dscores.T @ rows * self.used_scale)
            np.add.at(found["key"][..., :values], (b, own, k), probabilities.T @ d_rows)
            if sinks is not None:
                found["sinks"][of_heads] -= (weights[:, len(own) :] * delta)[:, 0]
        return {name: found[name] for name in self.needed}

    def assert_matches(self, found: Any, assert_close: Any) -> None:
        for name, want in self.want().items():
            got = np.asarray(found[name]).astype(np.float64)
            assert got.shape == want.shape
            if name == "key":  # keys that are in no list
                assert not got[~want.any(-1)].any()
            if want.any():
                assert_close(got, want, TOLERANCES[self.dtype])
            else:
                assert not got.any()


def _drawn(index: int) -> Call:
    rng = np.random.default_rng(index)
    features = tuple(name for name in ("lse", "window", "sinks") if rng.random() < 0.4)
    needed = ("query", "key", *(["sinks"] if "sinks" in features else []))
    return Call(
        batch=int(rng.integers(1, 4)),
        queries=int(rng.integers(1, 6)),
        keys=int(rng.integers(1, 260)),
        count=int(rng.choice([5, 31, 64, 65, 190])),
        heads=((16, 1), (64, 1), (100, 1), (128, 1), (32, 2))[int(rng.integers(5))],
        has_own_lists=bool(rng.integers(2)),
        features=features,
        needed=needed,
        seed=index,
    )


OTHERS = [
    Call(features=("lse",)),
    Call(features=("sinks", "lse"), needed=("query", "key", "sinks"), seed=1),
    Call(needed=("query",), heads=(64, 1), seed=2),
    Call(needed=("key",), heads=(16, 1), seed=3),
    Call(dims=(544, 480), dtype="float16", heads=(80, 1), seed=4),
    Call(scale=-0.03, heads=(64, 1), seed=5),
    Call(features=("packed", "window", "lse"), heads=(64, 1), seed=6),
    Call(features=("packed",), heads=(32, 2), has_own_lists=True, seed=7),
]
CASES = [*OTHERS, *map(_drawn, range(60))]


def lower(case: Call) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure("sm_90a", multiprocessors=3, seed=case.seed)
    return case.lowered()


def emulated(case: Call, seed: int | None = None) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case)
    emulator.configure("sm_90a", multiprocessors=3, seed=case.seed if seed is None else seed)
    return case.found(lowered)


def text(case: Call) -> str:
    """Runs in the process of ``machine``."""
    return lower(case).as_text()


@pytest.mark.rotating(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_kernels(case, machine, assert_close):
    case.assert_matches(machine.submit(emulated, case).result(timeout=600), assert_close)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_gradients_of_queries_have_the_same_bits_on_every_schedule(case, machine):
    first, other = (machine.submit(emulated, case, seed).result(600) for seed in (0, 1))
    np.testing.assert_array_equal(first["query"], other["query"])


@pytest.mark.parametrize(
    ("case", "has_kernel"),
    [
        (Call(), True),
        (Call(features=("deterministic",)), False),
        (Call(features=("deterministic",), needed=("query",)), True),
        (Call(dims=(64, 64), heads=(4, 1)), False),
    ],
    ids=str,
)
def test_other_backwards_are_in_plain_jax(case, has_kernel, machine):
    program = machine.submit(text, case).result(timeout=600)
    assert ("jax_memeff_backward" in program) == has_kernel


def shared_keys() -> Any:
    """The gradient of keys that a vmap over the queries shares; runs in the process of
    ``machine``.
    """
    emulator.configure("sm_90a", multiprocessors=3, seed=0)
    case = Call(batch=2, features=("lse",))
    given = case.rounded()
    given["key"] = jnp.where(jnp.isnan(given["key"]), 0, given["key"])
    names = ("query", "lists", "dout", "dlse")
    batched = {name: given[name][:, None] for name in names}

    def gradient(**arrays: Any) -> Any:
        return case.program(key=given["key"][:1], sinks=given["sinks"], **arrays)

    mapped = jax.jit(jax.vmap(lambda arrays: gradient(**arrays)))(batched)
    singly = [gradient(**{name: x[i] for name, x in batched.items()}) for i in range(2)]
    return jax.tree.map(np.asarray, (mapped, jax.tree.map(lambda *x: jnp.stack(x), *singly)))


def test_keys_that_a_vmap_shares(machine, assert_close):
    mapped, singly = machine.submit(shared_keys).result(timeout=600)
    jax.tree.map(lambda x, y: assert_close(x.astype(float), y.astype(float), 1e-3), mapped, singly)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case, assert_close):
    case.assert_matches(case.found(), assert_close)


@pytest.mark.gpu
def test_many_lists_on_a_gpu(assert_close):
    case = Call(batch=1, queries=700, keys=3000, count=500, heads=(128, 1), features=("lse",))
    found = [case.found() for _ in range(3)]
    case.assert_matches(found[0], assert_close)
    for other in found[1:]:
        np.testing.assert_array_equal(other["query"], found[0]["query"])


@pytest.mark.gpu
def test_gradients_of_queries_have_equal_bits_in_every_run(monkeypatch):
    """With random delays: ``tests/kernels/test_races.py``."""
    case = Call(batch=1, queries=200, keys=2000, count=300, features=("lse",))

    def run(arrays: dict[str, Any], zero: jax.Array) -> dict[str, jax.Array]:
        query = arrays["query"] + zero.astype(arrays["query"].dtype)
        return {"query": case.program(**{**arrays, "query": query})["query"]}

    lateness.assert_equal_runs(monkeypatch, run, case.rounded(), 1000)
