"""Runs the host library without XLA and without a GPU, in a separate program under sanitizers.

``record`` captures custom calls at lowering, with everything that a program file contains of them.
``run`` and ``fuzz`` pass them to the handlers, changed or not. See main.cc.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import functools
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_memeff import config

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
_OPTIONS = [
    # Without optimization the sanitizers see every access, and compiling takes half as long.
    *("-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
]
_DTYPES = {
    "bool": 1,
    "uint8": 6,
    "int32": 4,
    "uint32": 8,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
}
"""The numbers of XLA_FFI_DataType."""


@dataclasses.dataclass
class Call:
    """A custom call, which tests change in place."""

    target: str
    capability: int
    attributes: dict[str, Any]
    operands: list[tuple[str, tuple[int, ...]]]
    """dtype and sizes"""
    results: list[tuple[str, tuple[int, ...]]]


def compile_nothing(monkeypatch: Any) -> None:
    """Gives every kernel the same image."""
    from jax_memeff.codegen.toolchain import compile as compiler

    found = compiler.Compiled(b"code", (), (), (), "", 0.0, True)
    monkeypatch.setattr(compiler, "compile", lambda spec, arch: found)


def record(monkeypatch: Any, arch: str, function: Callable, *operands: Any) -> list[Call]:
    """The custom calls of a function, lowered for a device of this architecture."""
    calls = []
    real = jax.ffi.ffi_lowering

    def lowering(target: str, **options: Any) -> Any:
        rule = real(target, **options)

        def lower(ctx: Any, *values: Any, **attributes: Any) -> Any:
            capability = int("".join(filter(str.isdigit, arch.split(",")[0])))
            types = (
                [(aval.dtype.name, aval.shape) for aval in avals]
                for avals in (ctx.avals_in, ctx.avals_out)
            )
            calls.append(Call(target, capability, attributes, *types))
            return rule(ctx, *values, **attributes)

        return lower

    with monkeypatch.context() as patch:
        patch.setenv("JAX_MEMEFF_ARCHS", arch)
        patch.setattr(jax.ffi, "ffi_lowering", lowering)
        jax.clear_caches()
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return calls


def run(calls: Sequence[Call]) -> list[tuple[str, int]]:
    """The error of each call, "" for success, and the number of launched blocks."""
    output = _with_file(calls, "run")
    results = []
    while output:
        header, _, output = output.partition(b"\n")
        size, blocks = map(int, header.split())
        results.append((output[:size].decode(), blocks))
        output = output[size + 1 :]
    return results


def fuzz(calls: Sequence[Call], count: int, seed: int) -> str:
    """Changes calls at random and passes them to the handlers; returns the number of refusals.

    Raises ``CalledProcessError`` if the process ends with a signal or a report of a sanitizer.
    """
    return _with_file(calls, "fuzz", str(count), str(seed)).decode()


def _with_file(calls: Sequence[Call], command: str, *arguments: str) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        file.write(struct.pack("<I", len(calls)) + b"".join(map(_call, calls)))
        file.flush()
        words = [str(_executable()), command, file.name, *arguments]
        done = subprocess.run(words, capture_output=True)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def _call(call: Call) -> bytes:
    parts = [_text(call.target), struct.pack("<i", call.capability), _dict(call.attributes)]
    for buffers in (call.operands, call.results):
        parts.append(struct.pack("<I", len(buffers)))
        for dtype, sizes in buffers:
            parts.append(struct.pack(f"<iI{len(sizes)}q", _DTYPES[dtype], len(sizes), *sizes))
    return b"".join(parts)


def _dict(attributes: dict[str, Any]) -> bytes:
    parts = [_text(name) + _attribute(value) for name, value in attributes.items()]
    return struct.pack("<I", len(parts)) + b"".join(parts)


def _attribute(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"d" + _dict(value)
    if isinstance(value, (str, bytes)):
        return b"s" + _text(value)
    value = np.asarray(value)
    kind = {"float32": b"f", "int32": b"i", "int64": b"l"}[value.dtype.name]
    kind = kind.upper() if value.ndim else kind
    return kind + struct.pack("<I", value.size) + value.tobytes()


@functools.cache
def _executable() -> Path:
    """The executable, which is compiled once for the same sources."""
    own = sorted(_HERE.glob("*.cc"))
    left_out = ("module.cc", "driver.cc")  # this folder has its own driver.cc
    host = sorted(file for file in _ROOT.glob("ffi/src/**/*.cc") if file.name not in left_out)
    headers = [*_HERE.glob("*.h"), *_ROOT.glob("ffi/src/**/*.h"), *_ROOT.glob("**/memeff/params.h")]
    for folder in _folders_of_headers():  # XLA's API changes with jaxlib
        headers += [*Path(folder).glob("xla/ffi/api/*.h"), *Path(folder).glob("cuda.h")]
    texts = [file.read_bytes() for file in (*own, *host, *sorted(headers))]
    digest = hashlib.sha256(b"|".join([repr(_OPTIONS).encode(), *texts])).hexdigest()[:16]
    directory = (config.cache_dir() or Path(tempfile.gettempdir()) / "jax_memeff") / "handlers"
    executable = directory / f"handlers-{digest}"
    if executable.exists():
        return executable
    directory.mkdir(parents=True, exist_ok=True)
    with open(executable.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be building it
        if not executable.exists():
            _build(executable, (*own, *host))
    return executable


@functools.cache
def _folders_of_headers() -> list[str]:
    """Where the headers of jaxlib and of CUDA are."""
    words = [sys.executable, str(_ROOT / "cmake/find_headers.py")]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout.strip().split(";")


def _build(executable: Path, sources: Sequence[Path]) -> None:
    includes = [f"-I{folder}" for folder in (_HERE, _ROOT / "ffi/src", _ROOT / "ffi/include")]
    for folder in _folders_of_headers():
        includes += ["-isystem", folder]
    with tempfile.TemporaryDirectory(dir=executable.parent) as work:

        def run(*words: str) -> None:
            subprocess.run(["g++", *_OPTIONS, *words], cwd=work, check=True)

        # XLA's header takes longer than the rest of a file that includes it.
        units = {"own": [it for it in sources if it.parent == _HERE]}
        units["host"] = [it for it in sources if it.parent != _HERE]

        def compile(name: str) -> str:
            text = "".join(f'#include "{source}"\n' for source in units[name])
            (Path(work) / f"{name}.cc").write_text(text)
            run(*includes, "-c", f"{name}.cc", "-o", f"{name}.o")
            return f"{name}.o"

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile, units))
        run(*objects, "-o", executable.name)
        (Path(work) / executable.name).replace(executable)
