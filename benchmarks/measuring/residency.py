"""Kernels of another architecture on the device at hand, with as many CTAs on an SM as there.

A Hopper SM has more shared memory and runs more threads than most, so it may run more CTAs of a
kernel than the GPU that the kernel is for. A launch therefore asks for more shared memory than the
kernel uses. The clock, the tensor cores, L2 and DRAM remain those of the device at hand.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import jax

from jax_memeff._cuda import custom_call
from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import gpu
from jax_memeff.codegen.gpu import Gpu
from jax_memeff.codegen.launch import EntryPoint
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def padded_bytes(threads: int, shared_bytes: int, target: Gpu, device: Gpu) -> int:
    """The fewest bytes, at least ``shared_bytes``, with which as many CTAs of ``threads`` threads
    fit on an SM of ``device`` as without padding on one of ``target``.

    >>> padded_bytes(128, 60 * 1024, gpu.SM80, gpu.SM90) // 1024
    75
    >>> padded_bytes(256, 60 * 1024, gpu.SM86, gpu.SM90) // 1024
    113
    """
    wanted = target.resident_ctas(threads, shared_bytes)
    memory = device.max_shared_bytes + device.system_bytes
    if device.resident_ctas(threads, shared_bytes) <= wanted:
        return shared_bytes
    return memory // (wanted + 1) + 1 - device.system_bytes


class Residency:
    """Pads the launches of all kernels for ``arch`` that this process lowers from now on."""

    def __init__(self, arch: str):
        self._arch = arch
        self._target = gpu.of(arch)
        self._device = gpu.of(archs.of_capability(*_capability()))
        self._entries: dict[str, tuple[EntryPoint, bytes]] = {}
        attributes = custom_call.kernel_attributes

        def of_padded_kernel(spec: KernelSpec, *arguments: Any) -> dict[str, Any]:
            return attributes(cast(KernelSpec, _Padded(spec, self._pad)), *arguments)

        custom_call.kernel_attributes = of_padded_kernel
        compile_kernel = compiler.compile

        def compile_and_note(spec: KernelSpec, arch: str) -> compiler.Compiled:
            compiled = compile_kernel(spec, arch)
            for entry in spec.entry_points:
                self._entries[entry.name] = entry, compiled.image
            return compiled

        compiler.compile = compile_and_note

    def facts(self) -> dict[str, Any]:
        """The architecture, and for each entry point with shared memory its bytes without and with
        padding, and how many CTAs the driver says that an SM runs.
        """
        kernels = {}
        for name, (entry, image) in sorted(self._entries.items()):
            if entry.shared_bytes:
                padded = self._pad(entry).shared_bytes
                kernels[name] = {
                    "shared_bytes": entry.shared_bytes,
                    "padded_bytes": padded,
                    "ctas_per_sm": _occupancy(image, name, entry.threads, padded),
                    "target_ctas_per_sm": self._target.resident_ctas(
                        entry.threads, entry.shared_bytes
                    ),
                }
        return {"arch": self._arch, "kernels": kernels}

    def _pad(self, entry: EntryPoint) -> EntryPoint:
        padded = padded_bytes(entry.threads, entry.shared_bytes, self._target, self._device)
        return entry._replace(shared_bytes=padded)


class _Padded:
    """A spec whose entry points ask for more shared memory."""

    def __init__(self, spec: KernelSpec, pad: Any):
        self._spec = spec
        self.entry_points = tuple(map(pad, spec.entry_points))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def __getitem__(self, feature: Any) -> Any:
        return self._spec[feature]


def _capability() -> tuple[int, int]:
    major, minor = jax.devices()[0].compute_capability.split(".")
    return int(major), int(minor)


def _occupancy(image: bytes, name: str, threads: int, shared_bytes: int) -> int:
    """The CTAs of a kernel that an SM runs, as the driver says. JAX has a context."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: Any) -> None:
        if status := getattr(driver, function)(*arguments):
            raise RuntimeError(f"{function} returned {status} for {name}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    module, kernel, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
    call("cuFuncSetAttribute", kernel, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
    call(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        ctypes.byref(count),
        kernel,
        threads,
        ctypes.c_size_t(shared_bytes),
    )
    call("cuModuleUnload", module)
    return count.value
