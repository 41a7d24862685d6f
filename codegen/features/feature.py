"""One feature and everything about it. All code that lists features loops over these objects."""

from __future__ import annotations

import abc
import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from ..functions.sums import MOST_STRIPS
from ..launch import CapturedArray, ParamsField

Asked = TypeVar("Asked")
Compiled = TypeVar("Compiled")

Constant = bool | int | str


class CppType(NamedTuple):
    """A type in a kernel's configuration."""

    name: str


Placement = Literal["like query", "like query or replicated", "internal"]

Modified = Literal["scores", "mask", "probabilities"]


class Operand(NamedTuple):
    """An array of a call: one row of the table that serves all code which handles arrays without
    computing on them (jax_memeff/_call/operands.py, jax_memeff/_cuda/custom_call.py).

    Dims are named as in the documentation: B batch, N query heads, K key heads, T queries, S keys,
    H head dim, Hv value dim. ``?`` after a name means "or 1", and ``~`` means "or fewer": batch
    indices share parts of the array, if ``jax.vmap`` does not map it.
    """

    role: str
    """The name of its buffer in the custom call."""
    dims: str
    """The dims of the buffer."""
    packed_dims: str | None = None
    """Its dims if sequences are packed; by default the same, with a batch of sequences."""
    places: tuple[str, ...] = ()
    """Its places in a call's operands, by default ``role``; ``*`` is any place in a tuple. Arrays
    of several places are combined into one buffer, or exclude each other."""
    array_dims: str | None = None
    """The dims of the array before it is made a buffer, if they differ from ``dims``."""
    has_gradient: bool = False
    placement: Placement = "internal"
    """Which shardings of the user's array are accepted. The call makes internal arrays itself."""

    @property
    def broadcast_by_vmap(self) -> bool:
        """Batch indices may share parts of it."""
        return "~" in self.dims


OPERANDS = (
    Operand(
        "query",
        "B T N H",
        "1 query_tokens N H",
        has_gradient=True,
        placement="like query",
    ),
    Operand(
        "key",
        "B~ S K H",
        "1 key_tokens K H",
        has_gradient=True,
        placement="like query",
    ),
    Operand(
        "value",
        "B~ S K Hv",
        "1 key_tokens K Hv",
        has_gradient=True,
        placement="like query",
    ),
)
"""The arrays that any call may have; those of features come with the features."""


