"""Mask functions in paged calls: KV blocks that interval arithmetic decides."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import paged_attention

from jax_memeff import Mask

SIZE = 64
"""The page size, a multiple of the tile's keys at head dim 128."""


def _tree(b: Any, h: Any, q: Any, k: Any, first: Any) -> Any:
    return (k < first[b]) | ((q - k) % 2 == 0)


def _window(b: Any, h: Any, q: Any, k: Any, first: Any) -> Any:
    return q - k < 100


def _sinks(b: Any, h: Any, q: Any, k: Any, first: Any) -> Any:
    return (k < 3) | (q - k < 100)


MASKS = {"tree": _tree, "window": _window, "sinks": _sinks}


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step of two sequences with a mask function."""

    mask: str
    tokens: int = 5
    lengths: tuple[int, int] = (1000, 777)
    heads: tuple[int, int] = (8, 2)
    is_invariant: bool = False
    is_opaque: bool = False
    """Whether the mask is written so that no block is decided."""
    spoils: bool = False
    """Whether pages that no query attends to have NaN in their keys and values."""

    def __str__(self) -> str:
        words = [self.mask, f"{self.tokens}of{max(self.lengths)}", "x".join(map(str, self.heads))]
        return "-".join([*words, *(["invariant"] if self.is_invariant else [])])

    def valid(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        first = jnp.asarray(self.lengths) - self.tokens
        found = MASKS[self.mask](b, h, q, k, first)
        # The product of neighbours is even, which bounds do not see.
        return found | ((k * (k + 1)) & 1 == 1) if self.is_opaque else found

    def pools(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Keys and values, and the table."""
        rng = np.random.default_rng(0)
        pages = -(-max(self.lengths) // SIZE)
        table = rng.permutation(2 * pages).reshape(2, pages).astype(np.int32)
        shape = 2 * pages, SIZE, self.heads[1], 128
        pools = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
        for b, length in enumerate(self.lengths if self.spoils else ()):
            q = np.arange(length - self.tokens, length)[:, None]
            attended = np.any(np.asarray(self.valid(b, 0, q, np.arange(pages * SIZE))), axis=0)
            for place in range(length // SIZE):
                if not attended[place * SIZE : (place + 1) * SIZE].any():
                    for pool in pools:
                        pool[table[b, place]] = np.nan
        return pools, table

    def arrays(self) -> list[jax.Array]:
        rng = np.random.default_rng(1)
        query = rng.standard_normal((2, self.tokens, self.heads[0], 128))
        (key, value), table = self.pools()
        arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
        return [*arrays, jnp.asarray(table), jnp.asarray(self.lengths, jnp.int32)]

    def call(self, implementation: Any = "cuda") -> Any:
        return jax.jit(
            functools.partial(
                paged_attention,
                mask=Mask.function(self.valid),
                is_causal=True,
                batch_invariant=self.is_invariant,
                return_residual=True,
                implementation=implementation,
            )
        )

    def run(self, implementation: Any = "cuda") -> list[np.ndarray]:
        """Output and logsumexp."""
        return [np.asarray(x, np.float32) for x in self.call(implementation)(*self.arrays())]


# The mask leaves no block out, so the keys are split in the same way.
BITS = [
    Step("tree"),
    Step("tree", heads=(32, 1)),
    Step("tree", is_invariant=True),
    Step("window", is_invariant=True, lengths=(1000, 300)),
    Step("sinks", is_invariant=True, tokens=1),
]
SPOILED = [
    Step("window", spoils=True),
    Step("sinks", spoils=True),
    Step("sinks", spoils=True, tokens=1, lengths=(4000, 3)),
    Step("window", spoils=True, tokens=8, heads=(8, 1), lengths=(4000, 300)),
]


def lower(step: Step, arch: str) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(arch, multiprocessors=5)
    return step.call().lower(*step.arrays())


def emulated(step: Step, arch: str) -> list[np.ndarray]:
    """Output and logsumexp. Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, step, arch)
    emulator.configure(arch, multiprocessors=5)
    return [np.asarray(x, np.float32) for x in lowered.compile()(*step.arrays())]


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all steps before the first one runs."""
    calls = [(call["step"], call["arch"]) for call in selected if "arch" in call]
    bits = [call["step"] for call in selected if call["step"] in BITS]
    calls += [(own, "sm_90a") for step in dict.fromkeys(bits) for own in both(step)]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


def both(step: Step) -> list[Step]:
    """The step with decided blocks, and without."""
    return [step, dataclasses.replace(step, is_opaque=True)]


def assert_same_bits(step: Step, found: Any, opaque: Any) -> None:
    assert np.isfinite(found[1]).all(), step
    for decided, tested in zip(found, opaque, strict=True):
        np.testing.assert_array_equal(decided, tested)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("step", BITS, ids=str)
def test_emulated_decisions_change_no_bit(step, machine):
    found = [machine.submit(emulated, own, "sm_90a") for own in both(step)]
    assert_same_bits(step, *(run.result(600) for run in found))


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("step", SPOILED, ids=str)
def test_emulated_steps_leave_out_blocks(step, arch, machine, assert_close):
    """NaN of values would reach the output through a probability of 0."""
    found = machine.submit(emulated, step, arch).result(600)
    assert_close(found, dataclasses.replace(step, spoils=False).run("xla"), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("step", BITS, ids=str)
def test_decisions_change_no_bit(step):
    assert_same_bits(step, *(own.run() for own in both(step)))


@pytest.mark.gpu
@pytest.mark.parametrize("step", SPOILED, ids=str)
def test_steps_leave_out_blocks(step, assert_close):
    clean = dataclasses.replace(step, spoils=False)
    assert_close(step.run(), clean.run("xla"), 2e-2)
