"""The source of a kernel: an include, a configuration, an instantiation, and assertions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_memeff.codegen.spec import SPEC_GRADIENTS, EntryPoint, KernelSpec
from jax_memeff.codegen.tiles import sm80, sm90

_ELEMENTS = {
    "f16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    "f32": "memeff::Tf32x3",
    "tf32": "memeff::Tf32",
}

# Left out otherwise, because CuTe's file of these shapes takes seconds to read.
_EXTENDED_SHAPES = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n"

_CONFIG = """\
#include <memeff/kernels/{header}.cuh>

struct Config {{
  using Element = {element};
  static constexpr int kHeadDim = {padded_head_dim};
  static constexpr int kValueDim = {padded_value_dim};
  static constexpr int kTileQuery = {tile_query};
  static constexpr int kTileKey = {tile_key};
{schedule}  static constexpr int kAlignment = {alignment};
  static constexpr auto kMask = memeff::MaskKind::{mask};
  static constexpr bool kVarlen = {varlen};
  static constexpr bool kBroadcastBatch = {broadcast_batch};
  static constexpr bool kSegments = {segments};
  static constexpr bool kBoolean = {boolean};
  static constexpr bool kBlockMask = {block_mask};
  static constexpr bool kSoftCap = {soft_cap};
  static constexpr bool kDropout = {dropout};
  static constexpr bool kBias = {has_bias};
{bias}{extra}{captured}}};
"""

_SCHEDULE_SM80 = """\
  static constexpr int kWarps = {warps};
  static constexpr int kBlocksPerSm = {blocks_per_sm};
"""

_STAGES = """\
  static constexpr int kStages = {stages};
"""

_QUERY_STAGES = """\
  static constexpr int kQueryStages = {query_stages};
  static constexpr int kConsumerGroups = {consumer_groups};
"""

_STAGE_REGISTERS = """\
  static constexpr bool kStageRegisters = {stage_registers};
"""

_SEQUENTIAL = """\
  static constexpr bool kSequential = {sequential};
"""

_SPLIT = """\
  static constexpr int kKeyWarps = {key_warps};
  static constexpr int kStages = {stages};
  static constexpr bool kPackHeads = {pack_heads};
"""

_QUERY_BUFFERS = """\
  static constexpr int kQueryBuffers = {buffers};
"""

_GRADIENT = """\
  static constexpr bool k{name}Gradient = {wanted};
"""

_BIAS = """\
  using BiasElement = {element};
  static constexpr auto kBiasAccess = memeff::BiasAccess::{access};
  static constexpr bool kTmaBias = {tma};
"""

_SUMS = """\
  static constexpr auto kBiasGradient = memeff::BiasGradient::{way};
  static constexpr bool kDeterministic = {deterministic};
  static constexpr bool kOrdersQueries = {orders_queries};
  static constexpr bool kSplitQ = {split_q};
"""

_DBIAS = """\
  static constexpr int kDbiasStages = {stages};
"""

_KEY_BUFFERS = """\
  static constexpr int kQBlockStages = {visit};
  static constexpr int kProbabilityStages = {probability};
"""

_CAPTURED = """\
  static constexpr int k{name}Array = {index};
