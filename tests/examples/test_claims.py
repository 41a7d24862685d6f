"""The examples take the time that they and the README say, and pass the comparison they name."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| `examples/(\w+)\.py`, (\d) \|", (ROOT / "README.md").read_text(), re.M)
MINUTES = {"under a minute": 1, "about a minute": 1, "under two minutes": 2}


def docstring(name):
    text = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text()))
    assert text is not None
    return text


@pytest.mark.quick
@pytest.mark.parametrize(("name", "minutes"), ROWS)
def test_the_readme_has_the_minutes_of_the_docstring(name, minutes):
    (command,) = re.findall(rf"^    python examples/{name}\.py +# (.+)$", docstring(name), re.M)
    (said,) = (number for words, number in MINUTES.items() if words in command)
    assert said == int(minutes)


@pytest.mark.quick
def test_the_readme_has_every_example_that_is_a_command():
    scripts = ROOT.glob("examples/*.py")
    commands = {path.stem for path in scripts if '__name__ == "__main__"' in path.read_text()}
    assert commands == {name for name, _ in ROWS}


@pytest.mark.rotating(10)  # whole runs, because only they have the time that is stated
@pytest.mark.parametrize(("name", "minutes"), ROWS)
def test_the_default_takes_the_minutes_and_succeeds(name, minutes, tmp_path):
    """In CPU time, because other processes delay wall times. The exit status is the comparison."""
    tests_own = ("XLA_FLAGS", "JAX_", "PYTEST")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(tests_own)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = [] if name == "train_llama" else ["--output", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, f"examples/{name}.py", *output],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**kept, "JAX_PLATFORMS": "cpu"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stdout + run.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2 * 60 * int(minutes)  # of two cores
