"""Lists of keys in the kernels, on the emulated machine and on a GPU: random calls of every kind,
with the sequences and the definition of ``paging.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest

import jax_memeff
from jax_memeff import Mask

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
CAP = 2.0
FORMS = ("padded", "packed", "pages", "ragged pages")
dot_product_attention: Any = jax_memeff.dot_product_attention
varlen_attention: Any = jax_memeff.varlen_attention


@dataclasses.dataclass(frozen=True)
class Call:
    """Sequences whose last tokens have lists of keys."""

    form: Literal["padded", "packed", "pages", "ragged pages"]
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    count: int
    heads: tuple[int, int] = (4, 2)
    has_own_lists: bool = False
    """Whether each key head has lists of its own."""
    dims: tuple[int, int] = (64, 64)
    is_latent: bool = False
    dtype: str = "bfloat16"
    features: tuple[str, ...] = ()
    page_size: int = 16
    is_missing: bool = False
    """Whether the pool lacks a page of every sequence that has two."""
    scales: tuple[str, str] | None = None
    """The layouts of the scales of a float8 pool."""
    seed: int = 0

    def __str__(self) -> str:
        sizes = "x".join(map(str, (*self.heads, *self.dims)))
        words = [self.form.replace(" ", "_"), f"{len(self.lengths)}x{max(self.counts)}", sizes]
        words += [f"{self.count}keys", *(["own"] if self.has_own_lists else []), self.dtype]
        words += ["latent"] if self.is_latent else []
        return "-".join([*words, *self.features, f"seed{self.seed}"])

    @property
    def in_pages(self) -> bool:
        return "pages" in self.form

    @functools.cached_property
    def made(self) -> paging.Paging:
        made = paging.paging(
            np.random.default_rng(self.seed),
            self.lengths,
            self.counts,
            page_size=self.page_size,
            heads=self.heads,
            dims=self.dims,
            gap=0 if self.form == "pages" else 3,
            dtype=jnp.dtype(self.dtype),
            is_latent=self.is_latent,
        )
        if self.scales:
            made = paging.quantized(made, self.scales, np.random.default_rng(self.seed))
        if self.is_missing:
            gone = np.flatnonzero(made.lengths > self.page_size)
            made.table[gone, 1] = np.resize([-1, len(made.key_pages), 2**31 - 1], len(gone))
        return made

    @functools.cached_property
    def lists(self) -> np.ndarray:
        """[tokens, 1|K, count]: repeats, holes, indices of no key, and empty lists."""
        rng, shape = np.random.default_rng(self.seed + 1), (len(self.made.query), self.count)
        shape = shape[0], self.heads[1] if self.has_own_lists else 1, shape[1]
        found = rng.integers(-1, max(self.lengths) + 2, shape).astype(np.int32)
        found[rng.random(shape) < 0.1] = -1
        odd = rng.random(shape) < 0.05
        found[odd] = rng.choice([-(2**31), 2**31 - 1, -2, 10**6], odd.sum())
        found[rng.random(shape[:2]) < 0.1] = -1
        half = rng.random(shape[:2]) < 0.2
        found[..., self.count // 2 :][half] = -1
        return found

    @property
    def sinks(self) -> np.ndarray | None:
        if "sinks" not in self.features:
            return None
        return np.linspace(-1, 1, self.heads[0]).astype(np.float32)

    def valid(self, b: int, h: Any, q: Any, k: Any) -> np.ndarray:
        """The definition: for :func:`paging.answer`."""
        made, heads, rows = self.made, h.size, q.ravel()
        found = np.zeros(np.broadcast_shapes(h.shape, q.shape, k.shape), bool)
        for head, row in np.ndindex(heads, rows.size):
            token = made.starts[b + 1] - made.lengths[b] + rows[row]
            own = self.lists[token, head * self.lists.shape[1] // heads]
            found[head, row] = np.isin(k.ravel(), own)
        if "causal" in self.features:
            found &= k <= q
        if "window" in self.features:
            found &= (k >= q - 20) & (k <= q + 3)
        if "function" in self.features:
            found &= (q - k + b) % 3 != 0
        if self.is_missing and made.lengths[b] > self.page_size:
            found &= k // self.page_size != 1
        return found

    def want(self) -> Any:
        def modified(scores: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if "soft cap" in self.features:
                scores = CAP * np.tanh(scores / CAP)
            return scores * 1.5 + 0.1 * q if "score function" in self.features else scores

        return paging.answer(self.made, valid=self.valid, sinks=self.sinks, modified=modified)

    def settings(self, lists: Any) -> dict[str, Any]:
        mask = Mask.keys(lists)
        if "causal" in self.features:
            mask &= Mask.causal("bottom_right")
        if "window" in self.features:
            mask &= Mask.window(20, 3, "bottom_right")
        settings: dict[str, Any] = {"sinks": self.sinks, "return_residual": True}
        if "soft cap" in self.features:
            settings["logits_soft_cap"] = CAP
        if self.in_pages:  # these are causal by default
            settings["is_causal"] = "causal" in self.features
            settings["batch_invariant"] = "invariant" in self.features
            settings |= self.made.scales
        if self.is_latent:
            settings["value_dim"] = self.dims[1]
        # Rows of calls without pages count from the first new token.
        shift = jnp.asarray(self.lengths) - jnp.asarray(self.counts)
        shift = jnp.zeros_like(shift) if self.in_pages else shift
        if "function" in self.features:
            mask &= Mask.function(lambda b, h, q, k: (q + shift[b] - k + b) % 3 != 0)
        if "score function" in self.features:
            settings["score_mod"] = lambda s, b, h, q, k: s * 1.5 + 0.1 * (q + shift[b])
        return settings | {"mask": mask}

    def arrays(self) -> tuple[Any, ...]:
        """The arguments of :meth:`program`."""
        made = self.made
        if self.in_pages:
            return *made.arguments, self.lists
        if self.form == "packed":
            keys, values = (
                np.concatenate([np.full((2, *x[0].shape[1:]), np.nan, x[0].dtype), *x])
                for x in (made.keys, made.values)
            )
            return made.query, keys, None if self.is_latent else values, self.lists
        query, lists = (self.padded(x) for x in (made.query, self.lists))
        longest = max(self.lengths)
        keys, values = (
            np.stack(
                [
                    np.pad(x, ((0, longest - len(x)), (0, 0), (0, 0)), constant_values=np.nan)
                    for x in own
                ]
            )
            for own in (made.keys, made.values)
        )
        return query, keys, None if self.is_latent else values, np.swapaxes(lists, 1, 2)

    def padded(self, x: np.ndarray) -> np.ndarray:
        """[B, T, ...] of an array [tokens, ...]."""
        found = np.zeros((len(self.counts), max(self.counts), *x.shape[1:]), x.dtype)
        for own, start, count in zip(found, self.made.starts, self.counts, strict=False):
            own[:count] = x[start : start + count]
        return found

    def program(self, *arrays: Any) -> Any:
        *given, lists = arrays
        settings = self.settings(lists)
        made = self.made
        if self.form == "padded":
            lengths = {
                "query_seq_lengths": np.array(self.counts),
                "key_value_seq_lengths": np.array(self.lengths),
            }
            return dot_product_attention(*given, **lengths, **settings)
        if self.form == "packed":
            starts = np.cumsum([2, *self.lengths])
            sizes = max(self.counts), max(self.lengths)
            return varlen_attention(*given, made.starts, starts, *sizes, **settings)
        if self.form == "ragged pages":
            starts = {"query_starts": made.starts, "max_query_length": max(self.counts)}
            return paging.paged_attention(*given, **starts, **settings)
        query, *others = given
        query = query.reshape(len(self.counts), -1, *query.shape[1:])
        settings["mask"] = dataclasses.replace(settings["mask"], key_lists=()) & Mask.keys(
            jnp.swapaxes(lists.reshape(*query.shape[:2], *lists.shape[1:]), 1, 2)
        )
        out, lse = paging.paged_attention(query, *others, **settings)
        return out.reshape(-1, *out.shape[2:]), lse.reshape(-1, *lse.shape[2:])

    def lowered(self) -> jax.stages.Lowered:
        return jax.jit(self.program).lower(*jax.tree.map(jnp.asarray, self.arrays()))

    def found(self, lowered: jax.stages.Lowered | None = None) -> Any:
        run = (lowered or self.lowered()).compile()
        out, lse = jax.tree.map(np.asarray, run(*jax.tree.map(jnp.asarray, self.arrays())))
        if self.form != "padded":
            return out, lse
        tokens = [np.zeros((len(self.made.query), *x.shape[2:]), x.dtype) for x in (out, lse)]
        tokens[1][:] = -np.inf
        for whole, x in zip(tokens, (out, lse), strict=True):
            for own, start, count in zip(x, self.made.starts, self.counts, strict=False):
                whole[start : start + count] = own[:count]
        return tuple(tokens)

    def assert_matches(self, found: Any, assert_close: Any) -> None:
        (out, lse), (want_out, want_lse) = found, self.want()
        finite = np.isfinite(want_lse)
        np.testing.assert_array_equal(np.isfinite(lse), finite)
        assert (lse[~finite] == -np.inf).all() and not out[~finite].any()
        tolerance = TOLERANCES[self.dtype]
        assert_close(out.astype(np.float64), want_out, tolerance)
        assert_close(lse[finite], want_lse[finite], tolerance)


def drawn(index: int) -> tuple[str, Call]:
    """An architecture and a call. There are few kernels among them, because each is compiled."""
    rng = np.random.default_rng(index)
    form = FORMS[index % 4]
    batch = int(rng.integers(1, 6))
    is_latent = index % 3 == 0
    longest, most = (130, 3) if is_latent else (90, 9)
    lengths = rng.integers(0, longest, batch)
    lengths[rng.integers(batch)] = longest
    counts = np.minimum(rng.integers(0, most + 1, batch), lengths)
    counts[rng.integers(batch)] = min(most, lengths.max())
    counts = np.minimum(counts, lengths)
    if form == "pages":
        counts = np.full(batch, most)
        lengths = np.maximum(lengths, most)
    if not counts.any():
        counts[lengths.argmax()] = 1
    arch = "sm_90a" if is_latent else ("sm_80", "sm_90a")[index // 8 % 2]
    masks = ((), ("causal",), ("window",), ("function",), ("causal", "function"))
    features = masks[int(rng.integers(len(masks)))]
    features += (("sinks", "soft cap"), ())[index // 16 % 2]
    count = int(rng.choice([1, 7, 16, 33, longest // 2, longest + 31]))
    heads = [(16, 1), (128, 1), (64, 1)] if is_latent else [(4, 2), (6, 2), (8, 1), (3, 3), (40, 1)]
    return arch, Call(
        form,
        tuple(map(int, lengths)),
        tuple(map(int, counts)),
        count,
        heads=heads[int(rng.integers(len(heads)))],
        has_own_lists=bool(rng.integers(2)),
        dims=(576, 512) if is_latent else (64, 64),
        is_latent=is_latent,
        features=features,
        page_size=int(rng.choice([1, 4, 16, 64])),
        is_missing="pages" in form and bool(rng.integers(2)),
        seed=index,
    )


_LENGTHS, _COUNTS = (100, 45, 0, 7, 70), (5, 3, 0, 1, 9)
OTHERS: list[tuple[str, Call]] = [
    ("sm_90a", Call("padded", _LENGTHS, _COUNTS, 40, (8, 2), True, (128, 128), dtype="float16")),
    ("sm_80", Call("packed", _LENGTHS, _COUNTS, 40, (2, 2), True, (72, 88))),
    ("sm_80", Call("padded", _LENGTHS, _COUNTS, 40, (4, 1), dtype="float32")),
    ("sm_90a", Call("packed", _LENGTHS, _COUNTS, 40, (4, 2), True, dtype="float32")),
    ("sm_90a", Call("padded", _LENGTHS, _COUNTS, 40, (2, 1), dims=(320, 264))),
    ("sm_75", Call("padded", _LENGTHS, _COUNTS, 40, dtype="float16")),
    # A latent call without a latent kernel, which copies the values.
    ("sm_80", Call("padded", _LENGTHS, _COUNTS, 40, (4, 1), dims=(96, 64), is_latent=True)),
    ("sm_90a", Call("padded", _LENGTHS, _COUNTS, 70, (16, 1), dims=(544, 480), is_latent=True)),
    ("sm_80", Call("ragged pages", _LENGTHS, _COUNTS, 40, features=("score function", "causal"))),
    ("sm_90a", Call("padded", _LENGTHS, _COUNTS, 40, features=("score function", "sinks"))),
]
# Results of a batch-invariant call, and pools of float8.
PAGED: Any = {"form": "ragged pages", "lengths": _LENGTHS, "counts": _COUNTS, "count": 300}
LATENT: Any = {**PAGED, "heads": (16, 1), "dims": (576, 512), "is_latent": True}
OTHERS += [
    ("sm_90a", Call(**PAGED, features=("invariant", "sinks"), is_missing=True)),
    ("sm_90a", Call(**LATENT, features=("invariant", "causal"), seed=1)),
    ("sm_80", Call(**PAGED, scales=("heads", "heads"), seed=2)),
    ("sm_90a", Call(**LATENT, scales=("heads", "heads"), seed=3)),
]
CASES = [*OTHERS, *map(drawn, range(240))]


def lower(case: Call, arch: str) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(arch, multiprocessors=5, seed=case.seed)
    return case.lowered()


def emulated(case: Call, arch: str, seed: int | None = None) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case, arch)
    emulator.configure(arch, multiprocessors=5, seed=case.seed if seed is None else seed)
    return case.found(lowered)


@pytest.mark.rotating(12)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("arch", "case"), CASES, ids=str)
def test_emulated_kernels(arch, case, machine, assert_close):
    case.assert_matches(machine.submit(emulated, case, arch).result(timeout=600), assert_close)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(("arch", "case"), CASES[len(OTHERS) : len(OTHERS) + 12], ids=str)
def test_emulated_results_have_the_same_bits_on_every_schedule(arch, case, machine):
    first, other = (machine.submit(emulated, case, arch, seed).result(600) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "case", [case for _, case in CASES[:60]], ids=[str(case) for _, case in CASES[:60]]
)
def test_kernels(case, assert_close):
    case.assert_matches(case.found(), assert_close)
