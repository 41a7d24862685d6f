"""What is asked of a kernel, before any kernel is chosen."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jax_memeff.codegen import arch as archs

Direction = Literal["forward", "backward"]
Dtype = Literal["f16", "bf16", "f32", "tf32", "f64"]

DIRECTIONS = ("forward", "backward")
DTYPE_BYTES: dict[Dtype, int] = {"f16": 2, "bf16": 2, "f32": 4, "tf32": 4, "f64": 8}
DTYPES = tuple(DTYPE_BYTES)
F32_DTYPES = ("f32", "tf32")
MASKS = frozenset({"causal", "window", "query_lengths", "key_lengths", "segments", "boolean"})
BIASES = (None, "16", "32")
QUERY_ROWS = (None, "16", "64", "consumer_groups")
BIAS_LAYOUTS = ("full", "shared", "columns", "rows")
GRADIENTS = ("query", "key", "value", "bias")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One feature set on one architecture; batch, sequence lengths and heads are run-time matters.

    ``dtype`` is that of query, key and value; f32 has two names, because kernels differ in how they
    multiply it: ``f32`` in three TF32 products, to the precision of f32, and ``tf32`` in one.
    ``masks`` is any subset of ``causal`` (a right bound only), ``window`` (a left bound, with or
    without a right one), ``query_lengths``, ``key_lengths``, ``segments`` and ``boolean``. Top-left
    and bottom-right alignment differ in a run-time offset, so they have no name here.
    ``bias`` is the number of bits of its elements. Its layout is ``rows`` when it is broadcast over
    columns, else ``columns`` when over rows, else ``shared`` when over batch elements or heads,
    else ``full``. ``bias_alignment`` is the number of bytes that each of its rows starts at a
    multiple of. ``varlen`` is packed sequences. ``broadcast_batch`` is that batch elements share
    keys, values, a bias or a boolean mask, as ``jax.vmap`` makes them where it does not map these;
    it takes no broadcast bias or mask. ``sequence`` never changes a kernel; ``explain`` reports the
    grid with it.
    ``needs_grad`` are the gradients of a backward (all of query, key and value by default).
    ``query_rows`` is set where a forward has few: they fit into a tile of so many rows, or there
    are too few tiles for a GPU, with ``consumer_groups`` of which the keys are not long, either;
    see ``support.query_rows``. ``few_keys`` is the same for the tiles of keys of a backward.

    Raises ``ValueError`` for a value that no problem can have; a possible problem that no kernel
    solves is left to ``select``.

    >>> Problem("forward", "bf16", 128, 128, "sm_90a", masks=frozenset({"causal"})).head_dim
    128
    """

    direction: Direction
    dtype: Dtype
    head_dim: int
    value_dim: int
    arch: str
    sequence: int | None = None
    masks: frozenset[str] = frozenset()
    varlen: bool = False
    broadcast_batch: bool = False
    bias: Literal["16", "32"] | None = None
    bias_layout: Literal["full", "shared", "columns", "rows"] = "full"
    bias_alignment: int = 16
    dropout: bool = False
    soft_cap: bool = False
    deterministic: bool = False
    needs_grad: tuple[str, ...] = ()
    query_rows: Literal["16", "64", "consumer_groups"] | None = None
    few_keys: bool = False

    def __post_init__(self):
        _expect_one_of("direction", self.direction, DIRECTIONS)
        _expect_one_of("dtype", self.dtype, DTYPES)
        _expect_one_of("bias", self.bias, BIASES)
        _expect_one_of("bias_layout", self.bias_layout, BIAS_LAYOUTS)
        _expect_one_of("query_rows", self.query_rows, QUERY_ROWS)
        for mask in sorted(self.masks):
            _expect_one_of("masks", mask, sorted(MASKS))
        for gradient in self.needs_grad:
            _expect_one_of("needs_grad", gradient, GRADIENTS)
        if self.direction == "backward" and not self.needs_grad:
            object.__setattr__(self, "needs_grad", ("query", "key", "value"))
        for name in ("head_dim", "value_dim", "bias_alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} to be at least 1, got {getattr(self, name)}")
        archs.capability(self.arch)

    @property
    def alignment(self) -> int:
        """Bytes, at most 16, that rows of query, key, value and their gradients are multiples of.

        A row begins where it does in an array of its own, or in a slice of a larger one along a
        leading dim, which is a multiple of its size away.

        >>> Problem("forward", "bf16", 128, 100, "sm_80").alignment
        8
        """
        size = DTYPE_BYTES[self.dtype]
        return math.gcd(16, self.head_dim * size, self.value_dim * size)

    def __str__(self) -> str:
        """One line with every input that is not at its default."""
        words = [
            self.direction,
            self.dtype,
            f"head_dim={self.head_dim}",
            f"value_dim={self.value_dim}",
            self.arch,
            *sorted(self.masks),
        ]
        words += [name for name in ("varlen", "broadcast_batch") if getattr(self, name)]
        words += [f"{self.bias}-bit {self.bias_layout} bias"] if self.bias else []
        words += [f"bias_alignment={self.bias_alignment}"] if self.bias_alignment != 16 else []
        words += [name for name in ("dropout", "soft_cap", "deterministic") if getattr(self, name)]
        words += [f"gradients of {', '.join(self.needs_grad)}"] if self.needs_grad else []
        words += [f"alignment={self.alignment}"] if self.alignment != 16 else []
        words += [f"query_rows={self.query_rows}"] if self.query_rows else []
        words += ["few_keys"] if self.few_keys else []
        return ", ".join(words)


def _expect_one_of(name: str, value, legal) -> None:
    if value not in legal:
        names = ", ".join(map(repr, legal))
        raise ValueError(f"expected {name} to be one of {names}, got {value!r}")
