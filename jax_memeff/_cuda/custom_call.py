"""The custom call, and its attributes: every number that the host library needs, computed here.

The host library reads them when a program is loaded, in the order in which they are written here
(``Call::decode`` of ffi/src/call.cc). A checksum covers them all, so an accidental change is an
error. It is not a signature: docs/deployment/export.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_memeff._call import divisors
from jax_memeff._call.operands import Operands, captured_name, items
from jax_memeff._call.options import Options
from jax_memeff._cuda import buffers, functions
from jax_memeff._cuda.buffers import Buffer
from jax_memeff._cuda.export import register_targets
from jax_memeff._cuda.problem import KernelCall, bias_alignment, sizes_of
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen import features, gpu
from jax_memeff.codegen.problem import Direction
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.errors import UnsupportedError

VERSION = 2
"""``kVersion`` of ffi/src/call.cc. It changes with the attributes, so that the programs of other
versions raise an error that says so.
"""

UNBOUNDED = 1 << 30
"""``kUnbounded`` of ffi/include/memeff/params.h: windows are computed in 32 bits."""

_MOST = 2**31 - 1

_DTYPES = {
    "bool": 1,
    "int32": 4,
    "uint8": 6,
    "uint32": 8,
    "float16": 10,
    "float32": 11,
    "bfloat16": 16,
    "float8_e4m3fn": 20,
}
"""``XLA_FFI_DataType``."""

_SPLITS = ("", "each", "some")
"""``Grid::Splits`` of ffi/src/kernels.h: ``codegen.launch.Grid.splits``."""


def attributes(
    direction: Direction,
    operands: Sequence[Buffer],
    results: Sequence[Buffer],
    avals: Operands,
    options: Options,
    specs: Mapping[str, KernelSpec],
) -> dict[str, Any]:
    """All attributes of a call.

    Args:
        direction: that of the kernels.
        operands: the buffers that the call reads.
        results: the buffers that it writes, workspaces included.
        avals: the types of the operands of the primitive.
        options: those of the primitive.
        specs: the kernel of each architecture, which is compiled here.

    Raises:
        CompileError: if a kernel does not compile.
        UnsupportedError: if a size does not fit 32 bits.
    """
    sizes = _sizes(avals, options)
    call = KernelCall(avals, options, None)
    numbers = [word for feature in features.FEATURES for word in feature.number_values(call)]
    attributes = {
        "direction": direction,
        **buffer_attributes(operands, results, _divisors(avals, options)),
        "sizes": _in_32_bits(sizes),
        **score_attributes(avals, options),
    }
    names = names_of([*operands, *results])
    return sealed(
        attributes,
        {
            arch: kernel_attributes(
                spec, arch, compiler.compile(spec, arch).image, names, sizes, numbers
            )
            for arch, spec in specs.items()
        },
    )


def sealed(
    attributes: Mapping[str, Any], kernels: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The attributes with the kernel of each architecture, the version and the checksum."""
    from jax_memeff._ffi import checksum

    described = {**attributes, "kernels": {"archs": ",".join(kernels), **kernels}}
    return {
        **described,
        "version": np.int32(VERSION),
        "checksum": np.int64(checksum(_bytes(described))),
    }


def _bytes(value: Any) -> bytes:
    """What the checksum of a value covers: its size in bytes and its bytes, for each number, array
    and text in a dictionary.
    """
    if isinstance(value, Mapping):
        return b"".join(map(_bytes, value.values()))
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        value = value.tobytes()
    return len(value).to_bytes(8, "little") + value


def names_of(buffers: Iterable[Buffer]) -> list[str]:
    """The names of all arrays; a buffer may hold several.

    >>> names_of([Buffer("query+key", None), Buffer("bias", None)])
    ['query', 'key', 'bias']
    """
    return [name for buffer in buffers for name in buffer.name.split("+")]


