"""Prints the include directories of the host module, separated by semicolons, for CMake."""

import importlib.util
import pathlib
import sys

TOOLKITS = ("/usr/local/cuda/include", "/opt/cuda/include")


def package_dirs(name: str) -> list[pathlib.Path]:
    spec = importlib.util.find_spec(name)
    return [pathlib.Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def first_with(header: str, candidates: list[pathlib.Path], advice: str) -> str:
    for candidate in candidates:
        if (candidate / header).is_file():
            return str(candidate)
    tried = "\n".join(f"  {candidate}" for candidate in candidates)
    sys.exit(f"{header} was not found; {advice}\nlooked in:\n{tried}")


jaxlib = [path / "include" for path in package_dirs("jaxlib")]
cuda = [
    path / part / "include" for path in package_dirs("nvidia") for part in ("cu13", "cuda_runtime")
]
print(
    first_with("xla/ffi/api/ffi.h", jaxlib, "install jaxlib"),
    first_with(
        "cuda.h",
        [*cuda, *map(pathlib.Path, TOOLKITS)],
        "install the wheel nvidia-cuda-runtime or a CUDA toolkit",
    ),
    sep=";",
)
