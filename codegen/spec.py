"""What is chosen for a problem: one kernel, described before its source is written."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from jax_memeff.codegen.problem import DTYPE_BYTES
from jax_memeff.codegen.tiles import sm80, sm90

# Relative, as is its import of this module: pyright knows the package by two names.
from . import shared_memory

MaskKind = Literal["none", "causal", "window"]
BiasAccess = Literal["vectors", "words", "columns", "rows", "elements"]
BiasGradient = Literal["none", "full", "shared", "columns", "dbias_kernel"]

MASK_KINDS: tuple[MaskKind, ...] = ("none", "causal", "window")
BIAS_ACCESSES: tuple[BiasAccess, ...] = ("vectors", "words", "columns", "rows", "elements")
BIAS_GRADIENTS: tuple[BiasGradient, ...] = ("none", "full", "shared", "columns", "dbias_kernel")
SpecDtype = Literal["f16", "bf16", "f32", "tf32"]

SPEC_DTYPES: tuple[SpecDtype, ...] = ("f16", "bf16", "f32", "tf32")
SPEC_GRADIENTS = ("query", "key", "value")
FAMILIES = ("sm90", "sm80")
"""In the order of choice."""
COMBINE_THREADS = 128
F16X3_SPLIT_THREADS = 256


class EntryPoint(NamedTuple):
    """A ``__global__`` function of the source, and what a launch of it needs.

    ``shared_bytes`` is the dynamic shared memory of a block, ``grid`` what blocks are tiles of (a
    bias gradient by tiles of scores, or by squares of as many queries as keys; operands are query,
    key and value by rows), ``takes_maps`` whether the tensor maps of the spec are its second
    parameter, and ``block_mask`` what says which tiles it visits.
    """

    name: str
    threads: int
    shared_bytes: int
    grid: Literal["queries", "keys", "q_splits", "bias", "bias_squares", "operands"] = "queries"
    takes_maps: bool = False
    block_mask: BlockMask | None = None
    takes_arrays: bool = False
    """Whether the table of ``KernelSpec.captured_arrays`` is its last parameter."""


class BlockMask(NamedTuple):
    """What says which tiles of scores, of ``query`` rows and ``key`` columns, a kernel visits: a
    line for each tile of ``lines`` (ffi/include/memeff/mask/block_mask.cuh).
    """

    lines: Literal["queries", "keys"]
    query: int
    key: int

    @property
    def name(self) -> str:
        """That of the buffer."""
        return f"{self.lines}_{self.query}x{self.key}"


class TensorMap(NamedTuple):
    """A tensor in global memory and the box of it that one copy moves."""

    name: str
    rows: int
    columns: int


class CapturedArray(NamedTuple):
    """An array that a feature brings: ``ArrayView`` of ffi/include/memeff/params.h.

    ``dims`` are named as in ffi/src/images/kernel_description.h, and ``alignment`` is in bytes.
    A ``zeroed`` one is a result that is zero when the first kernel begins.
    """

    name: str
    dims: str
    alignment: int = 4
    zeroed: bool = False


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """A kernel. Two equal specs give the same source.

    ``padded_head_dim`` (of query and key) and ``padded_value_dim`` are padded dims; the real ones
    are run-time parameters. ``gradients`` are those that a backward computes, and () in a forward;
    the gradient of the bias is apart, because there are several ways to sum it. ``bias`` is the
    number of bits of its elements, and ``bias_access`` how they come to the scores
    (ffi/include/memeff/core/common.cuh).
    ``split`` is a forward that splits the keys over blocks and combines their results; with
    ``pack_heads`` its tiles have the rows of all query heads that share a key head.
    ``alignment`` is what rows of query, key, value, output and gradients begin at multiples of, in
    bytes.
    ``deterministic`` kernels add what several blocks contribute in the same order in every run.
    ``shares`` is a backward in which several blocks may share a tile of keys.
    """

    direction: Literal["forward", "backward"]
    dtype: SpecDtype
    padded_head_dim: int
    padded_value_dim: int
    tile: sm80.Tile | sm90.Tile
    mask: MaskKind = "none"
    varlen: bool = False
    broadcast_batch: bool = False
    soft_cap: bool = False
    segments: bool = False
    boolean: bool = False
    dropout: bool = False
    bias: Literal["16", "32"] | None = None
    bias_access: BiasAccess = "vectors"
    bias_gradient: BiasGradient = "none"
    gradients: tuple[str, ...] = ()
    split: bool = False
    pack_heads: bool = False
    alignment: int = 16
    deterministic: bool = False
    split_q: bool = False
    family: str = "sm80"

    @property
    def name(self) -> str:
        """``fmha_fwd_bf16_d192v128_128x64_causal_softcap_sm80``, also the main entry point."""
        dims = "large" if self.large_dim else f"d{self.padded_head_dim}"
        value = "" if self.padded_value_dim == self.padded_head_dim else f"v{self.padded_value_dim}"
        words = [
            "fmha",
            "fwd" if self.direction == "forward" else "bwd",
            self.dtype,
            f"{dims}{value}",
            f"{self.tile.query}x{self.tile.key}",
        ]
        words += ["split"] if self.split else []
        words += ["gqa"] if self.pack_heads else []
        words += ["groups"] if self.consumer_groups > 1 else []
        words += [self.mask] if self.mask != "none" else []
        words += ["varlen"] if self.varlen else []
        words += ["vmap"] if self.broadcast_batch else []
        words += [word for word in ("segments", "boolean") if getattr(self, word)]
        words += ["softcap"] if self.soft_cap else []
        words += ["dropout"] if self.dropout else []
        if self.bias:
            usual = "elements" if self.large_dim else "vectors"
            access = "" if self.bias_access == usual else self.bias_access
            words.append(f"bias{self.bias}{access}")
        if self.direction == "backward" and self.gradients != SPEC_GRADIENTS:
            words.append("".join(f"d{gradient[0]}" for gradient in self.gradients) or "only")
        words += [f"dbias{self.bias_gradient}"] if self.bias_gradient != "none" else []
        words += [f"align{self.alignment}"] if self.alignment != 16 else []
        words += ["deterministic"] if self.deterministic else []
        words += ["splitq"] if self.split_q else []
        return "_".join([*words, self.family])

    @property
    def cpp_type(self) -> str:
        """The device class the source instantiates."""
        kernel = "FmhaForward" if self.direction == "forward" else "FmhaBackward"
        kernel += "Split" if self.split else "LargeDim" if self.large_dim else ""
        return f"memeff::{kernel}{self.family.capitalize()}<Config>"

    @property
    def f16x3(self) -> bool:
        """Whether a forward multiplies f32 in products of f16, which a kernel before it writes."""
        return self.family == "sm90" and self.dtype == "f32"

    @property
    def two_kernel(self) -> bool:
        """Whether a backward has a kernel for dq, and one for dk and dv, that wgmma computes."""
        return isinstance(self.tile, sm90.Tile) and self.tile.two_kernel

    @property
    def large_dim(self) -> bool:
        """Whether the kernel takes any head dim, in steps and chunks of its columns."""
        return self.padded_head_dim == sm80.LARGE_DIM

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of query, key, value and output."""
        return DTYPE_BYTES[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block of the main kernel."""
        if isinstance(self.tile, sm90.Tile):
            return sm90.WARPGROUP_THREADS * (self.consumers + 1)
        return 32 * self.tile.warps

    @property
    def computing_threads(self) -> int:
        """The threads of the main kernel less those that only copy."""
        if isinstance(self.tile, sm90.Tile):
            return sm90.WARPGROUP_THREADS * self.consumers
        return self.threads

    @property
    def consumers(self) -> int:
        """Warpgroups that compute: each owns 64 queries in a forward, alone or in turn with those
        of other teams, and 64 keys in a backward that is not divided.
        """
        by_query = self.direction == "forward" or self.two_kernel
        rows = self.tile.query if by_query else self.tile.key
        return rows // sm90.WARPGROUP_ROWS * self.consumer_groups

    @property
    def consumer_groups(self) -> int:
        """Warpgroups that share rows of a forward."""
        return self.tile.consumer_groups if isinstance(self.tile, sm90.Tile) else 1

    @property
    def owns_outputs(self) -> bool:
        """Whether a backward writes each gradient from the blocks that own it, without sums."""
        return self.large_dim or self.two_kernel

    @property
    def tma_bias(self) -> bool:
        """Whether the copy engine brings tiles of the bias."""
        if not isinstance(self.tile, sm90.Tile) or self.direction == "forward":
            return False
        return self.bias == "16" and self.bias_access == "vectors"

    @property
    def orders_queries(self) -> bool:
        """Whether blocks that add to the gradient of the query wait for each other."""
        return self.deterministic and "query" in self.gradients and not self.owns_outputs

    @property
    def has_block_mask(self) -> bool:
        """Whether segment ids and boolean masks say which tiles the kernel visits."""
        by_elements = self.split or self.varlen or self.large_dim or self.consumer_groups > 1
        return (self.segments or self.boolean) and not by_elements

    def _block_mask(
        self, lines: Literal["queries", "keys"], rows: int | None = None, columns: int | None = None
    ) -> BlockMask | None:
        """Of tiles of so many rows and columns, those of the spec by default."""
        if not self.has_block_mask:
            return None
        return BlockMask(lines, rows or self.tile.query, columns or self.tile.key)

    @property
    def block_masks(self) -> frozenset[BlockMask]:
        """The maps of all entry points."""
        return frozenset(entry.block_mask for entry in self.entry_points if entry.block_mask)

    @property
    def entry_points(self) -> tuple[EntryPoint, ...]:
        """The functions of the source in launch order."""
        maps = bool(self.tensor_maps)
        grid = "q_splits" if self.split_q else "keys"
        main = EntryPoint(
            self.name, self.threads, self.shared_bytes, grid, maps, self._block_mask("keys")
        )
        if self.split:
            combine = EntryPoint(f"{self.name}_combine", COMBINE_THREADS, 0)
            return (main._replace(grid="queries"), combine)
        if self.direction == "forward":
            halve = EntryPoint(f"{self.name}_split", F16X3_SPLIT_THREADS, 0, "operands")
            main = main._replace(grid="queries", block_mask=self._block_mask("queries"))
            return (halve, main) if self.f16x3 else (main,)
        # The last two read sums as the threads of the main kernel laid them out.
        threads = self.computing_threads
        preprocess = EntryPoint(f"{self.name}_preprocess", threads, 0)
        entries = [preprocess, *self._owners] if self.owns_outputs else [preprocess, main]
        if "query" in self.gradients and not self.owns_outputs:
            query_tile = self.tile.query * self.padded_head_dim * self.element_bytes
            entries.append(EntryPoint(f"{self.name}_postprocess", threads, query_tile))
        if self.bias_gradient in ("shared", "columns"):
            entries.append(EntryPoint(f"{self.name}_dbias_postprocess", threads, 0, "bias"))
        if self.bias_gradient == "dbias_kernel":
            recompute = EntryPoint(
                f"{self.name}_dbias", self.threads, 0, "bias", maps, self._block_mask("queries")
            )
            shared_bytes = self.shared_bytes if self.large_dim else shared_memory.dbias_sm80(self)
            if self.family == "sm90":
                side = max(self.tile.query, self.tile.key)
                block_mask = self._block_mask("queries", side, side)
                recompute = recompute._replace(grid="bias_squares", block_mask=block_mask)
                shared_bytes, _ = shared_memory.dbias_sm90(self)
            entries.append(recompute._replace(shared_bytes=shared_bytes))
        return tuple(entries)

    @property
    def _owners(self) -> list[EntryPoint]:
        """One for the gradient of the query, one for the others."""
        maps = bool(self.tensor_maps)
        query_bytes, key_bytes = self._owned_bytes if self.two_kernel else 2 * (self.shared_bytes,)
        rows = sm90.WARPGROUP_ROWS if self.two_kernel else None
        query_map, key_map = self._block_mask("queries"), self._block_mask("keys", rows)
        name, threads = self.name, self.threads
        query = EntryPoint(f"{name}_dq", threads, query_bytes, "queries", maps, query_map)
        key = EntryPoint(f"{name}_dkdv", threads, key_bytes, "keys", maps, key_map)
        sums_bias = self.bias_gradient == "columns" or (
            self.large_dim and self.bias_gradient in ("full", "shared")
        )
        others = {"key", "value"} & set(self.gradients) or sums_bias
        return [query] * ("query" in self.gradients) + [key] * bool(others)

    @property
    def _owned_bytes(self) -> tuple[int, int]:
        """Dynamic shared memory of the two kernels of a divided backward."""
        key_bytes, _ = shared_memory.dkdv_sm90(self)
        return shared_memory.dq_sm90(self), key_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the main kernel, or of the larger of two; the
        compiler asserts the number.
        """
        if self.two_kernel:
            return max(self._owned_bytes)
        forward = self.direction == "forward"
        if isinstance(self.tile, sm90.Tile):
            sizes = shared_memory.forward_sm90 if forward else shared_memory.backward_sm90
            return sizes(self, self.tile)
        if self.split:
            return shared_memory.split_sm80(self)
        if self.large_dim:
            sizes = (
                shared_memory.large_dim_forward_sm80
                if forward
                else shared_memory.large_dim_backward_sm80
            )
        else:
            sizes = shared_memory.forward_sm80 if forward else shared_memory.backward_sm80
        return sizes(self)

    @property
    def dbias_stages(self) -> int:
        """Pairs of parts of operands in the kernel for the gradient of a shared bias on wgmma."""
        _, stages = shared_memory.dbias_sm90(self)
        return stages

    @property
    def key_buffers(self) -> sm90.KeyBuffers:
        """Buffers of the kernel of a divided backward that owns keys."""
        _, buffers = shared_memory.dkdv_sm90(self)
        return buffers

    @property
    def persistent(self) -> bool:
        """Whether the blocks of a grid no larger than the GPU share all tiles of a problem."""
        return isinstance(self.tile, sm90.Tile) and self.direction == "forward"

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """What the kernel moves through the copy engine, in the order of its maps."""
        if not isinstance(self.tile, sm90.Tile) or self.f16x3:
            return ()
        head, value = panel_columns(self.padded_head_dim), panel_columns(self.padded_value_dim)
        if self.direction == "forward":
            return (
                TensorMap("query", sm90.WARPGROUP_ROWS, head),
                TensorMap("key", self.tile.key, head),
                TensorMap("value", self.tile.key, value),
            )
        queries = sm90.WARPGROUP_ROWS if self.two_kernel else self.tile.query
        bias = (TensorMap("bias", queries, panel_columns(self.tile.key)),)
        return (
            TensorMap("query", queries, head),
            TensorMap("key", self.tile.key, head),
            TensorMap("value", self.tile.key, value),
            TensorMap("out_gradient", queries, value),
            TensorMap("query_gradient", sm90.WARPGROUP_ROWS, head),
            TensorMap("key_gradient", sm90.WARPGROUP_ROWS, head),
            TensorMap("value_gradient", sm90.WARPGROUP_ROWS, value),
            *(bias if self.tma_bias else ()),
        )

    @property
    def captured_arrays(self) -> tuple[CapturedArray, ...]:
        """The arrays that features bring, in the order of ``ArrayTable``."""
        return ()

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """The matrix products that the warps of a block share, as (rows, columns)."""
        query, key = self.tile.query, self.tile.key
        if isinstance(self.tile, sm90.Tile):
            return {}  # wgmma divides them
        if self.split:
            return {"S": (query, key)}
        if self.direction == "forward":
            return {"S": (query, key), "out": (query, self.value_columns)}
        return {
            "S": (query, key),
            "dq": (query, self.head_columns),
            "dk": (key, self.head_columns),
            "dv": (key, self.value_columns),
        }

    @property
    def head_columns(self) -> int:
        """Columns of dq and dk that accumulators hold: a chunk of them in a wide kernel."""
        return self.tile.chunk or self.padded_head_dim

    @property
    def value_columns(self) -> int:
        """Columns of out and dv that accumulators hold."""
        return self.tile.chunk or self.padded_value_dim

    @property
    def warp_rows(self) -> tuple[int, ...]:
        """How many rows of a product a warp may own; in the forward each owns whole rows."""
        if self.direction == "backward" or self.large_dim:
            return (16, 32)
        if isinstance(self.tile, sm90.Tile):
            return (16,)
        return (self.tile.query * self.tile.key_warps // self.tile.warps,)

    @property
    def sort_key(self) -> tuple:
        """Specs are tried in this order: little padding, then few split rows, then large tiles."""
        return (
            FAMILIES.index(self.family),
            ("forward", "backward").index(self.direction),
            SPEC_DTYPES.index(self.dtype),
            self.padded_head_dim,
            self.padded_value_dim,
            self.tile.query if self.split else math.inf,
            -self.tile.query * self.tile.key,
            MASK_KINDS.index(self.mask),
            self.varlen,
            self.broadcast_batch,
            self.segments,
            self.boolean,
            self.soft_cap,
            self.dropout,
            self.bias or "",
            BIAS_ACCESSES.index(self.bias_access),
            BIAS_GRADIENTS.index(self.bias_gradient),
            -len(self.gradients),
            self.gradients,
            -self.alignment,
            self.deterministic,
            self.split_q,
        )


def panel_columns(dim: int) -> int:
    """Columns of the panels that a shared tile of ``dim`` columns consists of."""
    return 64 if dim % 64 == 0 else 32