def buffer_attributes(
    operands: Sequence[Buffer], results: Sequence[Buffer], divisors: Mapping[str, int]
) -> dict[str, Any]:
    """The names of the arrays, where they are, and the types of the buffers.

    >>> from jax.core import ShapedArray
    >>> packed = Buffer("query+key", ShapedArray((2, 9, 2, 4, 64), "bfloat16"))
    >>> out = Buffer("out", ShapedArray((2, 9, 4, 64), "bfloat16"))
    >>> found = buffer_attributes([packed], [out], {"key": 5})
    >>> found["operands"], found["results"]
    ('query,key', 'out')
    >>> found["arrays"].reshape(-1, 4).tolist()  # buffer, slot, slots, divisor
    [[0, 0, 2, 1], [0, 1, 2, 5], [1, 0, 1, 1]]
    >>> found["result_types"].tolist()  # XLA's number of the dtype, rank, sizes
    [16, 4, 2, 9, 4, 64]
    """
    arrays = []
    for index, buffer in enumerate([*operands, *results]):
        slots = buffer.name.split("+")
        for slot, name in enumerate(slots):
            arrays += [index, slot, len(slots), divisors.get(name, 1)]
    return {
        "operands": ",".join(names_of(operands)),
        "results": ",".join(names_of(results)),
        "arrays": np.array(arrays, np.int64),
        "operand_types": _types(operands),
        "result_types": _types(results),
    }


def _types(buffers: Iterable[Buffer]) -> np.ndarray:
    types = []
    for _, aval, *_ in buffers:
        types += [_DTYPES[aval.dtype.name], len(aval.shape), *aval.shape]
    return np.array(types, np.int64)


def score_attributes(avals: Operands, options: Options) -> dict[str, Any]:
    """``ScoreScale``, the windows of ``MaskParams``, and the alignment of the bias's rows."""

    def bound(limit: int | None) -> int:
        # A bound beyond the largest length still counts: offsets move the diagonal by up to 2**29.
        return UNBOUNDED if limit is None else max(min(limit, UNBOUNDED), -UNBOUNDED)

    windows = [
        bound(limit)
        for window in (avals.mask.top_left, avals.mask.bottom_right)
        for limit in ((None, None) if window is None else (window.left, window.right))
    ]
    scale = options.scaling.kernel_factors(has_function=options.score_function is not None)
    return {
        "scale": np.array(scale, np.float32),
        "windows": np.array(windows, np.int32),
        "bias_alignment": np.int32(bias_alignment(avals)),
    }


def kernel_attributes(
    spec: KernelSpec,
    arch: str,
    image: bytes,
    names: Sequence[str],
    sizes: Sizes,
    numbers: Sequence[int],
) -> dict[str, Any]:
    """``Kernel`` of ffi/src/kernels.h. Arrays are indices into ``names``, and -1 is none.

    Args:
        spec: the kernel.
        arch: the architecture that it is compiled for, ``"sm_90a"``.
        image: a fatbin.
        names: those of all arrays of the call.
        sizes: those of the call.
        numbers: the values of ``features.NUMBERS``.
    """
    places = {name: place for place, name in enumerate(names)}
    entries, fields = [], []
    for entry in spec.entry_points:
        grid, mask = entry.grid, entry.block_mask
        entries += [entry.threads, entry.shared_bytes, grid.ctas(sizes)]
        entries += [_SPLITS.index(grid.splits), grid.most_per_sm, entry.cluster]
        entries += [-1 if mask is None else places[mask.name], entry.takes_maps]
    for field in spec.params_fields:
        if field.value in features.NUMBERS:
            fields += [field.offset, -1, numbers[features.NUMBERS.index(field.value)]]
        else:
            fields += [field.offset, places[field.value], 0]
    maps = [
        number
        for box in spec.tensor_maps
        for number in (places.get(box.name, -1), box.rows, box.columns, box.name == "bias")
    ]
    captured = [
        number for array in spec.captured_arrays for number in (places[array.name], array.alignment)
    ]
    workspaces = spec.kernel.workspaces(spec, sizes, gpu.multiprocessors(arch))
    memory = [*spec.captured_arrays, *workspaces]
    zeroed = [places[array.name] for array in memory if array.zeroed and array.name in places]
    tile = spec.tile
    kernel = [architectures.capability(arch), arch.startswith("compute_")]
    kernel += [tile.query, tile.key, spec.alignment, tile.blocks_per_sm]
    return {
        "numbers": np.array(kernel, np.int64),
        "entry_names": ",".join(entry.name for entry in spec.entry_points),
        "entries": np.array(entries, np.int64),
        "maps": np.array(maps, np.int64),
        "captured": np.array(captured, np.int64),
        "fields": np.array(fields, np.int64),
        "zeroed": np.array(zeroed, np.int64),
        "image": image,
    }


