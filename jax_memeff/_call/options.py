"""What one attention call is made of: a static part and the arrays, in canonical shapes.

``api.py`` builds both once; everything below it (primitives, blockwise path, kernels) reads them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax

from jax_memeff._call.sequences import Sequences

if TYPE_CHECKING:
    from jax_memeff._call.mask import Mask

Implementation = Literal["cuda", "xla"]


class Divisors(NamedTuple):
    """How operands that have fewer elements than the batch B are shared by it.

    Batch element b reads element ``(b // divisor) % elements``. They come from ``jax.vmap``, which
    makes its axis the outermost part of the batch.
    """

    key: int = 1
    value: int = 1
    bias: int = 1
    booleans: tuple[int, ...] = ()
    """Of the arrays of ``Mask.booleans``; all 1 when empty."""
    bias_gradient: int = 0
    """How many elements of the batch in a row have one gradient of the bias, which is their sum.
    0: all of them where the bias has one element, otherwise each its own."""

    def of_booleans(self, mask: Mask) -> tuple[int, ...]:
        return self.booleans or (1,) * len(mask.booleans)


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
    residual_checkpoint_name: str | None = None
    """The name of output and logsumexp for the policies of ``jax.checkpoint``; None for the names
    that ``derivatives.named`` gives."""
    divisors: Divisors = dataclasses.field(default_factory=Divisors)
    batch_axes: tuple[int, ...] = ()
    """What the batch is made of where ``jax.vmap`` put axes into it: their sizes, outermost first,
    and that of the call's own batch. It matters to sharding alone."""


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
    """The arrays of a call; a pytree. None stands for an operand that is absent.

    With packed ``sequences`` B counts them, while query, key and value are [1, tokens, ...] and
    segment ids [1, tokens]; the mask has no lengths, because the sequences have them.
    """

    query: jax.Array
    """[B, T, N, H]"""
    key: jax.Array
    """[B, S, K, H], or fewer elements: see :class:`Divisors`"""
    value: jax.Array
    """[B, S, K, Hv], likewise"""
    bias: jax.Array | None
    """[1|B, 1|N, 1|T, 1|S], likewise, of the query's dtype or float32"""
    mask: Mask
    dropout: DropoutState | None
    position: Position | None
    sequences: Sequences | None = None

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """(B, N, T, S)"""
        batch, rows, heads, _ = self.query.shape
        if self.sequences is None:
            return batch, heads, rows, self.key.shape[1]
        batch = self.sequences.query_starts.shape[0] - 1
        return batch, heads, self.sequences.longest_query, self.sequences.longest_key


class QkvPackedOperands(NamedTuple):
    """The arrays of a call whose query, key and value are one array: ``Operands`` otherwise."""

    query_key_value: jax.Array
    """[B, T, 3, N, H]"""
    bias: jax.Array | None
    mask: Mask
    dropout: DropoutState | None
    position: Position | None

    def separate(self) -> Operands:
        """The same call with three arrays."""
        query, key, value = (self.query_key_value[:, :, index] for index in range(3))
        return Operands(query, key, value, *self[1:])


class NeedsGrad(NamedTuple):
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


class QkvPackedGradients(NamedTuple):
    """Gradients of ``QkvPackedOperands``; None where not wanted."""

    query_key_value: jax.Array | None
    bias: jax.Array | None
