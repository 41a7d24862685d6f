"""The layout of device code: folders in one order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jax_memeff.codegen.features import FEATURES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "ffi/include/memeff"
EMULATED = Path(__file__).parents[1] / "emulator/include/memeff"

# A header includes headers of its own folder and of those before it.
ORDER = ("arch", "core", "layout", "mask", "score", "collective", "schedule", "kernels")
SOURCES = (".cc", ".cuh", ".h", ".py")

HEADERS = sorted(INCLUDE.rglob("*.cuh")) + sorted(EMULATED.rglob("*.cuh"))


def _included(header: Path) -> list[str]:
    return re.findall(r"#include <memeff/([^>]+)>", header.read_text())


def _rank(path: str) -> int:
    return ORDER.index(path.split("/")[0])


@pytest.mark.parametrize(
    "header", HEADERS, ids=lambda header: str(header.relative_to(header.parents[1]))
)
def test_includes_follow_the_order_of_folders(header):
    root = EMULATED if header.is_relative_to(EMULATED) else INCLUDE
    rank = _rank(str(header.relative_to(root)))
    late = [name for name in _included(header) if name != "params.h" and _rank(name) > rank]
    assert not late, f"{header.name} includes headers of later folders than its own: {late}"


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
        str(header.relative_to(INCLUDE)): [name for name in _included(header) if name != "params.h"]
        for header in HEADERS
        if header.is_relative_to(INCLUDE)
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
    assert {name for name in replaced if not name.startswith("arch/")} == set()
    assert replaced - {"arch/format.cuh"} <= {
        str(header.relative_to(INCLUDE)) for header in INCLUDE.rglob("*.cuh")
    }


@pytest.mark.parametrize("folder", ["codegen/kernels", "ffi/src", "codegen/kernels"])
def test_kernels_and_host_do_not_name_modifiers_of_probabilities(folder):
    """They use ``ProbabilityModifiers``, the description and sets of modifiers."""
    names = [feature.name for feature in FEATURES if feature.modifies == "probabilities"]
    assert names
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in SOURCES]
    assert files
    found = [file.name for file in files for name in names if name in file.read_text().lower()]
    assert not found, f"these files name a modifier of probabilities: {found}"
