"""The documentation: examples run, paths exist, commands and tables are up to date."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_memeff import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"])
# A path in a code span begins with a directory of this repository, or is a file in its root.
TOP_LEVEL = {path.name for path in ROOT.iterdir() if not path.name.startswith(".venv")}


def names(paths):
    return [path.relative_to(ROOT).as_posix() for path in paths]


def python_blocks(page: Path) -> str:
    """The fenced Python of a page, with blank lines for the rest, which keeps line numbers."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_examples_run(page):
    code = python_blocks(page)
    if ">>>" in code:
        test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=report.append)
        assert runner.failures == 0, "".join(report)
    else:
        exec(compile(code, str(page), "exec"), {})


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_paths_exist(page):
    text = page.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        if not (page.parent / target).exists():
            missing.append(target)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([\w./-]+)`", prose):
        named = span.split("/")[0] in TOP_LEVEL and ("/" in span or "." in span)
        if named and not (ROOT / span).exists():
            missing.append(span)
    generated = {"jax_memeff/codegen", "jax_memeff/include/"}  # paths of an installation
    assert not set(missing) - generated


def test_readme_has_the_commands_that_ci_runs():
    """.ci/run takes both commands from the README: the example and the tests."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    example, tests = blocks
    assert all(block.count("\n") == 1 for block in blocks)
    prefix = "python3 -m venv .venv && .venv/bin/pip install "
    assert example == f'{prefix}-e ".[examples]" && .venv/bin/python examples/train_gpt.py\n'
    assert tests == f'{prefix}-e ".[test]" && .venv/bin/python -m pytest -n 2\n'
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/readme_commands.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == example + tests


@pytest.mark.quick
def test_support_table_is_up_to_date():
    path = ROOT / "docs/support_table.py"
    spec = importlib.util.spec_from_file_location("support_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["support_table"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    del sys.modules["support_table"]
    for page in (README, ROOT / "docs/support.md"):
        text = page.read_text()
        assert "| float64 |" in text
        assert text == module.updated(text), "run: python docs/support_table.py"
    assert "| float32 |" not in README.read_text() and "| float32 |" in text


COMMANDS = ["doctor", "verify", "bench", "info", "kernels", "explain", "build"]


@pytest.mark.quick
def test_documented_commands_are_understood():
    """The commands are only parsed, because each has its own tests."""
    page = ROOT / "docs/reference/commands.md"
    commands = re.findall(r"^\| `python -m jax_memeff ([^`]+)`", page.read_text(), re.MULTILINE)
    names = [command.split()[0] for command in commands]
    assert list(dict.fromkeys(names)) == COMMANDS
    for command in commands:
        arguments = command.replace("[", "").replace("]", "").split()
        assert cli._parser().parse_args(arguments).command


@pytest.mark.quick
def test_environment_variables_are_documented():
    source = (ROOT / "jax_memeff/config.py").read_text()
    variables = set(re.findall(r"JAX_MEMEFF_\w+", source))
    page = ROOT / "docs/deployment/jit.md"
    assert set(re.findall(r"JAX_MEMEFF_\w+", page.read_text())) == variables


@pytest.mark.quick
def test_the_readme_is_short_and_states_the_version():
    text = README.read_text()
    assert text.count("\n") <= 160
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^\| version \| (\S+),", text, re.MULTILINE) == [version]


@pytest.mark.quick
def test_anchors_exist():
    """A link to a section names a heading of that page."""
    lost = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", prose):
            other = page.parent / target if target else page
            if other.suffix == ".md" and anchor not in anchors(other):
                lost.append(f"{page.name}: {target}#{anchor}")
    assert not lost


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
