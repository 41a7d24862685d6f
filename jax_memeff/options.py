"""What one attention call is made of: a static part and the arrays, in canonical shapes.

``api.py`` builds both once; everything below it (primitives, blockwise path, kernels) reads them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax

if TYPE_CHECKING:
    from jax_memeff.mask import Mask

Implementation = Literal["cuda", "xla"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call: hashable, and a parameter of the primitives."""

    scale: float
    soft_cap: float | None = None
    dropout_threshold: int = 0
    """T of the dropout contract: an element is kept when its random byte is >= T. 0 is off."""
    precision: Literal["tf32x3", "tf32"] = "tf32x3"
    deterministic_backward: bool = False
    implementation: Implementation | None = None
    """None: the kernels on CUDA, the blockwise path elsewhere."""


class DropoutState(NamedTuple):
    """What the keep bit of an element depends on beside its row and column."""

    key_words: jax.Array
    """uint32[B, 2]: the two words of the Philox key, per batch element."""
    batch_base: jax.Array
    """uint32[B]: ``batch index * number of query heads``."""
    head_index: jax.Array
    """uint32[N]: the query head index added to ``batch_base``."""


class Position(NamedTuple):
    """Where local row 0 and column 0 stand in the global score matrix."""

    query: jax.Array
    """int32[]"""
    key: jax.Array
    """int32[]"""


class Operands(NamedTuple):
    """The arrays of a call; a pytree. None stands for an operand that is absent."""

    query: jax.Array
    """[B, T, N, H]"""
    key: jax.Array
    """[B, S, K, H]"""
    value: jax.Array
    """[B, S, K, Hv]"""
    bias: jax.Array | None
    """[1|B, 1|N, 1|T, 1|S], of the query's dtype or float32"""
    mask: Mask
    dropout: DropoutState | None
    position: Position | None


class Wants(NamedTuple):
    """Which gradients the backward computes; what nobody asks for is not allocated."""

    query: bool
    key: bool
    value: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients in the operands' own shapes and dtypes; None where not wanted."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    bias: jax.Array | None
