"""Ragged batches of paged calls for the tests of kernels, with their expected results."""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
from paging import Paging, answer, paged_attention, paging, quantized

from jax_memeff import Mask
from jax_memeff.codegen import strategy

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
CAP = 2.0
WINDOW = (20, 3)


TREE = np.tril(np.random.default_rng(0).random((12, 12)) < 0.4) | np.eye(12, dtype=bool)
"""The drafted tokens that each one attends to."""


def _tree(first: Any, tree: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    own, other = ((x - first).clip(0, len(tree) - 1) for x in (q, k))
    return (k < first) | tree[own, other] & (k <= q)


DECIDED = {
    "tree": _tree,
    "prefix": lambda first, tree, b, h, q, k: (k < 40 + 70 * b) | (k <= q - 50),
    "sliding": lambda first, tree, b, h, q, k: (q - k < 30 + 50 * h) & (k <= q),
    "sinks and window": lambda first, tree, b, h, q, k: (k < 5) | (abs(q - k - 20) < 40),
    "none": lambda first, tree, b, h, q, k: (k > 10**6) & (q >= 0),
}
"""Mask functions of which most tiles are decided, by the first new position of a sequence."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch. ``features`` are the names of its arguments."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bfloat16"
    features: tuple[str, ...] = ("is_causal",)
    is_missing: bool = False
    """Whether the pool lacks a page of every sequence that has two."""
    query_rows: strategy.QueryRows | str | None = "chosen"
    """The strategy, if the sizes do not choose it."""
    scales: tuple[str, str] | None = None
    """The layouts of the scales of a float8 pool, or None if the pool has the query's dtype."""
    seed: int = 0
    is_latent: bool = False
    is_exact: bool = False
    """Whether the pool has no spare page, so that memcheck detects reads beyond the last one."""
    frees_pages: bool = False
    """Whether keys, values and scales that come before the window of every query are NaN."""

    def __str__(self) -> str:
        sizes = f"{len(self.lengths)}x{max(self.counts)}of{max(self.lengths)}"
        words = [sizes, f"pages{self.page_size}", "x".join(map(str, (*self.heads, *self.dims)))]
        words += [self.dtype, *self.features, *(["missing"] if self.is_missing else [])]
        words += ["latent"] if self.is_latent else []
        words += ["exact"] if self.is_exact else []
        words += ["freed"] if self.frees_pages else []
        words += ["float8", *self.scales] if self.scales else []
        return "-".join([*words, str(self.query_rows), f"seed{self.seed}"])

    def batch(self) -> Paging:
        rng = np.random.default_rng(self.seed)
        made = paging(
            rng,
            self.lengths,
            self.counts,
            page_size=self.page_size,
            heads=self.heads,
            dims=self.dims,
            gap=3,
            dtype=jnp.dtype(self.dtype),
            max_pages=-(-max(self.lengths) // self.page_size) + 1,
            spare_pages=0 if self.is_exact else 2,
            is_latent=self.is_latent,
        )
        if self.scales:
            made = quantized(made, self.scales, rng)
        if self.frees_pages:
            self.free(made)
        if self.is_missing:
            gone = np.flatnonzero(made.lengths > self.page_size)
            made.table[gone, 1] = rng.choice([-1, len(made.key_pages), 2**31 - 1], len(gone))
        return made

    def free(self, made: Paging) -> None:
        """Overwrites what comes before the windows: whole pages and the first rows of another."""
        for row, length, count in zip(made.table, made.lengths, made.counts, strict=True):
            first = max(int(length) - min(int(count), int(length)) - WINDOW[0], 0)
            pages, rows = divmod(first, self.page_size)
            for pool in (made.key_pages, made.value_pages):
                pool[row[:pages]] = np.nan
                if rows:
                    pool[row[pages], :rows] = np.nan
            for scale in made.scales.values():
                if scale.ndim == 2:
                    scale[row[:pages]] = np.nan

    @property
    def sinks(self) -> np.ndarray:
        return np.linspace(-1, 1, self.heads[0]).astype(np.float32)

    @property
    def lists(self) -> np.ndarray:
        """Lists of KV blocks of 16 columns for Q blocks of 4 rows."""
        q_blocks = -(-max(self.counts) // 4)
        shape = len(self.lengths), self.heads[0], q_blocks, 4
        lists = np.random.default_rng(self.seed).integers(-1, max(self.lengths) // 16 + 1, shape)
        lists[:, :, ::2, 0] = 0
        return lists

    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"is_causal": "is_causal" in self.features}
        choices = {
            "logits_soft_cap": CAP,
            "local_window_size": WINDOW,
            "sinks": self.sinks,
            "batch_invariant": True,
            "score_mod": lambda s, b, h, q, k: s + (0.01 * b + 0.03 * h) * (k - q),
            "mask": Mask.function(lambda b, h, q, k: (q - k) % 3 != h % 3),
        }
        if decided := [name for name in self.features if name in DECIDED]:
            function, kept = DECIDED[decided[0]], jnp.asarray(self.counts)
            ends = jnp.asarray(self.lengths)
            given["mask"] = Mask.function(
                lambda b, h, q, k: function(ends[b] - kept[b], jnp.asarray(TREE), b, h, q, k)
            )
        if "kv_blocks" in self.features:
            given["mask"] = Mask.kv_blocks(self.lists, block_size=(4, 16))
        if self.is_latent:
            given["value_dim"] = self.dims[1]
        return given | {name: choices[name] for name in self.features if name in choices}

    def lowered(self, made: Paging, implementation: str = "cuda") -> jax.stages.Lowered:
        chosen = (
            strategy.using()
            if self.query_rows == "chosen"
            else strategy.using(
                forward=strategy.Strategy(query_rows=self.query_rows)  # type: ignore[arg-type]
            )
        )
        with chosen:
            call = jax.jit(
                lambda *arrays: paged_attention(
                    *arrays,
                    query_starts=jnp.asarray(made.starts),
                    max_query_length=max(self.counts),
                    return_residual=True,
                    implementation=implementation,
                    **self.arguments(),
                    **made.scales,
                )
            )
            return call.lower(*jax.tree.map(jnp.asarray, made.arguments))

    def found(self, made: Paging, lowered: jax.stages.Lowered | None = None) -> Any:
        run = (lowered or self.lowered(made)).compile()
        return jax.tree.map(np.asarray, run(*jax.tree.map(jnp.asarray, made.arguments)))

    def want(self, made: Paging) -> Any:
        def modified(scores: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if "logits_soft_cap" in self.features:
                scores = CAP * np.tanh(scores / CAP)
            return (
                scores + (0.01 * b + 0.03 * h) * (k - q) if "score_mod" in self.features else scores
            )

        def valid(b: Any, h: Any, q: Any, k: Any) -> Any:
            found = (k >= 0) & (q >= 0) & (h >= 0)
            if "is_causal" in self.features:
                found &= k <= q
            if "local_window_size" in self.features:
                found &= (k >= q - WINDOW[0]) & (k <= q + WINDOW[1])
            if "mask" in self.features:
                found &= (q - k) % 3 != h % 3
            for name in self.features:
                if name in DECIDED:
                    found &= DECIDED[name](made.lengths[b] - made.counts[b], TREE, b, h, q, k)
            if "kv_blocks" in self.features:
                row = q - (made.lengths[b] - made.counts[b])
                found &= (self.lists[b][h, row // 4] == k[..., None] // 16).any(-1)
            if self.is_missing and made.lengths[b] > self.page_size:
                found &= k // self.page_size != 1
            return found

        sinks = self.sinks if "sinks" in self.features else None
        return answer(made, modified=modified, valid=valid, sinks=sinks)


def assert_matches(found: Any, case: Case, assert_close: Any) -> None:
    (out, lse), (want_out, want_lse) = found, case.want(case.batch())
    assert (np.isfinite(lse) == np.isfinite(want_lse)).all()
    assert not out[~np.isfinite(want_lse)].any()  # rows without keys are 0, not NaN
    finite = np.isfinite(want_lse)
    assert_close(out.astype(np.float64), want_out, TOLERANCES[case.dtype])
    assert_close(lse[finite], want_lse[finite], TOLERANCES[case.dtype])


def lower(case: Case, arch: str) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(arch, multiprocessors=5)
    return case.lowered(case.batch())


def emulated(case: Case, arch: str) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case, arch)
    emulator.configure(arch, multiprocessors=5)
    return case.found(case.batch(), lowered)
