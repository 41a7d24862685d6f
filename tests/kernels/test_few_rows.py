"""Few queries with head dims above 256: the heads of a key head are rows, and keys are split."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_memeff
from jax_memeff._cuda import few_rows

attention: Any = jax_memeff.dot_product_attention


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of some sequences; NaN lies beyond their lengths."""

    lengths: tuple[int, ...] | None
    batch: int = 2
    rows: int = 1
    columns: int = 1024
    heads: tuple[int, int] = (4, 1)
    dims: tuple[int, int] = (320, 264)
    dtype: str = "bfloat16"
    soft_cap: float | None = None

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(len(str(self)))
        (heads, key_heads), (head, value) = self.heads, self.dims
        shapes = (self.rows, heads, head), (self.columns, key_heads, head)
        shapes = *shapes, (self.columns, key_heads, value)
        return [
            rng.standard_normal((self.batch, *shape), np.float32).astype(jnp.dtype(self.dtype))
            for shape in shapes
        ]

    def found(self, implementation: str | None = None) -> Any:
        query, key, value = self.arrays()
        lengths = None
        if self.lengths is not None:
            lengths = np.array(self.lengths, np.int32)
            for array in (key, value):
                for b, length in enumerate(self.lengths):
                    array[b, length:] = np.nan
        call = jax.jit(
            lambda *x: attention(
                *x[:3],
                key_value_seq_lengths=x[3],
                logits_soft_cap=self.soft_cap,
                return_residual=True,
                implementation=implementation,
            )
        )
        return jax.tree.map(np.asarray, call(query, key, value, lengths))

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        query, key, value = (x.astype(np.float64) for x in self.arrays())
        group = self.heads[0] // self.heads[1]
        key, value = (x.repeat(group, 2) for x in (key, value))
        scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(self.dims[0])
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        if self.lengths is not None:
            valid = np.arange(self.columns) < np.array(self.lengths)[:, None]
            scores = np.where(valid[:, None, None], scores, -np.inf)
        with np.errstate(all="ignore"):
            largest = scores.max(-1, keepdims=True)
            terms = np.where(scores > -np.inf, np.exp(scores - largest), 0)
            sums = terms.sum(-1, keepdims=True)
            lse = np.where(sums > 0, np.log(sums) + largest, -np.inf)[..., 0]
        terms = terms / np.where(sums > 0, sums, 1)
        return np.einsum("bnts,bsnh->btnh", terms, value), lse.swapaxes(1, 2)

    def assert_matches(self, found: Any) -> None:
        (out, lse), (wanted, wanted_lse) = found, self.wanted()
        error = out.astype(np.float64) - wanted
        if self.dtype == "float32":
            assert np.linalg.norm(error) <= 5e-6 * np.linalg.norm(wanted)
        else:
            # Probabilities, the outputs of the parts and the result are rounded.
            eps = float(ml_dtypes.finfo(jnp.dtype(self.dtype)).eps)
            assert abs(error).max() <= 1.5 * eps * np.abs(wanted).max()
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)


STEPS = [
    Step(None),
    Step((1024, 300)),  # a part without keys, and one with some
    Step((0, 1)),
    Step((7, 600), rows=3, heads=(4, 2), dtype="float16", soft_cap=2.0),
    Step(None, columns=521, heads=(3, 1)),  # a prime
    Step((512, 100), columns=512, dims=(264, 520), dtype="float32"),
    Step((40, 2000), columns=2048, heads=(70, 1), dims=(576, 512)),
]


def emulated(step: Step, arch: str) -> Any:
    """Runs in the process of ``machine``."""
    import emulator

    emulator.configure(arch, multiprocessors=5, seed=1)
    return step.found()


@pytest.mark.rotating(5)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_emulated_kernels(step, arch, machine):
    step.assert_matches(machine.submit(emulated, step, arch).result(timeout=600))


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_kernels(step):
    step.assert_matches(step.found("cuda"))


def test_a_row_that_is_not_a_number_stays_so():
    """A part returns NaN for a row whose query has one."""
    split = few_rows.Split(batch=1, rows=2, heads=1, key_heads=1, parts=2, part_keys=256)
    out = jnp.array([[jnp.nan, 1.0], [jnp.nan, 3.0]], jnp.bfloat16).reshape(2, 2, 1, 1)
    lse = jnp.array([[jnp.nan, 0.0], [jnp.nan, 0.0]], jnp.float32).reshape(2, 2, 1)
    merged, total = split.merged(out, lse)
    np.testing.assert_array_equal(np.asarray(merged, np.float32).ravel(), [np.nan, 2.0])
    np.testing.assert_allclose(np.asarray(total).ravel(), [np.nan, np.log(2)], rtol=1e-6)
