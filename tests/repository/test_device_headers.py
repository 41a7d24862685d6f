"""The layout of device code: folders in one order, and generations that do not know each other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from jax_memeff.codegen import kernels
from jax_memeff.codegen.features import FEATURES
from jax_memeff.codegen.kernels import sm80, sm90
from jax_memeff.codegen.toolchain import headers

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
CODEGEN = ROOT / "codegen"
EMULATED = Path(__file__).parents[1] / "emulator/include"

# A header includes headers of its own folder and of those before it.
LIBRARY = ("arch", "core", "layout", "mask", "score", "collective", "schedule")
GENERATIONS = {"sm80": sm80, "sm90": sm90}
ORDER = (*(f"memeff/{folder}" for folder in LIBRARY), "kernels/common", *GENERATIONS)
SOURCES = (".cc", ".cuh", ".h", ".py")

HEADERS = sorted(CODEGEN.rglob("*.cuh")) + sorted(EMULATED.rglob("*.cuh"))


def _included(header: Path) -> list[str]:
    names = re.findall(r"#include <((?:memeff|kernels)/[^>]+)>", header.read_text())
    return [name for name in names if name != "memeff/params.h"]


def _generation(path: str) -> str | None:
    """The generation whose folder a header is in, None for what generations share."""
    room, folder, *_ = path.split("/")
    return folder if room == "kernels" and folder != "common" else None


def _rank(path: str) -> int:
    return ORDER.index(_generation(path) or "/".join(path.split("/")[:2]))


@pytest.mark.parametrize(
    "header", HEADERS, ids=lambda header: str(header.relative_to(header.parents[1]))
)
def test_includes_follow_the_order_of_folders(header):
    root = EMULATED if header.is_relative_to(EMULATED) else CODEGEN
    own = str(header.relative_to(root))
    late = [name for name in _included(header) if _rank(name) > _rank(own)]
    assert not late, f"{header.name} includes headers of later folders than its own: {late}"
    others = [
        name for name in _included(header) if _generation(name) not in (None, _generation(own))
    ]
    assert not others, f"{header.name} includes headers of another generation: {others}"


@pytest.mark.parametrize("name", GENERATIONS)
def test_modules_of_a_generation_import_no_other_generation(name):
    others = "|".join({*GENERATIONS} - {name})
    pattern = re.compile(
        rf"^ *(?:from|import) .*\bkernels(?:\.| import .*)({others})\b", re.MULTILINE
    )
    files = [*(CODEGEN / "kernels" / name).glob("*.py"), *(CODEGEN / "kernels/common").glob("*.py")]
    assert not [file for file in files if pattern.search(file.read_text())]


def test_every_generation_is_listed():
    folders = {file.parent.name for file in (CODEGEN / "kernels").glob("*/__init__.py")}
    assert folders == {"common", *GENERATIONS}
    tables = [kernel for module in GENERATIONS.values() for kernel in module.KERNELS]
    assert sorted(kernels.KERNELS, key=str) == sorted(tables, key=str)


def test_every_header_is_in_the_digest(tmp_path, monkeypatch):
    """Else a kernel that was compiled before an edit would run after it."""
    copies = [tmp_path / folder.name for folder in headers.own_include_dirs()]
    for folder, copy in zip(headers.own_include_dirs(), copies, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(headers, "own_include_dirs", lambda: tuple(copies))
    digests, files = (
        {headers.own_digest()},
        [file for file in tmp_path.rglob("*") if file.is_file()],
    )
    assert {file.name for file in HEADERS if file.is_relative_to(CODEGEN)} < {
        file.name for file in files
    }
    for file in files:
        file.write_bytes(file.read_bytes() + b"\n")
        digests.add(headers.own_digest())
    assert len(digests) == 1 + len(files)


def test_no_header_includes_all_of_cute():
    """NVRTC reads all includes for each kernel, and half of CuTe is unused."""
    whole = [str(header) for header in HEADERS if "<cute/tensor.hpp>" in header.read_text()]
    assert not whole, f"include <cute/tensor_impl.hpp> and the algorithms that are called: {whole}"


def test_comments_name_files_that_exist():
    folders = "codegen|docs|ffi|jax_memeff|tests"
    paths = {
        (header.name, path)
        for header in HEADERS
        for path in re.findall(rf"\b(?:{folders})/[\w/]+\.(?:cc|cuh|h|md|py)\b", header.read_text())
    }
    assert paths
    assert not [pair for pair in paths if not (ROOT / pair[1]).exists()]


def test_includes_have_no_cycle():
    included = {
        str(header.relative_to(CODEGEN)): _included(header)
        for header in HEADERS
        if header.is_relative_to(CODEGEN)
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle of includes: {' -> '.join((*path, name))}"
        if name not in done:
            for other in included[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in included:
        visit(name, ())


def test_the_emulator_replaces_headers_of_arch_only():
    replaced = {str(header.relative_to(EMULATED)) for header in EMULATED.rglob("*.cuh")}
    assert {name for name in replaced if not name.startswith("memeff/arch/")} == set()
    assert replaced - {"memeff/arch/format.cuh"} <= {
        str(header.relative_to(CODEGEN)) for header in HEADERS if header.is_relative_to(CODEGEN)
    }


@pytest.mark.parametrize("folder", ["ffi/src", "codegen/kernels"])
def test_kernels_and_host_do_not_name_modifiers_of_probabilities(folder):
    """They use ``ProbabilityModifiers``, the description and sets of modifiers."""
    names = [feature.name for feature in FEATURES if feature.modifies == "probabilities"]
    assert names
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in SOURCES]
    assert files
    found = [file.name for file in files for name in names if name in file.read_text().lower()]
    assert not found, f"these files name a modifier of probabilities: {found}"
