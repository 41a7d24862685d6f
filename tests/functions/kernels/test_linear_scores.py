"""Score functions that are linear in the distance (ALiBi): Hopper's products add them."""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask
from jax_memeff._call.offsets import Offsets
from jax_memeff.codegen import strategy

OUT_TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3}
"""The allowed relative error of an output in the Frobenius norm."""
GRADIENT_TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3}
"""The same for gradients, relative to their terms. P, dS and the output are rounded."""
LSE_TOLERANCE = 3e-4
"""The allowed error of a logsumexp. Products add up to 128 slopes of 8, and truncate sums."""

USUAL = (0.5, 2.0**-8, -0.25, 0.0)
STEEP = (8.0, -7.9, 3.3, -1.0)
BEYOND = (8.5, -1e3, 1e-40, 0.7)
HUGE = (1e30, -1e30, 1e4, -0.1)
NOT_FINITE = (np.inf, 0.5, np.nan, -np.inf)


@dataclasses.dataclass(frozen=True)
class Call:
    """Sizes, features and slopes of a call; each of ``slopes`` is one of a head."""

    slopes: tuple[float, ...] = USUAL
    head_dim: int = 64
    dtype: str = "bfloat16"
    B: int = 2
    T: int = 333
    S: int = 261
    K: int = 4
    scale: float = 0.125
    mask: str = "none"
    lengths: tuple[tuple[int, int], ...] = ()
    offsets: tuple[int, int] = (0, 0)
    sinks: bool = False
    splits: bool = False
    backwards: bool = False
    """Whether the function subtracts slopes times the negative difference."""

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [f.name for f in fields if getattr(self, f.name) != f.default]
        return "-".join(f"{name}={getattr(self, name)}" for name in changed) or "usual"

    @property
    def heads(self) -> int:
        return len(self.slopes)

    def arrays(self) -> dict[str, Any]:
        rng = np.random.default_rng(17)
        shapes = {"query": (self.T, self.heads), "key": (self.S, self.K), "value": (self.S, self.K)}
        drawn = {
            name: rng.standard_normal((self.B, *shape, self.head_dim)).astype(self.dtype)
            for name, shape in shapes.items()
        }
        drawn["slopes"] = np.array(self.slopes, np.float32)
        if self.sinks:
            drawn["sinks"] = rng.standard_normal(self.heads).astype(np.float32)
        return drawn

    def structured_mask(self) -> Mask | None:
        mask = {
            "none": lambda: None,
            "causal": Mask.causal,
            "window": lambda: Mask.window(150, 70),
            "function": lambda: Mask.function(lambda b, h, q, k: (q // 50 != k // 50) | (h == 1)),
        }[self.mask]()
        if self.lengths:
            rows, columns = np.array(self.lengths, np.int32).T
            lengths = Mask.lengths(rows, columns)
            mask = lengths if mask is None else mask & lengths
        return mask

    def valid(self) -> np.ndarray:
        q = np.arange(self.T)[:, None] + self.offsets[0]
        k = np.arange(self.S) + self.offsets[1]
        h = np.arange(self.heads)[:, None, None]
        found = {
            "none": k == k,
            "causal": k <= q,
            "window": (k >= q - 150) & (k <= q + 70),
            "function": (q // 50 != k // 50) | (h == 1),
        }[self.mask]
        found = np.broadcast_to(found, (self.B, self.heads, self.T, self.S)).copy()
        for b, (rows, columns) in enumerate(self.lengths):
            found[b, :, rows:] = found[b, :, :, columns:] = False
        return found

    def score_function(self, slopes: Any) -> Any:
        if self.backwards:
            return lambda s, b, h, q, k: s - (q - k) * slopes[h]
        return lambda s, b, h, q, k: s + slopes[h] * (k - q)

    def ours(self, arrays: Any) -> Any:
        query, key = self.offsets
        return jax_memeff.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            scale=self.scale,
            mask=self.structured_mask(),
            offsets=Offsets(query=query, key=key) if any(self.offsets) else None,
            score_mod=self.score_function(arrays["slopes"]),
            sinks=arrays.get("sinks"),
            return_residual=True,
        )

    def expanded(self) -> dict[str, Any]:
        """The arrays in float64, with a key and value head for each query head."""
        arrays = {name: x.astype(np.float64) for name, x in self.arrays().items()}
        for name in ("key", "value"):
            arrays[name] = np.repeat(arrays[name], self.heads // self.K, 2)
        return arrays

    def defined(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and logsumexp by their definition, in float64."""
        weights, lse = self.weights()
        return np.einsum("bnts,bsnh->btnh", weights, self.expanded()["value"]), lse

    def defined_gradients(self, out_gradient: np.ndarray) -> tuple[Any, Any]:
        """The gradients of query, key and value by their definition, in float64, and the root of
        the sum of squares of the terms of each. The terms of a steep head are large and cancel.
        """
        arrays, (weights, _) = self.expanded(), self.weights()
        weight_gradient = np.einsum("btnh,bsnh->bnts", out_gradient, arrays["value"])
        delta = (weights * weight_gradient).sum(-1, keepdims=True)
        score_gradient = weights * (weight_gradient - delta) * self.scale
        size = weights * (abs(weight_gradient) + abs(delta)) * abs(self.scale)
        return (
            self.sums(score_gradient, weights, out_gradient, arrays),
            tuple(
                np.sqrt(found)
                for found in self.sums(
                    size**2, weights**2, out_gradient**2, {k: x**2 for k, x in arrays.items()}
                )
            ),
        )

    def sums(self, score_gradient: Any, weights: Any, out_gradient: Any, arrays: Any) -> Any:
        """dq, dk and dv of dS, P and dO."""
        groups = (self.B, self.S, self.K, -1, self.head_dim)
        return (
            np.einsum("bnts,bsnh->btnh", score_gradient, arrays["key"]),
            np.einsum("bnts,btnh->bsnh", score_gradient, arrays["query"]).reshape(groups).sum(3),
            np.einsum("bnts,btnh->bsnh", weights, out_gradient).reshape(groups).sum(3),
        )

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """The weights of the values [B, N, T, S], and the logsumexps."""
        arrays = self.expanded()
        key = arrays["key"]
        scores = np.einsum("btnh,bsnh->bnts", arrays["query"], key) * self.scale
        difference = np.arange(self.S) + self.offsets[1] - self.offsets[0]
        difference = difference - np.arange(self.T)[:, None]
        with np.errstate(invalid="ignore"):
            scores += arrays["slopes"][:, None, None] * difference
            scores = np.where(self.valid(), scores, -np.inf)
            sinks = arrays.get("sinks", np.full(self.heads, -np.inf))[:, None, None]
            # Rows beyond the length have no sink.
            rows = np.array([rows for rows, _ in self.lengths] or [self.T] * self.B)
            inside = np.arange(self.T)[:, None] < rows[:, None, None, None]
            sinks = np.where(inside, sinks, -np.inf)
            largest = np.maximum(scores.max(-1, keepdims=True), sinks)
            largest = np.where(np.isneginf(largest), 0, largest)
            weights = np.exp(scores - largest)
            total = weights.sum(-1, keepdims=True) + np.exp(sinks - largest)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = (largest + np.log(total))[..., 0]
            weights = np.where(total > 0, weights / total, np.where(total == 0, 0, np.nan))
        return weights, lse.swapaxes(1, 2)


CALLS = [
    Call(),
    Call(STEEP, B=1, T=200, K=2),
    Call(BEYOND, B=1, T=200),
    Call(HUGE, B=1, T=200, S=333),
    Call(NOT_FINITE, B=1, T=200, S=200),
    Call(B=1, T=70, scale=1e-5),
    Call(B=1, T=70, scale=12.0),
    Call(B=1, T=70, scale=0.0),
    Call(B=1, T=70, scale=-0.125),
    Call(dtype="float16", mask="causal", lengths=((333, 150), (77, 261)), sinks=True),
    Call(STEEP, dtype="float16", mask="causal", lengths=((333, 261), (200, 33)), sinks=True),
    Call(mask="causal", offsets=(200, 40)),
    Call(mask="causal", offsets=(2**29 - 100, 2**29 - 200), B=1, T=200),
    Call((0.1, 1e-4, -1e-4, -0.06), mask="causal", offsets=(2**27, 0), B=1, T=70),
    Call(head_dim=128, K=2, mask="window", backwards=True),
    Call(BEYOND, head_dim=128, B=1, K=1, mask="window", backwards=True),
    Call(head_dim=128, mask="function", B=1),
    Call(T=100, S=1000, B=1, splits=True),
    Call(STEEP, T=100, S=1000, B=1, splits=True),
]


# A backward adds these functions to its exponents. Very large slopes, and scales that are not
# positive, are evaluated element by element.
GRADIENT_CALLS = [
    Call(),
    Call(STEEP, B=1, T=200, K=2),
    Call(BEYOND, B=1, T=200),
    Call(NOT_FINITE, B=1, T=200, S=200),
    Call(B=1, T=70, scale=-0.125),
    Call(dtype="float16", mask="causal", lengths=((333, 150), (77, 261)), sinks=True),
    Call(mask="causal", offsets=(2**29 - 100, 2**29 - 200), B=1, T=200),
    Call(head_dim=128, K=2, mask="window", backwards=True),
    Call(head_dim=128, mask="function", B=1),
]


def results(call: Call, arch: str | None = None) -> Any:
    """Output and logsumexp. With an architecture it runs in the process of ``machine``."""
    if arch is not None:
        emulator.configure(arch)
    arrays = jax.tree.map(jnp.asarray, call.arrays())
    found = strategy.using() if call.splits else strategy.using(forward=strategy.PLAIN)
    with found:
        return jax.tree.map(np.asarray, jax.jit(call.ours)(arrays))


def gradients(call: Call, arch: str | None = None) -> Any:
    """A gradient of the output, and those of query, key and value; see ``results``."""
    if arch is not None:
        emulator.configure(arch)
    arrays = jax.tree.map(jnp.asarray, call.arrays())
    names = ("query", "key", "value")
    shape = arrays["query"].shape
    drawn = np.random.default_rng(5).standard_normal(shape).astype(call.dtype)

    def transposed(operands, rest, out_gradient):
        def out(*operands):
            return call.ours(rest | dict(zip(names, operands, strict=True)))[0]

        return jax.vjp(out, *operands)[1](out_gradient)

    operands = tuple(arrays[name] for name in names)
    found = jax.jit(transposed)(operands, arrays, jnp.asarray(drawn))
    return drawn, *map(np.asarray, found)


def assert_gradients_match(call: Call, found: Any) -> None:
    out_gradient, *own = (x.astype(np.float64) for x in found)
    wanted, sizes = call.defined_gradients(out_gradient)
    names = ("dq", "dk", "dv")
    for name, own_gradient, want, size in zip(names, own, wanted, sizes, strict=True):
        for head in range(want.shape[2]):
            if np.isfinite(call.slopes[head * call.heads // want.shape[2]]):
                error = np.linalg.norm(own_gradient[:, :, head] - want[:, :, head])
                most = GRADIENT_TOLERANCES[call.dtype] * np.linalg.norm(size[:, :, head])
                assert error <= most, (name, head)


def assert_matches(call: Call, found: Any) -> None:
    for name, own, want in zip(("out", "lse"), found, call.defined(), strict=True):
        own = own.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(own), np.isfinite(want), name)
        np.testing.assert_array_equal(np.isnan(own), np.isnan(want), name)
    out, lse = (np.nan_to_num(x.astype(np.float64), neginf=0) for x in found)
    want_out, want_lse = (np.nan_to_num(x, neginf=0) for x in call.defined())
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=LSE_TOLERANCE)
    for head in range(call.heads):
        error = np.linalg.norm(out[:, :, head] - want_out[:, :, head])
        assert error <= OUT_TOLERANCES[call.dtype] * np.linalg.norm(want_out[:, :, head])


@pytest.mark.rotating(5)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_emulated_kernels(call, machine):
    assert_matches(call, machine.submit(results, call, "sm_90a").result(timeout=600))


@pytest.mark.rotating(5)
@pytest.mark.parametrize("call", GRADIENT_CALLS, ids=str)
def test_emulated_gradients(call, machine):
    found = machine.submit(gradients, call, "sm_90a").result(timeout=600)
    assert_gradients_match(call, found)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_kernels(call):
    assert_matches(call, results(call))


@pytest.mark.gpu
@pytest.mark.parametrize("call", GRADIENT_CALLS, ids=str)
def test_gradients_on_the_gpu(call):
    assert_gradients_match(call, gradients(call))
