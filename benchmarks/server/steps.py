"""The measured steps of an inference server, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from programs.cells import Cell

ELEMENT_BYTES = 2
"""bfloat16"""


@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens of many sequences, whose keys and values are cached."""

    group: str
    lengths: tuple[int, ...]
    """The number of tokens of each sequence, the new ones included."""
    counts: tuple[int, ...]
    """The number of new tokens of each sequence, which are its last ones."""
    heads: int
    key_heads: int
    calls: tuple[str, ...]
    """Names of ``calls.CALLS``, or of peers: ``flash_mla``, or those of ``peers.PEERS``, which read
    contiguous keys.
    """
    head_dim: int = 128
    value_dim: int = 128
    is_latent: bool = False
    """The values are the first columns of the keys."""
    label: str | None = None

    @property
    def name(self) -> str:
        """A readable name, unique among the steps.

        >>> decode()[0].name, latent()[0].name
        ('B16 N32/8 S8192', 'B32 N128 S4096')
        """
        if self.label is not None:
            return self.label
        heads = f"N{self.heads}" if self.is_latent else f"N{self.heads}/{self.key_heads}"
        return f"B{len(self.lengths)} {heads} S{max(self.lengths)}"

    @property
    def cell(self) -> Cell:
        """The same step with contiguous keys; raises ``ValueError`` if the sequences differ."""
        if len(set(self.lengths)) > 1 or len(set(self.counts)) > 1:
            raise ValueError(f"expected equal sequences, got {self.lengths} and {self.counts}")
        sizes = (len(self.lengths), self.counts[0], self.lengths[0], self.heads, self.key_heads)
        dims = (self.head_dim, self.value_dim)
        return Cell("decode", *sizes, *dims, causal=self.counts[0] > 1, gradients=False)

    @property
    def key_value_bytes(self) -> int:
        """The bytes of keys and values in bfloat16, each read once.

        >>> decode()[0].key_value_bytes == 2 * 16 * 8192 * 8 * 128 * 2
        True
        """
        columns = self.head_dim if self.is_latent else self.head_dim + self.value_dim
        return sum(self.lengths) * self.key_heads * columns * ELEMENT_BYTES

    @property
    def flops(self) -> float:
        """``2 (H + Hv)`` for each query head and valid pair of a new token and a key.

        >>> ragged()[0].flops > 4 * 2048**2 / 2 * 4 * 32 * 128
        True
        """
        pairs = sum(
            length * count - count * (count - 1) / 2
            for length, count in zip(self.lengths, self.counts, strict=True)
        )
        return 2.0 * self.heads * pairs * (self.head_dim + self.value_dim)


DENSE = ("memeff_cuda", "jax_cudnn", "torch_cudnn", "torch_flash", "fa4")
PAGED = ("pages64", "pages16", "float8", "invariant", "tree")


def decode() -> list[Step]:
    """One new token for each sequence, bound by reading keys and values."""
    shapes = (
        (16, 8192, 32, 8),
        (64, 4096, 64, 8),
        (4, 65536, 32, 8),
        (1, 131072, 64, 8),
        (1, 4096, 32, 8),
        (16, 8192, 32, 1),
    )
    return [
        Step("decode", (length,) * batch, (1,) * batch, heads, key_heads, DENSE + PAGED)
        for batch, length, heads, key_heads in shapes
    ]


def prompts() -> list[Step]:
    """Whole prompts, bound by the tensor cores."""
    names = ("memeff_cuda", "jax_cudnn", "pages64", "pages16")
    return [Step("prompts", (4096,) * 4, (4096,) * 4, 32, 8, names)]


def ragged() -> list[Step]:
    """Decode steps and prompts in one call."""

    def step(steps: int, shortest: int, longest: int, prompts: int, prompt: int) -> Step:
        lengths = tuple(map(int, np.geomspace(shortest, longest, steps))) + (prompt,) * prompts
        return Step(
            "ragged",
            lengths,
            (1,) * steps + (prompt,) * prompts,
            32,
            8,
            ("pages64", "steps", "prompts"),
            label=f"{steps} steps of {shortest} to {longest} tokens, {prompts} x {prompt}",
        )

    return [step(128, 512, 16384, 4, 2048), step(8, 512, 2048, 1, 512)]


def latent() -> list[Step]:
    """Decode steps of multi-head latent attention."""
    shapes = (
        (32, 4096),
        (32, 16384),
        (64, 8192),
        (128, 4096),
        (32, 32768),
        (128, 8192),
        (128, 32768),
    )
    dims: Any = {"head_dim": 576, "value_dim": 512, "is_latent": True}
    calls = ("pages64", "float8", "invariant", "flash_mla")
    steps = [
        Step("latent", (length,) * batch, (1,) * batch, heads, 1, calls, **dims)
        for heads in (128, 16)
        for batch, length in shapes
    ]
    uneven = (65536, *[1024] * 63)
    label = "B64 N128 S65536 and 63 x 1024"
    return [*steps, Step("latent", uneven, (1,) * 64, 128, 1, calls, label=label, **dims)]


def tiny() -> list[Step]:
    """Steps small enough for a CPU: they test the harness, not the speed."""
    dims: Any = {"head_dim": 16, "value_dim": 16}
    peers = ("memeff_xla", "jax_xla", "torch_flash")
    mixed = ("pages64", "steps", "prompts")
    return [
        Step("decode", (64, 64), (1, 1), 4, 2, peers + PAGED, **dims),
        Step("prompts", (40, 40), (40, 40), 4, 2, ("memeff_xla", "pages64", "pages16"), **dims),
        Step("ragged", (70, 9, 40), (1, 1, 40), 4, 2, mixed, label="1 and 40", **dims),
        Step("latent", (70, 9), (1, 1), 16, 1, latent()[0].calls, 32, 16, is_latent=True),
    ]


SETS: dict[str, Callable[[], list[Step]]] = {
    function.__name__: function for function in (decode, prompts, ragged, latent, tiny)
}


def steps(names: str) -> list[Step]:
    """The steps of a comma-separated list of sets.

    >>> len(steps("decode,latent"))
    21
    """
    selected = []
    for name in names.split(","):
        if name not in SETS:
            raise ValueError(f"unknown set of steps {name!r}: expected some of {', '.join(SETS)}")
        selected += SETS[name]()
    return selected