class ProblemLike(Protocol):
    """What a feature reads of a ``Problem`` (codegen/problem.py)."""

    @property
    def direction(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def arch(self) -> str: ...
    @property
    def needs_grad(self) -> tuple[str, ...]: ...
    @property
    def is_positional(self) -> bool: ...
    def __getitem__(self, feature: Feature[Asked, Any], /) -> Asked: ...
    def asks(self, feature: Feature[Any, Any], /) -> bool: ...


class KernelTraits(abc.ABC):
    """What a feature reads of a ``Kernel`` (codegen/spec.py), which inherits it."""

    reads_bias_by_elements: ClassVar[bool] = False
    """Lanes load element by element a bias that is not broadcast over rows or columns."""
    sums_common_bias: ClassVar[bool] = True
    """The kernel adds up the gradient of a bias that batch indices or heads share. Otherwise a
    dbias kernel does."""
    sums_function_gradients: ClassVar[bool] = False
    """The kernel sums the gradients of arrays that a score function reads."""
    reads_pages: ClassVar[bool] = False
    """Keys and values may be in pages."""
    reads_float8_pages: ClassVar[bool] = False
    """These may be float8."""
    reads_latent: ClassVar[bool] = False
    """The values are the first columns of the keys."""
    splits_keys: ClassVar[bool] = False
    """A forward splits the keys over CTAs."""
    decides_mask_tiles: ClassVar[bool] = False
    """The kernel itself classifies the tiles of a mask function without a block mask."""

    @abc.abstractmethod
    def adds_across_blocks(self, problem: ProblemLike) -> bool:
        """Whether several CTAs add to a gradient in an order that only waiting can fix. Sums of dk,
        dv and full bias gradients have a fixed order anyway.
        """

    def adds_score_function(self, spec: Any) -> bool:
        """Whether the score function needs no more registers for each score, because it only adds
        a number that is the same along a diagonal: in the products of the scores, as part of the
        exponents, or from shared memory.
        """
        return False

    def strips_of_sums(self, arch: str) -> int:
        """How many gradients of captured arrays may be summed through shared memory."""
        return MOST_STRIPS


class TileLike(Protocol):
    """What a feature reads of a tile."""

    @property
    def key(self) -> int: ...
    @property
    def masks(self) -> tuple[str, ...]: ...


class SpecLike(Protocol):
    """What a feature reads of a ``KernelSpec`` (codegen/spec.py)."""

    @property
    def direction(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kernel(self) -> KernelTraits: ...
    @property
    def tile(self) -> TileLike: ...
    @property
    def bias_element(self) -> str: ...
    @property
    def tma_bias(self) -> bool: ...
    @property
    def captured_arrays(self) -> tuple[CapturedArray, ...]: ...
    def __getitem__(self, feature: Feature[Any, Compiled], /) -> Compiled: ...


class SupportRow(NamedTuple):
    """A row of the support table: a kernel has to exist for each of ``problems``."""

    title: str
    problems: tuple[Mapping[str, Any], ...]


class Feature(Generic[Asked, Compiled]):
    """A feature: something that a call may ask for besides attention itself. ``Asked`` is the type
    of its value in a problem, ``Compiled`` the type of its value in a kernel.

    Subclasses override what differs from a feature that changes no kernel. "It" and "its" in the
    descriptions below refer to the feature.
    """

    name: str
    """Its name in a problem."""
    title: str
    """Its name in sentences."""
    off: Asked
    """Its value in a problem without it."""
    together: Asked
    """Its value if all features are on at once."""
    alone: tuple[Mapping[str, Any], ...] = ()
    """The problems with only this feature that ``build --all`` compiles, one for each of its
    forms.
    """
    operands: tuple[Operand, ...] = ()
    """The arrays that it adds to a call."""
    per_head: bool = False
    """A tile with it has rows of one query head: it differs between heads that share a key head, or
    its random bits come in 16x16 blocks."""
    numbers: tuple[str, ...] = ()
    """The names of its run-time numbers, words of 32 bits that reach kernels as ``ParamsField``."""
    has_block_mask: bool = False
    """It is an array that lets a kernel skip tiles of scores."""
    modifies: Modified | None = None
    """The values that it changes in a main loop. That takes registers, so each tile declares
    whether it has them: ``modifiers`` of ``codegen/kernels/common/base.py``."""
    positional: bool = False
    """It counts from the global positions of row 0 and column 0."""
    axes: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Names and values of its axes in the test matrix (tests/support/case_matrix.py)."""
    support: tuple[SupportRow, ...] = ()

    def separates_heads(self, problem: ProblemLike) -> bool:
        """Whether a tile of a forward for this problem has rows of one query head only."""
        return self.per_head and problem.asks(self)

    def needs_block_mask(self, compiled: Compiled) -> bool:
        """Whether a kernel needs a block mask for it."""
        return self.has_block_mask and bool(compiled)

    def check(self, asked: Asked) -> None:
        """Raises ``ValueError`` if no problem can have this value."""

    def words(self, asked: Asked) -> str:
        """Its part of the one-line description of a problem."""
        return self.name

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> Compiled:
        """The value that ``kernel`` is compiled for."""
        raise NotImplementedError

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        """Its lines of the kernel's configuration."""
        return {}

    def source(self, spec: SpecLike) -> str:
        """C++ between the include and the configuration of the source."""
        return ""

    def captured_arrays(self, spec: SpecLike) -> tuple[CapturedArray, ...]:
        """Its operands that reach a kernel in the table of arrays (``ArrayTable``)."""
        return ()

    def params_fields(self, spec: SpecLike) -> tuple[ParamsField, ...]:
        """The fields of the kernel's first parameter that it fills."""
        return ()

    def tag(self, compiled: Compiled, kernel: KernelTraits) -> str:
        """Its word in the kernel's name."""
        return ""

    def gradient_tag(self, compiled: Compiled) -> str:
        """Its word after the gradients in the kernel's name."""
        return ""

    def sort_key(self, compiled: Compiled) -> tuple:
        """Its part of the sort key of kernels."""
        return ()

    def family_reasons(self, problem: ProblemLike) -> list[str]:
        """Reasons why no kernel serves the problem."""
        return []

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        """Reasons why a kernel does not serve the problem."""
        return []

    def needs_registers(self, spec: SpecLike) -> bool:
        """Whether a kernel with this modifier needs those registers."""
        return bool(spec[self])

    def asked_by(self, call: Any) -> Asked:
        """Its value for a call, as ``jax_memeff._cuda.problem.KernelCall`` describes it."""
        raise NotImplementedError

    def number_values(self, call: Any) -> tuple[int, ...]:
        """Its ``numbers`` for a call, as 32-bit words."""
        return ()

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Adds its flags to ``python -m jax_memeff explain`` and ``build``."""

    def from_flags(self, flags: argparse.Namespace) -> Asked:
        """Its value for these flags."""
        return self.off


class Flag(Feature[bool, bool]):
    """A feature that is on or off, and changes the kernel with one constant.

    ``asked_by`` determines whether a call asks for it. ``flag`` is its option on the command line,
    by default its name.
    """

    off = False

    def __init__(
        self,
        name: str,
        title: str,
        *,
        constant: str,
        tag: str,
        flag: str = "",
        asked_by: Any,
        modifies: Modified | None = None,
        positional: bool = False,
        together: bool = True,
        operands: tuple[Operand, ...] = (),
        per_head: bool = False,
        has_block_mask: bool = False,
        values: tuple[Any, ...] = (),
        support: str = "",
    ):
        self.name, self.title, self.together = name, title, together
        self._constant, self._tag, self._asked_by = constant, tag, asked_by
        self._flag = flag or name
        self.modifies, self.positional = modifies, positional
        self.operands, self.per_head, self.has_block_mask = operands, per_head, has_block_mask
        self.axes = ((name, values),) if values else ()
        self.alone = ({name: True},)
        self.support = (SupportRow(support or title, ({name: True},)),)

    def check(self, asked: bool) -> None:
        expect_one_of(self.name, asked, (False, True))

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> bool:
        return problem[self]

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        return {self._constant: spec[self]}

    def tag(self, compiled: bool, kernel: KernelTraits) -> str:
        return self._tag if compiled else ""

    def sort_key(self, compiled: bool) -> tuple:
        return (compiled,)

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        if spec[self] == self.compiled(problem, spec.kernel):
            return []
        return [f"it is compiled {'with' if spec[self] else 'without'} {self.title}"]

    def asked_by(self, call: Any) -> bool:
        return self._asked_by(call)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        flag = f"--{self._flag.replace('_', '-')}"
        parser.add_argument(flag, action="store_true", help=self.support[0].title)

    def from_flags(self, flags: argparse.Namespace) -> bool:
        return getattr(flags, self._flag)


def at_least(least: int) -> Callable[[str], int]:
    """The type of a command-line argument that is an integer of at least ``least``.

    >>> at_least(1)("64")
    64
    """

    def integer(text: str) -> int:
        try:
            if (number := int(text)) >= least:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")

    return integer


def expect_one_of(name: str, value: Any, legal: Collection[Any]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``legal``."""
    if value not in legal:
        names = ", ".join(map(repr, legal))
        raise ValueError(f"expected {name} to be one of {names}, got {value!r}")
