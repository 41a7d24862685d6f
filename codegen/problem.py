"""The requirements that a call has of a kernel, before any kernel is chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from jax_memeff.codegen import arch as archs

# Relative, as in features/ and spec.py, because pyright finds the package under two names.
from . import features as registry
from .features.feature import Feature, expect_one_of

Direction = Literal["forward", "backward", "tangent"]
Dtype = Literal["f16", "bf16", "f32", "tf32", "f64"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "tangent")
REQUIRED_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
"""The directions in which a call without a kernel is an error. Tangents without a kernel are
computed in plain JAX."""
DTYPE_BYTES: dict[Dtype, int] = {"f16": 2, "bf16": 2, "f32": 4, "tf32": 4, "f64": 8}
DTYPES = tuple(DTYPE_BYTES)
F32_DTYPES = ("f32", "tf32")
GRADIENTS = tuple(operand.role for operand in registry.operands() if operand.has_gradient)

_Asked = TypeVar("_Asked")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One feature set on one architecture. Batch, sequence lengths and heads are run-time values.

    ``dtype`` is that of query, key and value. f32 has two names, because kernels multiply it in two
    ways: ``f32`` with three products of TF32 (on Hopper of float16), to the precision of f32, and
    ``tf32`` with one.
    ``features`` are values by the names of ``features.FEATURES``; a feature that is absent is off.
    ``needs_grad`` are the gradients of a backward, or the operands that have a tangent, by default
    all of query, key and value.
    ``sequence`` never changes a kernel; ``explain`` uses it to report the grid.

    ``problem[feature]`` is the value of a feature. Raises ``ValueError`` for a value that no
    problem can have; a possible problem that no kernel solves is left to ``select``.

    >>> from jax_memeff.codegen.features import MASK, SINKS
    >>> problem = Problem("forward", "bf16", 128, 128, "sm_90a", {"mask": "causal"})
    >>> problem[MASK], problem[SINKS]
    ('causal', False)
    """

    direction: Direction
    dtype: Dtype
    head_dim: int
    value_dim: int
    arch: str
    features: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
    needs_grad: tuple[str, ...] = ()
    sequence: int | None = None
    _values: Mapping[str, Any] = dataclasses.field(init=False, repr=False, compare=False)
    """``features`` by name."""

    def __post_init__(self):
        expect_one_of("direction", self.direction, DIRECTIONS)
        expect_one_of("dtype", self.dtype, DTYPES)
        asked = dict(self.features)
        for name in asked:
            expect_one_of("features", name, registry.BY_NAME)
        if asked.get("keys"):
            asked |= registry.without_lists(asked, self.direction)
        for feature in registry.FEATURES:
            feature.check(asked.setdefault(feature.name, feature.off))
        values = tuple((feature.name, asked[feature.name]) for feature in registry.FEATURES)
        object.__setattr__(self, "features", values)
        object.__setattr__(self, "_values", asked)
        for gradient in self.needs_grad:
            expect_one_of("needs_grad", gradient, GRADIENTS)
        if self.direction != "forward" and not self.needs_grad:
            object.__setattr__(self, "needs_grad", ("query", "key", "value"))
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} to be at least 1, got {getattr(self, name)}")
        archs.capability(self.arch)

    def __getitem__(self, feature: Feature[_Asked, Any]) -> _Asked:
        return self._values[feature.name]

    def asks(self, feature: Feature[Any, Any]) -> bool:
        """Whether the feature is on."""
        return self[feature] != feature.off

    @property
    def is_positional(self) -> bool:
        """Whether a feature counts from the global positions of row 0 and column 0."""
        return any(feature.positional and self.asks(feature) for feature in registry.FEATURES)

    @property
    def alignment(self) -> int:
        """The alignment in bytes, at most 16, of rows of query, key, value and their gradients.

        A row begins in an array of its own, or in a slice of a larger one along a leading dim, at a
        multiple of its size.

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
        ]
        words += [
            feature.words(self[feature]) for feature in registry.FEATURES if self.asks(feature)
        ]
        derivatives = "tangents" if self.direction == "tangent" else "gradients"
        words += [f"{derivatives} of {', '.join(self.needs_grad)}"] if self.needs_grad else []
        words += [f"alignment={self.alignment}"] if self.alignment != 16 else []
        return ", ".join(words)
