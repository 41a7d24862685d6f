"""Batch-invariant latent attention: the bits of a token are the same in every call."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import paged_attention

from jax_memeff.codegen.features import pages

H, HV = 576, 512
FEATURES = {
    "local_window_size": (300, 0),
    "logits_soft_cap": 5.0,
    "score_mod": lambda score, b, h, q, k: score + 0.003 * (h + 1) * (k - q),
}


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence whose last ``tokens`` tokens several calls compute."""

    length: int
    tokens: int = 30
    heads: int = 16
    features: tuple[str, ...] = ("is_causal",)
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return "-".join(map(str, (self.length, self.heads, self.dtype, *self.features)))

    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"is_causal": "is_causal" in self.features}
        given |= {name: FEATURES[name] for name in self.features if name in FEATURES}
        if "sinks" in self.features:
            given["sinks"] = np.linspace(-1, 1, self.heads).astype(np.float32)
        return given

    def calls(self) -> list[Call]:
        """The first one computes all tokens. Long sequences take every second one."""
        part = max(2, self.tokens // 3)
        calls = [
            Call(self, self.tokens),
            Call(self, self.tokens, slots=0, multiprocessors=3),
            Call(self, 1),
            Call(self, 1, multiprocessors=1, page_size=64),
            Call(self, 1, slots=0, others=((90, 1), (0, 1))),
            # There are slots for some of the sequences.
            Call(self, 1, slots=3, others=((700, 1), (1490, 2), (2600, 0)), multiprocessors=9),
            # The tiles of a step are in a batch whose longest sequence has more queries and keys.
            Call(self, 1, others=((self.length + 700, part), (5, 5)), multiprocessors=12),
            Call(self, part, others=((130, 0), (self.length + 700, 1)), multiprocessors=7),
            Call(self, part, slots=0, others=((200, 2),), multiprocessors=20, page_size=48),
        ]
        return calls[:: 2 if self.length > 8000 else 1]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that computes the last ``count`` tokens of a sequence.

    ``others`` are the lengths and numbers of queries of other sequences. There is memory for
    ``slots`` results of segments, at most.
    """

    sequence: Sequence
    count: int
    slots: int = 1000
    others: tuple[tuple[int, int], ...] = ()
    multiprocessors: int = 6
    page_size: int = 16

    def arrays(self) -> tuple[Any, ...]:
        """The arguments of the call. Unused pages are NaN, and pages are in random order."""
        sequence, size = self.sequence, self.page_size
        rng = np.random.default_rng(len(self.others) + size)
        own = np.random.default_rng(sequence.length)
        keys = [own.standard_normal((sequence.length, H))]
        queries = [own.standard_normal((sequence.tokens, sequence.heads, H))[-self.count :]]
        for length, count in self.others:
            keys.append(3 * rng.standard_normal((length, H)))
            queries.append(rng.standard_normal((count, sequence.heads, H)))
        order = rng.permutation(len(keys))
        needed = [-(-len(keys[i]) // size) for i in order]
        free = list(rng.permutation(sum(needed) + 2))
        pool = np.full((sum(needed) + 2, size, 1, H), np.nan)
        table = np.full((len(keys), max(needed) + len(self.others)), -7, np.int32)
        for row, i in enumerate(order):
            for page in range(needed[row]):
                table[row, page] = free.pop()
                part = keys[i][page * size : (page + 1) * size]
                pool[table[row, page], : len(part), 0] = part
        query = np.concatenate([queries[i] for i in order])
        starts = np.cumsum([0, *(len(queries[i]) for i in order)]).astype(np.int32)
        lengths = np.array([len(keys[i]) for i in order], np.int32)
        dtype = sequence.dtype
        return jnp.asarray(query, dtype), jnp.asarray(pool, dtype), table, lengths, starts

    def lowered(self) -> jax.stages.Lowered:
        longest = max([self.count, *(count for _, count in self.others)])

        @jax.jit
        def attention(query: Any, pool: Any, table: Any, lengths: Any, starts: Any) -> Any:
            return paged_attention(
                query,
                pool,
                None,
                table,
                lengths,
                value_dim=HV,
                query_starts=starts,
                max_query_length=longest,
                batch_invariant=True,
                return_residual=True,
                implementation="cuda",
                **self.sequence.arguments(),
            )

        with mock.patch.object(pages, "most_segments", lambda _: self.slots):
            return attention.lower(*self.arrays())

    def rows(self, lowered: jax.stages.Lowered) -> tuple[np.ndarray, np.ndarray]:
        """Output and logsumexp of the sequence's own tokens."""
        arrays = self.arrays()
        *_, lengths, starts = arrays
        (place,) = np.flatnonzero(lengths == self.sequence.length)
        out, lse = lowered.compile()(*arrays)
        rows = slice(starts[place], starts[place + 1])
        return np.asarray(out)[rows], np.asarray(lse)[rows]


def lower(call: Call) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure("sm_90a", multiprocessors=call.multiprocessors)
    return call.lowered()


def emulated(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, call)
    # Each call has another order of warps, copies and products.
    emulator.configure("sm_90a", multiprocessors=call.multiprocessors, seed=call.multiprocessors)
    return call.rows(lowered)


SEQUENCES = [
    Sequence(150),
    # A segment of 512 keys ends at the last key, before it, and after it.
    Sequence(1024),
    Sequence(1025, features=("is_causal", "sinks")),
    Sequence(1535, features=()),
    # The first KV block of a window and its last one belong to different consumers, and windows of
    # the tokens of a tile begin in different segments.
    Sequence(830, features=("is_causal", "local_window_size", "sinks")),
    Sequence(600, features=("is_causal", "logits_soft_cap"), dtype="float16"),
    Sequence(600, features=("is_causal", "score_mod"), tokens=9),
    Sequence(300, heads=24, features=("is_causal", "local_window_size")),
    # Segments of 1024 keys, and row tiles that share their keys.
    Sequence(1500, heads=128, tokens=5),
    Sequence(1030, heads=64, tokens=6, features=("is_causal", "local_window_size")),
    # Large groups have segments of 2048 keys from 8192 on.
    Sequence(8192, heads=24, tokens=2),
    Sequence(10300, heads=24, tokens=2),
]


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all calls before the first one runs."""
    sequences = [call["sequence"] for call in selected if {*call} == {"sequence"}]
    calls = [(call,) for sequence in sequences for call in sequence.calls()]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_emulated_bits_do_not_depend_on_the_call(sequence, machine):
    runs = [machine.submit(emulated, call) for call in sequence.calls()]
    assert_equal_bits([run.result(600) for run in runs])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_bits_do_not_depend_on_the_call(sequence, dtype):
    calls = dataclasses.replace(sequence, dtype=dtype).calls()
    assert_equal_bits([call.rows(call.lowered()) for call in calls])


def assert_equal_bits(found: Any) -> None:
    (all_out, all_lse), *others = found
    assert np.isfinite(all_lse).all()
    for out, lse in others:
        np.testing.assert_array_equal(out.view(np.uint16), all_out[-len(out) :].view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), all_lse[-len(lse) :].view(np.uint32))
