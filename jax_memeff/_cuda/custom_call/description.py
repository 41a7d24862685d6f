"""The description of a kernel that travels with its code, and the digests of both and of the call.

The host library checks a call against it before it loads or launches anything, because a program
may come from a file: ffi/src/images/kernel_description.h has the format of the text,
sealed_image.h that of an image, and launch/call.h that of the attributes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_memeff._cuda.custom_call.buffers import Buffer
from jax_memeff.codegen import features
from jax_memeff.codegen.launch import PACKED_ROW_DIMS, ROW_DIMS
from jax_memeff.codegen.problem import Direction
from jax_memeff.codegen.spec import KernelSpec

_MAGIC = b"\x89MEMEFF\n"
_VERSION = 1

_DTYPES = {
    "bool": "pred",
    "uint8": "u8",
    "int32": "s32",
    "uint32": "u32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float8_e4m3fn": "f8e4m3fn",
}

_SPEC_DTYPES = {"tf32": "f32"}
"""The dtype of a kernel's arrays, where the kernel's own dtype goes by another name."""

_DIMS = {
    **{operand.role: operand.dims for operand in features.operands()},
    "out": "B T N Hv",
    "logsumexp": ROW_DIMS,
    "filled_out": "B T N Hv",
    "filled_logsumexp": ROW_DIMS,
    "out_gradient": "B T N Hv",
    "logsumexp_gradient": ROW_DIMS,
    "query_gradient": "B T N H",
    "key_gradient": "B S K H",
    "value_gradient": "B S K Hv",
    "bias_gradient": "B~ N? T? S?",
    "query_tangent": "B T N H",
    "key_tangent": "B S K H",
    "value_tangent": "B S K Hv",
    "out_tangent": "B T N Hv",
    "logsumexp_tangent": ROW_DIMS,
}
"""The dims of the arrays of a call. Workspaces get "...", because only the seal covers their
sizes."""

_VARLEN_DIMS = {
    **{
        operand.role: operand.packed_dims
        for operand in features.operands()
        if operand.packed_dims is not None
    },
    "out": "1 query_tokens N Hv",
    "logsumexp": PACKED_ROW_DIMS,
    "marked_query_lengths": "B+1",
    "filled_out": "1 query_tokens N Hv",
    "filled_logsumexp": PACKED_ROW_DIMS,
    "out_gradient": "1 query_tokens N Hv",
    "logsumexp_gradient": PACKED_ROW_DIMS,
    "query_gradient": "1 query_tokens N H",
    "key_gradient": "1 key_tokens K H",
    "value_gradient": "1 key_tokens K Hv",
    "query_tangent": "1 query_tokens N H",
    "key_tangent": "1 key_tokens K H",
    "value_tangent": "1 key_tokens K Hv",
    "out_tangent": "1 query_tokens N Hv",
    "logsumexp_tangent": PACKED_ROW_DIMS,
}
"""The dims of the arrays of a call with packed sequences."""


def sealed_image(spec: KernelSpec, arch: str, code: bytes, buffers: Iterable[Buffer]) -> bytes:
    """The description of a kernel, then its code, then a digest of both.

    Args:
        spec: the kernel.
        arch: the architecture that the code is compiled for, ``"sm_90a"``.
        code: a fatbin.
        buffers: all operands and results of the call.
    """
    text = describe(spec, arch, buffers).encode()
    header = _MAGIC + struct.pack("<3Q", _VERSION, len(text), len(code))
    image = header + text + code
    return image + hashlib.sha256(image).digest()


def describe(spec: KernelSpec, arch: str, buffers: Iterable[Buffer]) -> str:
    """The facts about a kernel that the host library must know, one per line."""
    lines = [
        f"arch {arch}",
        f"direction {spec.direction}",
        f"dtype {_SPEC_DTYPES.get(spec.dtype, spec.dtype)}",
        f"padded_dims {spec.padded_head_dim} {spec.padded_value_dim}",
        f"tile {spec.tile.query} {spec.tile.key}",
        f"alignment {spec.alignment}",
        f"blocks_per_sm {spec.tile.blocks_per_sm}",
    ]
    for entry in spec.entry_points:
        mask = entry.block_mask.name if entry.block_mask else "-"
        maps = "maps" if entry.takes_maps else "-"
        sizes = f"{entry.threads} {entry.shared_bytes}"
        blocks = f"{entry.grid.product} {entry.grid.most_per_sm} {entry.cluster}"
        lines.append(f"entry {entry.name} {sizes} {blocks} {mask} {maps}")
    for box in spec.tensor_maps:
        row_dim = 2 if box.name == "bias" else 1
        lines.append(f"map {box.name} {box.rows} {box.columns} {row_dim}")
    for buffer in buffers:
        dtype = _DTYPES[buffer.aval.dtype.name]
        lines += [
            f"array {name} {dtype} {_dims(spec, name, len(buffer.aval.shape))}".rstrip()
            for name in buffer.name.split("+")
        ]
    for array in spec.captured_arrays:
        lines.append(f"captured {array.name} {array.alignment} {'zeroed' if array.zeroed else '-'}")
    for field in spec.params_fields:
        is_number = field.value in features.NUMBERS
        value = f"#{features.NUMBERS.index(field.value)}" if is_number else field.value
        lines.append(f"field {field.offset} {value}")
    return "\n".join(lines) + "\n"


_CONSTANT_RANGES = ("query_starts", "key_starts", "function_batch_index", "function_head_index")
"""Arrays that may come from ``buffers.constant_range``."""


def _dims(spec: KernelSpec, name: str, rank: int) -> str:
    """The dims of an array of the call.

    "..." for workspaces, whose sizes are covered by the seal of the call alone.
    """
    if name.startswith(("queries_", "keys_")):  # codegen.launch.BlockMask.name
        side, tile = name.split("_")
        query, key, *_ = tile.split("x")
        return f"B? N? T/{query} *" if side == "queries" else f"B? N? S/{key} *"
    dims = _DIMS | _VARLEN_DIMS if spec[features.VARLEN] else _DIMS
    found = dims.get(spec.kernel.array_of(name), "...")
    for array in spec.captured_arrays:
        if array.name == name:
            found = array.dims
    is_constant = name in _CONSTANT_RANGES and rank == 2
    return f"1 {found}" if is_constant else found


def types(buffers: Sequence[Buffer]) -> str:
    """``bf16[2,128,4,64] f32[2,128,4]``

    >>> from jax.core import ShapedArray
    >>> out, x = ShapedArray((2, 3), "bfloat16"), ShapedArray((), "int32")
    >>> types([Buffer("out", out), Buffer("x", x)])
    'bf16[2,3] s32[]'
    """
    return " ".join(
        f"{_DTYPES[buffer.aval.dtype.name]}[{','.join(map(str, buffer.aval.shape))}]"
        for buffer in buffers
    )


def names(buffers: Sequence[Buffer], divisors: Mapping[str, int]) -> str:
    """The names of buffers, with the divisors that are not 1.

    >>> buffers = [Buffer("query+key", None), Buffer("bias", None)]
    >>> names(buffers, {"key": 1, "bias": 5})
    'query+key,bias/5'
    """

    def with_divisor(name: str) -> str:
        divisor = divisors.get(name, 1)
        return name if divisor == 1 else f"{name}/{divisor}"

    return ",".join("+".join(map(with_divisor, buffer.name.split("+"))) for buffer in buffers)


def seal(direction: Direction, attributes: Mapping[str, Any]) -> bytes:
    """The digest of a call's attributes, computed like ``seal_of`` of ffi/src/launch/call.cc."""
    texts = ("operands", "operand_types", "results", "result_types")
    numbers = ("scale", "windows", "numbers", "longest", "bias_alignment")
    kernels = attributes["kernels"]
    sealed = "\n".join([direction, *(attributes[name] for name in texts), ""]).encode()
    sealed += b"".join(attributes[name].tobytes() for name in numbers)
    for arch in kernels["archs"].split(","):
        # An image ends with the digest of the rest of it.
        sealed += arch.encode() + b"\n" + kernels[arch][-hashlib.sha256().digest_size :]
    return hashlib.sha256(sealed).digest()
