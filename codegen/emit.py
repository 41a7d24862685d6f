"""The source of a kernel: an include, a configuration, an instantiation, and assertions."""

from __future__ import annotations

from jax_memeff.codegen.features import FEATURES
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.kernels.common.base import has_token_grid
from jax_memeff.codegen.launch import EntryPoint
from jax_memeff.codegen.spec import KernelSpec

_INCLUDE = """\
#include <{file}>
"""

_CONFIG = """
struct Config {{
{lines}}};
"""

_KERNEL = """
using {alias} = memeff::{cpp_class};
static_assert({alias}::kThreads == {threads});
"""

_SHARED = """\
static_assert({alias}::kSharedBytes == {shared_bytes});
"""

_ENTRY = """\
extern "C" __global__ void {cluster}__launch_bounds__({alias}::kThreads, {blocks})
{name}(const __grid_constant__ memeff::{params} params{maps}) {{
{begin}  {alias}::run(params{pass_maps});
}}
"""

_LET_NEXT_START = "  memeff::let_next_kernel_start();\n"
_WAIT_FOR_BEFORE = "  memeff::wait_for_kernel_before();\n"


def source(spec: KernelSpec) -> str:
    """The CUDA C++ of ``spec``, deterministic; the device headers hold all the logic.

    The assertions make the compiler prove the thread and shared-memory numbers that the launcher
    takes from ``spec``.
    """
    lines = (_line(name, value) for name, value in _config(spec).items())
    text = spec.kernel.defines(spec)
    text += _INCLUDE.format(file=spec.kernel.device_file)
    text += "".join(feature.source(spec) for feature in FEATURES)
    text += _CONFIG.format(lines="".join(lines))
    entries = spec.entry_points
    nexts = (*entries[1:], None)
    return text + "".join(_kernel(spec, *pair) for pair in zip(entries, nexts, strict=True))


def _config(spec: KernelSpec) -> dict[str, Constant | CppType]:
    head_columns, value_columns = spec.kernel.columns(spec)
    config: dict[str, Constant | CppType] = {
        "Element": CppType(spec.kernel.element(spec)),
        "kHeadDim": head_columns,
        "kValueDim": value_columns,
        "kTileQuery": spec.tile.query,
        "kTileKey": spec.tile.key,
        **spec.kernel.constants(spec),
        "kAlignment": spec.alignment,
    }
    for feature in FEATURES:
        config.update(feature.constants(spec))
    for index, array in enumerate(spec.captured_arrays):
        config[f"k{''.join(map(str.capitalize, array.name.split('_')))}Array"] = index
    config["Params"] = CppType(f"memeff::{spec.direction.capitalize()}Params")
    return {
        **config,
        "kTokenGrid": has_token_grid(spec),
        "kBlockMask": spec.has_block_mask,
    }


def _line(name: str, value: Constant | CppType) -> str:
    if isinstance(value, CppType):
        return f"  using {name} = {value.name};\n"
    if isinstance(value, bool):
        return f"  static constexpr bool {name} = {str(value).lower()};\n"
    return f"  static constexpr {'int' if isinstance(value, int) else 'auto'} {name} = {value};\n"


def _kernel(spec: KernelSpec, entry: EntryPoint, following: EntryPoint | None) -> str:
    suffix = entry.name.removeprefix(spec.name)
    alias = "".join(word.capitalize() for word in suffix.split("_")) or "Kernel"
    direction = spec.direction.capitalize()
    maps_type = spec.kernel.maps_type or f"{direction}Maps"
    maps = f", const __grid_constant__ memeff::{maps_type} maps"
    params = f"{direction}Params"
    if spec.captured_arrays:
        params = f"WithArrays<memeff::{params}>"
    begin = _LET_NEXT_START if entry.overlaps else _LET_NEXT_START + _WAIT_FOR_BEFORE
    if following is not None and following.overlaps:
        # The next kernel reads what the one before this clears, and does not wait for it.
        begin = _WAIT_FOR_BEFORE + _LET_NEXT_START
    text = _KERNEL + (_SHARED if entry.shared_bytes else "") + _ENTRY
    return text.format(
        alias=alias,
        cpp_class=entry.cpp_class,
        threads=entry.threads,
        shared_bytes=entry.shared_bytes,
        blocks=entry.blocks or f"{alias}::kBlocksPerSm",
        cluster=f"__cluster_dims__({entry.cluster}, 1, 1) " if entry.cluster > 1 else "",
        name=entry.name,
        begin=begin,
        params=params,
        maps=maps if entry.takes_maps else "",
        pass_maps=", maps" if entry.takes_maps else "",
    )
