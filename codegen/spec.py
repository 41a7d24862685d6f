"""A spec describes one kernel, before its source is generated."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from jax_memeff.codegen import gpu
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.strategy import Sizes, Strategy

from . import features as registry
from .features.feature import Constant, CppType, Feature, KernelTraits, ProblemLike
from .launch import (
    BlockMask,
    CapturedArray,
    EntryPoint,
    ParamsField,
    TensorMap,
    Workspace,
)
from .problem import DIRECTIONS, DTYPE_BYTES, Direction, Problem

SpecDtype = Literal["f16", "bf16", "f32", "tf32"]
Family = Literal["sm90", "sm80"]

SPEC_DTYPES: tuple[SpecDtype, ...] = ("f16", "bf16", "f32", "tf32")
SPEC_GRADIENTS = ("query", "key", "value")
FAMILIES: tuple[Family, ...] = ("sm90", "sm80")
"""In the order of preference."""

_DIRECTION_WORDS: Mapping[Direction, str] = {
    "forward": "fwd",
    "backward": "bwd",
    "tangent": "tangent",
}

_ELEMENTS = {
    "f16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    "f32": "memeff::Tf32x3",
    "tf32": "memeff::Tf32",
}

_Compiled = TypeVar("_Compiled")


class Tile(Protocol):
    """A row of a kernel's table: the attributes that every tile has
    (``kernels/sm80/base.py``, ``kernels/sm90/base.py``).
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def query(self) -> int: ...
    @property
    def key(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def modifiers(self) -> tuple[str, ...]: ...
    @property
    def masks(self) -> tuple[str, ...]: ...
    @property
    def spill_bytes(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...


class Row(NamedTuple):
    """A tile, and the padded head dims that it is tried for."""

    padded_head_dim: int
    padded_value_dim: int
    tile: Tile


@dataclasses.dataclass(frozen=True)
class Kernel(KernelTraits):
    """Everything that is specific to a device kernel. Its module and its device file have the path
    ``stem`` below ``codegen/kernels/``. Two kernels of one class are equal: they have no state.
    """

    stem: ClassVar[str]
    direction: ClassVar[Direction]
    family: ClassVar[Family]
    class_name: ClassVar[str]
    """The device class of the main entry point."""
    header: ClassVar[str | None] = None
    """The path of the device file below ``codegen/kernels/``, by default ``stem``."""
    maps_type: ClassVar[str] = ""
    """The device type of its tensor maps, if it is not that of its direction."""
    own_problems: ClassVar[tuple[tuple[tuple[int, int], Mapping[str, Any]], ...]] = ()
    """Head dims and features that ``closure`` adds because only this kernel serves them."""
    owns_outputs: ClassVar[bool] = False
    """The CTAs that own a result write it, without sums in global memory. A forward always does."""
    moves_unaligned_rows_in_pieces: ClassVar[bool] = False
    """Rows that are not aligned to 16 bytes take registers in the main loop."""
    persistent: ClassVar[bool] = False
    """A grid no larger than the GPU divides all work tiles."""

    @property
    def device_file(self) -> str:
        """The device file as the source includes it."""
        return f"kernels/{self.header or self.stem}.cuh"

    @abc.abstractmethod
    def dims(self) -> Iterable[tuple[int, int]]:
        """The padded head dims of query and value that it is compiled for."""

    @abc.abstractmethod
    def configure(self, problem: Problem, own: Gpu, padded: tuple[int, int]) -> Iterable[Tile]:
        """Tiles for a problem on a GPU, the fastest first, if query and value are padded to these
        dims. The first whose shared memory fits the GPU and whose registers suffice for the
        features of the problem is chosen. They do not depend on sizes, which are run-time values.
        """

    def rows(self, problem: Problem) -> Iterator[Row]:
        """The tiles for all padded head dims."""
        own = gpu.of(problem.arch)
        for padded in self.dims():
            for tile in self.configure(problem, own, padded):
                yield Row(*padded, tile)

    @abc.abstractmethod
    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        """The reasons against this kernel, besides those of its features."""

    @abc.abstractmethod
    def threads(self, spec: KernelSpec) -> int:
        """The threads of a CTA of the main entry point."""

    def computing_threads(self, spec: KernelSpec) -> int:
        """The threads of the main entry point, not counting those that only copy."""
        return self.threads(spec)

    @abc.abstractmethod
    def shared_bytes(self, spec: KernelSpec) -> int:
        """The dynamic shared memory of a CTA of the main entry point; the compiler asserts it."""

    @abc.abstractmethod
    def entry_points(self, spec: KernelSpec) -> tuple[EntryPoint, ...]:
        """The functions of the source in launch order."""

    @abc.abstractmethod
    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        """The lines of the configuration besides those that every kernel has."""

    @abc.abstractmethod
    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        """The arrays that the entry points write besides results, for a call of these sizes."""

    def tensor_maps(self, spec: KernelSpec) -> tuple[TensorMap, ...]:
        """The tensors that TMA copies, in the order of the maps."""
        return ()

    def defines(self, spec: KernelSpec) -> str:
        """Macros before the includes of the source."""
        return ""

    def element(self, spec: KernelSpec) -> str:
        """The C++ type of query, key and value in products."""
        return _ELEMENTS[spec.dtype]

    def columns(self, spec: KernelSpec) -> tuple[int, int]:
        """Columns of gradients of query and key, and of outputs, that accumulators hold."""
        return spec.padded_head_dim, spec.padded_value_dim

    def words(self, spec: KernelSpec) -> list[str]:
        """Its words in the name of a spec, after the tile."""
        return []

    def gradient_words(self, spec: KernelSpec) -> list[str]:
        """Its words in the name of a spec, after the gradients."""
        return []

    def dims_word(self, spec: KernelSpec) -> str:
        """The head dims in the name of a spec."""
        value = "" if spec.padded_value_dim == spec.padded_head_dim else f"v{spec.padded_value_dim}"
        return f"d{spec.padded_head_dim}{value}"

    def alignment(self, problem: Problem) -> int:
        """The alignment in bytes of rows in global memory, as far as the kernel uses it."""
        return problem.alignment

    def has_tma_bias(self, spec: KernelSpec) -> bool:
        """Whether TMA copies tiles of the bias."""
        return False

    def reads_block_mask(self, spec: KernelSpec) -> bool:
        """Whether the kernel reads a block mask if masks are arrays."""
        return True

    def completed(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> KernelSpec:
        """``spec`` with the fields that only this kernel sets."""
        return spec

    def adds_across_blocks(self, problem: ProblemLike) -> bool:
        bias = registry.BIAS.compiled(problem, self)
        query_sums = "query" in problem.needs_grad and not self.owns_outputs
        return query_sums or (bias is not None and bias.gradient == "columns")


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """A kernel with everything that it is compiled for. Two equal specs give the same source.

    ``padded_head_dim`` (of query and key) and ``padded_value_dim`` are padded dims; the real ones
    are run-time parameters. ``spec[feature]`` is what the kernel has of a feature. ``gradients``
    are those of query, key and value that a backward computes or that have a tangent, and () in a
    forward. Rows of query, key, value, output and gradients begin at multiples of ``alignment``
    bytes. ``pack_gqa`` is whether tiles of a split forward have the rows of all query heads that
    share a key head, and ``split_q`` whether CTAs of a backward may share a KV block.
    """

    kernel: Kernel
    dtype: SpecDtype
    padded_head_dim: int
    padded_value_dim: int
    tile: Tile
    features: tuple[tuple[str, Any], ...]
    gradients: tuple[str, ...] = ()
    alignment: int = 16
    pack_gqa: bool = False
    split_q: bool = False

    def __getitem__(self, feature: Feature[Any, _Compiled]) -> _Compiled:
        return self.features[registry.POSITION[feature.name]][1]

    @property
    def name(self) -> str:
        """``fmha_fwd_bf16_d192v128_128x64_causal_softcap_sm80``, also the main entry point."""
        kernel = self.kernel
        words = [
            "fmha",
            _DIRECTION_WORDS[self.direction],
            self.dtype,
            kernel.dims_word(self),
            f"{self.tile.query}x{self.tile.key}",
            *kernel.words(self),
        ]
        words += [feature.tag(self[feature], kernel) for feature in registry.FEATURES]
        words += [f"align{self.alignment}"] if self.alignment != 16 else []
        if self.direction != "forward" and self.gradients != SPEC_GRADIENTS:
            words.append("".join(f"d{gradient[0]}" for gradient in self.gradients) or "only")
        words += [feature.gradient_tag(self[feature]) for feature in registry.FEATURES]
        words += [*kernel.gradient_words(self), self.family]
        return "_".join(filter(None, words))

    @property
    def direction(self) -> Direction:
        """The direction of the kernel."""
        return self.kernel.direction

    @property
    def family(self) -> Family:
        """The instructions of its products: wgmma (sm90) or mma.sync (sm80)."""
        return self.kernel.family

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of query, key, value and output."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bias_element(self) -> str:
        """The C++ type of a bias that has the dtype of the query."""
        return _ELEMENTS[self.dtype]

    @property
    def threads(self) -> int:
        """The threads of a CTA of the main entry point."""
        return self.kernel.threads(self)

    @property
    def computing_threads(self) -> int:
        """The threads of the main entry point, not counting those that only copy."""
        return self.kernel.computing_threads(self)

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a CTA of the main entry point, or of the larger of two."""
        return self.kernel.shared_bytes(self)

    @property
    def entry_points(self) -> tuple[EntryPoint, ...]:
        """The functions of the source in launch order."""
        return self.kernel.entry_points(self)

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """The tensors that TMA copies, in the order of the maps."""
        return self.kernel.tensor_maps(self)

    @property
    def tma_bias(self) -> bool:
        """Whether TMA copies tiles of the bias."""
        return self.kernel.has_tma_bias(self)

    @property
    def persistent(self) -> bool:
        """A grid no larger than the GPU divides all work tiles."""
        return self.kernel.persistent

    @property
    def deterministic_dq(self) -> bool:
        """CTAs that add to the gradient of the query wait for each other."""
        deterministic = self[registry.DETERMINISTIC] and "query" in self.gradients
        return deterministic and not self.kernel.owns_outputs

    @property
    def captured_arrays(self) -> tuple[CapturedArray, ...]:
        """The arrays of features, in the order of ``ArrayTable``."""
        return tuple(
            array for feature in registry.FEATURES for array in feature.captured_arrays(self)
        )

    @property
    def params_fields(self) -> tuple[ParamsField, ...]:
        """The fields of the kernels' first parameter that features fill."""
        return tuple(
            field for feature in registry.FEATURES for field in feature.params_fields(self)
        )

    @property
    def has_block_mask(self) -> bool:
        """Whether the kernel reads a block mask."""
        by_arrays = any(feature.needs_block_mask(self[feature]) for feature in registry.FEATURES)
        is_paged = self[registry.PAGES].size > 0
        return by_arrays and not is_paged and self.kernel.reads_block_mask(self)

    def block_mask(
        self,
        lines: Literal["queries", "keys"],
        query: int | None = None,
        key: int | None = None,
        parts: int = 1,
    ) -> BlockMask | None:
        """The block mask for tiles of ``query`` rows and ``key`` columns, by default the tile's."""
        if not self.has_block_mask:
            return None
        return BlockMask(lines, query or self.tile.query, key or self.tile.key, parts)

    @property
    def block_masks(self) -> frozenset[BlockMask]:
        """The block masks of all entry points."""
        return frozenset(entry.block_mask for entry in self.entry_points if entry.block_mask)

    @property
    def sort_key(self) -> tuple:
        """The order of ``closure``: least padding, then fewest split rows, then largest tiles."""
        return (
            FAMILIES.index(self.family),
            DIRECTIONS.index(self.direction),
            SPEC_DTYPES.index(self.dtype),
            self.padded_head_dim,
            self.padded_value_dim,
            self.tile.query if self.kernel.splits_keys else math.inf,
            (-self.tile.query * self.tile.key, -self.tile.query),
            *(feature.sort_key(self[feature]) for feature in registry.FEATURES),
            -len(self.gradients),
            self.gradients,
            -self.alignment,
            self.split_q,
        )