def _sizes(avals: Operands, options: Options) -> Sizes:
    """The sizes of the call. Packed sequences have at least one query and key, to fill the gaps."""
    sizes = sizes_of(avals, options.divisors)
    return sizes.with_rows() if sizes.packed else sizes


def _in_32_bits(sizes: Sizes) -> np.ndarray:
    """The sizes of ``ProblemShape``."""
    named = {
        "batch": sizes.batch,
        "queries": sizes.queries,
        "keys": sizes.keys,
        "query heads": sizes.heads,
        "key heads": sizes.key_heads,
        "head dim": sizes.head_dim,
        "value dim": sizes.value_dim,
        "query tokens": sizes.query_tokens or 0,
        "key tokens": sizes.key_tokens or 0,
    }
    for name, size in named.items():
        if size >= _MOST:
            raise UnsupportedError(
                [
                    f"kernels count in 32 bits, so at most {_MOST - 1} {name}, got {size}",
                    "split the batch, or pass implementation='xla'",
                ]
            )
    return np.array(list(named.values()), np.int32)


def _divisors(avals: Operands, options: Options) -> dict[str, int]:
    """The divisors of the buffers, by name; a buffer without an entry has 1."""
    operand_divisors = options.divisors
    _, boolean = divisors.combined(avals.mask, operand_divisors, avals.scores_shape[0])
    bounds = functions.window_buffers(avals.mask)
    buffer_divisors = {
        buffers.buffer_name(item, bounds): operand_divisors[item.name] for item in items(avals)
    }
    buffer_divisors |= {
        "boolean": boolean,
        "bias_gradient": operand_divisors.of_gradient("bias") or 1,
    }
    gradients = {
        f"captured{index}_gradient": operand_divisors.of_gradient(captured_name(index)) or 1
        for index in range(len(avals.captured))
    }
    return buffer_divisors | gradients


def custom_call(
    ctx: mlir.LoweringRuleContext,
    direction: Direction,
    operands: list[Buffer],
    results: list[Buffer],
    *,
    avals: Operands,
    options: Options,
    specs: dict[str, KernelSpec],
    aliased: Mapping[int, int] | None = None,
) -> Sequence[Any]:
    """The values of the results of the custom call, which has workspaces besides these; ``aliased``
    maps operands that are written in place to their results.
    """
    register_targets()
    count = len(results)
    results = [*results, *buffers.workspace_buffers(avals, options, specs)]
    lower = jax.ffi.ffi_lowering(
        f"jax_memeff_{direction}",
        operand_layouts=buffers.layouts(operands),
        result_layouts=buffers.layouts(results),
        operand_output_aliases=dict(aliased or {}),
    )
    context = ctx.replace(
        avals_in=[buffer.aval for buffer in operands],
        avals_out=[buffer.aval for buffer in results],
    )
    return lower(
        context,
        *(buffer.value for buffer in operands),
        **attributes(direction, operands, results, avals, options, specs),
    )[:count]
