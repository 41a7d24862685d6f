"""The static part of a call. The arrays are in ``operands``."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jax_memeff._call.scaling import Scaling
from jax_memeff.codegen.functions.program import Program

Implementation = Literal["cuda", "xla"]

RANDOM_BLOCK = 16
"""Random bits are drawn for blocks of scores with this many rows and columns."""


@dataclasses.dataclass(frozen=True)
class Divisors:
    """How the batch indices of a call map to those of operands that have fewer.

    Batch index b reads index ``(b // divisor) % indices`` of the operand. Divisors come from
    ``jax.vmap``, which makes its axis the outermost part of the batch.

    >>> divisors = Divisors((("bias", 4),))
    >>> divisors["bias"], divisors["key"], divisors.of_gradient("bias")
    (4, 1, 0)
    """

    operands: tuple[tuple[str, int], ...] = ()
    """The divisors that are not 1, each with the name of its operand, as ``mask.booleans.0``."""
    gradients: tuple[tuple[str, int], ...] = ()
    """For operands whose first dim may be 1: the number of consecutive batch indices over which
    the gradient is summed. An operand that is not listed has one gradient if its first dim is 1,
    and otherwise one for each batch index."""

    def __getitem__(self, name: str) -> int:
        return dict(self.operands).get(name, 1)

    def of_gradient(self, name: str) -> int:
        """The number of consecutive batch indices per gradient; 0 if the operand is not listed."""
        return dict(self.gradients).get(name, 0)

    @classmethod
    def of(cls, operands: dict[str, int], gradients: dict[str, int]) -> Divisors:
        """Divisors by name, in one normal form, so that equal calls share one program."""
        kept = (name for name in sorted(operands) if operands[name] != 1)
        summed = (name for name in sorted(gradients) if gradients[name])
        return cls(
            tuple((name, operands[name]) for name in kept),
            tuple((name, gradients[name]) for name in summed),
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call: hashable, and a parameter of the primitives."""

    scaling: Scaling
    score_function: Program | None = None
    """The user's function of the scores; its arrays are ``Operands.captured``."""
    dropout_threshold: int = 0
    """T of the dropout contract: an element is kept if its random byte is >= T. 0 is off."""
    precision: Literal["tf32x3", "tf32"] = "tf32x3"
    deterministic_backward: bool = False
    implementation: Implementation | None = None
    """None: the kernels on CUDA, the blockwise path elsewhere."""
    row_maxima: bool = False
    """Whether a forward also returns the largest score of each row."""
    residual_checkpoint_name: str | None = None
    """The name of output and logsumexp for the policies of ``jax.checkpoint``; None means the
    default names of ``vjp.named``."""
    has_whole_rows: bool = True
    """Whether the keys are all keys of each row; a product of a ring has a part of them."""
    latent_dim: int | None = None
    """The number of columns of the keys that are the values, if ``Operands.value`` is None."""
    has_gpu_tiles: bool = False
    """Whether tiles of listed keys have the size for a GPU on the blockwise path."""
    divisors: Divisors = dataclasses.field(default_factory=Divisors)
    batch_axes: tuple[int, ...] = ()
    """The sizes of the axes that ``jax.vmap`` put into the batch, outermost first, and of the
    call's own batch; empty without a vmap. Only sharding reads it."""

    @property
    def kept_scale(self) -> float:
        """The factor by which kept probabilities are scaled."""
        return 256 / (256 - self.dropout_threshold)

    @property
    def position_multiple(self) -> tuple[int, str]:
        """The multiple at which a device's rows and columns begin, and which feature needs it."""
        return (RANDOM_BLOCK, "dropout") if self.dropout_threshold else (1, "")
