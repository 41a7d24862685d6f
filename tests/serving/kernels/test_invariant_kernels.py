"""Batch-invariant calls in the kernels: the bits of a token are the same in every batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import TOLERANCES, Case
from paging import Paging, paged_attention


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    del b  # the index of the sequence in the batch
    return score + 0.03 * (h + 1) * (k - q)


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A sequence whose last token several calls compute."""

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

    def calls(self) -> list[Call]:
        """Calls that compute the last token: in a chunk, in a chunk beside others, and in steps, on
        machines with few and with many multiprocessors.
        """
        return [
            Call(self, (150,), (self.length,), 5),
            Call(self, (2, 40, 30), (200, self.length, 30), 5),
            Call(self, (1, 1), (self.length, 7), 5),
            Call(self, (1,), (self.length,), 1),
            Call(self, (1,), (self.length,), 20),
        ]


@dataclasses.dataclass(frozen=True)
class Call:
    """A batch that has the sequence."""

    invariant: Invariant
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    multiprocessors: int

    @property
    def case(self) -> Case:
        return dataclasses.replace(
            self.invariant.case, lengths=self.lengths, counts=self.counts, seed=len(self.counts)
        )

    @property
    def place(self) -> int:
        """The index of the sequence."""
        return self.lengths.index(self.invariant.length)

    def batch(self) -> Paging:
        """A batch in which the sequence has its own queries, keys, values and scales."""
        own, made, place = self.invariant.case.batch(), self.case.batch(), self.place
        count, end = self.counts[place], made.starts[place + 1]
        made.query[end - count : end] = own.query[150 - count : 150]
        for name, scale in (("key_pages", "key_scale"), ("value_pages", "value_scale")):
            for page in range(-(-self.invariant.length // 16)):
                target, source = made.table[place, page], own.table[0, page]
                getattr(made, name)[target] = getattr(own, name)[source]
                if scale in made.scales and made.scales[scale].ndim == 2:
                    made.scales[scale][target] = own.scales[scale][source]
            if scale in made.scales and made.scales[scale].ndim == 1:
                made.scales[scale][:] = own.scales[scale]
        return made

    def lowered(self) -> jax.stages.Lowered:
        made = self.batch()
        features = self.case.arguments() | made.scales
        if "score_mod" in features:
            features["score_mod"] = alibi
        call = jax.jit(
            lambda *arrays, starts: paged_attention(
                *arrays,
                query_starts=starts,
                max_query_length=max(self.counts),
                return_residual=True,
                implementation="cuda",
                batch_invariant=True,
                **features,
            )
        )
        arrays = map(jnp.asarray, made.arguments)
        return call.lower(*arrays, starts=jnp.asarray(made.starts))

    def row(self, lowered: jax.stages.Lowered) -> tuple[np.ndarray, np.ndarray]:
        """The results of the last token of the sequence."""
        made = self.batch()
        arrays = map(jnp.asarray, made.arguments)
        out, lse = lowered.compile()(*arrays, starts=jnp.asarray(made.starts))
        last = made.starts[self.place + 1] - 1
        return np.asarray(out)[last], np.asarray(lse)[last]


def lower(call: Call) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(call.invariant.arch, multiprocessors=call.multiprocessors)
    return call.lowered()


def emulated(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """The results of the last token. Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, call)
    emulator.configure(call.invariant.arch, multiprocessors=call.multiprocessors)
    return call.row(lowered)


INVARIANT = [
    Invariant("sm_80", length=900, dims=(128, 128)),
    Invariant("sm_90a", features=("is_causal", "local_window_size", "logits_soft_cap")),
    Invariant(
        "sm_80", features=("is_causal", "local_window_size", "sinks"), length=700, dims=(128, 128)
    ),
    Invariant("sm_90a", dims=(128, 128), scales=("heads", "pages"), length=600),
    # Each of three warps of a step has one or two segments, and those before the window are masked.
    Invariant(
        "sm_90a", features=("is_causal", "local_window_size", "sinks"), length=1300, dims=(128, 128)
    ),
    Invariant("sm_90a", length=1300, dims=(72, 96)),
    Invariant("sm_80", dtype="float32", features=("is_causal", "sinks")),
    Invariant("sm_90a", features=("is_causal", "score_mod"), length=300),
    Invariant("sm_86", dims=(264, 264), length=300),
]


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all calls before the first one runs."""
    invariants = [call["invariant"] for call in selected if {*call} == {"invariant"}]
    calls = [(call,) for invariant in invariants for call in invariant.calls()]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("invariant", INVARIANT, ids=str)
def test_emulated_bits_do_not_depend_on_the_batch(invariant, machine, assert_close):
    runs = [machine.submit(emulated, call) for call in invariant.calls()]
    found = [run.result(600) for run in runs]
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
    calls = dataclasses.replace(invariant, dtype=dtype).calls()
    assert_equal_bits([call.row(call.lowered()) for call in calls])


def assert_equal_bits(found: Any) -> None:
    (first_out, first_lse), *others = found
    assert np.isfinite(first_lse).all()
    for out, lse in others:
        np.testing.assert_array_equal(out, first_out)
        np.testing.assert_array_equal(lse, first_lse)


@dataclasses.dataclass(frozen=True)
class LongSequence:
    """A sequence that is computed in chunks, beside other sequences, in random pages."""

    dims: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    pool_dtype: str | None = None
    """The dtype of the pool; that of the query by default."""
    length: int = 1500
    features: tuple[str, ...] = ()

    def rows(
        self, rng: np.random.Generator, batch: int, begin: int, end: int, implementation: Any
    ) -> list[np.ndarray]:
        """Output and logsumexp of the tokens [begin, end), the last ones of a call."""
        own = np.random.default_rng(0)
        (h, hv), size, n, k = self.dims, 16, 8, 2
        each = -(-self.length // size)
        table = rng.permutation(batch * each).reshape(batch, each).astype(np.int32)
        place = int(rng.integers(batch))
        pools = []
        for dim in (h, hv):
            # The other sequences have keys of 0, so their scores differ from those of this one.
            pool = np.zeros((batch * each, size, k, dim), np.float32)
            pool[table[place]] = own.standard_normal((each, size, k, dim))
            pools.append(jnp.asarray(pool, self.pool_dtype or self.dtype))
        tokens = own.standard_normal((self.length, n, h))
        counts = rng.integers(0, 9, batch)
        counts[place] = end - begin
        lengths = rng.integers(8, self.length, batch).astype(np.int32)
        lengths[place] = end
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = slice(starts[place], starts[place + 1])
        query = rng.standard_normal((self.length + 8 * batch, n, h))
        query[rows] = tokens[begin:end]
        arrays = (jnp.asarray(query, self.dtype), *pools, table, lengths, starts)
        return [np.asarray(x[rows]) for x in self.call(implementation)(*arrays)]

    @functools.cache  # noqa: B019
    def call(self, implementation: Any) -> Any:
        given = {"local_window_size": (700, 0), "logits_soft_cap": 5.0}

        @jax.jit
        def attention(query: Any, key: Any, value: Any, table: Any, lengths: Any, starts: Any):
            return paged_attention(
                query,
                key,
                value,
                table,
                lengths,
                query_starts=starts,
                max_query_length=self.length,
                batch_invariant=True,
                return_residual=True,
                implementation=implementation,
                **{name: given[name] for name in self.features},
            )

        return attention


SEQUENCES = [
    LongSequence(),
    LongSequence(dims=(64, 64), dtype="float16", features=("local_window_size",)),
    LongSequence(dims=(192, 128), features=("logits_soft_cap",)),
    LongSequence(dims=(256, 256)),
    LongSequence(pool_dtype="float8_e4m3fn"),
    LongSequence(dtype="float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_bits_in_random_batches(sequence, seed):
    """Each seed has ten batches of steps and chunks, with other neighbours and pages."""
    rng = np.random.default_rng(seed)
    whole = sequence.rows(rng, 1, 0, sequence.length, "cuda")
    assert np.isfinite(whole[1]).all()
    for _ in range(10):
        end = int(rng.integers(1, sequence.length + 1))
        begin = max(0, end - int(rng.choice([1, 1, 3, 60, 700])))
        found = sequence.rows(rng, int(rng.choice([1, 3, 24])), begin, end, "cuda")
        for part, expected in zip(found, whole, strict=True):
            np.testing.assert_array_equal(part, expected[begin:end])
