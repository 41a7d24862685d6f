"""Kernels compile wherever pip put the wheels, and mixing them with a toolkit is reported."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

import jax_memeff
from jax_memeff import _ffi
from jax_memeff.codegen.toolchain import headers, parts

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

ROOT = Path(str(jax_memeff.__file__)).parent
BASE = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
REQUIRED = ("cuda-core", "cuda-bindings", "cuda-pathfinder", "numpy", "rich")
REQUIRED += ("markdown-it-py", "mdurl", "Pygments")
OF_COMMANDS = ("__init__.py", "__main__.py", "_command")
WHEELS = {part.wheel.name: part for part in (*parts.HEADERS, *parts.LIBRARIES)}
COMPILE = """
import sys
from jax_memeff.codegen.toolchain import nvrtc, parts
source = '''#include <cute/tensor_impl.hpp>
extern "C" __global__ void tiny(float* x) { x[cute::Int<1>{}] *= 2.f; }'''
code, log = nvrtc.compile(source, "sm_80", "tiny")
assert nvrtc.fatbin(code, "sm_80", "tiny")
assert not any("jax" == name for name in sys.modules)
for place in parts.all_found().values():
    print(place.part.name, place.via, place.path)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A directory as ``pip install --target`` makes it, with links to the installed wheels."""
    if not BASE.exists():
        pytest.skip(f"needs an interpreter without packages, and there is no {BASE}")
    target = tmp_path_factory.mktemp("target")
    for name in (*REQUIRED, *WHEELS):
        link_distribution(name, target)
    link_package(target / "jax_memeff")
    return target


def link_distribution(name, target):
    for file in importlib.metadata.distribution(name).files or ():
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.is_file():
            link = target / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.resolve())


def link_package(package):
    """Links jax_memeff in the layout of a wheel."""
    package.mkdir()
    codegen, include = headers.own_include_dirs()
    for source in (*ROOT.glob("[!_]*"), *map(ROOT.joinpath, OF_COMMANDS)):
        (package / source.name).symlink_to(source)
    for name, source in (("codegen", codegen), ("include", include)):
        (package / name).symlink_to(source)
    module = Path(str(_ffi.__file__))
    (package / module.name).symlink_to(module)


def run(wheels, tmp_path, *command, **environment):
    """Runs ``command`` with a Python that has only the packages in ``wheels``."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [BASE, "-s", "-S", *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **inherited,
            "PYTHONPATH": str(wheels),
            "JAX_MEMEFF_CACHE_DIR": str(tmp_path / "cache"),
            **environment,
        },
    )


def test_kernels_compile_from_wheels_on_pythonpath(wheels, tmp_path):
    """The wheels come from ``pip install --target`` or from the environment of another
    interpreter.
    """
    done = run(wheels, tmp_path, "-W", "error", "-c", COMPILE)
    assert done.returncode == 0, done.stderr
    places = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert {name for name, *_ in places} == {"nvrtc", "nvfatbin", "cutlass", "cudart", "cccl"}
    assert all(via == "wheel" and path.startswith(str(wheels)) for _, via, path in places)


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit with headers only, which CUDA_PATH names."""
    root = tmp_path / "toolkit"
    (root / "include").mkdir(parents=True)
    cudart = parts.headers(parts.CUDART)
    assert cudart is not None
    for header in cudart.path.iterdir():
        (root / "include" / header.name).symlink_to(header)
    return root


def test_wheels_come_before_a_toolkit(wheels, toolkit, tmp_path):
    done = run(wheels, tmp_path, "-W", "error", "-c", COMPILE, CUDA_PATH=str(toolkit))
    assert done.returncode == 0, done.stderr
    assert str(toolkit) not in done.stdout


def test_cccl_may_come_from_a_toolkit(toolkit, tmp_path):
    """CUTLASS names CCCL by a path that begins above its directory."""
    target = tmp_path / "target"
    for name in (*REQUIRED, *WHEELS):
        if name != parts.CCCL.wheel.name:
            link_distribution(name, target)
    link_package(target / "jax_memeff")
    done = run(target, tmp_path, "-c", COMPILE, CUDA_PATH=str(toolkit))
    assert done.returncode == 0, done.stderr
    assert "cccl CUDA_PATH" in done.stdout


def test_a_mixture_of_wheels_and_a_toolkit_warns_once(wheels, toolkit, tmp_path):
    """The compiling process warns once, and ``info`` shows the place."""
    without = "without = parts._in_wheels\n"
    without += "parts._in_wheels = lambda part: None if part.name == 'cudart' else without(part)\n"
    program = COMPILE.replace("source =", without + "source =", 1)
    program += 'nvrtc.compile(source, "sm_80", "tiny")\nprint(nvrtc.versions())'
    done = run(wheels, tmp_path, "-c", program, CUDA_PATH=str(toolkit))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"CUDA headers from {toolkit}/include (CUDA_PATH)" in done.stderr
    assert '[nvrtc]"' in done.stderr and "nvidia-cuda-runtime" in done.stderr
    assert f", in {toolkit}/include" in done.stdout.splitlines()[-1]


def test_a_toolkit_beside_the_wheel_of_cutlass_is_no_mixture(monkeypatch):
    places = {part: parts.Found(part, Path("/usr"), "system", None) for part in WHEELS.values()}
    places[parts.CUTLASS] = parts.Found(parts.CUTLASS, Path("/wheels"), parts.WHEEL, "4.2.0")
    monkeypatch.setattr(parts, "all_found", lambda: places)
    parts.warn_of_mixture.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts.warn_of_mixture()
    parts.warn_of_mixture.cache_clear()


def test_info_names_places_and_the_command(wheels, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for entry in wheels.iterdir():
        if not entry.name.startswith(("nvidia_cuda_nvrtc", "nvidia_cutlass", "cutlass")):
            (bare / entry.name).symlink_to(entry)
    done = run(bare, tmp_path, "-m", "jax_memeff", "info")
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert "not found" in lines["CUTLASS"]
    assert "searched sys.path" in lines
    assert str(bare) in (line.strip() for line in done.stdout.splitlines())
    assert "not set" in lines["searched CONDA_PREFIX"] and "searched system" in lines
    assert lines["to install it"].strip().endswith('[nvrtc]"')
    done = run(wheels, tmp_path, "-m", "jax_memeff", "info")
    assert f"{wheels}/cutlass_library/source/include" in done.stdout
    assert "to install it" not in done.stdout
