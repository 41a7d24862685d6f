"""The folders of the package form a tree: each imports only those below it, folders inside it
included. Imports inside functions count, because they only hide a circle.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import jax_memeff

pytestmark = pytest.mark.quick

PACKAGE = Path(jax_memeff.__file__).parent

BELOW = {
    "_functions": set(),
    "_call": {"_functions"},
    "_blockwise": {"_functions", "_call"},
    "_sharding": {"_call"},
    "_cuda": {"_functions", "_call", "_blockwise"},
    "_op": {"_call", "_blockwise", "_sharding", "_cuda"},
    "_ring": {"_call", "_blockwise", "_op"},
    "_api": {"_functions", "_call", "_blockwise", "_sharding", "_cuda", "_op", "_ring"},
    "_command": {"_call", "_cuda"},
    "flax": {"_call", "_op", "_sharding", "_api"},
    "clients": {"_call", "_api"},
}
"""The folders that each folder may import, besides the files of the top level."""


def imported(file: Path) -> set[str]:
    """The modules of the package that a file imports, with the names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("jax_memeff.") for name in found if name.startswith("jax_memeff.")}


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_imports_those_below_it(folder):
    rooms = {
        name.split(".")[0] for file in (PACKAGE / folder).rglob("*.py") for name in imported(file)
    }
    assert rooms & BELOW.keys() - {folder} <= BELOW[folder]


def test_one_file_uses_internals_of_jax():
    """The same file imports what ``jax.extend`` has, which takes Pallas along."""
    internal = re.compile(r"^ *(?:from|import) jax\.(?:_src|extend)\b", re.MULTILINE)
    users = {file for file in PACKAGE.rglob("*.py") if internal.search(file.read_text())}
    assert users == {PACKAGE / "_compat.py"}


def test_every_folder_is_listed():
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert folders - {"codegen"} == BELOW.keys()
