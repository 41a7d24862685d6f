"""``python -m jax_memeff doctor``: what works on this machine, and what to do next."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import platform
import time
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from jax_memeff import config
from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import gpu
from jax_memeff.codegen.toolchain import nvrtc, parts, prebuilt, program_cache
from jax_memeff.errors import CompileError

_MARKS = {
    True: "[green]ok     [/green]",
    False: "[red]broken [/red]",
    None: "[yellow]absent [/yellow]",
}

_REPORT = "report it, with the output of: python -m jax_memeff info"

_TINY = 'extern "C" __global__ void doctor(float* x) { x[threadIdx.x] *= 2.f; }'


class Finding(NamedTuple):
    """One line: whether a part works, what is known of it, and the command or advice that helps.

    ``works`` is None for a part that is absent, on a machine that does not need it.
    """

    part: str
    works: bool | None
    text: str
    advice: str = ""


class Machine(NamedTuple):
    """``driver`` is the CUDA version of the driver, such as ``(12, 8)``, or None without one;
    ``devices`` are the compute capabilities of the GPUs that JAX sees, times ten; ``platforms`` is
    the value of ``JAX_PLATFORMS``, which may keep JAX from looking for GPUs.
    """

    driver: tuple[int, int] | None
    devices: tuple[int, ...]
    jax_error: str
    platforms: str = ""


def run(out: Console) -> int:
    """Print the findings; returns 1 if something is broken."""
    machine = _machine()
    findings = []
    for finding in _findings(machine):
        findings.append(finding)
        out.print(f"{_MARKS[finding.works]} {finding.part:<10} {escape(finding.text)}")
    broken = [finding for finding in findings if finding.works is False]
    advice = dict.fromkeys(finding.advice for finding in findings if finding.advice)
    out.print("\n[bold]Next[/bold]")
    for line in advice or _first_steps(machine):
        out.print(f"  {escape(line)}", soft_wrap=True)  # a command in one line can be copied
    return 1 if broken else 0


def _findings(machine: Machine) -> Iterator[Finding]:
    yield _package()
    yield _gpu(machine)
    if machine.driver is not None:
        yield _plugin(machine)
    yield _compiler(machine)
    yield _cache()
    if config.kernel_archive() is not None:
        yield _archive()
    yield _attention(machine)


def _machine() -> Machine:
    import jax

    devices, error = [], ""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    found = (device.compute_capability.replace(".", "") for device in devices)
    capabilities = tuple(sorted({int(number) for number in found}))
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    return Machine(_driver(), capabilities, error, platforms)


def _driver() -> tuple[int, int] | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _package() -> Finding:
    """The host module is registered at the first lowering; a jaxlib that is too old refuses it."""
    installed = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax-memeff", "jax", "jaxlib")
    )
    text = f"{installed}, Python {platform.python_version()}"
    try:
        importlib.import_module("jax_memeff._cuda.export").register_targets()
    except Exception as error:  # a jaxlib may raise anything
        return Finding("package", False, f"{text}: {error}", "pip install --upgrade jax jaxlib")
    return Finding("package", True, text)


def _gpu(machine: Machine) -> Finding:
    if machine.driver is None:
        text = "no NVIDIA driver (libcuda.so.1): calls run on the blockwise path, in plain JAX"
        return Finding("GPU", None, text)
    text = "driver of CUDA {}.{}".format(*machine.driver)
    if machine.driver < (12, 4):
        advice = "update the NVIDIA driver to 550.54.14 or later, or 580 or later for CUDA 13"
        return Finding("GPU", False, f"{text}, which is too old for the kernels", advice)
    return Finding("GPU", True, text)


def _plugin(machine: Machine) -> Finding:
    """Whether JAX uses the GPU, and whether there are kernels for it."""
    if not machine.devices:
        text = f"JAX does not use the GPU: {machine.jax_error}"
        if machine.platforms and not {"cuda", "gpu"} & set(machine.platforms.split(",")):
            advice = f"unset JAX_PLATFORMS, which is {machine.platforms!r}, or add cuda to it"
            return Finding("JAX's GPU", False, text, advice)
        return Finding("JAX's GPU", False, text, _install(machine))
    names = ", ".join(f"sm_{capability}" for capability in machine.devices)
    if min(machine.devices) < gpu.FIRST_CAPABILITY:
        advice = "pass implementation='xla' on GPUs before sm_75, for which there are no kernels"
        return Finding("JAX's GPU", False, names, advice)
    return Finding("JAX's GPU", True, names)


def _compiler(machine: Machine) -> Finding:
    """Whether a kernel compiles, with parts whose result this driver can load."""
    needed = machine.driver is not None
    missing = [part.title for part, place in parts.all_found().items() if place is None]
    try:
        parts.import_("cuda.core")
        if missing:
            raise CompileError(f"{', '.join(missing)} not found", {})
        arch = archs.of_capability(*divmod((machine.devices or (80,))[-1], 10))
        start = time.perf_counter()
        code, _ = nvrtc.compile(_TINY, arch, "doctor")
        nvrtc.fatbin(code, arch, "doctor")
    except CompileError as error:
        first = str(error).splitlines()[0].removeprefix("a kernel did not compile: ")
        first = first.removeprefix("error: ")
        archive = config.kernel_archive() is not None
        advice = _install_compiler(machine) if needed and not archive else ""
        return Finding("compiler", False if advice else None, first, advice)
    version, milliseconds = nvrtc.version(), 1e3 * (time.perf_counter() - start)
    text = f"NVRTC {version} compiles for {arch}, a tiny kernel in {milliseconds:.0f} ms"
    if machine.driver is not None and int(version.split(".")[0]) > machine.driver[0]:
        text = f"NVRTC {version} is newer than the driver, which cannot load what it compiles"
        return Finding("compiler", False, text, _install_compiler(machine))
    return Finding("compiler", True, text)


def _cache() -> Finding:
    cache = program_cache.current()
    if refusal := cache.refusal():
        return Finding("cache", False, refusal, refusal.rpartition(": ")[2])
    if cache.directory is None:
        advice = "set JAX_MEMEFF_CACHE_DIR to a directory, so that kernels are compiled only once"
        return Finding("cache", False, "no home directory: kernels stay in memory", advice)
    count = len(cache.entries())
    if cache.is_writable():
        return Finding("cache", True, f"{cache.directory}, {count} kernels")
    text = f"{cache.directory}, {count} kernels, is read-only: others are compiled by each process"
    advice = "set JAX_MEMEFF_CACHE_DIR to a directory to which you can write"
    return Finding("cache", bool(count), text, "" if count else advice)


def _archive() -> Finding:
    again = "python -m jax_memeff build --models NAMES --output FILE, and name it in "
    again += "JAX_MEMEFF_KERNELS"
    try:
        found = prebuilt.contents()
    except prebuilt.UnusableArchiveError as error:
        return Finding("archive", False, str(error), again)
    assert found is not None
    if not found.fits:
        text = f"was written by jax_memeff {found.version}, whose headers differ"
        return Finding("archive", False, text, again)
    if not found.kernels:
        return Finding("archive", False, "has no kernels", again)
    return Finding("archive", True, f"{found.kernels} kernels for {', '.join(found.archs)}")


def _attention(machine: Machine) -> Finding:
    """A forward and a backward, on the GPU if JAX uses one."""
    import jax
    import jax.numpy as jnp

    import jax_memeff

    def loss(x):
        return jax_memeff.dot_product_attention(x, x, x, is_causal=True).astype(jnp.float32).sum()

    try:
        device = jax.local_devices(backend="cuda" if machine.devices else "cpu")[0]
    except RuntimeError as error:
        named = f"unset JAX_PLATFORMS, which is {machine.platforms!r}, or name a known backend"
        text = f"JAX has no backend: {str(error).splitlines()[0]}"
        return Finding("attention", False, text, named if machine.platforms else _REPORT)
    start = time.perf_counter()
    try:
        with jax.default_device(device):
            x = jnp.ones((1, 64, 2, 64), jnp.float16)
            finite = bool(jnp.isfinite(jax.jit(jax.grad(loss))(x)).all())
    except Exception as error:  # the driver, the compiler and JAX may raise anything
        advice = _install(machine) if machine.devices else _REPORT
        return Finding("attention", False, f"{type(error).__name__}: {error}", advice)
    seconds = time.perf_counter() - start
    text = f"forward and backward on {device.device_kind} in {seconds:.1f} s, compilation included"
    if not finite:
        return Finding("attention", False, f"{text}: the gradient is not finite", _REPORT)
    return Finding("attention", True, text)


def _install(machine: Machine) -> str:
    """The command that installs JAX's plugin and the compiler for the driver of this machine."""
    return parts.install_extra(f"cuda{_cuda(machine)}")


def _install_compiler(machine: Machine) -> str:
    """The command for a machine without a compiler; it installs no plugin if JAX has one."""
    return parts.install(_cuda(machine)) if machine.devices else _install(machine)


def _cuda(machine: Machine) -> int:
    assert machine.driver is not None
    return 13 if machine.driver >= (13, 0) else 12


def _first_steps(machine: Machine) -> tuple[str, ...]:
    """The next steps on a machine on which nothing is missing."""
    use = "replace jax.nn.dot_product_attention with jax_memeff.dot_product_attention, or call"
    use += " jax_memeff.patch_jax_nn()"
    if machine.devices:
        return (
            f"Nothing is missing: {use}",
            "To compile before the first call: python -m jax_memeff build --models llama "
            "--output kernels.zip",
        )
    return (
        f"Nothing is missing on a CPU: {use}",
        f"On a machine with a GPU: {parts.install_extra('cuda13')}, or cuda12 for drivers without "
        "CUDA 13",
    )
