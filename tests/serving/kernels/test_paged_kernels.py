"""Paged keys in the kernels: on the emulated machine, and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import Paging, answer, paged_attention, paging, quantized

from jax_memeff import Mask
from jax_memeff.codegen import strategy

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
CAP = 2.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch. ``features`` are names of the arguments that it has."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bfloat16"
    features: tuple[str, ...] = ("is_causal",)
    is_missing: bool = False
    """Whether the pool lacks a page of every sequence with two."""
    query_rows: strategy.QueryRows | str | None = "chosen"
    """The strategy, if it is not that of the sizes."""
    scales: tuple[str, str] | None = None
    """The layouts of the scales of a float8 pool; None if the pool has the query's dtype."""
    seed: int = 0
    is_latent: bool = False

    def __str__(self) -> str:
        sizes = f"{len(self.lengths)}x{max(self.counts)}of{max(self.lengths)}"
        words = [sizes, f"pages{self.page_size}", "x".join(map(str, (*self.heads, *self.dims)))]
        words += [self.dtype, *self.features, *(["missing"] if self.is_missing else [])]
        words += ["latent"] if self.is_latent else []
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
            is_latent=self.is_latent,
        )
        if self.scales:
            made = quantized(made, self.scales, rng)
        if self.is_missing:
            gone = np.flatnonzero(made.lengths > self.page_size)
            made.table[gone, 1] = rng.choice([-1, len(made.key_pages), 2**31 - 1], len(gone))
        return made

    @property
    def sinks(self) -> np.ndarray:
        return np.linspace(-1, 1, self.heads[0]).astype(np.float32)

    @property
    def lists(self) -> np.ndarray:
        """KV blocks of 16 columns for each 4 rows of the user's."""
        q_blocks = -(-max(self.counts) // 4)
        shape = len(self.lengths), self.heads[0], q_blocks, 4
        lists = np.random.default_rng(self.seed).integers(-1, max(self.lengths) // 16 + 1, shape)
        lists[:, :, ::2, 0] = 0
        return lists

    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"is_causal": "is_causal" in self.features}
        choices = {
            "logits_soft_cap": CAP,
            "local_window_size": (20, 3),
            "sinks": self.sinks,
            "score_mod": lambda s, b, h, q, k: s + (0.01 * b + 0.03 * h) * (k - q),
            "mask": Mask.function(lambda b, h, q, k: (q - k) % 3 != h % 3),
        }
        if "kv_blocks" in self.features:
            given["mask"] = Mask.kv_blocks(self.lists, block_size=(4, 16))
        if self.is_latent:
            given["value_dim"] = self.dims[1]
        return given | {name: choices[name] for name in self.features if name in choices}

    def lowered(self, made: Paging) -> jax.stages.Lowered:
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
                    implementation="cuda",
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
                found &= (k >= q - 20) & (k <= q + 3)
            if "mask" in self.features:
                found &= (q - k) % 3 != h % 3
            if "kv_blocks" in self.features:
                row = q - (made.lengths[b] - made.counts[b])
                found &= (self.lists[b][h, row // 4] == k[..., None] // 16).any(-1)
            if self.is_missing and made.lengths[b] > self.page_size:
                found &= k // self.page_size != 1
            return found

        sinks = self.sinks if "sinks" in self.features else None
        return answer(made, modified=modified, valid=valid, sinks=sinks)


DECODE = Case((100, 17, 1, 0), (1, 1, 1, 1))
RAGGED = Case((120, 48, 200, 3), (100, 1, 130, 5))
MIXED = Case((100, 400, 30, 1, 0, 150), (1, 1, 1, 1, 1, 70))  # decode steps and a prompt
EMULATED = [
    ("sm_80", DECODE),
    ("sm_80", MIXED),
    ("sm_90a", dataclasses.replace(MIXED, features=("sinks", "score_mod"), is_missing=True)),
    ("sm_80", dataclasses.replace(DECODE, is_missing=True, page_size=32, query_rows="16")),
    ("sm_80", dataclasses.replace(RAGGED, features=("local_window_size", "sinks"), page_size=48)),
    ("sm_80", dataclasses.replace(RAGGED, dtype="float32", is_missing=True)),
    ("sm_80", dataclasses.replace(DECODE, dims=(36, 44), query_rows=None)),  # rows of 8 bytes
    ("sm_75", dataclasses.replace(DECODE, dtype="float16")),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows=None, is_missing=True)),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows=None, page_size=128, dims=(128, 128))),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows="consumer_groups", page_size=80)),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows="64", features=("is_causal", "mask"))),
    ("sm_80", dataclasses.replace(RAGGED, features=("is_causal", "kv_blocks"))),
    (
        "sm_90a",
        dataclasses.replace(
            RAGGED, query_rows=None, features=("is_causal", "score_mod", "logits_soft_cap")
        ),
    ),
    ("sm_80", dataclasses.replace(MIXED, dims=(320, 264), is_missing=True)),
    (
        "sm_86",
        dataclasses.replace(
            RAGGED, dims=(264, 300), features=("is_causal", "sinks", "local_window_size")
        ),
    ),
    ("sm_80", dataclasses.replace(DECODE, dims=(276, 276), dtype="float32", page_size=48)),
    ("sm_90a", dataclasses.replace(MIXED, scales=("heads", "heads"))),
    ("sm_80", dataclasses.replace(DECODE, scales=("none", "none"), dtype="float16")),
    (
        "sm_90a",
        dataclasses.replace(
            DECODE, scales=("pages", "pages"), dims=(128, 192), page_size=32, is_missing=True
        ),
    ),
    (
        "sm_80",
        dataclasses.replace(
            RAGGED,
            scales=("pages", "heads"),
            dims=(80, 48),
            features=("is_causal", "sinks", "score_mod", "mask"),
        ),
    ),
    ("sm_86", dataclasses.replace(RAGGED, scales=("heads", "pages"), dims=(256, 256))),
    ("sm_75", dataclasses.replace(DECODE, scales=("heads", "pages"), dtype="float16")),
]


