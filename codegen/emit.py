"""The source of a kernel: an include, a configuration, an instantiation, and assertions."""

from __future__ import annotations

from jax_memeff.codegen.spec import SPEC_GRADIENTS, EntryPoint, KernelSpec
from jax_memeff.codegen.tiles import sm80, sm90

_ELEMENTS = {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}

_CONFIG = """\
#include <memeff/kernels/{header}.cuh>

struct Config {{
  using Element = {element};
  static constexpr int kHeadDim = {head_class};
  static constexpr int kValueDim = {value_class};
  static constexpr int kTileQuery = {tile_query};
  static constexpr int kTileKey = {tile_key};
{schedule}  static constexpr auto kMask = memeff::MaskKind::{mask};
  static constexpr bool kVarlen = {varlen};
  static constexpr bool kSegments = {segments};
  static constexpr bool kBoolean = {boolean};
  static constexpr bool kSoftCap = {soft_cap};
  static constexpr bool kDropout = {dropout};
  static constexpr bool kBias = {has_bias};
{bias}{extra}}};
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
"""

_PARK = """\
  static constexpr bool kParkRegisters = {parks};
"""

_GRADIENT = """\
  static constexpr bool k{name}Gradient = {wanted};
"""

_BIAS = """\
  using BiasElement = {element};
  static constexpr bool kBiasPerRow = {per_row};
"""

_BIAS_GRADIENT = """\
  static constexpr auto kBiasGradient = memeff::BiasGradient::{way};
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
{name}(const __grid_constant__ memeff::{params} params{maps}) {{
  {alias}::run(params{pass_maps});
}}
"""


def source(spec: KernelSpec) -> str:
    """The CUDA C++ of ``spec``, deterministic; the device headers hold all the logic.

    The assertions make the compiler prove the thread and shared-memory numbers that the launcher
    takes from ``spec``.
    """
    text = _CONFIG.format(
        header=f"fmha_{'fwd' if spec.direction == 'forward' else 'bwd'}_{spec.family}",
        element=_ELEMENTS[spec.dtype],
        head_class=spec.head_class,
        value_class=spec.value_class,
        tile_query=spec.tile.query,
        tile_key=spec.tile.key,
        schedule=_schedule(spec),
        mask=spec.mask,
        varlen=_bool(spec.varlen),
        segments=_bool(spec.segments),
        boolean=_bool(spec.boolean),
        soft_cap=_bool(spec.soft_cap),
        dropout=_bool(spec.dropout),
        has_bias=_bool(spec.bias is not None),
        bias=_bias(spec),
        extra=_gradients(spec) if spec.direction == "backward" else _park(spec.tile),
    )
    if spec.direction == "forward":
        (main,) = spec.entry_points
        return text + _main(spec, main, "ForwardParams")
    preprocess, main, *after = spec.entry_points
    return (
        text
        + _stage(spec, preprocess, "Preprocess")
        + _main(spec, main, "BackwardParams")
        + "".join(
            _stage(spec, entry, entry.name.rpartition("_")[2].capitalize()) for entry in after
        )
    )


def _schedule(spec: KernelSpec) -> str:
    tile = spec.tile
    if isinstance(tile, sm80.Tile):
        return _SCHEDULE_SM80.format(warps=tile.warps, blocks_per_sm=tile.blocks_per_sm)
    text = _STAGES.format(stages=tile.stages)
    if spec.direction == "forward":
        text += _QUERY_STAGES.format(query_stages=tile.query_stages)
    return text


def _park(tile: sm80.Tile | sm90.Tile) -> str:
    return _PARK.format(parks=_bool(tile.park)) if isinstance(tile, sm80.Tile) else ""


def _bias(spec: KernelSpec) -> str:
    if spec.bias is None:
        return ""
    element = "float" if spec.bias == "32" else _ELEMENTS[spec.dtype]
    return _BIAS.format(element=element, per_row=_bool(spec.bias_per_row))


def _gradients(spec: KernelSpec) -> str:
    gradients = [
        _GRADIENT.format(name=name.capitalize(), wanted=_bool(name in spec.gradients))
        for name in SPEC_GRADIENTS
    ]
    return "".join([*gradients, _BIAS_GRADIENT.format(way=spec.bias_gradient)])


def _bool(value: bool) -> str:
    return str(value).lower()


def _main(spec: KernelSpec, entry: EntryPoint, params: str) -> str:
    blocks = "Config::kBlocksPerSm" if isinstance(spec.tile, sm80.Tile) else spec.tile.blocks_per_sm
    maps = f"{spec.direction.capitalize()}Maps" if spec.tensor_maps else None
    return _kernel(entry, "Kernel", spec.cpp_type, f"Kernel::kThreads, {blocks}", params, maps)


def _stage(spec: KernelSpec, entry: EntryPoint, stage: str) -> str:
    """A kernel before or after the main one of the backward."""
    tiles = (
        ""
        if spec.family == "sm80"
        else f", memeff::BackwardTiles{spec.family.capitalize()}<Config>"
    )
    cpp_type = f"memeff::FmhaBackward{stage}<Config{tiles}>"
    bounds = f"{stage}::kThreads, {stage}::kBlocksPerSm"
    return _kernel(entry, stage, cpp_type, bounds, "BackwardParams")


def _kernel(
    entry: EntryPoint, alias: str, cpp_type: str, bounds: str, params: str, maps: str | None = None
) -> str:
    text = _KERNEL + (_SHARED if entry.shared_bytes else "") + _ENTRY
    return text.format(
        alias=alias,
        cpp_type=cpp_type,
        threads=entry.threads,
        shared_bytes=entry.shared_bytes,
        bounds=bounds,
        name=entry.name,
        params=params,
        maps=f", const __grid_constant__ memeff::{maps} maps" if maps else "",
        pass_maps=", maps" if maps else "",
    )
