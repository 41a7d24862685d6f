"""The structure of the code: folders import each other in one direction, functions stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PACKAGES = {"jax_memeff.codegen": ROOT / "codegen", "jax_memeff": ROOT / "jax_memeff"}
MOST_LINES_OF_A_FUNCTION = 80
CODE_FOLDERS = ("benchmarks", "codegen", "docs", "examples", "ffi", "jax_memeff", "tests")


def modules(package: str) -> dict[str, Path]:
    """The files of a package by module name."""
    root = PACKAGES[package]
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join((package, *(part for part in parts if part != "__init__")))] = file
    return found


def imported(file: Path, module: str, *, typing: bool = False) -> Iterator[str]:
    """The names that a module imports when it is loaded or when one of its functions runs.

    Imports that only type checkers see count with ``typing``.
    """
    tree = ast.parse(file.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing
        for child in ast.walk(node)
    }
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def users(package: str, *, typing: bool = False) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports.

    ``from package.module import name`` uses the module, and ``from package import module`` too, not
    all that the package imports.
    """
    files = modules(package)
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        used = set()
        for name in imported(file, module, typing=typing):
            used |= {name if name in files else name.rpartition(".")[0]} & files.keys()
        graph[module] = used - {module}
    return graph


def room(module: str, package: str) -> str:
    """The folder of a module below the package, or the module itself if it is in no folder."""
    return module.removeprefix(package).strip(".").split(".")[0] or "__init__"


def rooms(package: str) -> dict[str, set[str]]:
    """The rooms of a package that each of its rooms imports."""
    files = modules(package)
    graph: dict[str, set[str]] = {room(module, package): set() for module in files}
    for module, file in files.items():
        for name in imported(file, module):
            name = name if name in files else name.rpartition(".")[0]
            if name in files and name != package:
                graph[room(module, package)].add(room(name, package))
    return {name: used - {name} for name, used in graph.items()}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that remain after removing, repeatedly, every node that uses no other."""
    left = {node: set(used) for node, used in graph.items()}
    while free := [node for node, used in left.items() if not used & left.keys()]:
        for node in free:
            del left[node]
    return sorted(left)


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_each_other_in_one_direction(package):
    graph = rooms(package)
    assert len(graph) > 5 and any(graph.values())
    assert cycle(graph) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package):
    """In whichever folder they are, also inside functions: such imports only hide a circle."""
    graph = users(package)
    assert sum(map(len, graph.values())) > len(graph) > 40
    assert cycle(graph) == []


def test_imports_for_types_are_seen(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("if TYPE_CHECKING:\n    from ..below import name\n")
    assert list(imported(file, "package.folder.module")) == []
    assert list(imported(file, "package.folder.module", typing=True)) == ["package.below.name"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_need_each_other_for_their_types(package):
    """A lower module is typed by what is below it: the conditions of a mask, not the mask; what a
    feature reads of a problem, not the problem.
    """
    assert cycle(users(package, typing=True)) == []


def code(suffix: str) -> list[Path]:
    files = [file for folder in CODE_FOLDERS for file in (ROOT / folder).rglob(f"*{suffix}")]
    assert files
    return files


# Comments, literals (which may have braces), preprocessor directives and access labels.
_NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'"""
    r"|^\ *\#(?:[^\n]*\\\n)*[^\n]*|^\ *(?:public|private|protected):",
    re.DOTALL | re.MULTILINE,
)
_SCOPE = re.compile(
    r"\s*(template\s*<.*>\s*)?(struct|class|union|enum|namespace|extern)\b", re.DOTALL
)


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """The first and the last line of each function of a C++ source, and of each block in it."""
    text = _NOT_CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    blocks: list[tuple[int, bool]] = []
    head_begin = 0
    for mark in re.finditer("[{};]", text):
        head = text[head_begin : mark.start()]
        if mark[0] == "{":
            first = head_begin + len(head) - len(head.lstrip())
            blocks.append((text.count("\n", 0, first) + 1, ")" in head and not _SCOPE.match(head)))
        elif mark[0] == "}":
            line, is_function = blocks.pop()
            if is_function:
                yield line, text.count("\n", 0, mark.start()) + 1
        head_begin = mark.end()
    assert not blocks


def test_functions_of_cpp_are_found():
    source = """#define OPEN {
namespace a {
template <class B>
struct C : D<(1 > 0)> {
  int e = f({1, 2});  // {
 private:
  // Comment.
  template <class G>
  void g(char h = '{',
         G i) const {
    for (int j = 0; j < 1; ++j) {
    }
  }
};
}
"""
    assert sorted(cpp_functions(source)) == [(8, 13), (11, 12)]


@pytest.mark.parametrize("suffix", [".cuh", ".h", ".cc"])
def test_functions_of_cpp_are_small(suffix):
    long = [
        f"{file}:{first}: {last - first + 1} lines"
        for file in code(suffix)
        for first, last in cpp_functions(file.read_text())
        if last - first >= MOST_LINES_OF_A_FUNCTION
    ]
    assert not long


def test_the_code_generator_needs_neither_jax_nor_cuda():
    """Imports every module of it in a fresh process."""
    names = sorted(modules("jax_memeff.codegen"))
    assert "jax_memeff.codegen.kernels.sm80.forward" in names
    heavy = {"jax", "numpy", "cuda.core", "cuda.bindings"}
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(sorted({heavy!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