def lower(case: Case, arch: str) -> jax.stages.Lowered:
    """For the process of ``machine``."""
    emulator.configure(arch, multiprocessors=5)
    return case.lowered(case.batch())


def emulated(case: Case, arch: str) -> Any:
    """For the process of ``machine``."""
    lowered = emulator.lowered(lower, case, arch)
    emulator.configure(arch, multiprocessors=5)
    return case.found(case.batch(), lowered)


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """The programs of all cases are lowered before the first runs."""
    calls = [(call["case"], call["arch"]) for call in selected if {"case", "arch"} <= {*call}]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("arch", "case"), EMULATED, ids=str)
def test_emulated_kernels(arch, case, machine, assert_close):
    found = machine.submit(emulated, case, arch).result(timeout=600)
    assert_matches(found, case, assert_close)


def assert_matches(found: Any, case: Case, assert_close: Any) -> None:
    (out, lse), (want_out, want_lse) = found, case.want(case.batch())
    assert (np.isfinite(lse) == np.isfinite(want_lse)).all()
    assert not out[~np.isfinite(want_lse)].any()  # rows without keys, NaN included
    finite = np.isfinite(want_lse)
    assert_close(out.astype(np.float64), want_out, TOLERANCES[case.dtype])
    assert_close(lse[finite], want_lse[finite], TOLERANCES[case.dtype])


_FEATURES = ("is_causal", "logits_soft_cap", "local_window_size", "sinks", "score_mod", "mask")