"""

_KERNEL = """
using {alias} = {cpp_type};
static_assert({alias}::kThreads == {threads});
"""

_SHARED = """\
static_assert({alias}::kSharedBytes == {shared_bytes});
"""

_ENTRY = """\
extern "C" __global__ void __launch_bounds__({bounds})
{name}(const __grid_constant__ memeff::{params} params{maps}{arrays}) {{
  memeff::let_next_kernel_start();
  memeff::wait_for_kernel_before();
  {alias}::run(params{pass_maps}{pass_arrays});
}}
"""


def source(spec: KernelSpec) -> str:
    """The CUDA C++ of ``spec``, deterministic; the device headers hold all the logic.

    The assertions make the compiler prove the thread and shared-memory numbers that the launcher
    takes from ``spec``.
    """
    text = _EXTENDED_SHAPES if _has_extended_shapes(spec) else ""
    text += _CONFIG.format(
        header=_header(spec),
        element="memeff::F16x3" if spec.f16x3 else _ELEMENTS[spec.dtype],
        padded_head_dim=spec.head_columns,
        padded_value_dim=spec.value_columns,
        tile_query=spec.tile.query,
        tile_key=spec.tile.key,
        schedule=_schedule(spec),
        alignment=spec.alignment,
        mask=spec.mask,
        varlen=_bool(spec.varlen),
        broadcast_batch=_bool(spec.broadcast_batch),
        segments=_bool(spec.segments),
        boolean=_bool(spec.boolean),
        block_mask=_bool(spec.has_block_mask),
        soft_cap=_bool(spec.soft_cap),
        dropout=_bool(spec.dropout),
        has_bias=_bool(spec.bias is not None),
        bias=_bias(spec),
        extra=_forward(spec) if spec.direction == "forward" else _backward(spec),
        captured=_captured(spec),
    )
    if spec.direction == "forward":
        before = spec.entry_points[: spec.f16x3]
        main, *after = spec.entry_points[spec.f16x3 :]
        return text + _stages(spec, before, "F16x3") + _main(spec, main) + _stages(spec, after)
    if spec.large_dim or spec.two_kernel:
        return text + _stages(
            spec, spec.entry_points, "LargeDim" if spec.large_dim else "TwoKernel"
        )
    preprocess, main, *after = spec.entry_points
    return text + _stages(spec, [preprocess]) + _main(spec, main) + _stages(spec, after)


def _header(spec: KernelSpec) -> str:
    direction = "fwd" if spec.direction == "forward" else "bwd"
    kinds = {
        "split": spec.split,
        "large_dim": spec.large_dim,
        "two_kernel": spec.two_kernel,
        "f16x3": spec.f16x3,
    }
    kind = "".join(f"{kind}_" for kind, is_so in kinds.items() if is_so)
    return f"fmha_{direction}_{kind}{spec.family}"


def _forward(spec: KernelSpec) -> str:
    if isinstance(spec.tile, sm90.Tile):
        return _SEQUENTIAL.format(sequential=_bool(spec.tile.sequential)) if spec.f16x3 else ""
    if spec.large_dim:
        return ""
    if not spec.split:
        return _STAGE_REGISTERS.format(stage_registers=_bool(spec.tile.stage_registers))
    return _SPLIT.format(
        key_warps=spec.tile.key_warps,
        stages=spec.tile.stages,
        pack_heads=_bool(spec.pack_heads),
    )


def _schedule(spec: KernelSpec) -> str:
    tile = spec.tile
    if isinstance(tile, sm80.Tile):
        text = _SCHEDULE_SM80.format(warps=tile.warps, blocks_per_sm=tile.blocks_per_sm)
        if spec.direction == "backward":
            text += _QUERY_BUFFERS.format(buffers=tile.query_buffers)
        return text
    text = _STAGES.format(stages=tile.stages)
    if spec.two_kernel:
        text += _KEY_BUFFERS.format(**dataclasses.asdict(spec.key_buffers))
    if spec.direction == "forward":
        text += _QUERY_STAGES.format(
            query_stages=tile.query_stages, consumer_groups=tile.consumer_groups
        )
    return text


def _has_extended_shapes(spec: KernelSpec) -> bool:
    return isinstance(spec.tile, sm90.Tile) and spec.tile.key not in sm90.BASIC_COLUMNS


def _bias(spec: KernelSpec) -> str:
    if spec.bias is None:
        return ""
    element = "float" if spec.bias == "32" else _ELEMENTS[spec.dtype]
    return _BIAS.format(element=element, access=spec.bias_access, tma=_bool(spec.tma_bias))


def _backward(spec: KernelSpec) -> str:
    gradients = [
        _GRADIENT.format(name=name.capitalize(), wanted=_bool(name in spec.gradients))
        for name in SPEC_GRADIENTS
    ]
    sums = _SUMS.format(
        way=spec.bias_gradient,
        deterministic=_bool(spec.deterministic),
        orders_queries=_bool(spec.orders_queries),
        split_q=_bool(spec.split_q),
    )
    recompute = ""
    if spec.family == "sm90" and spec.bias_gradient == "dbias_kernel":
        recompute = _DBIAS.format(stages=spec.dbias_stages)
    return "".join([*gradients, sums, recompute])


def _captured(spec: KernelSpec) -> str:
    """Where the kernel finds the arrays of its features in the table."""
    return "".join(
        _CAPTURED.format(name="".join(map(str.capitalize, array.name.split("_"))), index=index)
        for index, array in enumerate(spec.captured_arrays)
    )


def _bool(value: bool) -> str:
    return str(value).lower()


def _main(spec: KernelSpec, entry: EntryPoint) -> str:
    blocks = "Config::kBlocksPerSm" if isinstance(spec.tile, sm80.Tile) else spec.tile.blocks_per_sm
    return _kernel(spec, entry, "Kernel", spec.cpp_type, f"Kernel::kThreads, {blocks}")


def _stages(spec: KernelSpec, entries: Sequence[EntryPoint], kind: str = "") -> str:
    """The kernels before or after the main one, or, of a ``kind``, those instead of it."""
    text = ""
    direction = spec.direction.capitalize()
    tiles = ""
    if spec.family != "sm80" and spec.direction == "backward" and not kind:
        tiles = f", memeff::BackwardTiles{spec.family.capitalize()}<Config>"
    for entry in entries:
        suffix = entry.name.removeprefix(f"{spec.name}_")
        stage = "".join(word.capitalize() for word in suffix.split("_"))
        cpp_type = f"memeff::Fmha{direction}{kind}{stage}<Config{tiles}>"
        text += _kernel(spec, entry, stage, cpp_type, f"{stage}::kThreads, {stage}::kBlocksPerSm")
    return text


def _kernel(spec: KernelSpec, entry: EntryPoint, alias: str, cpp_type: str, bounds: str) -> str:
    text = _KERNEL + (_SHARED if entry.shared_bytes else "") + _ENTRY
    direction = spec.direction.capitalize()
    maps = f", const __grid_constant__ memeff::{direction}Maps maps"
    arrays = ", const __grid_constant__ memeff::ArrayTable arrays"
    return text.format(
        alias=alias,
        cpp_type=cpp_type,
        threads=entry.threads,
        shared_bytes=entry.shared_bytes,
        bounds=bounds,
        name=entry.name,
        params=f"{direction}Params",
        maps=maps if entry.takes_maps else "",
        pass_maps=", maps" if entry.takes_maps else "",
        arrays=arrays if entry.takes_arrays else "",
        pass_arrays=", arrays" if entry.takes_arrays else "",
    )