def random_cases(seed: int) -> Iterator[Case]:
    """Ragged batches without end."""
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        batch = int(rng.integers(1, 9))
        longest = int(rng.choice([40, 300, 2000]))
        lengths = rng.integers(0, longest, batch)
        most = int(rng.choice([1, 1, 5, 64, 400]))
        counts = rng.integers(0, most + 1, batch)
        lengths[0], counts[0] = longest, most
        key_heads = int(rng.choice([1, 2, 8]))
        case = Case(
            tuple(map(int, lengths)),
            tuple(map(int, counts)),
            page_size=int(rng.choice([16, 32, 48, 64, 128, 256])),
            heads=(key_heads * int(rng.choice([1, 4, 6])), key_heads),
            dims=((64, 64), (128, 128), (128, 128), (192, 128), (40, 72), (256, 256))[
                rng.integers(6)
            ],
            dtype=str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"])),
            features=tuple(name for name in _FEATURES if rng.random() < 0.3),
            is_missing=bool(rng.random() < 0.3),
            seed=number,
        )
        layouts = tuple(map(str, rng.choice(["none", "heads", "pages"], 2)))
        if rng.random() < 0.3 and case.dtype != "float32" and not any(d % 16 for d in case.dims):
            case = dataclasses.replace(case, scales=layouts)
        yield case


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(itertools.islice(random_cases(0), 200)), ids=str)
def test_kernels(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    del b  # the place of the sequence in the batch
    return score + 0.03 * (h + 1) * (k - q)


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A sequence whose last token is computed in several calls."""

    arch: str
    dtype: str = "bfloat16"
    features: tuple[str, ...] = ("is_causal",)
    length: int = 150
    dims: tuple[int, int] = (64, 64)
    scales: tuple[str, str] | None = None

    def __str__(self) -> str:
        return "-".join(map(str, (self.arch, self.dtype, *self.features, self.length, self.dims)))

    @property
    def case(self) -> Case:
        """The sequence alone, with a chunk of 150 queries."""
        return Case(
            (self.length,),
            (150,),
            dtype=self.dtype,
            features=self.features,
            dims=self.dims,
            scales=self.scales,
        )


def rows_of_last_tokens(invariant: Invariant, on_gpu: bool) -> list[Any]:
    """The last token of a sequence: in a chunk, in a chunk beside others, and in steps, on machines
    with few and with many multiprocessors."""
    length, features, case = invariant.length, invariant.features, invariant.case
    own, own_features = case.batch(), {"score_mod": alibi} if "score_mod" in features else {}
    calls = [
        ((150,), (length,), 5),
        ((2, 40, 30), (200, length, 30), 5),
        ((1, 1), (length, 7), 5),
        ((1,), (length,), 1),
        ((1,), (length,), 20),
    ]
    found = []
    for counts, lengths, multiprocessors in calls:
        if not on_gpu:
            emulator.configure(invariant.arch, multiprocessors=multiprocessors)
        others = dataclasses.replace(case, lengths=lengths, counts=counts, seed=len(counts))
        made, place = others.batch(), lengths.index(length)
        end = made.starts[place + 1]
        made.query[end - counts[place] : end] = own.query[150 - counts[place] : 150]
        for name, scale in (("key_pages", "key_scale"), ("value_pages", "value_scale")):
            for page in range(-(-length // 16)):
                target, source = made.table[place, page], own.table[0, page]
                getattr(made, name)[target] = getattr(own, name)[source]
                if scale in made.scales and made.scales[scale].ndim == 2:
                    made.scales[scale][target] = own.scales[scale][source]
            if scale in made.scales and made.scales[scale].ndim == 1:
                made.scales[scale][:] = own.scales[scale]
        call = jax.jit(
            lambda *arrays, starts, most, case=others: paged_attention(
                *arrays,
                query_starts=starts,
                max_query_length=most,
                return_residual=True,
                implementation="cuda",
                batch_invariant=True,
                **case.arguments() | own_features | made.scales,  # noqa: B023
            ),
            static_argnames="most",
        )
        arrays = map(jnp.asarray, made.arguments)
        out, lse = call(*arrays, starts=jnp.asarray(made.starts), most=max(counts))
        found.append((np.asarray(out[end - 1]), np.asarray(lse[end - 1])))
    return found


INVARIANT = [
    Invariant("sm_80", length=900, dims=(128, 128)),
    Invariant("sm_90a", features=("is_causal", "local_window_size", "logits_soft_cap")),
    Invariant(
        "sm_80", features=("is_causal", "local_window_size", "sinks"), length=700, dims=(128, 128)
    ),
    Invariant("sm_90a", dims=(128, 128), scales=("heads", "pages"), length=600),
    Invariant("sm_80", dtype="float32", features=("is_causal", "sinks")),
    Invariant("sm_90a", features=("is_causal", "score_mod"), length=300),
    Invariant("sm_86", dims=(264, 264), length=300),
]


@pytest.mark.parametrize("invariant", INVARIANT, ids=str)
def test_emulated_bits_do_not_depend_on_the_batch(invariant, machine, assert_close):
    found = machine.submit(rows_of_last_tokens, invariant, False).result(600)
    assert_equal_bits(found)
    if "score_mod" not in invariant.features:
        want_out, want_lse = invariant.case.want(invariant.case.batch())
        out, lse = found[0]
        assert_close(out.astype(np.float64), want_out[149], TOLERANCES[invariant.dtype])
        assert_close(lse, want_lse[149], TOLERANCES[invariant.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("invariant", INVARIANT, ids=str)
def test_bits_do_not_depend_on_the_batch(invariant, dtype):
    if invariant.scales and dtype == "float32":
        pytest.skip("kernels read pages of float8 with queries of 16 bits")
    assert_equal_bits(rows_of_last_tokens(dataclasses.replace(invariant, dtype=dtype), True))


def assert_equal_bits(found: Any) -> None:
    (first_out, first_lse), *others = found
    assert np.isfinite(first_lse).all()
    for out, lse in others:
        np.testing.assert_array_equal(out, first_out)
        np.testing.assert_array_equal(lse, first_lse)
